//! Directories that must be ours alone: what is in them decides what we run as root.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

use crate::error::{Context, Error, Kind, Result};

/// Makes `dir`, and what is missing above it, mode 0700. One that exists is left as it is: see [`check_private`].
pub fn make_private(dir: &Path) -> Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .context(|| format!("make directory {}", dir.display()))
}

/// Refuses a directory that could be exchanged or written to under us. A symbolic link is none.
///
/// # Errors
/// Denied when it is no directory, another user's, or others can write to it; NotFound when it is not there.
pub fn check_private(dir: &Path) -> Result<()> {
    let found = fs::symlink_metadata(dir).context(|| format!("look at {}", dir.display()))?;
    let own = nix::unistd::geteuid().as_raw();
    let mode = found.mode() & 0o7777;
    let why = if !found.is_dir() {
        "it is no directory; move it away or choose another".to_owned()
    } else if found.uid() != own {
        format!(
            "it belongs to uid {} and not to uid {own}; change its owner or choose another",
            found.uid()
        )
    } else if mode & 0o022 != 0 {
        format!("others can write to it (mode {mode:04o}); run chmod 0700 on it")
    } else {
        return Ok(());
    };
    Err(Error::new(
        Kind::Denied,
        format!("use directory {}: {why}", dir.display()),
    ))
}

/// Both: `dir` is there and ours alone. True when it had to be made.
///
/// # Errors
/// Those of [`check_private`], and what the kernel says to making it.
pub fn private(dir: &Path) -> Result<bool> {
    // As a rule it is there, and this is one look.
    match check_private(dir) {
        Err(e) if e.is_gone() => {}
        found => return found.map(|()| false),
    }
    make_private(dir)?;
    check_private(dir).map(|()| true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_directory_that_others_can_write_to_is_refused() {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path().join("a/b");
        assert!(private(&dir).unwrap());
        assert!(!private(&dir).unwrap());
        make_private(&dir).unwrap();
        check_private(&dir).unwrap();
        for mode in [0o777, 0o1777, 0o720] {
            fs::set_permissions(&dir, fs::Permissions::from_mode(mode)).unwrap();
            let error = private(&dir).unwrap_err();
            assert_eq!(error.kind(), Kind::Denied, "{error}");
        }
    }

    #[test]
    fn neither_a_file_nor_a_link_is_a_directory() {
        let top = tempfile::tempdir().unwrap();
        let (file, link) = (top.path().join("file"), top.path().join("link"));
        fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(top.path(), &link).unwrap();
        for path in [&file, &link] {
            let denied = check_private(path).unwrap_err();
            assert_eq!(denied.kind(), Kind::Denied);
        }
        let absent = check_private(&top.path().join("absent")).unwrap_err();
        assert!(absent.is_gone());
    }
}
