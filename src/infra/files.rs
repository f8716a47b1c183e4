//! The pod's own files: hostname, hosts, resolv.conf, and the tmpfs `shm`, in one directory of the pod.
//!
//! The directory is a mount of its own, made of itself: shm, and the pins of the pod's namespaces ([`super::pins`]), go
//! with it by one unmount. Each unmount waits until every processor has seen it.
//!
//! Promise: `remove` undoes what any part of `make` did, as often as it is called. Texts from a request are checked
//! before they become a line: none can smuggle in another one.

use std::fmt::Write as _;
use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use serde::{Deserialize, Serialize};

use super::label;
use super::pins;
use crate::error::{Context, Error, Kind, Result};
use crate::failpoint;
use crate::sys::mount::{bind_to_itself, detach_all};
use crate::sys::mountinfo;

/// More of a host's file than this is not copied into every pod.
const MAX_COPY: u64 = 1 << 20;

/// Longest label the kernel, DNS and every libc agree on.
const MAX_HOSTNAME: usize = 63;

/// DNS of a pod; `None` in [`PodFiles`] copies the host's resolv.conf, an empty one means an empty file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dns {
    /// Addresses.
    pub servers: Vec<String>,
    /// Search domains.
    pub searches: Vec<String>,
    /// Resolver options, `ndots:5`.
    pub options: Vec<String>,
}

/// What the files under the pod's directory hold.
#[derive(Clone, Debug)]
pub struct PodFiles {
    /// The pod's, see [`hostname`]. Empty: the host's.
    pub hostname: String,
    /// See [`Dns`].
    pub dns: Option<Dns>,
    /// The host's hosts file is the pod's.
    pub host_network: bool,
    /// The host's /dev/shm is the pod's.
    pub host_ipc: bool,
    /// Bytes of the pod's shm.
    pub shm_size: u64,
    /// SELinux label of the files and of the pod's shm; `None` leaves it to the kernel. The host's /dev/shm keeps its own.
    pub label: Option<String>,
}

/// Paths to bind into containers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodFilePaths {
    /// For /etc/hostname.
    pub hostname: PathBuf,
    /// For /etc/hosts.
    pub hosts: PathBuf,
    /// For /etc/resolv.conf.
    pub resolv_conf: PathBuf,
    /// For /dev/shm.
    pub shm: PathBuf,
}

impl PodFiles {
    /// Writes the files (0644; `dir` is made 0700) and mounts shm (tmpfs 1777, nosuid, nodev, noexec, sized) unless the
    /// host's is used, which must be there. A second call writes them anew and keeps the shm that is mounted.
    ///
    /// The steps are not undone here when a later one fails: [`PodFiles::remove`] does it.
    pub fn make(&self, dir: &Path) -> Result<PodFilePaths> {
        let resolv_conf = self.resolv_conf()?;
        let hostname = self.own_hostname();
        let hosts = self.hosts(&hostname, &[])?;
        if make_dir(dir)? || !is_mount(dir)? {
            failpoint::hit("files.bind.before")?;
            bind_to_itself(dir)
                .map_err(|e| Error::mount(format_args!("make {} a mount", dir.display()), e))?;
        }
        let paths = PodFilePaths {
            hostname: dir.join("hostname"),
            hosts: dir.join("hosts"),
            resolv_conf: dir.join("resolv.conf"),
            shm: if self.host_ipc {
                PathBuf::from("/dev/shm")
            } else {
                dir.join("shm")
            },
        };
        self.write(&paths.hostname, format!("{hostname}\n").as_bytes())?;
        self.write(&paths.hosts, hosts.as_bytes())?;
        self.write(&paths.resolv_conf, &resolv_conf)?;
        if !self.host_ipc {
            failpoint::hit("files.shm.before")?;
            self.mount_shm(&paths.shm, dir)?;
            failpoint::hit("files.shm.after")?;
        } else if !paths.shm.is_dir() {
            return Err(Error::new(
                Kind::State,
                "share the host's /dev/shm with the pod: the host has none",
            ));
        }
        Ok(paths)
    }

    /// Adds `ip hostname` lines to hosts once the pod's addresses are known ("10.1.2.3" or "10.1.2.3/24"). Written in
    /// place, the same inode: it may be bind-mounted. Nothing is done on the host's network.
    pub fn set_addresses(&self, dir: &Path, addresses: &[String]) -> Result<()> {
        if self.host_network {
            return Ok(());
        }
        let text = self.hosts(&self.own_hostname(), addresses)?;
        self.write(&dir.join("hosts"), text.as_bytes())
    }

    /// Undo: unmounts `dir` with all below it (detach, repeated until none is left) and removes the pins of the pod's
    /// namespaces, the files, and `dir` if that leaves it empty; absent = done.
    pub fn remove(dir: &Path) -> Result<()> {
        detach_all(dir)?;
        failpoint::hit("files.remove.half")?;
        let shm = dir.join("shm");
        // One that was mounted where the directory was no mount.
        detach_all(&shm)?;
        pins::remove(dir)?;
        for name in ["hostname", "hosts", "resolv.conf"] {
            let path = dir.join(name);
            absent_is_done(fs::remove_file(&path))
                .context(|| format!("remove {}", path.display()))?;
        }
        absent_is_done(fs::remove_dir(&shm)).context(|| format!("remove {}", shm.display()))?;
        match fs::remove_dir(dir) {
            Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            other => absent_is_done(other).context(|| format!("remove {}", dir.display())),
        }
    }

    fn own_hostname(&self) -> String {
        if !self.hostname.is_empty() {
            return self.hostname.clone();
        }
        nix::unistd::gethostname()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default()
    }

    fn hosts(&self, hostname: &str, addresses: &[String]) -> Result<String> {
        if self.host_network {
            return Ok(String::from_utf8_lossy(&host_file("/etc/hosts")?).into_owned());
        }
        let mut text =
            String::from("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n");
        word("hostname", hostname)?;
        for address in addresses {
            let ip = address.split('/').next().unwrap_or_default();
            ip.parse::<std::net::IpAddr>().map_err(|e| {
                Error::caused(
                    Kind::Invalid,
                    format_args!("write address {address:?} to the pod's hosts"),
                    e,
                )
            })?;
            let _ = writeln!(text, "{ip}\t{hostname}");
        }
        Ok(text)
    }

    fn resolv_conf(&self) -> Result<Vec<u8>> {
        let Some(dns) = &self.dns else {
            return host_file("/etc/resolv.conf");
        };
        for (what, words) in [
            ("server", &dns.servers),
            ("search domain", &dns.searches),
            ("option", &dns.options),
        ] {
            words
                .iter()
                .try_for_each(|w| word(&format!("DNS {what}"), w))?;
        }
        let mut text = String::new();
        if !dns.searches.is_empty() {
            let _ = writeln!(text, "search {}", dns.searches.join(" "));
        }
        for server in &dns.servers {
            let _ = writeln!(text, "nameserver {server}");
        }
        if !dns.options.is_empty() {
            let _ = writeln!(text, "options {}", dns.options.join(" "));
        }
        Ok(text.into_bytes())
    }

    fn mount_shm(&self, shm: &Path, dir: &Path) -> Result<()> {
        make_dir(shm)?;
        let device = |path: &Path| {
            fs::symlink_metadata(path)
                .map(|m| m.dev())
                .context(|| format!("look at {}", path.display()))
        };
        if device(shm)? != device(dir)? {
            return Ok(());
        }
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        let mut data = format!("mode=1777,size={}", self.shm_size);
        if let Some(label) = &self.label {
            // Everything in it has this label for good; the quotes are for the ',' of categories.
            let _ = write!(data, ",context=\"{label}\"");
        }
        mount(Some("shm"), shm, Some("tmpfs"), flags, Some(data.as_str())).map_err(|e| {
            let what = format!("mount the pod's shm at {}", shm.display());
            Error::mount(label::told(&what, self.label.as_deref(), e as i32), e)
        })
    }

    /// Writes in place, never through a symbolic link; shortened last, so that a reader never sees an empty file.
    fn write(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let what = format!("write {}", path.display());
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o644)
            .custom_flags(libc::O_NOFOLLOW)
            .open(path)
            .context(|| &what)?;
        if let Some(wanted) = &self.label {
            label::set(&file, wanted, &what)?;
        }
        file.write_all(bytes)
            .and_then(|()| file.set_len(bytes.len() as u64))
            // Whatever our umask is.
            .and_then(|()| file.set_permissions(Permissions::from_mode(0o644)))
            .context(|| &what)
    }
}

/// A pod name made into a hostname: at most 63 bytes, cut cleanly (never ends in '-' or '.'), lower case letters,
/// digits, '-', '.'; what is none of these becomes '-'. A name with nothing usable in it becomes `pod`.
pub fn hostname(name: &str) -> String {
    let usual: String = name
        .chars()
        .map(|c| match c.to_ascii_lowercase() {
            c @ ('a'..='z' | '0'..='9' | '.') => c,
            _ => '-',
        })
        .collect();
    let edge = ['-', '.'];
    let from = usual.trim_start_matches(edge);
    // All ASCII by now, so any cut is between characters.
    let cut = from
        .get(..MAX_HOSTNAME)
        .unwrap_or(from)
        .trim_end_matches(edge);
    if cut.is_empty() {
        "pod".to_owned()
    } else {
        cut.to_owned()
    }
}

/// One word of a line.
fn word(what: &str, text: &str) -> Result<()> {
    if text.is_empty() || text.chars().any(|c| c.is_whitespace() || c.is_control()) {
        return Err(Error::new(
            Kind::Invalid,
            format!("check {what} {text:?}: use one word without spaces or newlines"),
        ));
    }
    Ok(())
}

/// A file of the host, at most 1 MiB of it; empty when there is none.
fn host_file(path: &str) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    match fs::File::open(path).and_then(|file| file.take(MAX_COPY).read_to_end(&mut bytes)) {
        Ok(_) => Ok(bytes),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(Error::io(format_args!("read {path}"), e)),
    }
}

/// False: it was there.
fn make_dir(dir: &Path) -> Result<bool> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && !dir.is_symlink() && dir.is_dir() => {
            Ok(false)
        }
        other => other
            .map(|()| true)
            .context(|| format!("make {}", dir.display())),
    }
}

fn is_mount(dir: &Path) -> Result<bool> {
    let what = || format!("find out whether {} is a mount", dir.display());
    let dir = fs::canonicalize(dir).context(what)?;
    let table = mountinfo::read().context(what)?;
    Ok(table.iter().any(|entry| entry.point == dir))
}

fn absent_is_done(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files() -> PodFiles {
        PodFiles {
            hostname: "web-1".to_owned(),
            dns: None,
            host_network: false,
            host_ipc: true,
            shm_size: 1 << 20,
            label: None,
        }
    }

    /// 086a.
    #[test]
    fn a_long_pod_name_is_cut_cleanly() {
        assert_eq!(hostname("web-1"), "web-1");
        assert_eq!(hostname(&"a".repeat(128)).len(), 63);
        let at_the_cut = format!("{}-{}", "a".repeat(62), "b".repeat(40));
        assert_eq!(hostname(&at_the_cut), "a".repeat(62));
        assert_eq!(
            hostname(&format!("{}-.-.{}", "a".repeat(58), "b".repeat(9))),
            format!("{}-.-.b", "a".repeat(58))
        );
        assert_eq!(hostname("-Web_Über."), "web--ber");
        assert_eq!(hostname("..-"), "pod");
        assert_eq!(hostname(""), "pod");
    }

    #[test]
    fn dns_lines_come_in_the_usual_order_and_an_empty_one_is_an_empty_file() {
        let text = |dns: Dns| {
            PodFiles {
                dns: Some(dns),
                ..files()
            }
            .resolv_conf()
            .map(|b| String::from_utf8_lossy(&b).into_owned())
        };
        let list = |words: &[&str]| words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>();
        let dns = Dns {
            servers: list(&["10.0.0.1", "fd00::1"]),
            searches: list(&["a.b", "c"]),
            options: list(&["ndots:5"]),
        };
        assert_eq!(
            text(dns).ok().as_deref(),
            Some("search a.b c\nnameserver 10.0.0.1\nnameserver fd00::1\noptions ndots:5\n")
        );
        assert_eq!(text(Dns::default()).ok().as_deref(), Some(""));
        for bad in ["", "a b", "1.1.1.1\nnameserver 6.6.6.6"] {
            assert!(
                text(Dns {
                    servers: list(&[bad]),
                    ..Dns::default()
                })
                .is_err(),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn files_are_made_changed_in_place_and_removed() {
        let base = tempfile::tempdir().expect("make a directory");
        let dir = base.path().join("pod");
        let paths = files().make(&dir).expect("make");
        let inode = || fs::metadata(&paths.hosts).expect("look").ino();
        let (before, short) = (inode(), fs::read_to_string(&paths.hosts).expect("read"));
        assert_eq!(
            fs::read_to_string(&paths.hostname).expect("read"),
            "web-1\n"
        );

        files()
            .set_addresses(&dir, &["10.1.2.3/24".to_owned(), "fd00::2/64".to_owned()])
            .expect("set");
        let long = fs::read_to_string(&paths.hosts).expect("read");
        assert_eq!(long, format!("{short}10.1.2.3\tweb-1\nfd00::2\tweb-1\n"));
        files().set_addresses(&dir, &[]).expect("set");
        assert_eq!(
            (inode(), fs::read_to_string(&paths.hosts).expect("read")),
            (before, short)
        );
        assert!(
            files()
                .set_addresses(&dir, &["10.1.2.3 evil".to_owned()])
                .is_err()
        );

        PodFiles::remove(&dir).expect("remove");
        PodFiles::remove(&dir).expect("remove what is gone");
        assert!(!dir.exists());
    }

    #[test]
    fn a_link_in_the_place_of_a_file_is_not_followed() {
        let base = tempfile::tempdir().expect("make a directory");
        let target = base.path().join("target");
        fs::write(&target, "untouched").expect("write");
        std::os::unix::fs::symlink(&target, base.path().join("hosts")).expect("link");
        assert!(files().make(base.path()).is_err());
        assert_eq!(fs::read_to_string(&target).expect("read"), "untouched");
    }
}
