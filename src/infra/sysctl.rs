//! Which kernel settings a pod may have, and writing them inside its namespaces.
//!
//! Promise: only settings that belong to a namespace of the pod's own are written, each by one write to the one file
//! its key names. A value is a value: it is never parsed, split or handed to a program that would
//! (`+kernel.core_pattern=...` in a value once wrote another setting on the host).

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;

use nix::sched::CloneFlags;

use super::{InfraSpec, Namespace};
use crate::error::{Context, Error, Kind, Result};
use crate::sys::thread_ns::{self, Enter};

/// Longest value; the kernel takes a page.
const MAX_VALUE: usize = 4095;

const IPC: &[&str] = &[
    "kernel/shmall",
    "kernel/shmmax",
    "kernel/shmmni",
    "kernel/shm_rmid_forced",
    "kernel/shm_next_id",
    "kernel/msgmax",
    "kernel/msgmnb",
    "kernel/msgmni",
    "kernel/msg_next_id",
    "kernel/sem",
    "kernel/sem_next_id",
];

/// Checks a pod's sysctls against its namespaces. Allowed are `net.*` where the pod has a network namespace, and the
/// IPC settings (`kernel.shm*`, `kernel.msg*`, `kernel.sem*`, `fs.mqueue.*`) where it has an IPC namespace; `New` and
/// `Path` count alike.
///
/// Returns them with each key as its path below /proc/sys (`net/ipv4/ip_forward`); such keys are accepted, too, so that
/// a checked map passes again. As for sysctl(8), the first separator of a key decides: after a `.`, a `/` inside the key
/// is a dot of the path. Invalid names the key and the reason.
pub fn check_sysctls(
    sysctls: &BTreeMap<String, String>,
    spec: &InfraSpec,
) -> Result<BTreeMap<String, String>> {
    let mut checked = BTreeMap::new();
    for (key, value) in sysctls {
        let path = path_of(key).ok_or_else(|| {
            refuse(
                key,
                "a key is names of letters, digits and '_-:@', joined by '.'",
            )
        })?;
        if let Err(why) = allowed(&path, spec) {
            return Err(refuse(key, why));
        }
        if value.len() > MAX_VALUE {
            return Err(refuse(key, "its value is longer than 4095 bytes"));
        }
        if value.is_empty() || value.chars().any(|c| c.is_control() && c != '\t') {
            return Err(refuse(
                key,
                "its value is empty, or has a newline or another control character",
            ));
        }
        if checked
            .insert(path, value.clone())
            .is_some_and(|other| other != *value)
        {
            return Err(refuse(key, "it is given twice, with different values"));
        }
    }
    Ok(checked)
}

/// Writes checked sysctls from a thread that is in the namespaces of `pid`, our unreaped child.
pub(super) fn write(sysctls: &BTreeMap<String, String>, pid: i32) -> Result<()> {
    if sysctls.is_empty() {
        return Ok(());
    }
    let open = |name: &str| {
        let path = format!("/proc/{pid}/ns/{name}");
        fs::File::open(&path).context(|| format!("open {path}"))
    };
    let (net, ipc) = (open("net")?, open("ipc")?);
    let ways = [
        Enter::Join(net.as_fd(), CloneFlags::CLONE_NEWNET),
        Enter::Join(ipc.as_fd(), CloneFlags::CLONE_NEWIPC),
    ];
    thread_ns::run(&ways, || {
        sysctls
            .iter()
            .try_for_each(|(path, value)| write_one(path, value))
    })
}

fn write_one(path: &str, value: &str) -> Result<()> {
    // The kernel shows the settings of the namespaces of whoever opens the file.
    let file = Path::new("/proc/sys").join(path);
    OpenOptions::new()
        .write(true)
        .open(&file)
        .and_then(|mut open| open.write(value.as_bytes()))
        .and_then(|taken| match taken == value.len() {
            true => Ok(()),
            // The kernel stops where its numbers end. What follows is no part of the setting, and a second write
            // would be a second setting.
            false => Err(io::Error::from_raw_os_error(libc::EINVAL)),
        })
        .map_err(|e| {
            // No such setting, or a value the kernel does not take: the request is wrong, not the machine.
            let wrong = matches!(
                e.raw_os_error(),
                Some(libc::ENOENT | libc::EINVAL | libc::ERANGE)
            );
            let error = Error::io(
                format_args!("write sysctl {} = {value:?}", path.replace('/', ".")),
                e,
            );
            if wrong {
                error.as_kind(Kind::Invalid)
            } else {
                error
            }
        })
}

fn allowed(path: &str, spec: &InfraSpec) -> std::result::Result<(), &'static str> {
    if path.starts_with("net/") {
        return match spec.network {
            Namespace::Host => {
                Err("the pod is on the host's network, whose settings are not the pod's to change")
            }
            Namespace::New | Namespace::Path(_) => Ok(()),
        };
    }
    if path.starts_with("fs/mqueue/") || IPC.contains(&path) {
        return match spec.ipc {
            Namespace::Host => {
                Err("the pod shares the host's IPC, whose settings are not the pod's to change")
            }
            Namespace::New | Namespace::Path(_) => Ok(()),
        };
    }
    match path {
        "kernel/hostname" | "kernel/domainname" => Err("give the pod a hostname instead"),
        _ => Err(
            "it does not belong to a namespace: allowed are net.*, kernel.shm*, kernel.msg*, kernel.sem*, fs.mqueue.*",
        ),
    }
}

/// The path below /proc/sys that a key names.
fn path_of(key: &str) -> Option<String> {
    let swap = key
        .find(['.', '/'])
        .is_some_and(|at| key.as_bytes().get(at) == Some(&b'.'));
    let path: String = key
        .chars()
        .map(|c| match c {
            '.' if swap => '/',
            '/' if swap => '.',
            c => c,
        })
        .collect();
    let good = |part: &str| {
        let usual = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | ':' | '@' | '.');
        !part.is_empty() && part != "." && part != ".." && part.chars().all(usual)
    };
    (key.len() <= 255 && path.split('/').count() > 1 && path.split('/').all(good)).then_some(path)
}

fn refuse(key: &str, why: &str) -> Error {
    let shown: String = key.chars().take(100).collect();
    Error::new(Kind::Invalid, format!("check sysctl {shown:?}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(
        key: &str,
        value: &str,
        network: Namespace,
        ipc: Namespace,
    ) -> Result<BTreeMap<String, String>> {
        let spec = InfraSpec {
            network,
            ipc,
            ..InfraSpec::default()
        };
        check_sysctls(&BTreeMap::from([(key.to_owned(), value.to_owned())]), &spec)
    }

    #[test]
    fn settings_of_the_pods_own_namespaces_pass_and_pass_again() {
        let new = || Namespace::New;
        for (key, path) in [
            ("net.ipv4.ip_forward", "net/ipv4/ip_forward"),
            ("net/ipv4/ip_forward", "net/ipv4/ip_forward"),
            (
                "net.ipv4.conf.eth0/100.forwarding",
                "net/ipv4/conf/eth0.100/forwarding",
            ),
            (
                "net/ipv4/conf/eth0.100/forwarding",
                "net/ipv4/conf/eth0.100/forwarding",
            ),
            ("kernel.shmmax", "kernel/shmmax"),
            ("fs.mqueue.msg_max", "fs/mqueue/msg_max"),
        ] {
            let once = check(key, "1", new(), new()).expect(key);
            assert_eq!(once.keys().collect::<Vec<_>>(), [path]);
            let spec = InfraSpec {
                network: new(),
                ipc: new(),
                ..InfraSpec::default()
            };
            assert_eq!(check_sysctls(&once, &spec).expect(key), once);
        }
    }

    /// 086p: on the host's network (or IPC) the settings are the host's.
    #[test]
    fn settings_of_the_host_are_refused() {
        let refused = |key: &str, network, ipc| {
            let error = check(key, "1", network, ipc).expect_err(key);
            assert_eq!(error.kind(), Kind::Invalid);
            assert!(error.to_string().contains(key), "{error}");
        };
        refused("net.ipv4.ip_forward", Namespace::Host, Namespace::New);
        refused("kernel.shmmax", Namespace::New, Namespace::Host);
        for key in [
            "kernel.core_pattern",
            "kernel.hostname",
            "kernel.domainname",
            "vm.swappiness",
            "kernel.shmmax.x",
        ] {
            refused(key, Namespace::New, Namespace::New);
        }
    }

    /// 086o: neither key nor value leads anywhere else.
    #[test]
    fn hostile_keys_and_values_are_refused() {
        let new = || Namespace::New;
        for key in [
            "",
            "net",
            "net.",
            ".net",
            "net..x",
            "net.ipv4.//.x",
            "net/../kernel/core_pattern",
            "net/./x",
            "net.a b",
            "net.x\n",
            "net.x=1",
            "/net/x",
            "net.x\0",
            "../net/x",
            "net.ipv4/../../kernel/core_pattern",
        ] {
            assert!(check(key, "1", new(), new()).is_err(), "{key:?}");
        }
        for value in [
            "",
            "1\n",
            "1\nkernel.core_pattern=x",
            "\0",
            &"1".repeat(4096),
        ] {
            assert!(
                check("net.ipv4.ip_forward", value, new(), new()).is_err(),
                "{value:?}"
            );
        }
        // Harmless as a value: the kernel refuses it when it is written.
        assert!(
            check(
                "kernel.shm_rmid_forced",
                "1+kernel.core_pattern=|/x",
                new(),
                new()
            )
            .is_ok()
        );
    }

    #[test]
    fn one_setting_in_two_spellings_must_agree() {
        let spec = InfraSpec {
            network: Namespace::New,
            ..InfraSpec::default()
        };
        let both = |a: &str, b: &str| {
            BTreeMap::from([
                ("net.x.y".to_owned(), a.to_owned()),
                ("net/x/y".to_owned(), b.to_owned()),
            ])
        };
        assert!(check_sysctls(&both("1", "1"), &spec).is_ok());
        assert!(check_sysctls(&both("1", "2"), &spec).is_err());
    }
}
