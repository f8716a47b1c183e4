//! Asking another program one question: `containerd --version`, `runc features`.
//!
//! Promises an answer within the bound, whatever the program does, and leaves no process behind. Must never start a
//! thread: `start` forks afterwards.

use std::ffi::OsStr;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::error::{Context, Error, Kind, Result};

/// Largest answer read, bytes.
const ANSWER_MAX: usize = 1024 * 1024;

/// Runs `program` with `args`, nothing on its standard input, and gives what it wrote to standard output.
///
/// # Errors
/// NotFound without the program, Deadline after `limit`, Other when it does not exit with 0 or answers too much.
pub fn ask(program: &OsStr, args: &[&str], limit: Duration) -> Result<Vec<u8>> {
    let what = || format!("run {} {}", program.to_string_lossy(), args.join(" "));
    let end = Instant::now() + limit;
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .context(what)?;
    let answer = listen(&mut child, end);
    if answer.is_err() {
        kill_group(&child);
    }
    // It has closed its output or been killed; one that closes its output and lives on is killed at the bound.
    let status = loop {
        match child.try_wait().context(what)? {
            Some(status) => break status,
            None if Instant::now() < end => std::thread::sleep(Duration::from_millis(2)),
            None => {
                kill_group(&child);
                break child.wait().context(what)?;
            }
        }
    };
    let answer = answer.map_err(|e| e.within(what()))?;
    if !status.success() {
        return Err(Error::new(
            Kind::Other,
            format!("{}: it ended with {status}", what()),
        ));
    }
    Ok(answer)
}

fn listen(child: &mut Child, end: Instant) -> Result<Vec<u8>> {
    let Some(mut output) = child.stdout.take() else {
        return Ok(Vec::new());
    };
    let mut answer = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        let ready = poll(
            &mut [PollFd::new(output.as_fd(), PollFlags::POLLIN)],
            timeout,
        );
        match ready {
            Err(nix::errno::Errno::EINTR) => continue,
            Err(e) => return Err(Error::sys("wait for its answer", e)),
            Ok(0) => {
                return Err(Error::new(
                    Kind::Deadline,
                    "wait for its answer: it took too long",
                ));
            }
            Ok(_) => {}
        }
        match output.read(&mut chunk).context(|| "read its answer")? {
            0 => return Ok(answer),
            n => answer.extend_from_slice(&chunk[..n]),
        }
        if answer.len() > ANSWER_MAX {
            return Err(Error::new(
                Kind::Other,
                format!("read its answer: it is longer than {ANSWER_MAX} bytes"),
            ));
        }
    }
}

fn kill_group(child: &Child) {
    // The group is its own (process_group(0)), and it has not been waited for, so the number is still its.
    if let Ok(pid) = i32::try_from(child.id()) {
        let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_whole_and_a_failure_is_no_answer() {
        let limit = Duration::from_secs(10);
        assert_eq!(ask("echo".as_ref(), &["hi"], limit).unwrap(), b"hi\n");
        assert!(ask("false".as_ref(), &[], limit).is_err());
        assert_eq!(
            ask("/nonexistent/x".as_ref(), &[], limit)
                .unwrap_err()
                .kind(),
            Kind::NotFound
        );
    }

    #[test]
    fn a_program_that_hangs_is_ended_at_the_bound() {
        let error = ask(
            "sh".as_ref(),
            &["-c", "sleep 60 & sleep 60"],
            Duration::from_millis(50),
        )
        .unwrap_err();
        assert_eq!(error.kind(), Kind::Deadline);
    }
}
