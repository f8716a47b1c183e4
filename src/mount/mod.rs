//! Root filesystem mounts. STUB of the public surface; bodies to be written.
#![allow(missing_docs, unused_variables, clippy::todo)]
use std::path::Path;

use crate::error::Result;

/// One mount as containerd's snapshotter names it.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct Mount {
    pub kind: String,
    pub source: String,
    pub target: String,
    pub options: Vec<String>,
}

/// Mounts all, in order, below `root`; undoes what it did when one fails.
pub fn mount_all(mounts: &[Mount], root: &Path) -> Result<()> {
    todo!()
}
/// Unmounts everything mounted at and below `path` (from mountinfo, deepest first, detach on EBUSY); absent = done; never follows symbolic links.
pub fn unmount_tree(path: &Path) -> Result<()> {
    todo!()
}
