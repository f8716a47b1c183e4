//! The crate's error: a kind that maps onto one status code, a message that says what was tried, and its source.
//!
//! Promise: the kind survives every layer of context, so that the answer on the wire is chosen by kind and never by text.

use std::fmt;
use std::io;

use serde::{Deserialize, Serialize};

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What kind of failure it is. Maps one-to-one onto a ttrpc status code (`service::guard`). On disk it is its name in
/// lower case; a name of another version is read as [`Kind::Other`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The thing asked for does not exist (code 5).
    NotFound,
    /// The thing to be made exists already (code 6).
    Exists,
    /// The thing is in a state that does not allow this (code 9).
    State,
    /// The request itself is wrong (code 3).
    Invalid,
    /// A time limit passed (code 4).
    Deadline,
    /// Come again: work is under way (code 14).
    Busy,
    /// The other side has gone away (code 14).
    Gone,
    /// Not built, or not possible on this kernel (code 12).
    Unsupported,
    /// Somebody cancelled the work (code 1).
    Cancelled,
    /// The kernel or a file mode forbids it (code 7).
    Denied,
    /// Anything else (code 2).
    #[default]
    #[serde(other)]
    Other,
}

impl Kind {
    /// How a Go daemon ends the text of an error of this kind, which is how people and programs find it there.
    #[must_use]
    pub fn daemons_words(self) -> Option<&'static str> {
        match self {
            Self::NotFound => Some(": not found"),
            Self::Exists => Some(": already exists"),
            _ => None,
        }
    }
}

/// A failure: its kind, what was being done (outermost first), and the cause.
#[derive(Debug)]
pub struct Error {
    kind: Kind,
    message: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error of `kind` with a message in lower case that says what was tried and what to do next.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            source: None,
        }
    }

    /// An I/O failure while doing `what` ("open /run/x"); its kind follows the errno.
    pub fn io(what: impl fmt::Display, source: io::Error) -> Self {
        let kind = match source.kind() {
            io::ErrorKind::NotFound => Kind::NotFound,
            io::ErrorKind::AlreadyExists => Kind::Exists,
            io::ErrorKind::PermissionDenied => Kind::Denied,
            io::ErrorKind::TimedOut => Kind::Deadline,
            io::ErrorKind::InvalidInput
            | io::ErrorKind::InvalidData
            | io::ErrorKind::NotADirectory => Kind::Invalid,
            io::ErrorKind::Unsupported => Kind::Unsupported,
            _ => Kind::Other,
        };
        Self {
            kind,
            message: what.to_string(),
            source: Some(Box::new(source)),
        }
    }

    /// The same for a nix errno.
    pub fn sys(what: impl fmt::Display, errno: nix::errno::Errno) -> Self {
        Self::io(what, io::Error::from_raw_os_error(errno as i32))
    }

    /// A mount that the kernel refused while doing `what`. Its ENOSPC is not the disk's: count_mounts in fs/namespace.c
    /// answers so when a mount namespace has as many mounts as it may have.
    pub fn mount(what: impl fmt::Display, source: impl Into<io::Error>) -> Self {
        let source = source.into();
        if source.kind() != io::ErrorKind::StorageFull {
            return Self::io(what, source);
        }
        let most = std::fs::read_to_string("/proc/sys/fs/mount-max").unwrap_or_default();
        let what = format!(
            "{what}: no disk is full, this mount namespace has the {} mounts that fs.mount-max allows: raise it, or look in /proc/self/mountinfo for who leaves mounts behind",
            most.trim()
        );
        Self::io(what, source)
    }

    /// Any other cause.
    pub fn caused(
        kind: Kind,
        what: impl fmt::Display,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self {
            kind,
            message: what.to_string(),
            source: Some(Box::new(source)),
        }
    }

    /// The kind.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The same error with another kind (for example a NotFound inside becomes Invalid for the caller).
    pub fn as_kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }

    /// The same error with what was being done in front: "`what`: old message".
    pub fn within(mut self, what: impl fmt::Display) -> Self {
        self.message = format!("{what}: {}", self.message);
        self
    }

    /// True when the error means "it is not there (any more)": success for every undo.
    pub fn is_gone(&self) -> bool {
        matches!(self.kind, Kind::NotFound)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        let mut next: Option<&(dyn std::error::Error + 'static)> =
            self.source.as_ref().map(|e| e.as_ref() as _);
        while let Some(cause) = next {
            write!(f, ": {cause}")?;
            // Our own Display already prints its chain.
            next = if cause.is::<Error>() {
                None
            } else {
                cause.source()
            };
        }
        Ok(())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|e| e.as_ref() as _)
    }
}

/// Adds what was being done to a failing result.
pub trait Context<T> {
    /// `what` in lower case: "read /run/podvisor/default/x/journal.json".
    fn context<D: fmt::Display>(self, what: impl FnOnce() -> D) -> Result<T>;
}

impl<T> Context<T> for std::result::Result<T, io::Error> {
    fn context<D: fmt::Display>(self, what: impl FnOnce() -> D) -> Result<T> {
        self.map_err(|e| Error::io(what(), e))
    }
}

impl<T> Context<T> for std::result::Result<T, nix::errno::Errno> {
    fn context<D: fmt::Display>(self, what: impl FnOnce() -> D) -> Result<T> {
        self.map_err(|e| Error::sys(what(), e))
    }
}

impl<T> Context<T> for Result<T> {
    fn context<D: fmt::Display>(self, what: impl FnOnce() -> D) -> Result<T> {
        self.map_err(|e| e.within(what()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_kept_by_name_and_strange_ones_are_other() {
        for (kind, name) in [
            (Kind::NotFound, "\"notfound\""),
            (Kind::Denied, "\"denied\""),
            (Kind::Other, "\"other\""),
        ] {
            assert_eq!(serde_json::to_string(&kind).unwrap(), name);
            assert_eq!(serde_json::from_str::<Kind>(name).unwrap(), kind);
        }
        let strange = serde_json::from_str::<Kind>("\"of-tomorrow\"").unwrap();
        assert_eq!(strange, Kind::Other);
    }

    #[test]
    fn a_full_mount_namespace_is_no_full_disk() {
        use nix::errno::Errno;
        let full = Error::mount("mount x", Errno::ENOSPC).to_string();
        assert!(full.starts_with("mount x: no disk is full"), "{full}");
        assert!(full.contains("fs.mount-max"), "{full}");
        let denied = Error::mount("mount x", Errno::EACCES);
        assert_eq!(denied.kind(), Kind::Denied);
        assert!(denied.to_string().starts_with("mount x: "), "{denied}");
    }

    #[test]
    fn kind_survives_context_and_text_reads_outside_in() {
        let inner: Result<()> =
            Err(io::Error::from_raw_os_error(libc::ENOENT)).context(|| "open /x");
        let outer = inner
            .context(|| "start sandbox a")
            .map_err(|e| (e.kind(), e.to_string()));
        assert_eq!(
            outer,
            Err((
                Kind::NotFound,
                "start sandbox a: open /x: No such file or directory (os error 2)".to_owned()
            ))
        );
    }
}
