//! What pods that are gone have left on the node: found by reading, settled one by one.
//!
//! Owns the judgement that nobody is there any more to look after a thing. Promises that nothing of a living supervisor
//! is touched, also when its runtime directory was wiped away under it. Must never decide on a DEL by anything but the
//! network's record.

use std::collections::{BTreeSet, HashSet};
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use super::record::{self, Found, Record};
use super::teardown;
use crate::cgroup::{Group, Layout};
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::failpoint;
use crate::network::{self, Debt, Holder, NetworkRecord, netns};
use crate::process::{Identity, Reaper};
use crate::undo::together;

/// A directory without a journal that is younger than this may belong to a pod that is just being made.
const YOUNG: Duration = Duration::from_secs(60);

/// How long a new supervisor leaves the node to its own pod before it looks after what others have left.
const HEAD_START: Duration = Duration::from_secs(1);

/// How long a plugin's process may take to end after SIGKILL.
const ORPHAN_LIMIT: Duration = Duration::from_secs(5);

/// Pods that are undone side by side: one that is stuck delays no other.
pub const AT_ONCE: usize = 16;

/// Where links for iproute2 are.
const LINKS: &str = "/run/netns";

/// A network whose pod is gone and whose DEL is owed; or one of a pod that lives, and whose runtime directory is gone.
#[derive(Clone, Debug)]
pub struct OwedNetwork {
    /// containerd namespace; empty when no file of the record says so any more.
    pub namespace: String,
    /// Sandbox id, else the name of the record's directory.
    pub id: String,
    /// Pod metadata, as far as known.
    pub holder: Holder,
    /// Tries so far.
    pub debt: Debt,
    /// Owed for a day, and the netns is gone.
    pub leaked: bool,
    /// The record itself.
    pub record: NetworkRecord,
    /// It lives, without a directory by which it could be found.
    pub supervisor: Option<Identity>,
}

impl OwedNetwork {
    /// How people are shown it.
    pub fn state(&self) -> &'static str {
        if self.supervisor.is_some() {
            "directory lost"
        } else if self.leaked {
            "network leaked"
        } else {
            "network pending"
        }
    }
}

/// A network that waits for the next supervisor of its pod.
#[derive(Clone, Debug)]
pub struct ParkedNetwork {
    /// Whose it was, and since when.
    pub holder: Holder,
    /// What its plugins gave.
    pub ips: Vec<String>,
    /// Its keeper lives.
    pub kept: bool,
    /// What the CNI plugin's job is doing, where it is one of those.
    pub stage: Option<network::Stage>,
    /// The record itself.
    pub record: NetworkRecord,
}

impl ParkedNetwork {
    /// How people are shown it.
    pub fn state(&self) -> &'static str {
        if self.holder.is_parked() {
            "network parked"
        } else if !self.holder.failed.is_empty() || self.holder.claim.is_some() {
            "network ending"
        } else {
            "network starting"
        }
    }
}

/// Something that nobody looks after any more.
#[derive(Debug)]
pub enum Left {
    /// A pod whose supervisor has died.
    Pod(Box<Record>),
    /// A pod's directory without a usable journal. The reason why it has to be left alone, if there is one.
    Directory {
        /// Namespace.
        namespace: String,
        /// Id.
        id: String,
        /// Why it must not be touched.
        kept: Option<String>,
    },
    /// A parked network whose keeper has died: its pod may still come for it.
    Parked(Box<ParkedNetwork>),
    /// A network that owes a DEL.
    Network(Box<OwedNetwork>),
    /// A network's record that owes nothing.
    Record(NetworkRecord),
    /// A pinned netns that nothing on record belongs to.
    Netns {
        /// The pin.
        path: PathBuf,
        /// A process that is still in it.
        user: Option<i32>,
    },
    /// A link for iproute2 to a pin that is gone.
    Link(PathBuf),
}

/// Networks that owe a DEL and whose pods are gone, by id.
pub fn owed(config: &Config) -> Vec<OwedNetwork> {
    without_directory(config)
        .filter(|o| o.supervisor.is_none() && o.record.owes_del())
        .collect()
}

/// Pods that live without their runtime directories, which somebody has removed: known by their networks alone.
pub fn astray(config: &Config) -> Vec<OwedNetwork> {
    without_directory(config)
        .filter(|o| o.supervisor.is_some())
        .collect()
}

fn without_directory(config: &Config) -> impl Iterator<Item = OwedNetwork> {
    let records = NetworkRecord::list(config).into_iter();
    records
        .filter(|(namespace, id, record)| {
            // First what needs no file to be read: each supervisor that starts asks this of every record on the node.
            !has_directory(config, namespace, id)
                && !record
                    .holder()
                    .is_some_and(|h| h.is_kept() || h.is_used() || (h.keeper && h.is_alive()))
                && !is_listed(config, record)
        })
        .map(|(namespace, id, record)| OwedNetwork {
            holder: record.holder().unwrap_or_default(),
            debt: record.debt().unwrap_or_default(),
            leaked: record.is_leaked(),
            supervisor: record.held_by(),
            namespace,
            id,
            record,
        })
}

/// Networks that are kept for the next supervisor of their pod and whose own pod is gone, by id.
pub fn parked(config: &Config) -> Vec<ParkedNetwork> {
    let records = NetworkRecord::list(config).into_iter();
    let parked = records.filter_map(|(namespace, id, record)| {
        let holder = record.holder()?;
        let keeper = holder.keeper && holder.is_alive();
        let here = (keeper || holder.is_kept()) && record.owes_del();
        (here && !has_directory(config, &namespace, &id)).then(|| ParkedNetwork {
            ips: record.read_result().map(|r| r.ips).unwrap_or_default(),
            kept: holder.is_alive(),
            stage: network::stage_at(config, record.place()),
            holder,
            record,
        })
    });
    parked.collect()
}

/// Everything that is left, in the order in which it is best settled.
pub fn left(config: &Config) -> Vec<Left> {
    // Pins first: one that is listed here has its journal already, if it is ever to have one.
    let pins = pinned(config);
    let pods = record::list(config, None);
    let networks = Networks::read(config);
    let mut known: HashSet<OsString> = networks.places().collect();
    let mut left = Vec::new();
    for found in pods {
        match found {
            Found::Record(record) => {
                known.insert(record.network_record(config).place().into());
                if !record.is_supervised() {
                    left.push(Left::Pod(record));
                }
            }
            Found::Broken { namespace, id, .. } => {
                let network = networks.of(config, &namespace, &id);
                known.insert(network.place().into());
                left.push(Left::Directory {
                    kept: keep(config, &namespace, &id, &network),
                    namespace,
                    id,
                });
            }
        }
    }
    let alone = parked(config).into_iter().filter(|p| !p.kept);
    left.extend(alone.map(|p| Left::Parked(Box::new(p))));
    left.extend(owed(config).into_iter().map(|o| Left::Network(Box::new(o))));
    for (namespace, id, record) in networks.0 {
        let idle = !record.owes_del() && !record.is_held() && !is_listed(config, &record);
        // Or removed since they were read.
        if idle && record.dir().exists() && !has_directory(config, &namespace, &id) {
            left.push(Left::Record(record));
        }
    }
    let pins = pins.into_iter().filter(|name| !known.contains(name));
    left.extend(pins.map(|name| {
        let path = config.runtime_root.join("netns").join(name);
        Left::Netns {
            user: user_of(&path),
            path,
        }
    }));
    left.extend(dangling(config).into_iter().map(Left::Link));
    left
}

/// The records of all networks, read once: there may be thousands, and as many pods that ask for theirs.
struct Networks(Vec<(String, String, NetworkRecord)>);

impl Networks {
    fn read(config: &Config) -> Self {
        Self(NetworkRecord::list(config))
    }

    fn places(&self) -> impl Iterator<Item = OsString> {
        let records = self.0.iter().map(|(_, _, record)| record);
        records.filter_map(|r| r.dir().file_name().map(OsString::from))
    }

    /// What [`NetworkRecord::find`] finds.
    fn of(&self, config: &Config, namespace: &str, id: &str) -> NetworkRecord {
        let usual = NetworkRecord::at(config, namespace, id);
        if usual.dir().exists() && usual.is_mine() {
            return usual;
        }
        let taken = self.0.iter().find(|(n, i, _)| n == namespace && i == id);
        taken.map_or(usual, |(_, _, record)| record.clone())
    }
}

/// DEL under its own bound; then the netns and the record go. Errors: `Busy`, "network clean-up pending", while it fails.
pub async fn settle(config: &Config, reaper: &Reaper, record: &NetworkRecord) -> Result<()> {
    if record.is_held() {
        return Err(Error::new(
            Kind::Busy,
            format!(
                "clean up network {}: its supervisor lives; ask that one",
                record.dir().display()
            ),
        ));
    }
    settle_own(config, reaper, record).await
}

/// [`settle`] by the one who has it.
pub async fn settle_own(config: &Config, reaper: &Reaper, record: &NetworkRecord) -> Result<()> {
    if !record.withdraw(config).await? {
        // Another supervisor of the pod was quicker.
        return Ok(());
    }
    // What a plugin has started may go on attaching the pod after its supervisor's death.
    let alone = network::kill_orphans_alone(config, record, ORPHAN_LIMIT).await;
    alone.map_err(pending)?;
    del_and_clear(config, reaper, record).await
}

/// [`settle_own`] where no plugin can be at work: every ADD has ended well and no DEL was begun. Spares the look at each
/// process of the machine, which costs milliseconds where there are hundreds.
pub async fn settle_quiet(config: &Config, reaper: &Reaper, record: &NetworkRecord) -> Result<()> {
    if !record.withdraw(config).await? {
        return Ok(());
    }
    del_and_clear(config, reaper, record).await
}

async fn del_and_clear(config: &Config, reaper: &Reaper, record: &NetworkRecord) -> Result<()> {
    failpoint::hit("gc.settle.before")?;
    network::del(config, reaper, record, config.del_timeout())
        .await
        .map_err(pending)?;
    clear(config, record)
}

fn pending(error: Error) -> Error {
    error.within("network clean-up pending").as_kind(Kind::Busy)
}

/// Removes a record that owes nothing, and its netns.
pub fn clear(config: &Config, record: &NetworkRecord) -> Result<()> {
    if let Some(hash) = record.dir().file_name() {
        netns::unpin(&config.runtime_root.join("netns").join(hash))?;
    }
    failpoint::hit("gc.record.before")?;
    record.remove()
}

/// What a supervisor does for the node when it starts: one try, in the background, of every DEL that is owed, as soon as
/// it is due. Costs the listing of one directory when there is none.
pub async fn retry_due(config: &Config, reaper: &Reaper) {
    tokio::time::sleep(HEAD_START).await;
    let tries = owed(config).into_iter();
    let tries = tries.map(|owed| Box::pin(async move { retry(config, reaper, &owed).await }));
    together(tries.collect(), AT_ONCE).await;
}

async fn retry(config: &Config, reaper: &Reaper, owed: &OwedNetwork) {
    if !wait_until_due(&owed.record).await || owed.record.is_held() {
        return;
    }
    match settle(config, reaper, &owed.record).await {
        Ok(()) => tracing::info!(step = "cni-del", pod = owed.id, "owed network cleaned up"),
        Err(error) => {
            let tries = owed.record.debt().map_or(0, |d| d.tries);
            tracing::warn!(step = "cni-del", pod = owed.id, tries, %error, "owed network not cleaned up");
        }
    }
}

/// False: it is not due for long, or somebody else was quicker.
async fn wait_until_due(record: &NetworkRecord) -> bool {
    let end = Instant::now() + network::LONGEST_PAUSE;
    while let Some(debt) = record.debt() {
        if debt.is_due(SystemTime::now()) {
            return true;
        }
        if record.is_leaked() || Instant::now() > end {
            return false;
        }
        tokio::time::sleep(HEAD_START).await;
    }
    false
}

/// A pod's journal names this very record: the only word for it when `pod.json` is damaged and the pod is not the one that
/// the network was made for.
fn is_listed(config: &Config, record: &NetworkRecord) -> bool {
    record.holder().is_none()
        && record::list(config, None).iter().any(|found| match found {
            Found::Record(pod) => pod.network_record(config).dir() == record.dir(),
            Found::Broken { .. } => false,
        })
}

fn has_directory(config: &Config, namespace: &str, id: &str) -> bool {
    !namespace.is_empty() && config.sandbox_dir(namespace, id).exists()
}

/// Why a directory without a journal has to stay: it is young, or something of the pod is alive.
fn keep(config: &Config, namespace: &str, id: &str, network: &NetworkRecord) -> Option<String> {
    let dir = config.sandbox_dir(namespace, id);
    if let Some(supervisor) = network.held_by() {
        return Some(format!("its supervisor (pid {}) lives", supervisor.pid));
    }
    let age = fs::metadata(&dir)
        .and_then(|m| m.modified())
        .ok()
        .and_then(|at| at.elapsed().ok());
    if age.is_none_or(|age| age < YOUNG) {
        return Some("it is new, and may belong to a pod that is being made".into());
    }
    let path = teardown::cgroup_of(config, namespace, id);
    let busy = Layout::detect()
        .and_then(|layout| Group::new(&layout, &path))
        .is_ok_and(|group| group.exists());
    busy.then(|| "its cgroup is there, so that it may run".into())
}

/// What is pinned, by the netns' file: a user namespace pinned beside one (`<hash>.user`) belongs to it and goes with it.
fn pinned(config: &Config) -> BTreeSet<OsString> {
    let stem = |name: OsString| match name.to_str().and_then(|n| n.strip_suffix(".user")) {
        Some(stem) => stem.into(),
        None => name,
    };
    let files = names(&config.runtime_root.join("netns")).into_iter();
    files.map(stem).collect()
}

/// Links of ours whose pin is gone.
fn dangling(config: &Config) -> Vec<PathBuf> {
    let pins = config.runtime_root.join("netns");
    let ours = |link: &PathBuf| {
        fs::read_link(link)
            .is_ok_and(|to| to.starts_with(&pins) && fs::symlink_metadata(&to).is_err())
    };
    let links = names(Path::new(LINKS)).into_iter();
    links
        .filter(|n| n.to_string_lossy().starts_with("podvisor-"))
        .map(|n| Path::new(LINKS).join(n))
        .filter(ours)
        .collect()
}

/// A process that is in the netns pinned at `path`.
pub fn user_of(path: &Path) -> Option<i32> {
    let pin = fs::metadata(path).ok().filter(|_| netns::is_pinned(path))?;
    names(Path::new("/proc")).into_iter().find_map(|name| {
        let pid: i32 = name.to_str()?.parse().ok()?;
        let own = fs::metadata(format!("/proc/{pid}/ns/net")).ok()?;
        (own.ino() == pin.ino() && own.dev() == pin.dev()).then_some(pid)
    })
}

fn names(dir: &Path) -> Vec<OsString> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<OsString> = entries.map(|e| e.file_name()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(dir: &Path) -> Config {
        Config {
            runtime_root: dir.join("run"),
            state_root: dir.join("lib"),
            ..Config::default()
        }
    }

    fn record(
        config: &Config,
        id: &str,
        supervisor: Option<crate::process::Identity>,
    ) -> NetworkRecord {
        let record = NetworkRecord::at(config, "default", id);
        let holder = Holder {
            namespace: "default".into(),
            sandbox_id: id.into(),
            name: format!("name-of-{id}"),
            boot_id: crate::clock::boot_id(),
            supervisor,
            ..Holder::default()
        };
        record.hold(&holder).unwrap();
        fs::write(record.dir().join("add-started.json"), "").unwrap();
        record
    }

    #[test]
    fn only_what_nobody_looks_after_is_owed() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        record(&config, "gone", None);
        record(&config, "alive", crate::process::Identity::own().ok());
        record(&config, "listed", None);
        fs::create_dir_all(config.sandbox_dir("default", "listed")).unwrap();
        let stopped = record(&config, "stopped", None);
        fs::write(stopped.dir().join("network-stopped"), "{}").unwrap();
        let owed = owed(&config);
        let names: Vec<&str> = owed.iter().map(|o| o.holder.name.as_str()).collect();
        assert_eq!(names, ["name-of-gone"]);
        assert_eq!(owed[0].state(), "network pending");
        let kinds: Vec<String> = left(&config).iter().map(|l| format!("{l:?}")).collect();
        let begins = |text: &str| kinds.iter().filter(|k| k.starts_with(text)).count();
        assert_eq!(
            (
                begins("Network"),
                begins("Record"),
                begins("Directory"),
                begins("Netns")
            ),
            (1, 1, 1, 0),
            "{kinds:?}"
        );
    }

    #[test]
    fn a_pin_without_a_record_is_found_and_one_with_a_record_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        let pins = config.runtime_root.join("netns");
        fs::create_dir_all(&pins).unwrap();
        fs::write(pins.join("0123"), "").unwrap();
        let held = record(&config, "alive", crate::process::Identity::own().ok());
        let hash = held.dir().file_name().unwrap().to_owned();
        fs::write(pins.join(&hash), "").unwrap();
        let mut user = hash;
        user.push(".user");
        fs::write(pins.join(user), "").unwrap();
        let left = left(&config);
        assert!(
            matches!(&left[..], [Left::Netns { path, user: None }] if path.ends_with("0123")),
            "{left:?}"
        );
    }
}
