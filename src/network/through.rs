//! One chain run as it is asked for, on the netns that the caller gave, with nothing written down: for the CNI plugin
//! where it can keep nothing, and the caller knows what to delete.

use serde_json::Value;
use tokio::time::Instant;

use super::chain::Chain;
use super::{Attachment, NetworkConf, versions};
use crate::config::Config;
use crate::error::Result;
use crate::process::Reaper;

/// What is asked of an attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Through {
    /// ADD.
    Add,
    /// DEL; a netns that is gone is given as an empty one.
    Del,
    /// CHECK.
    Check,
}

/// Runs it within the bound of ADD, or of DEL for the others. `previous`: prevResult, as the caller gave it. The result of
/// ADD, Null of the others.
pub async fn pass(
    config: &Config,
    reaper: &Reaper,
    conf: &NetworkConf,
    attachment: &Attachment,
    verb: Through,
    previous: Option<&Value>,
) -> Result<Value> {
    let chain = Chain::new(config, reaper, conf, attachment)?;
    let begun = Instant::now();
    match verb {
        Through::Add => {
            attachment.check()?;
            versions::require(config, reaper, conf, chain.programs()).await?;
            let bound = config.add_timeout();
            let added = chain.add_after(previous, begun + bound, bound).await;
            added.map(|r| r.raw).map_err(|failed| failed.error)
        }
        Through::Del => {
            let deleted = chain.del(previous, begun, config.del_timeout()).await;
            deleted.map(|()| Value::Null)
        }
        Through::Check => {
            let previous = previous.unwrap_or(&Value::Null);
            let checked = chain.check(previous, config.del_timeout()).await;
            checked.map(|()| Value::Null)
        }
    }
}
