//! Beside the markers: whose network it is, and how the tries of an owed DEL went.
//!
//! | file | says |
//! |---|---|
//! | `pod.json` | the pod by name, uid and attempt, and the supervisor that has it; written before `add-started.json`. Whose the network is: see `handover` |
//! | `owed.json` | first failure, number of tries, last error, next try |
//!
//! Neither decides whether a DEL is owed: that is the markers' word alone. Both are whole or absent; one that is empty
//! or cut off counts as absent, so that the DEL is owed *now*.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::{Claim, NetworkRecord, Parking, disk, netns};
use crate::clock;
use crate::error::{Error, Kind, Result};
use crate::process::Identity;

/// Name of the file about the tries; removed when a new ADD begins.
pub(super) const OWED: &str = "owed.json";
pub(super) const POD: &str = "pod.json";

/// Pause before the second try, doubled from try to try.
pub const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// Longest pause while there is hope.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// A DEL that has failed for this long, and whose netns is gone, is *leaked*: it is still retried, once in this time.
pub const LEAKED_AFTER: Duration = Duration::from_secs(24 * 3600);

/// Whose network a record is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Holder {
    /// containerd namespace.
    pub namespace: String,
    /// Sandbox id.
    pub sandbox_id: String,
    /// Pod metadata, empty when none was given.
    pub name: String,
    /// Pod metadata.
    pub uid: String,
    /// Pod's own (Kubernetes) namespace.
    pub pod_namespace: String,
    /// Pod metadata.
    pub attempt: u32,
    /// Where the netns is pinned.
    pub netns: PathBuf,
    /// Boot that `supervisor` belongs to.
    pub boot_id: String,
    /// The supervisor that has the pod. None: the pod is gone, only its network is left.
    pub supervisor: Option<Identity>,
    /// Its process serves nobody any more: it only makes and keeps the network.
    pub keeper: bool,
    /// Nobody has claimed it: another supervisor of the same pod may take it over.
    pub parked: Option<Parking>,
    /// Unix nanoseconds: when it was begun, or taken over.
    pub begun: u64,
    /// SHA-256 of what its plugins are asked for.
    pub digest: String,
    /// CNI_CONTAINERID of its ADDs: the id of the sandbox that it was made for.
    pub made_for: String,
    /// The interfaces it is to have.
    pub ifnames: Vec<String>,
    /// Why there will be none.
    pub failed: String,
    /// "network/interface" where it was made for a daemon's pod by the CNI plugin; empty: for a pod of ours.
    pub network: String,
    /// A daemon's pod has it.
    pub claim: Option<Claim>,
    /// What kind of failure that was; Other where an older version has written it.
    pub failed_as: Kind,
}

/// How the tries of an owed DEL went so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Debt {
    /// Unix nanoseconds of the first failure; 0: there was none yet.
    pub first_failure: u64,
    /// Failed tries.
    pub tries: u32,
    /// How the last one failed.
    pub last_error: String,
    /// Unix nanoseconds of the next try; 0: now.
    pub next_try: u64,
}

impl Debt {
    /// Whether the next try may be made. A clock that was set back must not put it off for ever.
    pub fn is_due(&self, now: SystemTime) -> bool {
        let (now, day) = (clock::unix_nanos(now), nanos(LEAKED_AFTER));
        self.next_try <= now || self.next_try - now > day
    }

    /// Whether it has failed for a day.
    fn is_old(&self, now: SystemTime) -> bool {
        self.first_failure != 0
            && clock::unix_nanos(now).saturating_sub(self.first_failure) >= nanos(LEAKED_AFTER)
    }

    /// The same after one more failure.
    fn after(mut self, error: &Error, now: SystemTime, netns_gone: bool) -> Self {
        let at = clock::unix_nanos(now);
        if self.first_failure == 0 {
            self.first_failure = at;
        }
        self.tries = self.tries.saturating_add(1);
        self.last_error = error.to_string();
        let pause = if netns_gone && self.is_old(now) {
            LEAKED_AFTER
        } else {
            pause(self.tries)
        };
        self.next_try = at.saturating_add(nanos(pause));
        self
    }
}

impl NetworkRecord {
    /// Writes down whose network it will be, before anything of it exists.
    pub fn hold(&self, holder: &Holder) -> Result<()> {
        self.make_dir()?;
        if self.is_daemons() {
            // Of what a daemon's pod has, only add-started and the result have to outlive a power cut.
            return self.hold_for_the_boot(holder);
        }
        self.write_json(POD, holder)
    }

    /// The same without the way to the disk: for what a power cut makes void anyway.
    pub(super) fn hold_for_the_boot(&self, holder: &Holder) -> Result<()> {
        let path = self.dir().join(POD);
        let text = serde_json::to_vec(holder)
            .map_err(|e| Error::caused(Kind::Other, format!("write {}", path.display()), e))?;
        disk::write_for_the_boot(&path, &text)
    }

    /// Whose it is; None when that was never written, or is damaged.
    pub fn holder(&self) -> Option<Holder> {
        let text = disk::read(&self.dir().join(POD)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// True while the supervisor that made it lives and has not let go: what is owed is that one's business.
    pub fn is_held(&self) -> bool {
        self.held_by().is_some()
    }

    /// The session, of this boot, of the supervisor that had it last and has not let go: where its plugins run.
    pub fn last_session(&self) -> Option<i32> {
        let holder = self.holder()?;
        let supervisor = holder.supervisor?;
        (holder.boot_id == clock::boot_id()).then_some(supervisor.pid)
    }

    /// The living supervisor that has it.
    pub fn held_by(&self) -> Option<Identity> {
        let holder = self.holder().filter(Holder::is_alive)?;
        holder.supervisor.filter(|_| self.is_mine())
    }

    /// The pod is gone, its network is not: from now on anybody may send the DEL.
    pub fn let_go(&self) -> Result<()> {
        match self.holder() {
            Some(holder) if holder.supervisor.is_some() && self.is_mine() => self.write_json(
                POD,
                &Holder {
                    supervisor: None,
                    keeper: false,
                    parked: None,
                    ..holder
                },
            ),
            _ => Ok(()),
        }
    }

    /// How the tries of the owed DEL went; None when none is owed.
    pub fn debt(&self) -> Option<Debt> {
        if !self.owes_del() {
            return None;
        }
        let text = disk::read(&self.dir().join(OWED)).ok();
        let read = text.and_then(|t| serde_json::from_slice(&t).ok());
        Some(read.unwrap_or_default())
    }

    /// Owed for a day, and the netns is gone.
    pub fn is_leaked(&self) -> bool {
        self.debt().is_some_and(|d| d.is_old(SystemTime::now())) && self.netns_is_gone()
    }

    /// Counts a try that failed. Its own failure is only logged: the DEL stays owed in any case.
    pub(super) fn note_failure(&self, error: &Error) {
        let debt = self.debt().unwrap_or_default();
        let debt = debt.after(error, SystemTime::now(), self.netns_is_gone());
        if let Err(error) = self.write_json(OWED, &debt) {
            tracing::warn!(%error, "failed DEL not counted");
        }
    }

    fn netns_is_gone(&self) -> bool {
        self.holder()
            .is_none_or(|h| h.netns.as_os_str().is_empty() || !netns::is_pinned(&h.netns))
    }

    fn write_json(&self, name: &str, value: &impl Serialize) -> Result<()> {
        let path = self.dir().join(name);
        let text = serde_json::to_vec(value)
            .map_err(|e| Error::caused(Kind::Other, format!("write {}", path.display()), e))?;
        disk::write_durable(&path, &text)
    }
}

/// Pause after the try of this number.
pub fn pause(tries: u32) -> Duration {
    let doubled = FIRST_PAUSE.saturating_mul(1 << tries.saturating_sub(1).min(16));
    doubled.min(LONGEST_PAUSE)
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use std::fs;

    fn record() -> (tempfile::TempDir, NetworkRecord) {
        let dir = tempfile::tempdir().unwrap();
        let config = Config {
            state_root: dir.path().join("lib"),
            ..Config::default()
        };
        let record = NetworkRecord::at(&config, "default", "p1");
        (dir, record)
    }

    fn holder() -> Holder {
        Holder {
            namespace: "default".into(),
            sandbox_id: "p1".into(),
            name: "web".into(),
            boot_id: clock::boot_id(),
            supervisor: Identity::own().ok(),
            ..Holder::default()
        }
    }

    #[test]
    fn pauses_double_up_to_a_minute() {
        let seconds: Vec<f64> = [1, 2, 3, 7, 8, 40].map(|t| pause(t).as_secs_f64()).into();
        assert_eq!(seconds, [0.5, 1.0, 2.0, 32.0, 60.0, 60.0]);
    }

    #[test]
    fn a_day_without_a_netns_is_a_leak_and_is_tried_daily() {
        let error = Error::new(Kind::Other, "no");
        let begin = SystemTime::now();
        let first = Debt::default().after(&error, begin, true);
        assert_eq!((first.tries, first.last_error.as_str()), (1, "no"));
        assert!(!first.is_due(begin) && first.is_due(begin + FIRST_PAUSE));
        let later = begin + LEAKED_AFTER;
        let old = first.clone().after(&error, later, true);
        assert!(old.is_old(later) && !old.is_due(later + LONGEST_PAUSE));
        assert!(old.is_due(later + LEAKED_AFTER));
        // The netns is there: there is hope still.
        assert!(
            first
                .after(&error, later, false)
                .is_due(later + LONGEST_PAUSE)
        );
    }

    #[test]
    fn a_clock_that_was_set_back_makes_it_due() {
        let debt = Debt::default().after(&Error::new(Kind::Other, "no"), SystemTime::now(), true);
        assert!(debt.is_due(SystemTime::now() - LEAKED_AFTER * 2));
    }

    #[test]
    fn the_holder_is_known_until_it_lets_go() {
        let (_keep, record) = record();
        record.hold(&holder()).unwrap();
        assert!(record.is_held());
        record.let_go().unwrap();
        assert!(!record.is_held());
        assert_eq!(record.holder().unwrap().name, "web");
        let other_boot = Holder {
            boot_id: "other".into(),
            ..holder()
        };
        record.hold(&other_boot).unwrap();
        assert!(!record.is_held());
    }

    #[test]
    fn a_record_of_an_older_version_tells_no_kind_and_the_rest() {
        let (_keep, record) = record();
        let told = Holder {
            failed: "no address is free".into(),
            failed_as: Kind::Denied,
            ..holder()
        };
        record.hold(&told).unwrap();
        assert_eq!(record.holder(), Some(told.clone()));
        let path = record.dir().join(POD);
        let mut kept: serde_json::Value =
            serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(kept["failed_as"], "denied");
        kept.as_object_mut().unwrap().remove("failed_as");
        fs::write(&path, kept.to_string()).unwrap();
        let older = Holder {
            failed_as: Kind::Other,
            ..told
        };
        assert_eq!(record.holder(), Some(older));
    }

    #[test]
    fn cut_off_files_mean_owed_now_by_nobody_known() {
        let (_keep, record) = record();
        record.hold(&holder()).unwrap();
        fs::write(record.dir().join("add-started.json"), "").unwrap();
        record.note_failure(&Error::new(Kind::Other, "no"));
        assert_eq!(record.debt().unwrap().tries, 1);
        for name in [OWED, POD] {
            let path = record.dir().join(name);
            let whole = fs::read(&path).unwrap();
            for length in [0, whole.len() / 2] {
                fs::write(&path, &whole[..length]).unwrap();
                if name == OWED {
                    assert_eq!(record.debt(), Some(Debt::default()));
                } else {
                    assert!(record.holder().is_none() && !record.is_held());
                }
            }
        }
        fs::write(record.dir().join("network-stopped"), "{}").unwrap();
        assert_eq!(record.debt(), None);
    }
}
