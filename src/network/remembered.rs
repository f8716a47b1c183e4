//! The last good text of each network's file, `<runtime_root>/.network-configs`: kept for the boot, shared by all
//! supervisors, lost without harm.
//!
//! Must never make a network of a file that is gone, and never fail a caller: what cannot be kept is not kept.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::kept;
use crate::config::Config;

const FILE: &str = ".network-configs";

/// What is remembered, by path of the file.
#[derive(Debug)]
pub(super) struct Memory {
    texts: BTreeMap<String, String>,
    changed: bool,
}

impl Memory {
    /// Reads it.
    pub(super) fn open(config: &Config) -> Self {
        Self {
            texts: kept::read(config, FILE),
            changed: false,
        }
    }

    /// The text that `path` had when it last was good.
    pub(super) fn last_good(&self, path: &Path) -> Option<&[u8]> {
        self.texts.get(path.to_str()?).map(String::as_bytes)
    }

    /// Remembers a good text.
    pub(super) fn remember(&mut self, path: &Path, bytes: &[u8]) {
        let (Some(path), Ok(text)) = (path.to_str(), std::str::from_utf8(bytes)) else {
            return;
        };
        if self.texts.get(path).is_none_or(|old| old != text) {
            self.texts.insert(path.to_owned(), text.to_owned());
            self.changed = true;
        }
    }

    /// Drops the files of `dir` that are not among `there`.
    pub(super) fn forget_all_but(&mut self, dir: &Path, there: &[PathBuf]) {
        let before = self.texts.len();
        self.texts.retain(|path, _| {
            let path = Path::new(path);
            path.parent() != Some(dir) || there.iter().any(|t| t == path)
        });
        self.changed |= self.texts.len() != before;
    }

    /// Writes it where something has changed.
    pub(super) fn save(&self, config: &Config) {
        if self.changed {
            kept::write(config, FILE, &self.texts);
        }
    }
}
