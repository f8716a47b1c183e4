//! The configuration file `/etc/podvisor/config.toml` (or `$PODVISOR_CONFIG`): every path and every bound.
//!
//! A missing file means the defaults. Unknown keys are errors: a misspelt bound must not silently be the default.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use crate::error::{Error, Kind, Result};

/// Where the file is when `$PODVISOR_CONFIG` does not say otherwise.
pub const DEFAULT_PATH: &str = "/etc/podvisor/config.toml";

/// `create` of an OCI runtime: a big image on a slow disk needs minutes.
const CREATE_TIMEOUT: f64 = 240.0;
/// What no configuration may shorten it below: on a loaded machine a healthy one needs seconds.
const CREATE_FLOOR: f64 = 30.0;

/// All settings. Durations are written in seconds and may have a fraction.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Runtime state, one directory per namespace and sandbox: journal, markers, pod files. A tmpfs.
    pub runtime_root: PathBuf,
    /// What must survive a reboot: network intents, results, owed DELs.
    pub state_root: PathBuf,
    /// Directory of sockets for containerd.
    pub socket_dir: PathBuf,
    /// OCI runtime for `podvisor`'s own containers: a name or an absolute path. Empty: crun where it runs, else runc.
    pub runtime: String,
    /// Bound of one `create` of an OCI runtime, seconds: 0 is the default, less than 30 (also negative) is 30. Read it
    /// through [`Config::create_timeout`].
    pub runtime_create_timeout: f64,
    /// Settings of single OCI runtimes, by file name or absolute path; the path wins.
    pub runtimes: BTreeMap<String, Runtime>,
    /// What a daemon's runtime options leave open.
    pub options: Options,
    /// Parent of the pods' cgroups when the caller names none.
    pub cgroup_parent: String,
    /// Seconds a supervisor that was never given anything, and that nobody is connected to, waits before it leaves.
    pub idle_timeout: f64,
    /// `net.ipv4.ip_unprivileged_port_start=0` in pods with their own network, ours or of a CRI
    /// that leaves the pod's namespaces to us, unless the pod says otherwise.
    pub unprivileged_ports: bool,
    /// `net.ipv4.ping_group_range=0 2147483647` (ping without a capability) in the same pods, unless the pod says otherwise
    /// or has users of its own.
    pub unprivileged_icmp: bool,
    /// Everything about CNI.
    pub cni: Cni,
    /// Parking of results that nobody claimed.
    pub parking: Parking,
    /// What the supervisor tells of its work while that lasts.
    pub log: Log,
}

/// The `[options]` table: for containers of daemons, in the place of what their own options leave empty, false or 0.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// OCI runtime: a name or an absolute path. Empty: runc.
    pub binary_name: String,
    /// Parent of the OCI runtime's `--root`, absolute. Empty: `/run/containerd/runc`.
    pub root: String,
    /// Use the systemd cgroup driver.
    pub systemd_cgroup: bool,
    /// Pass `--no-pivot`.
    pub no_pivot_root: bool,
    /// Pass `--no-new-keyring`.
    pub no_new_keyring: bool,
    /// cgroup that supervisors are moved into.
    pub shim_cgroup: String,
    /// Host uid that owns the pipes of standard streams.
    pub io_uid: u32,
    /// Host gid that owns the pipes of standard streams.
    pub io_gid: u32,
    /// Directory in which criu works, absolute. Empty: one in the bundle, removed afterwards.
    pub criu_work_path: String,
}

/// One `[runtimes.<name>]` table.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Runtime {
    /// In the place of `runtime_create_timeout`, by the same rules; what is not there is that one's.
    pub create_timeout: Option<f64>,
}

/// The `[cni]` table.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cni {
    /// Where network configurations are.
    pub conf_dir: PathBuf,
    /// Where plugins are, searched in order.
    pub plugin_dirs: Vec<PathBuf>,
    /// `plugin_dirs` are a daemon's (its CNI_PATH), and not those of the file.
    #[serde(skip)]
    pub dirs_told: bool,
    /// libcni's cache.
    pub cache_dir: PathBuf,
    /// Bound of a whole ADD chain, seconds.
    pub add_timeout: f64,
    /// Bound of one DEL chain, seconds.
    pub del_timeout: f64,
    /// Most chains of one network that run at a time on this machine, for ADD and for DEL each.
    pub parallel: u8,
    /// How long a supervisor whose pod is gone stays to retry a DEL that is still owed, seconds.
    pub keeper_time: f64,
}

/// The `[parking]` table.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Parking {
    /// Work goes on when its caller has left, and its result is parked. Without: it is stopped and undone then, as most
    /// runtimes do; for comparison.
    pub enabled: bool,
    /// An unclaimed result lives between one and two of these after its last waiter left, seconds.
    pub interval: f64,
    /// Hold a joined request until shortly before its own deadline.
    pub hold_waiters: bool,
    /// When a sandbox is shut down whose creation nobody waits for any more, its network stays for the next supervisor of
    /// the same pod.
    pub park_network_on_shutdown: bool,
}

/// The `[log]` table.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// While a stage of a pod's life lasts, a line says so this often, seconds.
    pub stage_interval: f64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            runtime_root: "/run/podvisor".into(),
            state_root: "/var/lib/podvisor".into(),
            socket_dir: "/run/containerd/s".into(),
            runtime: String::new(),
            runtime_create_timeout: CREATE_TIMEOUT,
            runtimes: BTreeMap::new(),
            options: Options::default(),
            cgroup_parent: "/podvisor".into(),
            idle_timeout: 60.0,
            unprivileged_ports: true,
            unprivileged_icmp: true,
            cni: Cni::default(),
            parking: Parking::default(),
            log: Log::default(),
        }
    }
}

impl Default for Cni {
    fn default() -> Self {
        Self {
            conf_dir: "/etc/cni/net.d".into(),
            plugin_dirs: vec![
                "/opt/cni/bin".into(),
                "/usr/lib/cni".into(),
                "/usr/libexec/cni".into(),
            ],
            dirs_told: false,
            cache_dir: "/var/lib/cni".into(),
            add_timeout: 300.0,
            del_timeout: 60.0,
            parallel: 16,
            keeper_time: 600.0,
        }
    }
}

impl Cni {
    /// What a record has to keep of where the plugins were; nothing where the file says it.
    pub fn told_dirs(&self) -> &[PathBuf] {
        match self.dirs_told {
            true => &self.plugin_dirs,
            false => &[],
        }
    }

    /// Where the plugins of an ADD are searched that was told to search in `then`: in what a daemon tells today, in what
    /// it told then, in what the file says.
    fn dirs_after(&self, then: &[PathBuf]) -> Vec<PathBuf> {
        let (first, last) = match self.dirs_told {
            true => (self.plugin_dirs.as_slice(), then),
            false => (then, self.plugin_dirs.as_slice()),
        };
        let mut dirs = first.to_vec();
        for dir in last {
            if !dirs.contains(dir) {
                dirs.push(dir.clone());
            }
        }
        dirs
    }
}

impl Default for Parking {
    fn default() -> Self {
        Self {
            enabled: true,
            interval: 60.0,
            hold_waiters: true,
            park_network_on_shutdown: true,
        }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self {
            stage_interval: 30.0,
        }
    }
}

impl Config {
    /// Reads `$PODVISOR_CONFIG`, else [`DEFAULT_PATH`]; the defaults when that file does not exist.
    pub fn load() -> Result<Self> {
        let named = env::var_os("PODVISOR_CONFIG").filter(|p| !p.is_empty());
        let path = named
            .as_ref()
            .map_or_else(|| Path::new(DEFAULT_PATH), Path::new);
        match fs::read_to_string(path) {
            Ok(text) => {
                Self::parse(&text).map_err(|e| e.within(format!("read {}", path.display())))
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound && named.is_none() => Ok(Self::default()),
            Err(e) => Err(Error::io(format!("read {}", path.display()), e)),
        }
    }

    /// The same, for the DEL of an ADD that was told to search for its plugins in `then`.
    pub fn searching(&self, then: &[PathBuf]) -> Self {
        let mut config = self.clone();
        config.cni.plugin_dirs = self.cni.dirs_after(then);
        config
    }

    /// Parses the file's text.
    pub fn parse(text: &str) -> Result<Self> {
        let config: Self = basic_toml::from_str(text)
            .map_err(|e| Error::caused(Kind::Invalid, "parse the configuration", e))?;
        for (key, value) in [
            ("idle_timeout", config.idle_timeout),
            ("cni.add_timeout", config.cni.add_timeout),
            ("cni.del_timeout", config.cni.del_timeout),
            ("cni.keeper_time", config.cni.keeper_time),
            ("parking.interval", config.parking.interval),
            ("log.stage_interval", config.log.stage_interval),
        ] {
            // A million seconds is eleven days; from_secs_f64 panics on what this excludes.
            if !(0.01..=1_000_000.0).contains(&value) {
                return Err(Error::new(
                    Kind::Invalid,
                    format!("check {key} = {value}: give seconds between 0.01 and 1000000"),
                ));
            }
        }
        let own = config.runtimes.iter().filter_map(|(name, runtime)| {
            Some((
                format!("runtimes.{name}.create_timeout"),
                runtime.create_timeout?,
            ))
        });
        let general = (
            "runtime_create_timeout".to_owned(),
            config.runtime_create_timeout,
        );
        for (key, value) in own.chain([general]) {
            if !(-1_000_000.0..=1_000_000.0).contains(&value) {
                return Err(Error::new(
                    Kind::Invalid,
                    format!("check {key} = {value}: give seconds, at most 1000000"),
                ));
            }
        }
        if !(1..=200).contains(&config.cni.parallel) {
            return Err(Error::new(
                Kind::Invalid,
                format!(
                    "check cni.parallel = {}: give a number between 1 and 200",
                    config.cni.parallel
                ),
            ));
        }
        if !config.cgroup_parent.starts_with('/') || config.cgroup_parent.contains("..") {
            return Err(Error::new(
                Kind::Invalid,
                format!(
                    "check cgroup_parent = {:?}: give an absolute path without '..'",
                    config.cgroup_parent
                ),
            ));
        }
        Ok(config)
    }

    /// Bound of one `create` of the OCI runtime at `binary`, or of one that has no settings of its own.
    pub fn create_timeout(&self, binary: &Path) -> Duration {
        let by = |key: Option<&str>| self.runtimes.get(key?)?.create_timeout;
        let own = by(binary.to_str()).or_else(|| by(binary.file_name().and_then(|n| n.to_str())));
        let asked = own.unwrap_or(self.runtime_create_timeout);
        let seconds = if asked == 0.0 { CREATE_TIMEOUT } else { asked };
        Duration::from_secs_f64(seconds.max(CREATE_FLOOR))
    }

    /// The longest of these bounds there is: for who does not know which runtime it will be.
    pub fn longest_create_timeout(&self) -> Duration {
        let general = self.create_timeout(Path::new(""));
        let own = self
            .runtimes
            .keys()
            .map(|name| self.create_timeout(Path::new(name)));
        own.fold(general, Duration::max)
    }

    /// Bound of a whole ADD chain.
    pub fn add_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.cni.add_timeout)
    }

    /// Bound of one DEL chain.
    pub fn del_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.cni.del_timeout)
    }

    /// An unclaimed result lives between one and two of these.
    pub fn parking_interval(&self) -> Duration {
        Duration::from_secs_f64(self.parking.interval)
    }

    /// How long a keeper of an owed DEL stays.
    pub fn keeper_time(&self) -> Duration {
        Duration::from_secs_f64(self.cni.keeper_time)
    }

    /// `--root` of the OCI runtime for containers the command makes; the supervisor adds the namespace.
    pub fn oci_root(&self) -> PathBuf {
        self.runtime_root.join("oci")
    }

    /// Runtime directory of one sandbox: `/run/podvisor/<namespace>/<id>`. Both parts must be checked ids.
    pub fn sandbox_dir(&self, namespace: &str, id: &str) -> PathBuf {
        self.runtime_root.join(namespace).join(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_keys_and_impossible_bounds_are_errors() {
        for text in [
            "runtim = \"runc\"",
            "idle_timeout = -1.0",
            "[cni]\nadd_timeout = 0.0",
            "[cni]\nparallel = 0",
            "cgroup_parent = \"x\"",
            "[cni",
            "[options]\nBinaryName = \"crun\"",
        ] {
            assert!(Config::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_create_has_its_default_its_floor_and_its_runtimes_own() {
        let bound = |text: &str, binary: &str| {
            let config = Config::parse(text).map_err(|e| e.to_string());
            config.map(|c| c.create_timeout(Path::new(binary)).as_secs())
        };
        for (text, want) in [
            ("", 240),
            ("runtime_create_timeout = 0.0", 240),
            ("runtime_create_timeout = 300.0", 300),
            ("runtime_create_timeout = 300", 300),
            ("runtime_create_timeout = 15.0", 30),
            ("runtime_create_timeout = -1.0", 30),
        ] {
            assert_eq!(bound(text, "/usr/bin/runc"), Ok(want), "{text}");
        }
        let two = "runtime_create_timeout = 60.0\n[runtimes.slow]\ncreate_timeout = 600.0\n\
            [runtimes.quick]\ncreate_timeout = -5.0\n[runtimes.\"/opt/slow\"]\ncreate_timeout = 300.0\n";
        for (binary, want) in [
            ("/usr/bin/runc", 60),
            ("/usr/bin/slow", 600),
            ("/opt/slow", 300),
            ("/usr/bin/quick", 30),
        ] {
            assert_eq!(bound(two, binary), Ok(want), "{binary}");
        }
        for text in [
            "runtime_create_timeout = nan",
            "runtime_create_timeout = 1e9",
            "[runtimes.runc]\ncreate_timeot = 1.0",
            "[runtimes.runc]\ncreate_timeout = inf",
        ] {
            assert!(bound(text, "runc").is_err(), "{text}");
        }
    }

    #[test]
    fn defaults_hold_where_the_file_is_silent() {
        let config = Config::parse("[cni]\nadd_timeout = 2.5\n").map_err(|e| e.to_string());
        assert_eq!(
            config.map(|c| (c.add_timeout(), c.del_timeout())),
            Ok((Duration::from_millis(2500), Duration::from_secs(60)))
        );
    }
}
