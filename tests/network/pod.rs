//! One pod as the network room sees it: a pinned netns, an attachment and a record.

use std::process::Command;
use std::time::Duration;

use podvisor::config::Config;
use podvisor::error::Error;
use podvisor::network::{
    self, AddResult, Attachment, NetworkConf, NetworkRecord, PortMapping, netns,
};
use podvisor::process::Reaper;

/// Runs `body` with a reaper on a current-thread runtime, as the supervisor has it.
pub fn supervised<F: AsyncFnOnce(Reaper)>(name: &str, body: F) {
    crate::support::sandboxed(name, || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async { body(Reaper::start().unwrap()).await });
    });
}

/// What a program prints; it has to succeed. Blocks, so that the reaper cannot take its exit away.
pub fn tool(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().unwrap();
    assert!(output.status.success(), "{program} {args:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub fn ip(args: &[&str]) -> String {
    tool("ip", args)
}

/// Bound of a DEL, far above what one takes.
pub const LIMIT: Duration = Duration::from_secs(20);

/// One pod's side of the room.
pub struct Pod {
    pub config: Config,
    pub conf: NetworkConf,
    pub record: NetworkRecord,
    pub attachment: Attachment,
}

impl Pod {
    /// A pod `id` with a pinned netns, on the network that was configured last.
    pub fn on(network: &str, id: &str) -> Self {
        let config = Config::default();
        let path = netns::path(&config, "test", id);
        netns::make(&path).unwrap();
        Self {
            conf: network::load_conf(&config, Some(network)).unwrap(),
            record: NetworkRecord::at(&config, "test", id),
            attachment: Attachment {
                container_id: id.into(),
                netns: path,
                ifname: "eth0".into(),
                args: vec![("K8S_POD_NAME".into(), "web".into())],
                port_mappings: Vec::new(),
                capabilities: Default::default(),
            },
            config,
        }
    }

    pub fn publish(mut self, host_port: u16, container_port: u16) -> Self {
        let protocol = "tcp".into();
        self.attachment.port_mappings.push(PortMapping {
            host_port,
            container_port,
            protocol,
            host_ip: String::new(),
        });
        self
    }

    pub async fn add(&self, reaper: &Reaper) -> Result<AddResult, Error> {
        network::add(
            &self.config,
            reaper,
            &self.record,
            &self.conf,
            &self.attachment,
        )
        .await
    }

    pub async fn del(&self, reaper: &Reaper) -> Result<(), Error> {
        network::del(&self.config, reaper, &self.record, LIMIT).await
    }

    /// Everything that must go with the pod.
    pub async fn gone(self, reaper: &Reaper) {
        self.del(reaper).await.unwrap();
        netns::unpin(&self.attachment.netns).unwrap();
        self.record.remove().unwrap();
    }
}
