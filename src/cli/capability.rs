//! Capabilities by name: what a workload has, is given, and is taken.
//!
//! Promises the usual fourteen of container engines, and that ALL never holds one that we could not give ourselves.

use std::fs;

use crate::error::{Context, Error, Kind, Result};

/// Stands for every capability.
const ALL: &str = "ALL";

/// By their numbers.
const NAMES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

/// What container engines leave to root in a container.
const USUAL: [&str; 14] = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];

/// See [`USUAL`].
pub fn usual() -> Vec<String> {
    USUAL.map(str::to_owned).to_vec()
}

/// `NET_ADMIN`, `cap_net_admin` → `CAP_NET_ADMIN`; `all` → `ALL`.
pub fn name(text: &str) -> std::result::Result<String, String> {
    let upper = text.to_ascii_uppercase();
    let bare = upper.strip_prefix("CAP_").unwrap_or(&upper);
    match bare {
        ALL => Ok(ALL.to_owned()),
        known if NAMES.contains(&known) => Ok(format!("CAP_{known}")),
        _ => Err(format!(
            "{text:?} is no capability: write its name, as in NET_ADMIN, or ALL"
        )),
    }
}

/// First what is given, then what is taken; ALL comes before single ones, so that `drop ALL, add KILL` is KILL alone.
/// Both lists are checked names. The order is that of the names.
///
/// # Errors
/// Those of reading /proc, for ALL.
pub fn change(held: &mut Vec<String>, add: &[String], drop: &[String]) -> Result<()> {
    if drop.iter().any(|d| d == ALL) {
        held.clear();
    }
    if add.iter().any(|a| a == ALL) {
        held.extend(ours()?);
    }
    held.extend(add.iter().filter(|a| *a != ALL).cloned());
    held.retain(|h| !drop.contains(h));
    held.sort();
    held.dedup();
    Ok(())
}

/// Those that our own bounding set has.
fn ours() -> Result<Vec<String>> {
    const WHAT: &str = "read our capabilities from /proc/self/status";
    let text = fs::read_to_string("/proc/self/status").context(|| WHAT)?;
    let line = text.lines().find_map(|l| l.strip_prefix("CapBnd:"));
    let bits = line.and_then(|l| u64::from_str_radix(l.trim(), 16).ok());
    let bits = bits.ok_or_else(|| Error::new(Kind::Other, format!("{WHAT}: it has none")))?;
    let held = NAMES.iter().enumerate().filter(|(n, _)| bits >> n & 1 == 1);
    Ok(held.map(|(_, name)| format!("CAP_{name}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(add: &[&str], drop: &[&str]) -> Vec<String> {
        let names =
            |list: &[&str]| -> Vec<String> { list.iter().map(|n| name(n).unwrap()).collect() };
        let mut held = usual();
        change(&mut held, &names(add), &names(drop)).unwrap();
        held
    }

    #[test]
    fn names_in_any_spelling_and_nothing_else() {
        assert_eq!(name("cap_net_admin").as_deref(), Ok("CAP_NET_ADMIN"));
        assert_eq!(name("BPF").as_deref(), Ok("CAP_BPF"));
        assert_eq!(name("all").as_deref(), Ok(ALL));
        for bad in ["", "NET", "CAP_", "CAP_CAP_KILL"] {
            assert!(name(bad).is_err(), "{bad}");
        }
        assert_eq!((NAMES[21], NAMES[40]), ("SYS_ADMIN", "CHECKPOINT_RESTORE"));
    }

    #[test]
    fn what_is_taken_is_gone_and_what_is_given_is_there_once() {
        assert_eq!(changed(&[], &[]), usual());
        assert_eq!(changed(&["KILL"], &["ALL"]), ["CAP_KILL"]);
        assert!(changed(&["SYS_PTRACE", "kill"], &[]).len() == 15);
        assert!(!changed(&["ALL"], &["CHOWN"]).contains(&"CAP_CHOWN".to_owned()));
        assert_eq!(changed(&[], &["ALL"]), Vec::<String>::new());
    }
}
