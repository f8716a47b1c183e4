//! Network configurations and the reference plugins.

use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where networks are configured, empty at the start of a sandbox.
pub const CONFIGS: &str = "/etc/cni/net.d";
/// Where a sandbox's own plugins go, empty at the start (but for plugins the machine has nowhere else).
pub const PLUGINS: &str = "/opt/cni/bin";

/// The directory with the reference plugins.
pub fn real_plugins() -> Option<PathBuf> {
    let dirs = ["/usr/lib/cni", "/usr/libexec/cni", PLUGINS].map(PathBuf::from);
    dirs.into_iter().find(|dir| {
        ["bridge", "host-local", "portmap"]
            .iter()
            .all(|name| dir.join(name).is_file())
    })
}

/// Puts the reference plugins where a daemon looks for them; gives the directory they are in.
pub fn use_real_plugins() -> Option<PathBuf> {
    let real = real_plugins()?;
    for entry in fs::read_dir(&real).unwrap().flatten() {
        let to = Path::new(PLUGINS).join(entry.file_name());
        if entry.path().is_file() && !to.exists() {
            std::os::unix::fs::symlink(entry.path(), to).unwrap();
        }
    }
    Some(real)
}

/// The reference plugins there are, by name and directory: the system's, and those of `scripts/setup --peers`.
pub fn plugin_sets() -> Vec<(&'static str, PathBuf)> {
    let system = real_plugins().map(|dir| ("system", dir));
    let newer = super::require::cni_peer("cni-1.9").map(|dir| ("cni-1.9", dir));
    system.into_iter().chain(newer).collect()
}

/// A bridge network with host-local addresses from `subnet` (`10.87.1.0/24`) behind masquerading.
pub fn bridge(name: &str, bridge: &str, subnet: &str) -> Network {
    let plugin = json!({
        "type": "bridge", "bridge": bridge, "isGateway": true, "ipMasq": true, "hairpinMode": true,
        "ipam": { "type": "host-local", "ranges": [[{ "subnet": subnet }]], "routes": [{ "dst": "0.0.0.0/0" }] }
    });
    Network {
        name: name.into(),
        version: "1.0.0".into(),
        bridge: Some(bridge.into()),
        plugins: vec![plugin],
    }
}

/// A network of exactly these plugins.
pub fn network(name: &str, plugins: Vec<Value>) -> Network {
    Network {
        name: name.into(),
        version: "1.0.0".into(),
        bridge: None,
        plugins,
    }
}

/// A conflist in the making.
#[derive(Debug, Clone)]
pub struct Network {
    name: String,
    version: String,
    bridge: Option<String>,
    plugins: Vec<Value>,
}

impl Network {
    /// Another `cniVersion` than 1.0.0.
    pub fn version(mut self, version: &str) -> Self {
        self.version = version.into();
        self
    }

    /// Gives the first plugin another name, for a fake in front of it.
    pub fn typed(mut self, name: &str) -> Self {
        self.plugins[0]["type"] = name.into();
        self
    }

    /// Adds the plugin that publishes ports.
    pub fn portmap(self) -> Self {
        self.plugin(json!({ "type": "portmap", "capabilities": { "portMappings": true } }))
    }

    /// Adds a plugin at the end of the chain.
    pub fn plugin(mut self, plugin: Value) -> Self {
        self.plugins.push(plugin);
        self
    }

    /// The conflist.
    pub fn json(&self) -> Value {
        json!({ "cniVersion": self.version, "name": self.name, "plugins": self.plugins })
    }

    /// Writes `10-<name>.conflist` and makes the bridge, which would outlive the pods anyway: take snapshots after it.
    pub fn write(&self) -> PathBuf {
        if let Some(bridge) = &self.bridge {
            let made = Command::new("ip")
                .args(["link", "add", bridge, "type", "bridge"])
                .output()
                .unwrap();
            assert!(
                made.status.success() || Path::new("/sys/class/net").join(bridge).exists(),
                "{made:?}"
            );
        }
        self.write_in(Path::new(CONFIGS))
    }

    /// Writes the conflist into another directory and makes nothing else.
    pub fn write_in(&self, dir: &Path) -> PathBuf {
        let file = dir.join(format!("10-{}.conflist", self.name));
        fs::create_dir_all(dir).unwrap();
        fs::write(&file, serde_json::to_vec_pretty(&self.json()).unwrap()).unwrap();
        file
    }
}
