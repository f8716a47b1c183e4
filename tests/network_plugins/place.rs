//! A machine with one generation of the plugins, and pods on it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use podvisor::client::Client;
use podvisor::proto::cri::sandbox_config::{PodSandboxConfig, PortMapping, Protocol};
use podvisor::proto::sandbox::sandbox as wire;
use serde_json::{Value, json};

use crate::kit::{self, Pod};
use crate::support::{Sandbox, Snapshot, cni, require, run};

/// The newest version of CNI that both generations speak.
pub const BOTH: &str = "1.0.0";

/// One generation of the plugins.
pub struct Set {
    pub name: &'static str,
    pub dir: PathBuf,
}

impl Set {
    pub fn is_old(&self) -> bool {
        self.name == "system"
    }
}

/// Runs `body` once for each generation, on one machine with the bridge `pvt0` and what `prepare` makes; nothing else may
/// be left when it ends.
pub fn each_set(name: &str, prepare: impl Fn(), body: impl Fn(&Set)) {
    if !require::cni_plugins() {
        return;
    }
    let minutes = if name.ends_with("_slow") { 30 } else { 5 };
    let machine = Sandbox::new(name).bound(Duration::from_secs(60 * minutes));
    machine.run(|| {
        tool("ip", &["link", "add", "pvt0", "type", "bridge"]);
        prepare();
        for (name, dir) in cni::plugin_sets() {
            println!("plugins: {name}");
            configure(&dir);
            fs::remove_dir_all("/var/lib/cni/networks").ok();
            let before = Snapshot::take();
            body(&Set { name, dir });
            before.assert_unchanged();
        }
    });
}

/// Settings of every podvisor from now on: where plugins are.
pub fn configure(plugins: &Path) {
    let text = format!("[cni]\nplugin_dirs = [{plugins:?}]\n");
    fs::write("/etc/podvisor/config.toml", text).unwrap();
}

/// Addresses by host-local, one range for each subnet, in this order.
pub fn host_local(subnets: &[&str]) -> Value {
    let ranges: Vec<Value> = subnets.iter().map(|s| json!([{ "subnet": s }])).collect();
    let default = |s: &&str| if s.contains(':') { "::/0" } else { "0.0.0.0/0" };
    let routes: Vec<Value> = subnets
        .iter()
        .map(|s| json!({ "dst": default(s) }))
        .collect();
    json!({"type": "host-local", "ranges": ranges, "routes": routes})
}

/// The bridge `pvt0` with these subnets.
pub fn bridge(subnets: &[&str]) -> Value {
    json!({
        "type": "bridge", "bridge": "pvt0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
        "ipam": host_local(subnets)
    })
}

pub fn portmap() -> Value {
    json!({"type": "portmap", "capabilities": {"portMappings": true}})
}

/// A network of these plugins, in a version that both generations speak.
pub fn network(name: &str, plugins: Vec<Value>) {
    cni::network(name, plugins)
        .version(BOTH)
        .write_in(Path::new(cni::CONFIGS));
}

/// A pod that is up, with a supervisor of its own.
pub struct Up {
    runtime: tokio::runtime::Runtime,
    client: Client,
    pod: Pod,
    infra: i32,
}

impl Up {
    /// A pod with these annotations, on the network of this name.
    pub fn on(network: &str, id: &str, annotations: &[(&str, &str)]) -> Self {
        Self::with(network, id, annotations, &[])
    }

    /// The same with published ports: of the host, of the pod.
    pub fn with(
        network: &str,
        id: &str,
        annotations: &[(&str, &str)],
        ports: &[(Protocol, u16, u16)],
    ) -> Self {
        let mut config = kit::config(id);
        let pairs = annotations.iter().map(|(k, v)| ((*k).into(), (*v).into()));
        config.annotations.extend(pairs);
        config
            .annotations
            .insert("io.podvisor.network".into(), network.into());
        config.port_mappings = ports.iter().map(published).collect();
        Self::of(id, &config)
    }

    fn of(id: &str, config: &PodSandboxConfig) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let pod = Pod::launch(id);
        let (client, infra) = runtime.block_on(async {
            let client = pod.connect().await;
            let infra = pod.up(&client, config).await;
            (client, infra)
        });
        Self {
            runtime,
            client,
            pod,
            infra,
        }
    }

    /// Its netns, by the infra process.
    pub fn netns(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.infra).into()
    }

    /// What a program prints that runs in its netns; it has to succeed.
    pub fn tool(&self, program: &str, args: &[&str]) -> String {
        in_netns(&self.netns(), program, args)
    }

    /// SandboxStatus, verbose.
    pub fn status(&self) -> wire::SandboxStatusResponse {
        self.runtime
            .block_on(kit::status(&self.client, &self.pod.id))
            .unwrap()
    }

    /// The document of the status.
    pub fn info(&self) -> Value {
        serde_json::from_str(&self.status().info["info"]).unwrap()
    }

    /// Its addresses in the order it tells, without prefix lengths.
    pub fn ips(&self) -> Vec<String> {
        ips(&self.info()["podvisor"]["network"]["ips"])
    }

    /// StopSandbox: the network has to be gone after it.
    pub fn stop(&self) {
        self.runtime
            .block_on(kit::stop(&self.client, &self.pod.id, 1))
            .unwrap();
    }

    /// ShutdownSandbox, and the end of the supervisor.
    pub fn shut(self) {
        self.runtime.block_on(self.pod.shut(&self.client));
    }
}

fn published(port: &(Protocol, u16, u16)) -> PortMapping {
    PortMapping {
        protocol: port.0.into(),
        host_port: port.1.into(),
        container_port: port.2.into(),
        ..Default::default()
    }
}

/// Addresses of a list, without prefix lengths.
pub fn ips(list: &Value) -> Vec<String> {
    let texts = list.as_array().unwrap().iter().map(|v| v.as_str().unwrap());
    texts
        .map(|t| t.split('/').next().unwrap().to_owned())
        .collect()
}

/// What a program prints; it has to succeed.
#[track_caller]
pub fn tool(program: &str, args: &[&str]) -> String {
    run(Command::new(program).args(args), kit::BOUND)
        .ok()
        .stdout
}

/// The same in another netns.
#[track_caller]
pub fn in_netns(netns: &Path, program: &str, args: &[&str]) -> String {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", netns.display()));
    run(command.arg(program).args(args), kit::BOUND).ok().stdout
}
