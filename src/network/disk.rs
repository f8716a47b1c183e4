//! Files that must survive a power cut: temp file, fsync, rename, fsync of the directory; directories that are ours alone.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::error::{Context, Error, Kind, Result};
use crate::failpoint;
use crate::sys::dir::private;

/// Most that is read of any file of this room: a configuration or a result is a few kilobytes.
const MAX_READ: u64 = 4 << 20;

/// Replaces `path` by `bytes`, mode 0600: readers see the old or the new text, also after a power cut.
pub(super) fn write_durable(path: &Path, bytes: &[u8]) -> Result<()> {
    write_whole(path, bytes)?;
    path.parent().map_or(Ok(()), sync_dir)
}

/// The same, but a power cut may bring the old text back, or take a new file away, until its directory is synced.
pub(super) fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    write(path, bytes, true)
}

/// The same for what says nothing after a reboot: readers see the old or the new text, a power cut may leave nothing.
pub(super) fn write_for_the_boot(path: &Path, bytes: &[u8]) -> Result<()> {
    write(path, bytes, false)
}

fn write(path: &Path, bytes: &[u8], sync: bool) -> Result<()> {
    let Some(temp) = temporary(path) else {
        return Err(Error::new(
            Kind::Invalid,
            format!("write {}: it is not a file's path", path.display()),
        ));
    };
    failpoint::hit("record.write.before")?;
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let opened = match options.open(&temp) {
        // What a killed writer left would stop create_new for ever.
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            remove_file(&temp)?;
            options.open(&temp)
        }
        opened => opened,
    };
    let written = opened
        .and_then(|mut f| {
            f.write_all(bytes)?;
            if sync { f.sync_all() } else { Ok(()) }
        })
        .map_err(|e| Error::io(format!("write {}", path.display()), e))
        .and_then(|()| failpoint::hit("record.write.half"))
        .and_then(|()| fs::rename(&temp, path).context(|| format!("write {}", path.display())));
    if written.is_err() {
        let _ = fs::remove_file(&temp);
    }
    written?;
    failpoint::hit("record.write.after")
}

/// Where `path` is written before it gets its name.
fn temporary(path: &Path) -> Option<PathBuf> {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name()?);
    name.push(".tmp");
    Some(path.parent()?.join(name))
}

/// Removes a file that [`write_whole`] writes, and what a killed writer may have left of it; absent = done.
pub(super) fn remove_written(path: &Path) -> Result<()> {
    temporary(path).map_or(Ok(()), |temp| remove_file(&temp))?;
    remove_file(path)
}

/// Makes what happened to the names in `dir` durable.
pub(super) fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir)
        .and_then(|d| d.sync_all())
        .context(|| format!("sync {}", dir.display()))
}

/// Removes a file; absent = done. Not yet durable: see [`sync_dir`].
pub(super) fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(Error::io(format!("remove {}", path.display()), e))
        }
        _ => Ok(()),
    }
}

/// Makes `dir` (mode 0700) and what is missing above it, durable, and refuses one that others can write to: what is in
/// it decides what we run as root.
pub(super) fn private_dir(dir: &Path) -> Result<()> {
    let is_new = private(dir)?;
    dir.parent().filter(|_| is_new).map_or(Ok(()), sync_dir)
}

/// Reads a regular file of modest size; never blocks on a fifo that somebody left in the directory.
pub(super) fn read(path: &Path) -> Result<Vec<u8>> {
    let what = || format!("read {}", path.display());
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(path)
        .context(what)?;
    let meta = file.metadata().context(what)?;
    if !meta.is_file() || meta.len() > MAX_READ {
        return Err(Error::new(
            Kind::Invalid,
            format!(
                "{}: it is not a regular file of at most {MAX_READ} bytes",
                what()
            ),
        ));
    }
    // Whole in one call, and one more for the end of it.
    let mut bytes = Vec::with_capacity(meta.len() as usize + 1);
    file.take(MAX_READ).read_to_end(&mut bytes).context(what)?;
    if bytes.is_empty() {
        return Err(Error::new(
            Kind::Invalid,
            format!("{}: the file is empty", what()),
        ));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_stale_temp_file_does_not_stop_the_next_write() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        fs::write(dir.path().join(".a.json.tmp"), "half").unwrap();
        write_durable(&path, b"whole").unwrap();
        assert_eq!(read(&path).unwrap(), b"whole");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
    }

    #[test]
    fn what_a_killed_writer_left_goes_with_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        for whole in [true, false] {
            if whole {
                write_durable(&path, b"whole").unwrap();
            }
            fs::write(dir.path().join(".a.json.tmp"), "half").unwrap();
            remove_written(&path).unwrap();
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn empty_files_and_fifos_are_errors_not_surprises() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("empty"), "").unwrap();
        nix::unistd::mkfifo(&dir.path().join("fifo"), nix::sys::stat::Mode::S_IRUSR).unwrap();
        for name in ["empty", "fifo"] {
            assert_eq!(
                read(&dir.path().join(name)).map_err(|e| e.kind()),
                Err(Kind::Invalid),
                "{name}"
            );
        }
    }
}
