//! `podvisor logs`: what a container has written, from its log file; works when the container, the pod's network or the
//! supervisor has ended. Each stream goes to its own descriptor.
//!
//! Promises that following loses nothing where the file is rotated, and ends when the container has ended and everything is
//! shown.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use crate::container::Status;
use crate::error::{Context, Error, Kind, Result};
use crate::stdio::log::{self, Line};

use super::failure::Failure;
use super::host::Host;
use super::{container, select, since, supervisor};

/// Between looks at a file that is followed.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Flags of `logs`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  podvisor logs web/main\n  podvisor logs -t --since 10m --tail 20 web"
)]
pub struct Args {
    /// Show the time of each line in front of it.
    #[arg(short, long)]
    timestamps: bool,
    /// Go on with what is written from now on, until the container has ended.
    #[arg(short, long)]
    follow: bool,
    /// Only what was written since then: a time as in 2026-11-30T13:33:12Z, or how long ago as in 10m.
    #[arg(long, value_name = "TIME", value_parser = since::since)]
    since: Option<String>,
    /// Only the last lines.
    #[arg(long, value_name = "NUMBER")]
    tail: Option<usize>,
    /// The pod (its main container), or POD/CONTAINER.
    #[arg(value_name = "POD[/CONTAINER]")]
    target: String,
}

/// Runs the verb.
pub async fn run(host: &Host, args: &Args) -> Result<u8, Failure> {
    let (pod, id) = select::container(host, &args.target)?;
    let dir = host.pod_dir(&pod.id);
    let present = container::log_path(&dir, &id);
    let files = container::log_files(&dir, &id);
    if files.is_empty() && !args.follow {
        return Err(Failure::no_such(
            Kind::NotFound,
            format!("read the log of container {id}: there is none"),
        ));
    }
    let mut show = Show::new(
        args,
        BufWriter::new(io::stdout()),
        BufWriter::new(io::stderr()),
    );
    let mut last = None;
    for path in files {
        let mut reader = Reader::open(&path)?;
        match reader.pass_on(&mut show) {
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return Ok(0),
            done => done.map_err(|e| Error::io(format!("read {}", path.display()), e))?,
        }
        if path == present {
            last = Some(reader);
        }
    }
    let ended = || has_ended(host, &pod.id, &id);
    let shown = match show.held_back().and_then(|()| show.flush()) {
        Ok(()) if args.follow => follow(&present, last, &mut show, ended).await,
        other => other,
    };
    match shown {
        // Whoever read us has seen enough.
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(0),
        done => {
            done.map_err(|e| Error::io(format!("read {}", present.display()), e))?;
            Ok(0)
        }
    }
}

/// Nothing more comes: the container has ended, or nobody is there to write down what it writes.
fn has_ended(host: &Host, pod: &str, id: &str) -> bool {
    match supervisor::reread(host, pod) {
        Ok(record) if record.is_supervised() => match record.containers.get(id) {
            Some(container) => container.status == Status::Stopped,
            None => true,
        },
        _ => true,
    }
}

async fn follow(
    path: &Path,
    mut reader: Option<Reader>,
    show: &mut Show<impl Write, impl Write>,
    ended: impl Fn() -> bool,
) -> io::Result<()> {
    loop {
        // Asked before reading: what was written before the end is read after it.
        let over = ended();
        if let Some(reader) = &mut reader {
            reader.pass_on(show)?;
        }
        let present = file_id(path);
        if present.is_some() && present != reader.as_ref().map(|r| r.file_id) {
            // Rotated, or there at last. What was written to the old file since then comes first.
            if let Some(old) = &mut reader {
                old.pass_on(show)?;
            }
            if let Ok(fresh) = Reader::open(path) {
                reader = Some(fresh);
                continue;
            }
        }
        show.flush()?;
        if over {
            return Ok(());
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// Device and inode of what is at a path; None: nothing is.
fn file_id(path: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(path).map(|m| (m.dev(), m.ino())).ok()
}

/// A log file, read line by line; the last line may not be whole yet.
struct Reader {
    from: BufReader<Box<dyn Read>>,
    /// Device and inode.
    file_id: (u64, u64),
    partial: Vec<u8>,
}

impl Reader {
    fn open(path: &Path) -> Result<Self> {
        let what = || format!("read {}", path.display());
        let file = File::open(path).context(what)?;
        let meta = file.metadata().context(what)?;
        Ok(Self {
            from: BufReader::new(Box::new(file)),
            file_id: (meta.dev(), meta.ino()),
            partial: Vec::new(),
        })
    }

    fn pass_on(&mut self, show: &mut Show<impl Write, impl Write>) -> io::Result<()> {
        loop {
            if self.from.read_until(b'\n', &mut self.partial)? == 0 {
                return Ok(());
            }
            let Some(raw) = self.partial.strip_suffix(b"\n") else {
                continue;
            };
            // A file that somebody else has written to may hold anything, and a line may be cut by a crash.
            if let Some(line) = log::parse(raw) {
                show.line(line)?;
            }
            self.partial.clear();
        }
    }
}

/// Writes lines to where their streams go.
struct Show<O: Write, E: Write> {
    out: O,
    err: E,
    timestamps: bool,
    /// Lines before this time are left out.
    since: Option<String>,
    /// The last lines and how many are wanted, until they are shown.
    tail: Option<(usize, VecDeque<Line>)>,
    /// Whole lines in `tail`.
    held: usize,
    /// Whether the next part of (stdout, stderr) begins a line.
    begins: [bool; 2],
}

impl<O: Write, E: Write> Show<O, E> {
    fn new(args: &Args, out: O, err: E) -> Self {
        Self {
            out,
            err,
            timestamps: args.timestamps,
            since: args.since.clone(),
            tail: args.tail.map(|most| (most, VecDeque::new())),
            held: 0,
            begins: [true, true],
        }
    }

    fn line(&mut self, line: Line) -> io::Result<()> {
        if self
            .since
            .as_ref()
            .is_some_and(|since| since::is_before(&line.at, since))
        {
            return Ok(());
        }
        let Some((most, kept)) = &mut self.tail else {
            return self.write(&line);
        };
        self.held += usize::from(line.full);
        kept.push_back(line);
        while self.held > *most {
            match kept.pop_front() {
                Some(gone) => self.held -= usize::from(gone.full),
                None => break,
            }
        }
        Ok(())
    }

    /// The last lines, of which there are no more now; from here on every line is shown.
    fn held_back(&mut self) -> io::Result<()> {
        if let Some((most, kept)) = self.tail.take() {
            for line in kept.iter().filter(|_| most > 0) {
                self.write(line)?;
            }
        }
        Ok(())
    }

    fn write(&mut self, line: &Line) -> io::Result<()> {
        let stream = usize::from(line.stderr);
        // In order on a terminal that shows both: what was written to the other stream comes first.
        let to: &mut dyn Write = if line.stderr {
            self.out.flush()?;
            &mut self.err
        } else {
            self.err.flush()?;
            &mut self.out
        };
        if self.timestamps && self.begins[stream] {
            write!(to, "{} ", line.at)?;
        }
        to.write_all(&line.text)?;
        if line.full {
            to.write_all(b"\n")?;
        }
        self.begins[stream] = line.full;
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()?;
        self.err.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(tail: Option<usize>, since: Option<&str>) -> Args {
        Args {
            timestamps: false,
            follow: false,
            since: since.map(str::to_owned),
            tail,
            target: String::new(),
        }
    }

    fn shown(text: &[u8], args: &Args) -> (String, String) {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let mut show = Show::new(args, &mut out, &mut err);
        let mut reader = Reader {
            from: BufReader::new(Box::new(io::Cursor::new(text.to_vec()))),
            file_id: (0, 0),
            partial: Vec::new(),
        };
        reader.pass_on(&mut show).unwrap();
        show.held_back().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (text(out), text(err))
    }

    const LOG: &[u8] = b"2026-11-30T13:33:12.000000001Z stdout F one\n\
        2026-11-30T13:33:13.000000001Z stdout P tw\n\
        2026-11-30T13:33:13.000000001Z stderr F bad\n\
        2026-11-30T13:33:13.000000001Z stdout F o\n\
        2026-11-30T13:33:14.000000001Z stdout F three\n";

    #[test]
    fn what_is_no_log_line_is_passed_by() {
        let nothing = (String::new(), String::new());
        assert_eq!(shown(b"garbage\n\n\xff", &args(None, None)), nothing);
    }

    #[test]
    fn the_last_lines_and_those_since_a_time() {
        let of = |tail, since| shown(LOG, &args(tail, since)).0;
        assert_eq!(of(None, None), "one\ntwo\nthree\n");
        assert_eq!(of(Some(1), None), "three\n");
        assert_eq!(
            shown(LOG, &args(Some(3), None)),
            ("two\nthree\n".to_owned(), "bad\n".to_owned())
        );
        assert_eq!(of(Some(0), None), "");
        assert_eq!(of(Some(99), None), "one\ntwo\nthree\n");
        assert_eq!(of(None, Some("2026-11-30T13:33:14Z")), "three\n");
        assert_eq!(of(None, Some("2026-11-30T13:33:14.000000001Z")), "three\n");
    }

    #[tokio::test]
    async fn a_file_is_followed_over_its_rotation() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let line = |text: &str| format!("2026-11-30T13:33:12.000000001Z stdout F {text}\n");
        std::fs::write(&path, line("one")).unwrap();
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let all = args(None, None);
        let mut show = Show::new(&all, &mut out, &mut err);
        let step = std::cell::Cell::new(0);
        let ended = || {
            step.set(step.get() + 1);
            match step.get() {
                2 => {
                    std::fs::rename(&path, dir.path().join("log.1")).unwrap();
                    std::fs::write(&path, line("two")).unwrap();
                }
                4 => std::fs::write(&path, line("two") + &line("three")).unwrap(),
                _ => {}
            }
            step.get() >= 6
        };
        let reader = Reader::open(&path).ok();
        follow(&path, reader, &mut show, ended).await.unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "one\ntwo\nthree\n");
    }
}
