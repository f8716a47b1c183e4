//! The only unsafe code of the crate, each block argued.
#![allow(unsafe_code)]

pub mod mount;
pub mod mountinfo;
