//! `podvisor rm`: removes pods and everything of theirs.

use std::rc::Rc;

use crate::error::{Error, Kind};
use crate::pod::Parked;

use super::failure::{Failure, NO_SUCH};
use super::host::Host;
use super::{output, owed, parked, remove, select};

/// Flags of `rm`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  podvisor rm -f web")]
pub struct Args {
    /// Stop what runs first, and remove what cannot be removed otherwise; what stays owed is kept on record.
    #[arg(short, long)]
    force: bool,
    /// Names, ids, or beginnings of ids; a pod that is gone but for its network gets a try of its clean-up.
    #[arg(required = true, value_name = "POD")]
    pods: Vec<String>,
}

/// Runs the verb.
pub async fn run(host: &Rc<Host>, args: Args) -> Result<u8, Failure> {
    let force = args.force;
    let shared = Rc::clone(host);
    super::each::run(args.pods, move |target| {
        let host = Rc::clone(&shared);
        async move { one(&host, &target, force).await }
    })
    .await
}

async fn one(host: &Host, target: &str, force: bool) -> Result<(), Failure> {
    let found = match select::pod(host, target) {
        Ok(found) => found,
        Err(unknown) => {
            if let Some(parked) = parked::find(host, target)? {
                match parked::undo(host, &parked).await {
                    Err(e) if force => owed::complain(&e),
                    tried => tried?,
                }
                output::line(target);
                return Ok(());
            }
            let owed = owed::find(host, target)?.ok_or(unknown)?;
            if owed.supervisor.is_some() {
                if !force {
                    let why = format!("remove pod {target}: {}", owed::reason(&owed));
                    return Err(Failure::new(NO_SUCH, Error::new(Kind::State, why)));
                }
                remove::astray(host, &owed).await?;
                output::line(target);
                return Ok(());
            }
            match owed::hurry(host, &owed).await {
                Err(e) if force => owed::complain(&e),
                tried => tried?,
            }
            output::line(target);
            return Ok(());
        }
    };
    if !force {
        remove::check(host, &found).map_err(|e| Failure::new(NO_SUCH, e))?;
    }
    remove::pod(host, &found, force, Parked::Undone).await?;
    output::line(target);
    Ok(())
}
