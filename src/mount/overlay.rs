//! Overlays with more layers than fit into the one page that mount(2) takes.
//!
//! Two ways: layer by layer through the descriptor based calls (Linux 6.8 knows `lowerdir+`), else mount(2) with
//! layers relative to the directory they share. Must never change the working directory of the process.

use std::ffi::CString;
use std::io;
use std::path::{Path, PathBuf};

use nix::mount::MsFlags;

use super::options::Options;
use crate::error::{Error, Kind, Result};
use crate::sys::mount::{FsContext, mount_in};

/// mount(2) copies one page of options; some room is left for what the kernel adds.
const PAGE: usize = 4096;
const LIMIT: usize = PAGE - 512;

/// Whether the options of this overlay need another way than plain mount(2).
pub(super) fn is_long(kind: &str, options: &Options) -> bool {
    kind == "overlay" && options.joined().len() > LIMIT
}

/// Mounts it at `target` (a path that may be `/proc/self/fd/N`).
pub(super) fn mount_long(source: &str, target: &Path, options: &Options) -> Result<()> {
    let Err(first) = by_layer(source, target, options) else {
        return Ok(());
    };
    relative(source, target, options)
        .map_err(|e| e.within(format!("layer by layer: {first}; relative")))
}

pub(super) fn by_layer(source: &str, target: &Path, options: &Options) -> io::Result<()> {
    let context = FsContext::open("overlay")?;
    let set = |key: &str, value: &str| context.set(key, &CString::new(value)?);
    let configured = set("source", source).and_then(|()| {
        for option in &options.data {
            match option.split_once('=') {
                Some(("lowerdir", layers)) => {
                    for layer in split(layers) {
                        // An empty one is the first half of "::", which starts data-only layers: the other way has it.
                        if layer.is_empty() {
                            return Err(io::ErrorKind::InvalidInput.into());
                        }
                        set("lowerdir+", &unescape(layer))?;
                    }
                }
                Some((key @ ("upperdir" | "workdir"), value)) => set(key, &unescape(value))?,
                Some((key, value)) => set(key, value)?,
                None => context.flag(option)?,
            }
        }
        if options.flags.contains(MsFlags::MS_RDONLY) {
            context.flag("ro")?;
        }
        context.mount(attributes(options.flags))
    });
    match configured {
        Ok(mount) => mount.attach(target),
        Err(e) => Err(io::Error::new(
            e.kind(),
            format!("{e} {}", context.messages()),
        )),
    }
}

pub(super) fn relative(source: &str, target: &Path, options: &Options) -> Result<()> {
    let (cwd, data) = shorten(&options.data);
    if data.len() >= PAGE {
        return Err(Error::new(
            Kind::Invalid,
            format!(
                "mount an overlay: its options take {} bytes and the kernel takes {PAGE}, use fewer layers",
                data.len()
            ),
        ));
    }
    let data =
        CString::new(data).map_err(|e| Error::caused(Kind::Invalid, "mount an overlay", e))?;
    mount_in(&cwd, source, target, "overlay", options.flags, &data)
        .map_err(|e| Error::mount(format_args!("mount an overlay from {}", cwd.display()), e))
}

/// The directory all layers share, and the options with layers relative to it.
fn shorten(options: &[String]) -> (PathBuf, String) {
    let layers: Vec<&str> = options
        .iter()
        .filter_map(|o| o.strip_prefix("lowerdir="))
        .flat_map(split)
        .filter(|l| !l.is_empty())
        .collect();
    let shared = layers.iter().copied().reduce(common).unwrap_or_default();
    // Up to the last '/', and never a whole layer: "" would be no path.
    let shared = shared.rfind('/').map_or("", |end| &shared[..=end]);
    if !shared.starts_with('/') {
        return ("/".into(), options.join(","));
    }
    let short = |option: &String| match option.strip_prefix("lowerdir=") {
        None => option.clone(),
        Some(list) => {
            let all: Vec<&str> = split(list)
                .map(|l| l.strip_prefix(shared).unwrap_or(l))
                .collect();
            format!("lowerdir={}", all.join(":"))
        }
    };
    let data: Vec<String> = options.iter().map(short).collect();
    (unescape(shared).into(), data.join(","))
}

fn common<'a>(a: &'a str, b: &'a str) -> &'a str {
    let same = a.bytes().zip(b.bytes()).take_while(|(x, y)| x == y).count();
    // Never inside a character, nor between a backslash and what it escapes: the cut is moved to a '/' later.
    let mut end = same;
    while !a.is_char_boundary(end) {
        end -= 1;
    }
    &a[..end]
}

/// Layers of a `lowerdir` value; `\:` is no separator. The escapes stay.
pub(super) fn split(list: &str) -> impl Iterator<Item = &str> {
    let mut escaped = false;
    list.split(move |c| {
        let separator = c == ':' && !escaped;
        escaped = c == '\\' && !escaped;
        separator
    })
}

pub(super) fn escape(layer: &str) -> String {
    layer
        .replace('\\', r"\\")
        .replace(':', r"\:")
        .replace(',', r"\,")
}

pub(super) fn unescape(layer: &str) -> String {
    let mut out = String::with_capacity(layer.len());
    let mut chars = layer.chars();
    while let Some(c) = chars.next() {
        out.push(if c == '\\' {
            chars.next().unwrap_or(c)
        } else {
            c
        });
    }
    out
}

/// `MOUNT_ATTR_*` (mount_setattr(2)) of the flags that belong to the mount.
fn attributes(flags: MsFlags) -> u64 {
    [
        (MsFlags::MS_RDONLY, 0x1),
        (MsFlags::MS_NOSUID, 0x2),
        (MsFlags::MS_NODEV, 0x4),
        (MsFlags::MS_NOEXEC, 0x8),
        (MsFlags::MS_NOATIME, 0x10),
        (MsFlags::MS_STRICTATIME, 0x20),
        (MsFlags::MS_NODIRATIME, 0x80),
    ]
    .into_iter()
    .filter(|(flag, _)| flags.contains(*flag))
    .fold(0, |sum, (_, bit)| sum | bit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(options: &[&str]) -> Vec<String> {
        options.iter().map(|o| (*o).to_owned()).collect()
    }

    #[test]
    fn layers_become_relative_to_what_they_share() {
        let options = list(&[
            "index=off",
            "lowerdir=/s/12/fs:/s/1/fs:/s/123/fs",
            "upperdir=/s/9/fs",
        ]);
        let (cwd, data) = shorten(&options);
        assert_eq!(cwd, PathBuf::from("/s/"));
        assert_eq!(
            data,
            "index=off,lowerdir=12/fs:1/fs:123/fs,upperdir=/s/9/fs"
        );
    }

    #[test]
    fn escapes_and_lone_layers_survive() {
        assert_eq!(shorten(&list(&["lowerdir=/a/b"])).1, "lowerdir=b");
        let (cwd, data) = shorten(&list(&[r"lowerdir=/a\:b/x\:1:/a\:b/y::/a\:b/d"]));
        assert_eq!(
            (cwd, data),
            (PathBuf::from("/a:b/"), r"lowerdir=x\:1:y::d".into())
        );
        assert_eq!(
            shorten(&list(&["lowerdir=a:b"])),
            (PathBuf::from("/"), "lowerdir=a:b".into())
        );
        assert_eq!(
            shorten(&list(&["volatile"])),
            (PathBuf::from("/"), "volatile".into())
        );
        assert_eq!(
            shorten(&list(&["lowerdir=/ä/x:/ö/y"])).0,
            PathBuf::from("/")
        );
    }
}
