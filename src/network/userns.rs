//! A pod's netns inside the pod's user namespace.
//!
//! The kernel gives a network namespace to the user namespace that its maker is in, for ever; a pod that is root only in
//! its own may mount sysfs, or change net.* settings, only in a netns of its own. So both are made by one clone, of a
//! process that does nothing but wait and is let go once they are pinned; or the netns alone, by a process that has joined
//! the user namespace which the caller gave. The user namespace is pinned beside the netns, at `<path>.user`, so that the
//! infra process, made later, can join it.

use std::fs::{self, File};
use std::io::{self, PipeReader, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::sched::CloneFlags;

use super::netns;
use crate::error::{Context, Error, Kind, Result};
use crate::process::Reaper;
use crate::sys;
use crate::sys::clone::{Report, Step};
use crate::sys::pin::pin;

/// One range of a user namespace's map: `size` ids from `inside` are those from `outside` on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdRange {
    /// First id inside.
    pub inside: u32,
    /// First id outside.
    pub outside: u32,
    /// How many.
    pub size: u32,
}

/// The user namespace that the netns is to belong to.
#[derive(Debug)]
pub enum Owner<'a> {
    /// A new one, with these maps of users and groups.
    New(&'a [IdRange], &'a [IdRange]),
    /// One that is there, by its path; it stays whose it is.
    Given(&'a Path),
}

/// Which user namespace a netns is to belong to, asked of one that is there.
#[derive(Clone, Copy, Debug)]
pub enum Wanted<'a> {
    /// Ours.
    Hosts,
    /// One of the pod's own, whose maps are known to be the same.
    Own,
    /// The one at this path.
    Given(&'a Path),
}

/// The netns at `path` belongs to what is wanted, and that is pinned with it for the infra process to join.
pub fn fits(path: &Path, wanted: Wanted<'_>) -> bool {
    let number = |path: &Path| fs::metadata(path).map(|m| (m.dev(), m.ino())).ok();
    let owner = match sys::netns::owner(path) {
        Ok(owner) => owner,
        // A kernel that cannot tell (before 4.9) has no netns of others here.
        Err(e) => return e.raw_os_error() == Some(libc::ENOTTY) && matches!(wanted, Wanted::Hosts),
    };
    let is_owner = |path: &Path| number(path) == Some(owner);
    match wanted {
        Wanted::Hosts => is_owner(Path::new("/proc/self/ns/user")),
        Wanted::Own => is_owner(&user_path(path)),
        Wanted::Given(given) => is_owner(&user_path(path)) && is_owner(given),
    }
}

/// The user namespace that owns a caller's netns, open; None when that is ours, or the kernel cannot tell.
pub fn of_given(netns: &Path) -> Result<Option<File>> {
    if fits(netns, Wanted::Hosts) {
        return Ok(None);
    }
    let what = || format!("find the user namespace of {}", netns.display());
    sys::netns::open_owner(netns).map(Some).context(what)
}

/// Where the user namespace of the netns at `path` is (to be) pinned.
pub fn user_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".user");
    PathBuf::from(name)
}

/// As [`netns::make`], for a netns that belongs to `owner`, which is pinned at [`user_path`].
///
/// On an error nothing is left. [`netns::unpin`] undoes both.
pub fn make(reaper: &Reaper, path: &Path, owner: &Owner<'_>) -> Result<()> {
    let what = || format!("make netns {} in a user namespace", path.display());
    netns::prepare(path).map_err(|e| e.within(what()))?;
    let made = make_pinned(reaper, path, owner);
    if let Err(error) = made {
        if let Err(undo) = netns::unpin(path) {
            tracing::warn!(error = %undo, "netns left behind");
        }
        return Err(error.within(what()));
    }
    netns::show(path);
    Ok(())
}

fn make_pinned(reaper: &Reaper, path: &Path, owner: &Owner<'_>) -> Result<()> {
    let (wait, go) = io::pipe().context(|| "make a pipe")?;
    // It cannot outlive us: end of file on the pipe is the end of its wait.
    let pid = match owner {
        Owner::New(uids, gids) => clone_new(reaper, wait, uids, gids)?,
        Owner::Given(user) => clone_inside(reaper, wait, user)?,
    };
    pin(pid, "user", &user_path(path))?;
    pin(pid, "net", path)?;
    drop(go);
    sys::netns::lo_up_in(path)
}

/// A process in new user and network namespaces that waits.
fn clone_new(reaper: &Reaper, wait: PipeReader, uids: &[IdRange], gids: &[IdRange]) -> Result<i32> {
    let (_reports, tell) = io::pipe().context(|| "make a pipe")?;
    let keep = [wait.as_raw_fd()];
    let steps = [Step::CloseExcept(&keep), Step::Await(wait.as_fd())];
    let kinds = CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET;
    let child = reaper.register_with(|| {
        sys::clone::spawn(kinds, &steps, tell.as_fd()).context(|| format!("clone into {kinds:?}"))
    })?;
    write_map(child.pid(), "gid_map", gids)?;
    write_map(child.pid(), "uid_map", uids)?;
    Ok(child.pid())
}

/// A process in the user namespace at `user`, and in a new network namespace, that waits. Of two clones: only a process
/// of one thread may join a user namespace, and what is made before the join belongs to another.
fn clone_inside(reaper: &Reaper, wait: PipeReader, user: &Path) -> Result<i32> {
    let what = || format!("join user namespace {}", user.display());
    let user = File::open(user).context(what)?;
    let (mut reports, tell) = io::pipe().context(|| "make a pipe")?;
    let mut keep = [wait.as_raw_fd(), user.as_raw_fd(), tell.as_raw_fd()];
    keep.sort_unstable();
    let steps = [
        Step::CloseExcept(&keep),
        Step::Join(user.as_fd(), CloneFlags::CLONE_NEWUSER),
        Step::CloneAgain(CloneFlags::CLONE_NEWNET),
        Step::Await(wait.as_fd()),
    ];
    let _held = reaper.hold_unknown();
    reaper.register_with(|| {
        sys::clone::spawn(CloneFlags::empty(), &steps, tell.as_fd()).context(|| "clone")
    })?;
    drop(tell);
    let mut bytes = [0; Report::SIZE];
    reports.read_exact(&mut bytes).context(what)?;
    let report = Report::parse(&bytes);
    if report.errno != 0 {
        let step = steps.get(report.step as usize).map_or("", Step::name);
        return Err(Error::io(
            format_args!("{}: {step}", what()),
            io::Error::from_raw_os_error(report.errno),
        )
        .as_kind(Kind::Invalid));
    }
    let child = reaper.adopt(report.pid).context(what)?;
    Ok(child.pid())
}

fn write_map(pid: i32, name: &str, map: &[IdRange]) -> Result<()> {
    let lines: Vec<String> = map
        .iter()
        .map(|r| format!("{} {} {}", r.inside, r.outside, r.size))
        .collect();
    let what = || format!("write {name} of a user namespace: {}", lines.join(", "));
    fs::write(format!("/proc/{pid}/{name}"), lines.join("\n"))
        .map_err(|e| Error::io(what(), e).as_kind(Kind::Invalid))
}
