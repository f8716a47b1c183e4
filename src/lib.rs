//! podvisor: one small supervisor process per pod.
//!
//! The rooms of this crate and the arrows between them are listed in `docs/architecture.md`; a test holds them.

pub mod cgroup;
#[cfg(feature = "cli")]
pub mod cli;
pub mod client;
pub mod clock;
pub mod config;
pub mod container;
pub mod error;
pub mod failpoint;
pub mod id;
pub mod infra;
pub mod job;
pub mod launch;
pub mod log;
pub mod mount;
pub mod network;
pub mod oci;
pub mod plugin;
pub mod pod;
pub mod process;
pub mod proto;
pub mod serve;
pub mod service;
pub mod spec;
pub mod stdio;
pub mod sys;
pub mod tally;
pub mod undo;
