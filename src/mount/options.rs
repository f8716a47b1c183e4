//! Mount options as snapshotters write them, sorted into what each system call takes. Pure.
//!
//! Promises that what is no known flag is passed on to the filesystem, and that propagation is kept apart: the kernel
//! takes a change of propagation only in a call of its own.

use nix::mount::MsFlags;

use super::idmap::Maps;
use crate::error::Result;

/// Sorted options of one mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Options {
    /// For the first call; holds MS_BIND and MS_REC of a bind.
    pub flags: MsFlags,
    /// For a call of its own; empty when propagation is left alone.
    pub propagation: MsFlags,
    /// For the filesystem.
    pub data: Vec<String>,
    /// The source is a file that a loop device is made of.
    pub is_loop: bool,
    /// Ids the files are shown with.
    pub maps: Maps,
}

/// Whether it is meant for containerd's own parts only.
pub(super) fn is_hint(option: &str) -> bool {
    option.starts_with("X-containerd.")
}

impl Options {
    /// Sorts `options` of a mount of type `kind`.
    pub(super) fn parse(kind: &str, options: &[String]) -> Result<Self> {
        let mut out = Self {
            flags: MsFlags::empty(),
            propagation: MsFlags::empty(),
            data: Vec::new(),
            is_loop: false,
            maps: Maps::default(),
        };
        match kind {
            "bind" => out.flags |= MsFlags::MS_BIND,
            "rbind" => out.flags |= MsFlags::MS_BIND | MsFlags::MS_REC,
            _ => {}
        }
        for option in options {
            let (key, value) = option.split_once('=').unwrap_or((option, ""));
            if matches!(key, "uidmap" | "gidmap") {
                out.maps.add(key, value)?;
                continue;
            }
            if option == "loop" {
                out.is_loop = true;
                continue;
            }
            if is_hint(option) {
                continue;
            }
            if let Some((clear, flag)) = flag(option) {
                if clear {
                    out.flags &= !flag;
                } else {
                    out.flags |= flag;
                }
            } else if let Some(flag) = propagation(option) {
                out.propagation |= flag;
            } else if !option.is_empty() {
                out.data.push(option.clone());
            }
        }
        Ok(out)
    }

    /// The filesystem's options as mount(2) takes them.
    pub(super) fn joined(&self) -> String {
        self.data.join(",")
    }

    pub(super) fn is_bind(&self) -> bool {
        self.flags.contains(MsFlags::MS_BIND)
    }

    /// Flags that the kernel ignores in the call that makes a bind, and that need a remount after it.
    pub(super) fn after_bind(&self) -> MsFlags {
        self.flags & !(MsFlags::MS_BIND | MsFlags::MS_REC)
    }
}

/// (it takes the flag away, the flag) of the names mount(8) knows.
fn flag(option: &str) -> Option<(bool, MsFlags)> {
    Some(match option {
        "defaults" => (false, MsFlags::empty()),
        "async" => (true, MsFlags::MS_SYNCHRONOUS),
        "sync" => (false, MsFlags::MS_SYNCHRONOUS),
        "atime" => (true, MsFlags::MS_NOATIME),
        "noatime" => (false, MsFlags::MS_NOATIME),
        "bind" => (false, MsFlags::MS_BIND),
        "rbind" => (false, MsFlags::MS_BIND.union(MsFlags::MS_REC)),
        "dev" => (true, MsFlags::MS_NODEV),
        "nodev" => (false, MsFlags::MS_NODEV),
        "diratime" => (true, MsFlags::MS_NODIRATIME),
        "nodiratime" => (false, MsFlags::MS_NODIRATIME),
        "dirsync" => (false, MsFlags::MS_DIRSYNC),
        "exec" => (true, MsFlags::MS_NOEXEC),
        "noexec" => (false, MsFlags::MS_NOEXEC),
        "mand" => (false, MsFlags::MS_MANDLOCK),
        "nomand" => (true, MsFlags::MS_MANDLOCK),
        "relatime" => (false, MsFlags::MS_RELATIME),
        "norelatime" => (true, MsFlags::MS_RELATIME),
        "strictatime" => (false, MsFlags::MS_STRICTATIME),
        "nostrictatime" => (true, MsFlags::MS_STRICTATIME),
        "remount" => (false, MsFlags::MS_REMOUNT),
        "ro" => (false, MsFlags::MS_RDONLY),
        "rw" => (true, MsFlags::MS_RDONLY),
        "suid" => (true, MsFlags::MS_NOSUID),
        "nosuid" => (false, MsFlags::MS_NOSUID),
        _ => return None,
    })
}

fn propagation(option: &str) -> Option<MsFlags> {
    let (kind, recursive) = match option.strip_prefix('r') {
        Some(kind) => (kind, MsFlags::MS_REC),
        None => (option, MsFlags::empty()),
    };
    let flag = match kind {
        "private" => MsFlags::MS_PRIVATE,
        "shared" => MsFlags::MS_SHARED,
        "slave" => MsFlags::MS_SLAVE,
        "unbindable" => MsFlags::MS_UNBINDABLE,
        _ => return None,
    };
    Some(flag | recursive)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(kind: &str, text: &str) -> Options {
        let list: Vec<String> = text.split(',').map(str::to_owned).collect();
        Options::parse(kind, &list).unwrap()
    }

    #[test]
    fn flags_propagation_and_data_are_kept_apart() {
        let o = parse(
            "overlay",
            "ro,nosuid,rslave,index=off,lowerdir=/a:/b,volatile,X-containerd.custom=1,",
        );
        assert_eq!(o.flags, MsFlags::MS_RDONLY | MsFlags::MS_NOSUID);
        assert_eq!(o.propagation, MsFlags::MS_SLAVE | MsFlags::MS_REC);
        assert_eq!(o.joined(), "index=off,lowerdir=/a:/b,volatile");
    }

    #[test]
    fn a_bind_is_a_bind_by_type_or_by_option_and_ro_comes_after_it() {
        assert_eq!(
            parse("bind", "ro").flags,
            MsFlags::MS_BIND | MsFlags::MS_RDONLY
        );
        assert!(parse("none", "rbind").is_bind() && parse("rbind", "rw").is_bind());
        assert_eq!(
            parse("bind", "rbind,ro,noexec").after_bind(),
            MsFlags::MS_RDONLY | MsFlags::MS_NOEXEC
        );
        assert!(parse("bind", "rbind,ro,rw").after_bind().is_empty());
    }

    #[test]
    fn loop_devices_and_maps_are_no_options_of_the_filesystem() {
        let o = parse("ext4", "ro,loop,uidmap=0:1000:1,gidmap=0:2000:1,noload");
        assert!(o.is_loop && o.joined() == "noload");
        assert_eq!(
            (o.maps.uids.as_str(), o.maps.gids.as_str()),
            ("0 1000 1\n", "0 2000 1\n")
        );
        assert!(Options::parse("ext4", &["uidmap=x".to_owned()]).is_err());
        assert_eq!(parse("ext4", "loop=/dev/loop0").joined(), "loop=/dev/loop0");
    }
}
