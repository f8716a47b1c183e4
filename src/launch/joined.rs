//! What a supervisor that is joined really serves.
//!
//! It may be that of an older executable. A daemon that is told a version the supervisor does not serve gives the pod
//! up at its first call, so the supervisor is asked. Must never keep a caller for long: one that does not answer is
//! taken for one of ours, and the daemon finds out by itself.

use std::time::Duration;

use tokio::runtime::Builder;
use tokio::time::timeout;

use crate::client::{self, Client};
use crate::error::{Kind, Result};
use crate::launch::bootstrap::TASK_VERSION;
use crate::launch::dialect::Dialect;
use crate::proto::task_v3::shim::ConnectRequest;

/// The version before ours: what is served where ours is not.
const TASK_VERSION_OLD: u32 = 2;

/// How long it may take to answer.
const LIMIT: Duration = Duration::from_secs(2);

/// The Task version of the supervisor at `address`; it is asked only where `dialect` tells it.
pub fn served(dialect: Dialect, address: &str) -> u32 {
    if matches!(dialect, Dialect::Plain | Dialect::Json(..=TASK_VERSION_OLD)) {
        return TASK_VERSION;
    }
    match connect(address) {
        // ttrpc's two ways to say that there is no such service.
        Err(error) if matches!(error.kind(), Kind::Invalid | Kind::Unsupported) => TASK_VERSION_OLD,
        _ => TASK_VERSION,
    }
}

/// Task.Connect of our version, which every supervisor that has it answers, for any id.
fn connect(address: &str) -> Result<()> {
    let runtime = Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| crate::error::Error::io("build a runtime", e))?;
    let call = async {
        let client = Client::connect(address).await?;
        let answer = client
            .task()
            .connect(client::context(Some(LIMIT)), &ConnectRequest::default())
            .await;
        answer
            .map(drop)
            .map_err(|e| client::from_ttrpc("ask the supervisor for its version", e))
    };
    runtime
        .block_on(async { timeout(LIMIT, call).await })
        .unwrap_or(Ok(()))
}
