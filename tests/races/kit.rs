//! One pod in the test's own process, with state of its own and a plugin that does as it is told.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use podvisor::config::Config;
use podvisor::container::Events;
use podvisor::pod::plan::{NETWORK_ANNOTATION, Request};
use podvisor::pod::{Pod, PodOptions};
use podvisor::process::Reaper;
use podvisor::proto::cri::sandbox_config::NamespaceMode;
use podvisor::spec::Spec;
use protobuf::well_known_types::any::Any;

use crate::support::{Snapshot, cni, fake, sandboxed};

/// The sandbox of every test.
pub const POD: &str = "p1";

/// What a supervisor is made from.
#[derive(Debug)]
pub struct Kit {
    pub dir: tempfile::TempDir,
    pub config: Config,
    pub plugin: fake::Fake,
    pub reaper: Reaper,
}

/// Runs `body` in a sandbox, on one thread as a supervisor does, and looks for what is left.
pub fn on_its_own(name: &str, body: impl AsyncFnOnce(&Kit)) {
    sandboxed(name, || {
        let dir = tempfile::Builder::new()
            .prefix("pvtest-races-")
            .tempdir_in("/run")
            .unwrap();
        let path = |name: &str| dir.path().join(name);
        let plugin = fake::plugin(&path("bin"), "fake");
        cni::network("fake", vec![serde_json::json!({"type": "fake"})]).write_in(&path("conf"));
        let mut config = Config {
            runtime_root: path("run"),
            state_root: path("state"),
            ..Config::default()
        };
        config.cni.conf_dir = path("conf");
        config.cni.plugin_dirs = vec![path("bin")];
        config.cni.cache_dir = path("cache");
        config.parking.interval = 0.3;
        let before = Snapshot::take();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let reaper = Reaper::start().unwrap();
            let kit = Kit {
                dir,
                config,
                plugin,
                reaper,
            };
            body(&kit).await;
            let left: Vec<_> = podvisor::pod::record::list(&kit.config, None);
            assert!(left.is_empty(), "{left:?}");
        });
        drop(runtime);
        before.assert_unchanged();
    });
}

/// A pod on this network (`none`: loopback only).
pub fn request(network: &str) -> Request {
    Request {
        id: POD.into(),
        bundle: "/".into(),
        annotations: BTreeMap::from([(NETWORK_ANNOTATION.to_owned(), network.to_owned())]),
        ..Request::default()
    }
}

/// A pod on the host's network.
pub fn on_the_host() -> Request {
    let mut wanted = request("");
    let linux = wanted
        .config
        .get_or_insert_default()
        .linux
        .mut_or_insert_default();
    linux
        .security_context
        .mut_or_insert_default()
        .namespace_options
        .mut_or_insert_default()
        .network = NamespaceMode::NODE.into();
    wanted
}

struct Silent;

impl Events for Silent {
    fn publish(&self, _: &'static str, _: Any) {}
}

impl Kit {
    /// A supervisor's pod; nothing was asked of it yet.
    pub fn pod(&self, namespace: &str) -> Pod {
        let options = PodOptions {
            config: Arc::new(self.config.clone()),
            namespace: namespace.into(),
            group: POD.into(),
            bundle: "/".into(),
            address: format!("unix://{}", self.dir.path().join("socket").display()),
        };
        Pod::new(options, self.reaper.clone(), Arc::new(Silent)).unwrap()
    }

    /// Its state directory.
    pub fn state(&self, namespace: &str) -> PathBuf {
        self.config.sandbox_dir(namespace, POD)
    }

    /// A sandbox' OCI spec with a cgroup of the caller's.
    pub fn spec(&self, cgroup: &str) -> Spec {
        let bundle = self.dir.path().join("bundle");
        std::fs::create_dir_all(&bundle).unwrap();
        let spec = serde_json::json!({
            "ociVersion": "1.0.2",
            "linux": {
                "cgroupsPath": cgroup,
                "namespaces": [{"type": "network"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}],
            },
        });
        std::fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
        Spec::read(&bundle).unwrap()
    }

    /// Waits until `check` holds.
    pub async fn until(&self, check: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !check() {
            assert!(Instant::now() < end, "it never came true");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
