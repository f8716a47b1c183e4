//! Network namespaces made and pinned for real. Needs root.
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test may panic, also in its helpers"
)]

use std::fs::{self, File};
use std::net::UdpSocket;
use std::os::fd::AsFd;

use nix::mount::{MntFlags, umount2};
use nix::sched::CloneFlags;
use podvisor::error::{Context, Kind};
use podvisor::sys::netns::Fresh;
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
