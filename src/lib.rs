//! One small supervisor process per pod.

pub mod proto;
