//! Checkpoint and restore: the runtime's verbs, and whether criu, which does the work, can do it on this kernel.

use std::ffi::OsString;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use super::{Runtime, add_console, args, environment, find};
use crate::error::{Error, Kind, Result};
use crate::process::{Helper, Reaper};

/// A dump writes all memory of the container to disk.
const DUMP_LIMIT: Duration = Duration::from_secs(600);
/// `criu check` tries a few system calls.
const CHECK_LIMIT: Duration = Duration::from_secs(30);
/// How much of its complaint is passed on, characters.
const REASON_BOUND: usize = 500;

/// What a checkpoint is to be; the names are those of criu's own options.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dump {
    /// The container ends with it.
    pub exit: bool,
    /// Open TCP connections are kept.
    pub open_tcp: bool,
    /// Unix sockets whose other end is outside are kept.
    pub external_unix_sockets: bool,
    /// A terminal of ours is kept.
    pub terminal: bool,
    /// File locks are kept.
    pub file_locks: bool,
    /// Namespaces that are made but not filled in.
    pub empty_namespaces: Vec<String>,
    /// `soft`, `full` or `strict`; empty: criu's own.
    pub cgroups_mode: String,
}

/// What a restore needs beside the container's id.
#[derive(Debug)]
pub struct Restore<'a> {
    /// Directory with `config.json`.
    pub bundle: &'a Path,
    /// Where the dump is.
    pub image: &'a Path,
    /// Where criu works.
    pub work: &'a Path,
    /// Where the runtime writes the pid of init.
    pub pid_file: &'a Path,
    /// `--no-pivot`.
    pub no_pivot_root: bool,
    /// See [`super::Create::console`].
    pub console: Option<&'a Path>,
    /// stdin, stdout and stderr of the container.
    pub stdio: [Stdio; 3],
}

/// Whether a container can be dumped or restored here.
///
/// # Errors
/// Unsupported, with criu's own words, or because it is not installed.
pub async fn check(reaper: &Reaper) -> Result<()> {
    let refused =
        |why: &str| Error::new(Kind::Unsupported, format!("criu cannot work here: {why}"));
    let Ok(binary) = find("criu") else {
        return Err(refused("it is not installed"));
    };
    let mut helper = Helper::new(&binary, CHECK_LIMIT);
    helper.env = environment();
    helper.args = args(["check"]);
    let output = helper.run(reaper).await?;
    if output.timed_out {
        return Err(refused("`criu check` does not end"));
    }
    if output.exit.code == 0 {
        return Ok(());
    }
    let said = [output.stderr, output.stdout].concat();
    let said = String::from_utf8_lossy(&said);
    // The first error is the cause; later ones follow from it.
    let mut lines = said.lines().map(str::trim).filter(|l| !l.is_empty());
    let line = lines.clone().find(|l| l.contains("Error"));
    let line = line
        .or_else(|| lines.next())
        .unwrap_or("`criu check` fails without a word");
    Err(refused(
        &line.chars().take(REASON_BOUND).collect::<String>(),
    ))
}

impl Runtime {
    /// Dumps the container to `image`.
    pub async fn checkpoint(
        &self,
        reaper: &Reaper,
        bundle: &Path,
        id: &str,
        image: &Path,
        work: &Path,
        dump: &Dump,
    ) -> Result<()> {
        let mut args = args(["checkpoint"]);
        add_paths(&mut args, image, work);
        for (wanted, flag) in [
            (!dump.exit, "--leave-running"),
            (dump.open_tcp, "--tcp-established"),
            (dump.external_unix_sockets, "--ext-unix-sk"),
            (dump.terminal, "--shell-job"),
            (dump.file_locks, "--file-locks"),
        ] {
            if wanted {
                args.push(flag.into());
            }
        }
        for namespace in &dump.empty_namespaces {
            args.push("--empty-ns".into());
            args.push(namespace.into());
        }
        if !dump.cgroups_mode.is_empty() {
            args.push("--manage-cgroups-mode".into());
            args.push((&dump.cgroups_mode).into());
        }
        args.push(id.into());
        self.run(reaper, bundle, args, DUMP_LIMIT, None)
            .await
            .map(drop)
    }

    /// Makes the container from a dump; its init runs at once.
    pub async fn restore(&self, reaper: &Reaper, id: &str, restore: Restore<'_>) -> Result<()> {
        let mut args = args(["restore", "--detach", "--bundle"]);
        args.push(restore.bundle.into());
        add_paths(&mut args, restore.image, restore.work);
        args.push("--pid-file".into());
        args.push(restore.pid_file.into());
        if restore.no_pivot_root {
            args.push("--no-pivot".into());
        }
        add_console(&mut args, restore.console);
        args.push(id.into());
        self.run(
            reaper,
            restore.bundle,
            args,
            DUMP_LIMIT,
            Some(restore.stdio),
        )
        .await
        .map(drop)
    }
}

fn add_paths(args: &mut Vec<OsString>, image: &Path, work: &Path) {
    args.push("--image-path".into());
    args.push(image.into());
    args.push("--work-path".into());
    args.push(work.into());
}
