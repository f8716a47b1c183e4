//! Networks that nobody has claimed yet: found by pod key, and handed from one supervisor to the next.
//!
//! The index is a symbolic link `<runtime_root>/.keys/<hash of the key>` to the network's record. It is there from the
//! moment a network is begun until its pod is somebody's, or it is undone; so it is lost with the boot, as it should be.
//! The owner is what `pod.json` in the record says, replaced whole.
//!
//! Promises: a network changes hands only through its link, under the lock of the index and that of the record (both
//! `flock`: the kernel takes them back from a process that dies). Whoever undoes one takes the link away first, and from
//! then on nobody else can have it. Must never give away what a living supervisor has not parked.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::time::{Instant, sleep};

use super::markers::Locked;
use super::{Holder, NetworkRecord, disk, netns, userns};
use crate::clock;
use crate::config::Config;
use crate::error::{Context, Error, Kind, Result};

/// Directory of the links; no namespace can be called so.
const KEYS: &str = ".keys";

/// In the record: locked (shared) by those who wait for the network under another sandbox id.
const WATCHED: &str = "watched";

/// How long the index may be locked by others, each of whom writes a few small files.
const LOCK_LIMIT: Duration = Duration::from_secs(10);
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// Whose pod it is, whatever the sandbox is called: a pod's metadata within a containerd namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodKey {
    namespace: String,
    pod_namespace: String,
    name: String,
    uid: String,
    attempt: u32,
    network: String,
}

/// That a network is parked, in its `pod.json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Parking {
    /// Unix nanoseconds, for people.
    pub at: u64,
    /// Seconds since the boot after which nobody needs to keep it any more.
    pub until: f64,
}

/// What became of a try to be the owner of a key's network.
#[derive(Debug)]
pub enum Owned {
    /// A new place, with nothing in it.
    Fresh(NetworkRecord),
    /// The network of an earlier supervisor, and what it said of it. Whole or not: see [`NetworkRecord::is_whole`].
    Taken(NetworkRecord, Box<Holder>),
    /// A living supervisor is at it.
    Elsewhere(Box<Holder>),
}

/// Somebody who waits for a network under another id: while it lives, the parked network is not thrown away.
#[derive(Debug)]
pub struct Watching {
    _file: Flock<fs::File>,
}

impl PodKey {
    /// None without metadata: a name and a uid are the least.
    pub fn new(
        namespace: &str,
        pod_namespace: &str,
        name: &str,
        uid: &str,
        attempt: u32,
    ) -> Option<Self> {
        (!name.is_empty() && !uid.is_empty()).then(|| Self {
            namespace: namespace.to_owned(),
            pod_namespace: pod_namespace.to_owned(),
            name: name.to_owned(),
            uid: uid.to_owned(),
            attempt,
            network: String::new(),
        })
    }

    /// The same pod's key for just one of its networks, as "network/interface": the daemon asks for each by itself.
    pub fn of_network(mut self, network: &str) -> Self {
        network.clone_into(&mut self.network);
        self
    }

    /// The network that nobody has claimed yet, and what is written of it. Looks only.
    pub fn look(&self, config: &Config) -> Option<(NetworkRecord, Holder)> {
        let place = fs::read_link(self.link(config)).ok()?;
        let place = place.file_name()?.to_str()?;
        let record = NetworkRecord::in_place(config, place, &self.namespace, "");
        let holder = record
            .holder()
            .filter(|h| h.key().as_ref() == Some(self))
            .filter(|h| crate::id::check("sandbox id", &h.sandbox_id).is_ok())?;
        let record = NetworkRecord::in_place(config, place, &self.namespace, &holder.sandbox_id);
        Some((record, holder))
    }

    fn link(&self, config: &Config) -> PathBuf {
        // A tuple with its kind, not a text that is joined: no two keys are spelt alike.
        let mut text = serde_json::json!([
            "pod",
            self.namespace,
            self.pod_namespace,
            self.name,
            self.uid,
            self.attempt
        ]);
        if let (false, Some(parts)) = (self.network.is_empty(), text.as_array_mut()) {
            parts.push(self.network.as_str().into());
        }
        let digest = Sha256::digest(text.to_string());
        config
            .runtime_root
            .join(KEYS)
            .join(crate::id::hex(&digest[..16]))
    }
}

impl Holder {
    /// The pod's key, where it has metadata.
    pub fn key(&self) -> Option<PodKey> {
        PodKey::new(
            &self.namespace,
            &self.pod_namespace,
            &self.name,
            &self.uid,
            self.attempt,
        )
        .map(|key| key.of_network(&self.network))
    }

    /// Its supervisor, or keeper, lives.
    pub fn is_alive(&self) -> bool {
        self.boot_id == clock::boot_id() && self.supervisor.is_some_and(|s| s.is_alive())
    }

    /// Parked in this boot.
    pub fn is_parked(&self) -> bool {
        self.parked.is_some() && self.boot_id == clock::boot_id()
    }

    /// Parked, and still kept for the pod: by a living keeper, or because its time is not over.
    pub fn is_kept(&self) -> bool {
        let in_time = |p: &Parking| clock::uptime().as_secs_f64() < p.until;
        self.is_parked() && (self.is_alive() || self.parked.as_ref().is_some_and(in_time))
    }

    /// Another supervisor may have it.
    pub fn is_takable(&self) -> bool {
        self.claim.is_none() && (!self.is_alive() || self.is_parked())
    }
}

/// Makes the owner of the key's network of what `holder` says of itself: of the one that an earlier supervisor has parked
/// or died with, else of `fresh`, which is then on the index. `intent` is told of the place before it changes hands.
///
/// Errors: Busy when the index cannot be locked; what `intent` says.
pub async fn own(
    config: &Config,
    key: &PodKey,
    fresh: &NetworkRecord,
    holder: &Holder,
    intent: impl Fn(&NetworkRecord) -> Result<()>,
) -> Result<Owned> {
    // Written before the lock is taken: it is synced, and others want the lock.
    // What a daemon's pod has taken is on the index still, and no longer to be had.
    let offered = || key.look(config).filter(|(_, by)| by.claim.is_none());
    let prepared = offered().is_none();
    if prepared {
        intent(fresh)?;
        fresh.hold(holder)?;
    }
    let _locked = lock(config).await?;
    let Some((record, before)) = offered() else {
        if !prepared {
            intent(fresh)?;
            fresh.hold(holder)?;
        }
        replace_link(&key.link(config), fresh.dir())?;
        return Ok(Owned::Fresh(fresh.clone()));
    };
    if prepared && record.dir() != fresh.dir() {
        // It is there for nothing; what an earlier life of this id owes stays on record.
        fresh
            .remove()
            .unwrap_or_else(|error| tracing::warn!(%error, "a place that is not needed is left"));
    }
    let again = before.sandbox_id == holder.sandbox_id && before.supervisor == holder.supervisor;
    if !again && !before.is_takable() {
        return Ok(Owned::Elsewhere(Box::new(before)));
    }
    // Its keeper may be at it just now, with a DEL or a CHECK.
    let Ok(_alone) = record.lock() else {
        return Ok(Owned::Elsewhere(Box::new(before)));
    };
    let taken = record.as_of(&holder.sandbox_id, holder.supervisor);
    intent(&taken)?;
    taken.hold(&Holder {
        netns: netns::of_record(config, &taken),
        made_for: before.made_for.clone(),
        ..holder.clone()
    })?;
    for slot in taken.slots() {
        slot.set_sandbox(&holder.sandbox_id)?;
    }
    Ok(Owned::Taken(taken, Box::new(before)))
}

impl NetworkRecord {
    /// Takes the network off the index. False: it is another sandbox's by now, and nothing of it is ours to touch. After
    /// true nobody else can have it.
    pub async fn withdraw(&self, config: &Config) -> Result<bool> {
        let Some(key) = self.holder().and_then(|h| h.key()) else {
            return Ok(self.is_mine());
        };
        let link = key.link(config);
        if !leads_to(&link, self.dir()) {
            // Not on the index, so it cannot change hands after this look.
            return Ok(self.is_mine());
        }
        let _locked = lock(config).await?;
        if !self.is_mine() {
            return Ok(false);
        }
        if leads_to(&link, self.dir()) {
            disk::remove_file(&link)?;
        }
        Ok(true)
    }

    /// From now on another supervisor of the same pod may have it; for how long somebody keeps it is told with it. False:
    /// another has it already. `keeper`: this process does nothing else any more.
    pub async fn park(&self, config: &Config, keeper: bool, keep: Duration) -> Result<bool> {
        let until = clock::uptime().saturating_add(keep).as_secs_f64();
        let at = clock::unix_nanos(SystemTime::now());
        self.change(config, |holder| {
            holder.parked = Some(Parking { at, until });
            holder.keeper = keeper;
        })
        .await
    }

    /// From now on this process keeps what is parked and kept by nobody who lives. False: somebody has it.
    pub async fn adopt(&self, config: &Config, own: crate::process::Identity) -> Result<bool> {
        let _locked = lock(config).await?;
        match self.holder() {
            Some(holder) if holder.is_parked() && !holder.is_alive() => {
                self.hold_for_the_boot(&Holder {
                    supervisor: Some(own),
                    keeper: true,
                    ..holder
                })?;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// It is its supervisor's own again, and off the index. False: another has it.
    pub async fn claim(&self, config: &Config) -> Result<bool> {
        if self.holder().is_some_and(|h| h.parked.is_some())
            && !self.change(config, |holder| holder.parked = None).await?
        {
            return Ok(false);
        }
        self.withdraw(config).await
    }

    /// Its supervisor serves nobody any more and only makes or keeps the network.
    pub fn set_keeper(&self) -> Result<()> {
        match self.holder().filter(|_| self.is_mine()) {
            Some(holder) => self.hold(&Holder {
                keeper: true,
                ..holder
            }),
            None => Ok(()),
        }
    }

    /// Tells those who watch under another id why there will be no network, and as what kind of failure.
    pub fn note_end(&self, config: &Config, kind: Kind, why: &Error) {
        let Some(holder) = self.holder().filter(|_| self.is_mine()) else {
            return;
        };
        let offered = holder
            .key()
            .is_some_and(|key| leads_to(&key.link(config), self.dir()));
        if !offered || !self.dir().join(WATCHED).exists() {
            return;
        }
        let told = Holder {
            failed: why.to_string(),
            failed_as: kind,
            ..holder
        };
        if let Err(error) = self.hold(&told) {
            tracing::warn!(%error, "those who wait under another id are not told");
        }
    }

    /// Something is where its netns is to be pinned.
    pub fn netns_is_left(&self, config: &Config) -> bool {
        netns::of_record(config, self).symlink_metadata().is_ok()
    }

    /// Counts as somebody who waits for it.
    pub fn watch(&self) -> Result<Watching> {
        let path = self.dir().join(WATCHED);
        let file = fs::OpenOptions::new()
            .create(true)
            .write(true)
            .truncate(false)
            .open(&path)
            .context(|| format!("open {}", path.display()))?;
        Flock::lock(file, FlockArg::LockSharedNonblock)
            .map(|file| Watching { _file: file })
            .map_err(|(_, e)| Error::sys(format!("lock {}", path.display()), e))
    }

    /// Somebody waits for it under another id.
    pub fn is_watched(&self) -> bool {
        let Ok(file) = fs::File::open(self.dir().join(WATCHED)) else {
            return false;
        };
        matches!(
            Flock::lock(file, FlockArg::LockExclusiveNonblock),
            Err((_, nix::errno::Errno::EWOULDBLOCK))
        )
    }

    /// Waits until nobody watches any more, who has read then what [`note_end`](Self::note_end) told; at most `limit`.
    pub async fn told(&self, limit: Duration) {
        let end = Instant::now() + limit;
        while self.is_watched() && Instant::now() < end {
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// What was taken over is all there, and is what the same ADDs would give now: same boot, same arguments, the netns
    /// (and the user namespace that it is to belong to) pinned, a result on disk for each attachment and no DEL.
    pub fn is_whole(&self, before: &Holder, now: &Holder, user: userns::Wanted<'_>) -> bool {
        let pinned = |path: &Path| netns::is_pinned(path);
        let attached = |ifname: &String| {
            let on = self.slot(ifname).on_record();
            on.owes_del && on.result.is_some() && pinned(&on.netns)
        };
        let netns = &before.netns;
        before.boot_id == now.boot_id
            && before.failed.is_empty()
            && !before.digest.is_empty()
            && before.digest == now.digest
            && pinned(netns)
            && userns::fits(netns, user)
            && !before.ifnames.is_empty()
            && before.ifnames == now.ifnames
            && before.ifnames.iter().all(attached)
            && self.slots().iter().filter(|s| s.owes_del()).count() == before.ifnames.len()
    }

    /// Changes what `pod.json` says, if it still is ours.
    async fn change(&self, config: &Config, change: impl FnOnce(&mut Holder)) -> Result<bool> {
        let _locked = lock(config).await?;
        let Some(mut holder) = self.holder().filter(|h| self.is_mine_by(h)) else {
            return Ok(false);
        };
        change(&mut holder);
        self.hold(&holder)?;
        Ok(true)
    }
}

/// Excludes every change of hands until dropped.
pub(super) async fn lock(config: &Config) -> Result<Locked> {
    let end = Instant::now() + LOCK_LIMIT;
    let mut file = index(config)?;
    loop {
        match try_lock(config, file, Instant::now() < end)? {
            Ok(locked) => return Ok(locked),
            Err(back) => file = back,
        }
        sleep(LOCK_PAUSE).await;
    }
}

/// [`lock`] for a process without an event loop.
pub(super) fn lock_blocking(config: &Config) -> Result<Locked> {
    let begun = std::time::Instant::now();
    let mut file = index(config)?;
    loop {
        match try_lock(config, file, begun.elapsed() < LOCK_LIMIT)? {
            Ok(locked) => return Ok(locked),
            Err(back) => file = back,
        }
        std::thread::sleep(LOCK_PAUSE);
    }
}

fn index(config: &Config) -> Result<fs::File> {
    let dir = config.runtime_root.join(KEYS);
    let what = || format!("lock {}", dir.display());
    disk::private_dir(&config.runtime_root).context(what)?;
    disk::private_dir(&dir).context(what)?;
    fs::File::open(&dir).context(what)
}

/// The file comes back when somebody else has the lock and one may try again.
fn try_lock(
    config: &Config,
    file: fs::File,
    again: bool,
) -> Result<std::result::Result<Locked, fs::File>> {
    let what = || format!("lock {}", config.runtime_root.join(KEYS).display());
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(dir) => Ok(Ok(Locked::of(dir))),
        Err((back, nix::errno::Errno::EWOULDBLOCK)) if again => Ok(Err(back)),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => {
            let text = format!("{}: networks are changing hands; retry", what());
            Err(Error::new(Kind::Busy, text))
        }
        Err((_, e)) => Err(Error::sys(what(), e)),
    }
}

fn leads_to(link: &Path, dir: &Path) -> bool {
    fs::read_link(link).is_ok_and(|to| to == dir)
}

fn replace_link(link: &Path, to: &Path) -> Result<()> {
    let what = || format!("link {} to {}", link.display(), to.display());
    match symlink(to, link) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
        made => return made.context(what),
    }
    // It leads to nothing of this key. Nobody else is here: the index is locked.
    disk::remove_file(link)?;
    symlink(to, link).context(what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::Identity;

    fn config(dir: &Path) -> Config {
        Config {
            runtime_root: dir.join("run"),
            state_root: dir.join("lib"),
            ..Config::default()
        }
    }

    fn holder(config: &Config, id: &str) -> (NetworkRecord, Holder) {
        let own = Identity::own().ok();
        let record = NetworkRecord::at(config, "n", id).as_of(id, own);
        let holder = Holder {
            namespace: "n".into(),
            sandbox_id: id.into(),
            name: "web".into(),
            uid: "u".into(),
            boot_id: clock::boot_id(),
            supervisor: own,
            ..Holder::default()
        };
        (record, holder)
    }

    #[test]
    fn no_two_keys_are_spelt_alike_and_without_metadata_there_is_none() {
        let config = Config::default();
        let link = |space: &str, name: &str, uid: &str, attempt| {
            let key = PodKey::new("n", space, name, uid, attempt);
            key.map(|key| key.link(&config))
        };
        let links = [
            link("a", "b_c", "d", 0),
            link("a_b", "c", "d", 0),
            link("a", "b", "c_d", 0),
            link("a", "b", "c_d", 1),
            link("", "b", "c_d", 0),
        ];
        let different: std::collections::BTreeSet<_> = links.iter().flatten().collect();
        assert_eq!(different.len(), links.len());
        assert!(link("a", "", "u", 0).is_none() && link("a", "b", "", 0).is_none());
    }

    #[tokio::test]
    async fn what_is_parked_changes_hands_once_and_is_nobody_elses_then() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        let (first, one) = holder(&config, "p1");
        let key = one.key().unwrap();
        let fine = |_: &NetworkRecord| Ok(());
        let owned = own(&config, &key, &first, &one, fine).await.unwrap();
        assert!(matches!(owned, Owned::Fresh(_)));
        let (second, two) = holder(&config, "p2");
        let owned = own(&config, &key, &second, &two, fine).await.unwrap();
        assert!(matches!(owned, Owned::Elsewhere(by) if by.sandbox_id == "p1"));
        assert!(first.park(&config, true, LOCK_LIMIT).await.unwrap());
        let owned = own(&config, &key, &second, &two, fine).await.unwrap();
        let Owned::Taken(taken, before) = owned else {
            panic!("{owned:?}");
        };
        assert_eq!(
            (before.sandbox_id.as_str(), taken.dir()),
            ("p1", first.dir())
        );
        assert!(taken.is_mine() && !first.is_mine());
        assert!(!first.withdraw(&config).await.unwrap());
        assert!(!first.claim(&config).await.unwrap());
        first.remove().unwrap();
        assert!(taken.dir().exists(), "another's record is left alone");
        assert_eq!(NetworkRecord::find(&config, "n", "p2").dir(), taken.dir());
        assert_ne!(NetworkRecord::free(&config, "n", "p1").dir(), taken.dir());
        assert!(taken.withdraw(&config).await.unwrap());
        assert!(key.look(&config).is_none());
    }
}
