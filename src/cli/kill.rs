//! `podvisor kill`: sends a signal to the first process of containers.

use std::rc::Rc;

use crate::container::Status;
use crate::error::Kind;
use crate::pod::record::Record;

use super::failure::Failure;
use super::host::Host;
use super::supervisor::{self, label};
use super::{attach, output, select};

/// Flags of `kill`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  podvisor kill -s HUP web\n  podvisor kill --all web",
    long_about = "Send a signal to containers. A first process of a container ignores what it has no handler for, KILL excepted."
)]
pub struct Args {
    /// Name or number of the signal.
    #[arg(short, long, value_name = "SIGNAL", default_value = "KILL", value_parser = signal)]
    signal: i32,
    /// To all containers of the pods, not to the main one.
    #[arg(short, long)]
    all: bool,
    /// The pods (their main containers), or POD/CONTAINER.
    #[arg(required = true, value_name = "POD[/CONTAINER]")]
    targets: Vec<String>,
}

/// `TERM`, `SIGTERM`, `15`; 1 to 64, real-time signals by number.
pub fn signal(text: &str) -> Result<i32, String> {
    let upper = text.to_ascii_uppercase();
    let named = match upper.strip_prefix("SIG").unwrap_or(&upper) {
        // The kernel's other names for two of them.
        "IOT" => Some(libc::SIGABRT),
        "POLL" => Some(libc::SIGIO),
        bare => format!("SIG{bare}")
            .parse::<nix::sys::signal::Signal>()
            .ok()
            .map(|s| s as i32),
    };
    let number = text.parse().ok().filter(|n| (1..=64).contains(n));
    let plain = text.bytes().all(|b| b.is_ascii_alphanumeric());
    named.or(number).filter(|_| plain).ok_or_else(|| {
        format!("{text:?} is no signal: write its name, as in TERM, or a number from 1 to 64")
    })
}

/// Runs the verb.
pub async fn run(host: &Rc<Host>, args: Args) -> Result<u8, Failure> {
    let (number, all, shared) = (args.signal, args.all, Rc::clone(host));
    super::each::run(args.targets, move |target| {
        let host = Rc::clone(&shared);
        async move { one(&host, &target, number, all).await }
    })
    .await
}

async fn one(host: &Host, target: &str, number: i32, all: bool) -> Result<(), Failure> {
    let (pod, ids) = match all {
        true => {
            let pod = select::readable(host, target)?;
            let ids = running(&pod);
            (pod, ids)
        }
        false => {
            let (pod, id) = select::container(host, target)?;
            let ids = running(&pod).into_iter().filter(|r| *r == id).collect();
            (pod, ids)
        }
    };
    if ids.is_empty() {
        let what = format!(
            "signal {target}: nothing of it is running; `podvisor ps -a` shows its state, pod {}",
            label(&pod)
        );
        return Err(Failure::no_such(Kind::State, what));
    }
    let client = supervisor::connect(&pod).await?;
    for id in &ids {
        attach::kill(&client, id, "", number).await?;
    }
    output::line(target);
    Ok(())
}

/// Containers whose programs run.
pub fn running(pod: &Record) -> Vec<String> {
    let all = pod.containers.iter();
    let live = all.filter(|(_, c)| matches!(c.status, Status::Running | Status::Paused));
    live.map(|(id, _)| id.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_by_name_and_number() {
        for (text, number) in [
            ("TERM", 15),
            ("sigterm", 15),
            ("9", 9),
            ("SIGUSR1", 10),
            ("iot", 6),
            ("34", 34),
        ] {
            assert_eq!(signal(text), Ok(number), "{text}");
        }
        for text in [
            "",
            "0",
            "65",
            "-9",
            "+9",
            "SIG",
            "SIGSIGTERM",
            "NOPE",
            "TERM\n",
        ] {
            assert!(signal(text).is_err(), "{text:?}");
        }
    }
}
