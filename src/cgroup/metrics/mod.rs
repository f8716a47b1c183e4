//! Statistics of a group in containerd's messages.
//!
//! Promises that a missing file is a missing field, never a failure: controllers come and go with kernels.

mod v1;
mod v2;

use std::fs;
use std::path::{Path, PathBuf};

use protobuf::well_known_types::any::Any;

use super::Group;
use crate::error::{Error, Kind, Result};
use crate::proto::any;

pub(super) fn metrics(group: &Group) -> Result<Any> {
    if !group.trees.iter().any(|t| t.dir().is_dir()) {
        return Err(Error::new(
            Kind::NotFound,
            format!("read statistics of cgroup {}: there is none", group.path()),
        ));
    }
    if group.v2 {
        any::pack(any::CGROUP2_METRICS, &v2::metrics(group))
    } else {
        any::pack(any::CGROUP1_METRICS, &v1::metrics(group))
    }
    .map_err(|e| Error::caused(Kind::Other, "encode cgroup statistics", e))
}

/// The files of one directory, read as numbers. A directory that is not there has no files.
struct Files(Option<PathBuf>);

impl Files {
    fn text(&self, file: &str) -> Option<String> {
        fs::read_to_string(self.0.as_ref()?.join(file)).ok()
    }

    /// A single number. "max" is `u64::MAX`, as containerd sends "no limit"; -1 (no limit on v1) likewise.
    fn number(&self, file: &str) -> Option<u64> {
        number(self.text(file)?.trim())
    }

    /// `key value` lines.
    fn keyed(&self, file: &str) -> Keyed {
        Keyed(self.text(file).unwrap_or_default())
    }

    /// Page sizes of the `hugetlb.<size>.<rest>` files there are, in order.
    fn huge_pages(&self, rest: &str) -> Vec<String> {
        let dir = self.0.as_deref().unwrap_or_else(|| Path::new(""));
        let mut sizes: Vec<String> = fs::read_dir(dir)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|e| {
                let name = e.file_name().into_string().ok()?;
                let size = name
                    .strip_prefix("hugetlb.")?
                    .strip_suffix(rest)?
                    .strip_suffix('.')?;
                (!size.contains('.')).then(|| size.to_owned())
            })
            .collect();
        sizes.sort();
        sizes
    }

    /// Lines of `rdma.current` or `rdma.max`: (device, handles, objects).
    fn rdma(&self, file: &str) -> Vec<(String, u32, u32)> {
        let text = self.text(file).unwrap_or_default();
        text.lines()
            .filter_map(|line| {
                let (device, rest) = line.split_once(' ')?;
                let of = |key: &str| {
                    let value = pairs(rest).find(|(k, _)| *k == key).map_or("0", |(_, v)| v);
                    if value == "max" {
                        u32::MAX
                    } else {
                        value.parse().unwrap_or(0)
                    }
                };
                Some((device.to_owned(), of("hca_handle"), of("hca_object")))
            })
            .collect()
    }
}

struct Keyed(String);

impl Keyed {
    fn find(&self, key: &str) -> Option<u64> {
        self.0.lines().find_map(|line| {
            let (name, value) = line.split_once(' ')?;
            (name == key).then(|| number(value.trim()))?
        })
    }

    fn get(&self, key: &str) -> u64 {
        self.find(key).unwrap_or(0)
    }

    fn is_empty(&self) -> bool {
        self.0.trim().is_empty()
    }
}

/// `key=value` words.
fn pairs(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split_whitespace()
        .filter_map(|word| word.split_once('='))
}

fn number(text: &str) -> Option<u64> {
    match text {
        "max" | "-1" => Some(u64::MAX),
        _ => text.parse().ok(),
    }
}

/// "8:16" as (major, minor).
fn device(text: &str) -> Option<(u64, u64)> {
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}
