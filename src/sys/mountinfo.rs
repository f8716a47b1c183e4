//! `/proc/<pid>/mountinfo`, parsed.
//!
//! Owns the format (proc(5)): which field is where, octal escapes, the variable number of optional fields. Promises
//! that a line it does not understand is left out instead of being guessed. Pure, but for [`read`].

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::{fs, io};

/// One mount of a mount namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Unique id of the mount while it lives.
    pub id: u64,
    /// Id of the mount it sits on.
    pub parent: u64,
    /// Directory of the filesystem that is the root of this mount.
    pub root: PathBuf,
    /// Where it is, as seen from the process' root.
    pub point: PathBuf,
    /// Options of the mount ("rw,nosuid").
    pub options: String,
    /// Filesystem type ("overlay").
    pub kind: String,
    /// What was mounted ("/dev/vda").
    pub source: PathBuf,
    /// Options of the filesystem ("rw,memory"); names the controllers of a cgroup v1 tree.
    pub super_options: String,
}

/// The mounts the calling thread sees (a thread may have a mount namespace of its own).
///
/// # Errors
/// Those of reading `/proc/thread-self/mountinfo`.
pub fn read() -> io::Result<Vec<Entry>> {
    // Paths may hold any byte, so the text is not taken for UTF-8.
    fs::read("/proc/thread-self/mountinfo").map(|bytes| parse(&bytes))
}

/// All entries of such a file, in its order.
#[must_use]
pub fn parse(bytes: &[u8]) -> Vec<Entry> {
    bytes.split(|b| *b == b'\n').filter_map(entry).collect()
}

fn entry(line: &[u8]) -> Option<Entry> {
    // 36 35 98:0 /root /point rw,noatime master:1 shared:2 - ext3 /dev/root rw,errors=continue
    let mut fields = line.split(|b| *b == b' ');
    let id = number(fields.next()?)?;
    let parent = number(fields.next()?)?;
    fields.next()?;
    let root = path(fields.next()?);
    let point = path(fields.next()?);
    let options = text(fields.next()?);
    fields.find(|f| *f == b"-")?;
    Some(Entry {
        id,
        parent,
        root,
        point,
        options,
        kind: text(fields.next()?),
        source: path(fields.next()?),
        super_options: text(fields.next().unwrap_or_default()),
    })
}

fn number(field: &[u8]) -> Option<u64> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

fn text(field: &[u8]) -> String {
    String::from_utf8_lossy(&unescape(field)).into_owned()
}

fn path(field: &[u8]) -> PathBuf {
    OsString::from_vec(unescape(field)).into()
}

/// The kernel writes space, tab, newline, backslash (and `#`) as a backslash and three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        if first == b'\\'
            && let [
                a @ b'0'..=b'3',
                b @ b'0'..=b'7',
                c @ b'0'..=b'7',
                after @ ..,
            ] = tail
        {
            out.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
            rest = after;
        } else {
            out.push(first);
            rest = tail;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn optional_fields_and_escapes_are_understood() {
        let text = b"22 27 0:21 / /proc rw,relatime - proc proc rw\n\
            36 35 98:0 /mnt1 /a\\040b\\134c\\011d rw,noatime master:1 shared:2 - ext3 /dev/r\\043 rw,errors=x\n\
            37 1 0:5 / / rw propagate_from:2 - overlay  rw\n";
        let all = parse(text);
        assert_eq!(all.len(), 3);
        assert_eq!(all[0].kind, "proc");
        assert_eq!(all[1].point, PathBuf::from("/a b\\c\td"));
        assert_eq!((all[1].id, all[1].parent), (36, 35));
        assert_eq!(all[1].source, PathBuf::from("/dev/r#"));
        assert_eq!(all[2].source, PathBuf::from(""));
        assert_eq!(all[2].super_options, "rw");
    }

    #[test]
    fn broken_lines_are_left_out() {
        assert!(
            parse(b"\n1 2 3\nx 2 0:1 / / rw - a b c\n1 2 0:1 / /p rw shared:1 ext4 a rw\n")
                .is_empty()
        );
        assert_eq!(unescape(b"\\04x\\9\\"), b"\\04x\\9\\");
    }

    #[test]
    fn our_own_table_has_a_root() {
        assert!(read().unwrap().iter().any(|e| e.point.as_os_str() == "/"));
    }
}
