//! `podvisor create`: a pod without a container. Prints its id.

use super::attach::Signals;
use super::failure::Failure;
use super::host::Host;
use super::{make, output, parse, plan};

/// Flags of `create`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  podvisor create --name web --publish 8080:80\n  podvisor run -d --sandbox web --rootfs /srv/web -- /bin/httpd -f -p 80"
)]
pub struct Args {
    /// Name of the pod.
    #[arg(long, value_parser = parse::name)]
    name: Option<String>,
    #[command(flatten)]
    pod: plan::Args,
}

/// Runs the verb.
pub async fn run(host: &Host, args: Args) -> Result<u8, Failure> {
    let plan = plan::check(host, args.name, args.pod)?;
    let made = make::pod(host, &plan, &mut Signals::catch()?).await?;
    output::line(&made.record.id);
    Ok(0)
}
