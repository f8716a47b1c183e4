//! `podvisor logs`: what a container has written, from its log file; works when the container, the pod's network or the
//! supervisor has ended. Each stream goes to its own descriptor.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};

use crate::error::{Context, Error, Kind};
use crate::stdio::log;

use super::failure::Failure;
use super::host::Host;
use super::{container, select};

/// Flags of `logs`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  podvisor logs web/main")]
pub struct Args {
    /// Show the time of each line in front of it.
    #[arg(short, long)]
    timestamps: bool,
    /// The pod (its main container), or POD/CONTAINER.
    #[arg(value_name = "POD[/CONTAINER]")]
    target: String,
}

/// Runs the verb.
pub fn run(host: &Host, args: &Args) -> Result<u8, Failure> {
    let (pod, id) = select::container(host, &args.target)?;
    let files = container::log_files(&host.pod_dir(&pod.id), &id);
    if files.is_empty() {
        return Err(Failure::no_such(
            Kind::NotFound,
            format!("read the log of container {id}: there is none"),
        ));
    }
    let (mut out, mut err) = (BufWriter::new(io::stdout()), BufWriter::new(io::stderr()));
    for path in files {
        let what = || format!("read {}", path.display());
        let file = File::open(&path).context(what)?;
        match copy(BufReader::new(file), &mut out, &mut err, args.timestamps) {
            // Whoever read us has seen enough.
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return Ok(0),
            done => done.map_err(|e| Error::io(what(), e))?,
        }
    }
    Ok(0)
}

fn copy(
    mut log: impl BufRead,
    out: &mut impl Write,
    err: &mut impl Write,
    timestamps: bool,
) -> io::Result<()> {
    let mut raw = Vec::new();
    // Whether the next part of (stdout, stderr) begins a line.
    let mut begins = [true, true];
    loop {
        raw.clear();
        if log.read_until(b'\n', &mut raw)? == 0 {
            break;
        }
        // The last line may be cut by a crash, and a file that somebody else has written to may hold anything.
        let Some(line) = log::parse(raw.strip_suffix(b"\n").unwrap_or(&raw)) else {
            continue;
        };
        let stream = usize::from(line.stderr);
        // In order on a terminal that shows both: what was written to the other stream comes first.
        let to: &mut dyn Write = if line.stderr {
            out.flush()?;
            err
        } else {
            err.flush()?;
            out
        };
        if timestamps && begins[stream] {
            write!(to, "{} ", line.at)?;
        }
        to.write_all(&line.text)?;
        if line.full {
            to.write_all(b"\n")?;
        }
        begins[stream] = line.full;
    }
    out.flush()?;
    err.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_log_line_is_passed_by() {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        copy(&b"garbage\n\n\xff"[..], &mut out, &mut err, false).unwrap();
        assert!(out.is_empty() && err.is_empty());
    }
}
