//! `podvisor stop`: ends a pod's containers and releases its network; its record stays until `rm`.

use std::rc::Rc;

use crate::pod::record::State;

use super::failure::{Failure, NO_SUCH};
use super::host::Host;
use super::{output, parked, remove, select};

/// Flags of `stop`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  podvisor stop -t 30 web")]
pub struct Args {
    /// Seconds between SIGTERM and SIGKILL.
    #[arg(short, long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    time: u32,
    /// Names, ids, or beginnings of ids.
    #[arg(required = true, value_name = "POD")]
    pods: Vec<String>,
}

/// Runs the verb.
pub async fn run(host: &Rc<Host>, args: Args) -> Result<u8, Failure> {
    let grace = args.time;
    let shared = Rc::clone(host);
    super::each::run(args.pods, move |target| {
        let host = Rc::clone(&shared);
        async move { one(&host, &target, grace).await }
    })
    .await
}

async fn one(host: &Host, target: &str, grace: u32) -> Result<(), Failure> {
    let record = match select::readable(host, target) {
        Ok(record) => record,
        // Of this one only the network is left, and it is parked.
        Err(unknown) => {
            let parked = parked::find(host, target)?.ok_or(unknown)?;
            parked::undo(host, &parked).await?;
            output::line(target);
            return Ok(());
        }
    };
    if record.state == State::Stopped && record.network.pending.is_none() {
        output::line(target);
        return Ok(());
    }
    let stopped = match record.is_supervised() {
        true => remove::stop(host, &record, grace).await,
        false => remove::stop_without(host, &record).await,
    };
    match stopped {
        Ok(()) => {
            output::line(target);
            Ok(())
        }
        Err(e) if e.is_gone() => Err(Failure::new(NO_SUCH, e)),
        Err(e) => Err(e.into()),
    }
}
