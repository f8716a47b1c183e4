//! The only unsafe code of the crate: thin, argued wraps of system calls that no well-kept crate offers in the form
//! needed here.
//!
//! Owns: every `unsafe` block (the infra program apart). Promises: each wrap is safe to call from anywhere unless its
//! name and text say otherwise, and returns the errno it met. Must never hold state of a pod.
#![allow(unsafe_code)]

pub mod clone;
pub mod dir;
pub mod fd;
pub mod fork;
pub mod guard;
mod image;
pub mod loopdev;
pub mod memory;
pub mod mount;
pub mod mountinfo;
pub mod netns;
pub mod pin;
pub mod process;
pub mod pty;
pub mod sched_core;
pub mod socket;
pub mod spawn;
pub mod thread_ns;
pub mod userns;
pub mod xattr;
