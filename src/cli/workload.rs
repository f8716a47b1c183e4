//! What a container is to be: the flags that `run` has for it, and the [`Workload`] they become.
//!
//! Promises that everything that can be checked beforehand is: directories, users, capabilities, limits. Must never make
//! anything.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Value, json};

use crate::error::{Error, Kind, Result};

use super::user::{self, User};
use super::{capability, mounts, parse, plan};

/// Terminal type of a workload whose caller does not say: what every terminal database has.
const TERM: &str = "xterm";

/// Flags of a container.
// No group of its own: it is flattened into arguments of the same name.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct Args {
    /// Pass our standard input on.
    #[arg(short, long, conflicts_with = "detach")]
    pub interactive: bool,
    /// Give the workload a terminal; with -i it is ours, and ctrl-p ctrl-q leaves the workload running.
    #[arg(short, long)]
    pub tty: bool,
    /// Set a variable; KEY alone takes the value from here. May be repeated.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse::variable)]
    pub env: Vec<String>,
    /// Working directory in the container [default: /].
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// Run as this user: names are those of the container's own /etc/passwd and /etc/group [default: root].
    #[arg(short, long, value_name = "USER[:GROUP]")]
    pub user: Option<String>,
    /// Most memory of the container, as in 64m or 2g.
    #[arg(short, long, value_name = "SIZE", value_parser = parse::size)]
    pub memory: Option<u64>,
    /// Most processor time, in processors, as in 0.5.
    #[arg(long, value_name = "NUMBER", value_parser = parse::cpus)]
    pub cpus: Option<f64>,
    /// Most processes and threads; 0 is no limit.
    #[arg(long, value_name = "NUMBER")]
    pub pids_limit: Option<u32>,
    /// Mount something: type=bind,src=DIR,dst=DIR[,ro] or type=tmpfs,dst=DIR[,size=SIZE]. May be repeated.
    #[arg(long, value_name = "KEY=VALUE,...", value_parser = mounts::flag)]
    pub mount: Vec<Value>,
    /// Mount a directory or file of the host. May be repeated.
    #[arg(short, long, value_name = "HOST:CTR[:ro]", value_parser = mounts::volume)]
    pub volume: Vec<Value>,
    /// Make the root file system read-only.
    #[arg(long)]
    pub read_only: bool,
    /// Give a capability, as NET_ADMIN, or ALL. May be repeated.
    #[arg(long, value_name = "CAP", value_parser = capability::name)]
    pub cap_add: Vec<String>,
    /// Take a capability away, or ALL. May be repeated.
    #[arg(long, value_name = "CAP", value_parser = capability::name)]
    pub cap_drop: Vec<String>,
}

/// What the workload is to be. The same wish gives the same bytes: a retry is known by them.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Workload {
    /// Checked, absolute.
    pub rootfs: PathBuf,
    /// Command and arguments; not empty.
    pub args: Vec<String>,
    /// `KEY=VALUE`; a PATH in it replaces the default.
    pub env: Vec<String>,
    /// Working directory in the container, absolute.
    pub cwd: String,
    /// It is passed our standard input.
    pub interactive: bool,
    /// It gets a terminal.
    pub tty: bool,
    /// Whom it runs as.
    pub user: User,
    /// Its root file system cannot be written to.
    pub read_only: bool,
    /// OCI mounts beside the usual ones.
    pub mounts: Vec<Value>,
    /// Its capabilities.
    pub capabilities: Vec<String>,
    /// Those that it keeps as another user than root.
    pub ambient: Vec<String>,
    /// OCI `linux.resources`, without devices; null where nothing is limited.
    pub resources: Value,
    /// OCI annotations.
    pub annotations: BTreeMap<String, String>,
    /// No program it runs gives it more rights.
    pub no_new_privileges: bool,
    /// OCI `oomScoreAdj`.
    pub oom_score_adj: i64,
    /// Paths that cannot be seen; `None`: the usual ones.
    pub masked: Option<Vec<String>>,
    /// Paths that cannot be written to; `None`: the usual ones.
    pub write_protected: Option<Vec<String>>,
}

impl Workload {
    /// With the usual capabilities, and nothing else said.
    pub fn at(rootfs: &Path) -> Result<Self> {
        Ok(Self {
            rootfs: check_rootfs(rootfs)?,
            capabilities: capability::usual(),
            ..Self::default()
        })
    }
}

/// The flags' workload. `base`: its root file system, checked, and what a file has said already.
pub fn build(
    base: Workload,
    args: Args,
    annotations: &[(String, String)],
    command: &[String],
) -> Result<Workload> {
    let mut work = base;
    work.interactive |= args.interactive;
    work.tty |= args.tty;
    if !command.is_empty() {
        work.args = command.to_vec();
    }
    work.env.extend(args.env);
    work.cwd = match args.workdir {
        Some(cwd) => cwd,
        None if work.cwd.is_empty() => "/".to_owned(),
        None => work.cwd,
    };
    if let Some(user) = &args.user {
        work.user = user::find(&work.rootfs, user)?;
    }
    work.read_only |= args.read_only;
    work.mounts.extend(args.mount);
    work.mounts.extend(args.volume);
    capability::change(&mut work.capabilities, &args.cap_add, &args.cap_drop)?;
    limit(&mut work.resources, args.memory, args.cpus, args.pids_limit);
    for (key, value) in annotations {
        plan::check_annotation(key)?;
        work.annotations.insert(key.clone(), value.clone());
    }
    check_command(&work)?;
    mounts::check(&work.mounts)?;
    Ok(work)
}

/// Terminal type for a workload that gets our terminal.
pub fn term() -> String {
    let ours = std::env::var("TERM").unwrap_or_default();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-+._".contains(c);
    match ours.is_empty() || !ours.chars().all(plain) {
        true => format!("TERM={TERM}"),
        false => format!("TERM={ours}"),
    }
}

/// A terminal for a process whose standard input is ours has to be ours.
pub fn check_terminal(tty: bool, interactive: bool) -> Result<()> {
    use std::io::IsTerminal;
    if tty && interactive && !std::io::stdin().is_terminal() {
        return Err(Error::new(
            Kind::Invalid,
            "give the workload our terminal: standard input is none; leave -t out, or -i",
        ));
    }
    Ok(())
}

/// The root file system as an absolute path without links; it has to be a directory.
pub fn check_rootfs(path: &Path) -> Result<PathBuf> {
    let next = "give a directory that holds the container's files with --rootfs";
    let found = match fs::canonicalize(path) {
        Ok(found) => found,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(Error::new(
                Kind::NotFound,
                format!("use rootfs {}: it is not there; {next}", path.display()),
            ));
        }
        Err(e) => {
            return Err(Error::io(
                format!("use rootfs {} ({next})", path.display()),
                e,
            ));
        }
    };
    if !found.is_dir() {
        return Err(Error::new(
            Kind::Invalid,
            format!("use rootfs {}: it is no directory; {next}", path.display()),
        ));
    }
    if found.to_str().is_none() {
        return Err(Error::new(
            Kind::Invalid,
            format!(
                "use rootfs {}: its path is no UTF-8; {next}",
                path.display()
            ),
        ));
    }
    Ok(found)
}

/// An absolute directory, for a process in a container.
pub fn check_cwd(cwd: &str) -> Result<()> {
    if cwd.starts_with('/') && !cwd.contains('\0') {
        return Ok(());
    }
    let what = format!("use working directory {cwd:?}: give an absolute path in the container");
    Err(Error::new(Kind::Invalid, what))
}

fn check_command(work: &Workload) -> Result<()> {
    check_cwd(&work.cwd)?;
    let nul = |words: &[String]| words.iter().any(|w| w.contains('\0'));
    if nul(&work.args) || nul(&work.env) || work.args.first().is_none_or(String::is_empty) {
        return Err(Error::new(
            Kind::Invalid,
            "use the command given: its first word is empty, or a word holds a NUL",
        ));
    }
    Ok(())
}

/// The period of processor limits, microseconds: what runtimes and daemons use.
const PERIOD: u32 = 100_000;

fn limit(resources: &mut Value, memory: Option<u64>, cpus: Option<f64>, pids: Option<u32>) {
    if let Some(bytes) = memory {
        resources["memory"]["limit"] = json!(bytes);
    }
    if let Some(cpus) = cpus {
        // From 0.01 to 65535 processors.
        let quota = (cpus * f64::from(PERIOD)).round() as i64;
        resources["cpu"]["quota"] = json!(quota);
        resources["cpu"]["period"] = json!(PERIOD);
    }
    if let Some(most) = pids.filter(|n| *n > 0) {
        resources["pids"]["limit"] = json!(most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rootfs_is_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        assert!(check_rootfs(dir.path()).is_ok_and(|p| p.is_absolute()));
        assert_eq!(
            check_rootfs(&dir.path().join("absent")).map_err(|e| e.kind()),
            Err(Kind::NotFound)
        );
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        assert_eq!(
            check_rootfs(&file).map_err(|e| e.kind()),
            Err(Kind::Invalid)
        );
    }

    #[test]
    fn limits_are_the_runtimes() {
        let mut made = Value::Null;
        limit(&mut made, Some(64 << 20), Some(1.5), Some(0));
        assert_eq!(
            made,
            json!({"memory": {"limit": 67_108_864}, "cpu": {"quota": 150_000, "period": 100_000}})
        );
        limit(&mut made, None, None, Some(7));
        assert_eq!(made["pids"], json!({"limit": 7}));
    }
}
