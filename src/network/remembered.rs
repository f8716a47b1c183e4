//! The last good text of each network's file, `<runtime_root>/.network-configs`: kept for the boot, shared by all
//! supervisors, lost without harm.
//!
//! Must never make a network of a file that is gone, and never fail a caller: what cannot be kept is not kept.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::disk;
use crate::config::Config;

const FILE: &str = ".network-configs";

/// What is remembered, by path of the file.
#[derive(Debug)]
pub(super) struct Memory {
    file: PathBuf,
    texts: BTreeMap<String, String>,
    changed: bool,
}

impl Memory {
    /// Reads it; empty when there is none, or it is damaged, or others could have written it.
    pub(super) fn open(config: &Config) -> Self {
        let file = config.runtime_root.join(FILE);
        let ours = config.runtime_root.is_dir() && disk::private_dir(&config.runtime_root).is_ok();
        let texts = match disk::read(&file) {
            Ok(bytes) if ours => serde_json::from_slice(&bytes).unwrap_or_default(),
            _ => BTreeMap::new(),
        };
        Self {
            file,
            texts,
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

    /// Writes it where something has changed. Of two writers at a time one wins; the other's news come with its next look.
    pub(super) fn save(&self) {
        let root = self.file.parent().unwrap_or(&self.file);
        if !self.changed || !root.is_dir() || disk::private_dir(root).is_err() {
            return;
        }
        // A name of our own: two supervisors must not write into one file.
        let temp = root.join(format!("{FILE}.{}", std::process::id()));
        let written = serde_json::to_vec(&self.texts)
            .map_err(std::io::Error::other)
            .and_then(|text| fs::write(&temp, text))
            .and_then(|()| fs::rename(&temp, &self.file));
        if let Err(error) = written {
            let _ = fs::remove_file(&temp);
            tracing::debug!(%error, "last good network configurations not kept");
        }
    }
}
