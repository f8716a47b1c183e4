//! Network namespaces made and pinned for real. Needs root.
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test may panic, also in its helpers"
)]

use std::fs::{self, File};
use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::CloneFlags;
use nix::sys::statfs::statfs;
use podvisor::error::{Context, Kind};
use podvisor::sys::mount::replace_bind;
use podvisor::sys::netns::{Fresh, is_copy_of_pin};
use podvisor::sys::thread_ns::{Enter, run};

#[test]
fn a_pinned_netns_is_new_has_lo_up_and_leaves_our_threads_alone() {
    let own = || fs::read_link("/proc/self/ns/net").expect("own netns");
    let before = own();
    let dir = tempfile::tempdir().expect("make a directory");
    let path = dir.path().join("netns");
    Fresh::begin().unwrap().pin(&path).expect("make a netns");

    let file = File::open(&path).expect("open it");
    let inside = run(
        &[Enter::Join(file.as_fd(), CloneFlags::CLONE_NEWNET)],
        || {
            let socket = UdpSocket::bind("127.0.0.1:0").context(|| "bind")?;
            let to = socket.local_addr().context(|| "address")?;
            socket.send_to(b"x", to).context(|| "send over lo")?;
            fs::read_link("/proc/thread-self/ns/net").context(|| "netns of the thread")
        },
    );
    assert_ne!(inside.expect("use it"), before);
    assert_eq!(own(), before);

    assert_eq!(
        Fresh::begin().unwrap().pin(&path).map_err(|e| e.kind()),
        Err(Kind::Exists)
    );
    umount2(&path, MntFlags::MNT_DETACH).expect("unmount");
    fs::remove_file(&path).expect("remove");
}

#[test]
fn a_netns_that_cannot_be_pinned_leaves_no_file() {
    let dir = tempfile::tempdir().expect("make a directory");
    assert!(
        Fresh::begin()
            .unwrap()
            .pin(&dir.path().join("no/such"))
            .is_err()
    );
    assert_eq!(fs::read_dir(dir.path()).expect("list").count(), 0);
}

#[test]
fn a_copy_of_a_pin_shows_that_it_is_one() {
    let dir = tempfile::tempdir().expect("make a directory");
    let [pin, other] = ["pin", "other"].map(|name| dir.path().join(name));
    Fresh::begin().unwrap().pin(&pin).expect("make a netns");
    fs::write(&other, "").expect("make a file");
    let theirs = Some("/proc/self/ns/net");
    mount(theirs, &other, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("bind a netns");
    let is_copy = |path: &Path| is_copy_of_pin(&statfs(path).expect("look at a mount"));
    assert!(is_copy(&pin) && !is_copy(&other));
    replace_bind(&pin, &other).expect("put the one in the place of the other");
    assert!(is_copy(&other));
    for path in [pin, other] {
        umount2(&path, MntFlags::MNT_DETACH).expect("unmount");
    }
}
