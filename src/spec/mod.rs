//! The part of config.json we read; the rest passes through untouched. STUB.
#![allow(missing_docs, unused_variables, clippy::todo)]
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::error::Result;

pub mod options;

/// config.json as JSON, unknown fields kept and order preserved.
#[derive(Clone, Debug)]
pub struct Spec {
    pub json: serde_json::Value,
}

impl Spec {
    /// Reads `<bundle>/config.json`. NotFound when missing; Invalid when it is no JSON object (cut in half).
    pub fn read(bundle: &Path) -> Result<Self> {
        todo!()
    }
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        todo!()
    }
    /// temp + rename beside the original.
    pub fn write(&self, bundle: &Path) -> Result<()> {
        todo!()
    }
    pub fn annotations(&self) -> BTreeMap<String, String> {
        todo!()
    }
    pub fn hostname(&self) -> &str {
        todo!()
    }
    /// (type, path or None), in order.
    pub fn namespaces(&self) -> Vec<(String, Option<PathBuf>)> {
        todo!()
    }
    pub fn has_own_pid_namespace(&self) -> bool {
        todo!()
    }
    pub fn cgroups_path(&self) -> Option<&str> {
        todo!()
    }
    pub fn sysctls(&self) -> BTreeMap<String, String> {
        todo!()
    }
    pub fn root_path(&self) -> Option<&str> {
        todo!()
    }
}
