//! Small JSON files directly in the runtime root that are kept for the boot and shared by all supervisors.
//!
//! Lost without harm, so that nothing here fails a caller: what cannot be kept is not kept. Believed only in a directory
//! that nobody else can write to.

use std::fs;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::disk;
use crate::config::Config;
use crate::failpoint;

/// Reads it; the default when there is none, or it is damaged.
pub(super) fn read<T: DeserializeOwned + Default>(config: &Config, name: &str) -> T {
    if !is_ours(config) {
        return T::default();
    }
    let text = disk::read(&config.runtime_root.join(name));
    text.ok()
        .and_then(|text| serde_json::from_slice(&text).ok())
        .unwrap_or_default()
}

/// Replaces it. Of two writers at a time one wins; the other's news come with its next look.
pub(super) fn write(config: &Config, name: &str, value: &impl Serialize) {
    if !is_ours(config) {
        return;
    }
    // A name of our own: two supervisors must not write into one file.
    let temp = config
        .runtime_root
        .join(format!("{name}.{}", std::process::id()));
    let written = serde_json::to_vec(value)
        .map_err(std::io::Error::other)
        .and_then(|text| fs::write(&temp, text))
        .inspect(|()| failpoint::pass("kept.write.half"))
        .and_then(|()| fs::rename(&temp, config.runtime_root.join(name)));
    if let Err(error) = written {
        let _ = fs::remove_file(&temp);
        tracing::debug!(%error, name, "not kept for the boot");
    }
}

/// Never made for this: a program that only looks leaves nothing behind.
fn is_ours(config: &Config) -> bool {
    config.runtime_root.is_dir() && disk::private_dir(&config.runtime_root).is_ok()
}
