//! One CNI plugin, run once: found, given CNI's environment and nothing else, bounded, and its end put into words.
//!
//! Promise: every failure names the plugin, the command, how it ended (code or signal), the time it took and the end of
//! its stderr; nothing that a plugin started outlives it, unless it ended well. Must never report "not found" as an
//! error's kind: an undo would take that for done.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::{Attachment, retry};
use crate::error::{Error, Kind, Result};
use crate::process::{Helper, Output, Reaper};

/// PATH of plugins: they call iptables, nft and the like. Ours is not passed on; a daemon's may be anything.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Most of stdout that is read; a result is a few kilobytes.
const OUTPUT_CAP: usize = 1 << 20;

/// How much of stderr, or of noise on stdout, goes into an error.
const SHOWN: usize = 400;

/// What a plugin can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Add,
    Del,
    Check,
    Status,
    Gc,
    Version,
}

impl Command {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Check => "CHECK",
            Self::Status => "STATUS",
            Self::Gc => "GC",
            Self::Version => "VERSION",
        }
    }
}

/// One call.
#[derive(Debug)]
pub(super) struct Call<'a> {
    pub(super) command: Command,
    /// The plugin's type.
    pub(super) name: &'a str,
    pub(super) program: &'a Path,
    /// CNI_PATH: where the plugin finds others (IPAM).
    pub(super) search: &'a [PathBuf],
    /// None for what is asked of a network or of the plugin itself.
    pub(super) attachment: Option<&'a Attachment>,
    /// CNI_NETNS; empty when the netns is gone.
    pub(super) netns: &'a Path,
    /// The configuration, for stdin.
    pub(super) conf: Vec<u8>,
    /// What is left of the chain's bound.
    pub(super) left: Duration,
    /// The chain's bound, for the error.
    pub(super) bound: Duration,
}

/// Finds a plugin's executable. State error, not NotFound: see the module's text.
pub(super) fn find(name: &str, dirs: &[PathBuf]) -> Result<PathBuf> {
    let executable = |path: &PathBuf| {
        fs::metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
    };
    dirs.iter().map(|d| d.join(name)).find(executable).ok_or_else(|| {
        let dirs: Vec<_> = dirs.iter().map(|d| d.display().to_string()).collect();
        Error::new(
            Kind::State,
            format!("find CNI plugin {name:?} in {}: it is not there; install it, or set cni.plugin_dirs", dirs.join(", ")),
        )
    })
}

/// Runs it. For ADD and VERSION what it printed; for the others Null.
pub(super) async fn run(reaper: &Reaper, call: Call<'_>) -> Result<Value> {
    let what = format!("run CNI plugin {:?} ({})", call.name, call.command.as_str());
    let mut helper = Helper::new(call.program, call.left);
    helper.env = environment(&call);
    // The bundle is our working directory: a plugin that stays behind must not hold it.
    helper.cwd = Some("/".into());
    helper.stdin = call.conf;
    helper.output_cap = OUTPUT_CAP;
    helper.guard = true;
    let output = helper
        .run(reaper)
        .await
        .map_err(|e| e.within(&what).as_kind(Kind::Other))?;
    let took = output.took;
    let judged = judge(call.command, &output, call.bound).map_err(|e| e.within(&what));
    match &judged {
        Ok(_) => tracing::debug!(
            plugin = call.name,
            command = call.command.as_str(),
            ?took,
            "CNI plugin ran"
        ),
        Err(error) => {
            let stdout = shown(&output.stdout, false);
            // Whoever asked for it tells of it, in one line.
            tracing::debug!(plugin = call.name, command = call.command.as_str(), ?took, limit = ?call.bound, %error, %stdout, "CNI plugin failed");
        }
    }
    judged
}

fn environment(call: &Call<'_>) -> Vec<(OsString, OsString)> {
    let args: Vec<String> = call
        .attachment
        .map(Attachment::cni_args)
        .unwrap_or_default()
        .iter()
        .map(|(k, v)| format!("{k}={v}"))
        .collect();
    let of = |part: fn(&Attachment) -> &String| call.attachment.map(part).cloned();
    let mut search = OsString::new();
    for dir in call.search {
        if !search.is_empty() {
            search.push(":");
        }
        search.push(dir);
    }
    vec![
        ("CNI_COMMAND".into(), call.command.as_str().into()),
        (
            "CNI_CONTAINERID".into(),
            of(|a| &a.container_id).unwrap_or_default().into(),
        ),
        ("CNI_NETNS".into(), call.netns.into()),
        (
            "CNI_IFNAME".into(),
            of(|a| &a.ifname).unwrap_or_default().into(),
        ),
        ("CNI_ARGS".into(), args.join(";").into()),
        ("CNI_PATH".into(), search),
        ("PATH".into(), PATH.into()),
    ]
}

/// Puts the end of a plugin into a result or into words.
fn judge(command: Command, output: &Output, bound: Duration) -> Result<Value> {
    let took = output.took.as_secs_f64();
    let stderr = shown(&output.stderr, true);
    let tail = if stderr.is_empty() {
        String::new()
    } else {
        format!("; its stderr ends with: {stderr}")
    };
    let fail = |kind, text: String| Err(Error::new(kind, format!("{text}{tail}")));
    if output.timed_out {
        return fail(
            Kind::Deadline,
            format!(
                "it had not ended after {took:.1} s and was killed: the whole chain may take {:.1} s",
                bound.as_secs_f64()
            ),
        );
    }
    if let Some(signal) = output.exit.signal {
        return fail(
            Kind::Other,
            format!("it was ended by {} after {took:.1} s", signal_name(signal)),
        );
    }
    let printed: Result<Value, _> = serde_json::from_slice(&output.stdout);
    if output.exit.code != 0 {
        let code = output.exit.code;
        let object = printed.as_ref().ok();
        let said = object.and_then(described);
        let words = said.as_ref().map_or(&stderr, |text| text);
        // Only within `cni::add`, which repeats it or turns it into an ordinary failure.
        let kind = match command == Command::Add && retry::is_passing(object, words) {
            true => Kind::Busy,
            false => Kind::Other,
        };
        return match said {
            Some(text) => fail(kind, format!("{text} (exit code {code} after {took:.1} s)")),
            None => fail(
                kind,
                format!(
                    "it exited with {code} after {took:.1} s and gave no error in JSON; stdout: {:?}",
                    shown(&output.stdout, false)
                ),
            ),
        };
    }
    if !matches!(command, Command::Add | Command::Version) {
        return Ok(Value::Null);
    }
    if output.truncated {
        return fail(
            Kind::Other,
            format!("it exited with 0 after {took:.1} s but printed more than {OUTPUT_CAP} bytes"),
        );
    }
    if output.stdout.iter().all(u8::is_ascii_whitespace) {
        return fail(
            Kind::Other,
            format!("it exited with 0 after {took:.1} s but printed no result"),
        );
    }
    match printed {
        // An error object with exit code 0 is no success.
        Ok(value) if value["code"].is_u64() && value["msg"].is_string() => {
            fail(Kind::Other, described(&value).unwrap_or_default())
        }
        Ok(value) => Ok(value),
        Err(e) => fail(
            Kind::Other,
            format!(
                "it exited with 0 after {took:.1} s but stdout is not one result in JSON ({e}); it begins with: {:?}",
                shown(&output.stdout, false)
            ),
        ),
    }
}

/// CNI's error object: {code, msg, details}.
fn described(value: &Value) -> Option<String> {
    let message = value["msg"].as_str()?;
    let mut text = format!(
        "it reports error {}: {}",
        value["code"],
        shown(message.as_bytes(), false)
    );
    if let Some(details) = value["details"].as_str().filter(|d| !d.is_empty()) {
        text.push_str(&format!("; details: {}", shown(details.as_bytes(), false)));
    }
    Some(text)
}

/// Foreign output on one line, cut, without control characters.
fn shown(bytes: &[u8], tail: bool) -> String {
    let cut = bytes.len().saturating_sub(SHOWN);
    let part = if tail {
        &bytes[cut..]
    } else {
        &bytes[..bytes.len() - cut]
    };
    let text = String::from_utf8_lossy(part);
    let text: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    let text = text.trim();
    match (cut, tail) {
        (0, _) => text.to_owned(),
        (_, true) => format!("… {text}"),
        (_, false) => format!("{text} …"),
    }
}

fn signal_name(signal: i32) -> String {
    nix::sys::signal::Signal::try_from(signal).map_or_else(
        |_| format!("signal {signal}"),
        |s| format!("signal {signal} ({s})"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::Exit;
    use std::time::SystemTime;

    fn output(code: u32, signal: Option<i32>, stdout: &str, stderr: &str) -> Output {
        Output {
            exit: Exit {
                code,
                signal,
                at: SystemTime::now(),
            },
            stdout: stdout.into(),
            stderr: stderr.into(),
            truncated: false,
            timed_out: false,
            took: Duration::from_millis(1500),
        }
    }

    fn text(command: Command, output: &Output) -> String {
        judge(command, output, Duration::from_secs(2))
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn a_result_is_given_and_the_output_of_del_does_not_matter() {
        let good = output(0, None, "{\"cniVersion\":\"1.0.0\"}\n", "a warning");
        assert_eq!(
            judge(Command::Add, &good, Duration::ZERO).unwrap()["cniVersion"],
            "1.0.0"
        );
        assert_eq!(
            judge(Command::Del, &output(0, None, "noise", ""), Duration::ZERO).unwrap(),
            Value::Null
        );
    }

    #[test]
    fn each_failure_says_how_it_ended_and_what_stderr_said() {
        let report = r#"{"code":7,"msg":"bad subnet","details":"10.0.0.0/33"}"#;
        let said = text(Command::Add, &output(1, None, report, ""));
        assert!(
            said.contains("error 7: bad subnet; details: 10.0.0.0/33 (exit code 1 after 1.5 s)"),
            "{said}"
        );

        let said = text(
            Command::Del,
            &output(139, Some(11), "", "about to\ncrash\n"),
        );
        assert!(
            said.contains("signal 11 (SIGSEGV) after 1.5 s; its stderr ends with: about to crash"),
            "{said}"
        );

        let said = text(Command::Del, &output(3, None, "oops", "why"));
        assert!(
            said.contains("exited with 3") && said.contains("\"oops\"") && said.contains("why"),
            "{said}"
        );

        let said = text(
            Command::Add,
            &output(0, None, "time=1 level=info\n{\"cniVersion\":\"1.0.0\"}", ""),
        );
        assert!(
            said.contains("not one result in JSON")
                && said.contains("begins with: \"time=1 level=info"),
            "{said}"
        );

        let said = text(Command::Add, &output(0, None, " \n", ""));
        assert!(said.contains("printed no result"), "{said}");

        let said = text(Command::Add, &output(0, None, report, ""));
        assert!(said.contains("error 7"), "{said}");
    }

    #[test]
    fn trailing_data_and_endless_output_are_no_result() {
        assert!(judge(Command::Add, &output(0, None, "{}{}", ""), Duration::ZERO).is_err());
        let mut endless = output(0, None, "{}", "");
        endless.truncated = true;
        assert!(judge(Command::Add, &endless, Duration::ZERO).is_err());
    }

    #[test]
    fn the_bound_is_a_deadline_error_with_both_times() {
        let mut killed = output(137, Some(9), "", "");
        killed.timed_out = true;
        let error = judge(Command::Add, &killed, Duration::from_secs(2)).unwrap_err();
        assert_eq!(error.kind(), Kind::Deadline);
        assert!(
            error.to_string().contains("after 1.5 s") && error.to_string().contains("2.0 s"),
            "{error}"
        );
    }

    #[test]
    fn what_is_shown_of_foreign_output_is_short_and_on_one_line() {
        let long = "x\n\u{1b}[31m".repeat(500);
        let said = shown(long.as_bytes(), true);
        assert!(said.chars().count() < SHOWN + 10 && !said.chars().any(char::is_control));
    }

    #[test]
    fn a_missing_plugin_is_never_taken_for_something_that_is_gone() {
        let error = find("bridge", &["/nonexistent".into()]).unwrap_err();
        assert!(!error.is_gone());
        assert!(error.to_string().contains("/nonexistent"), "{error}");
    }
}
