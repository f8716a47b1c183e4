//! Groups of this machine, where it lets us.

use super::*;
use std::ops::Deref;
use std::process::{Child, Command, Stdio};

/// A group of this machine. However its test ends, it goes at the end, with whoever is in it and in the groups below it.
struct Real(Group);

/// None (said) where this machine gives us no group.
fn real(name: &str) -> Option<Real> {
    let made = Layout::detect().and_then(|layout| {
        let path = format!("/podvisor-test-{}-{name}", std::process::id());
        let group = Group::new(&layout, &path)?;
        group.create()?;
        Ok(Real(group))
    });
    made.inspect_err(|e| eprintln!("skipped: this machine gives us no cgroup: {e}"))
        .ok()
}

impl Deref for Real {
    type Target = Group;

    fn deref(&self) -> &Group {
        &self.0
    }
}

impl Drop for Real {
    fn drop(&mut self) {
        let group = &self.0;
        // The test's own runtime does not wait for anybody who is being dropped.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                    .unwrap();
                runtime.block_on(async {
                    let _ = group.kill_all(LIMIT).await;
                    let _ = group.remove(LIMIT).await;
                });
            });
        });
    }
}

/// A shell in `group` that forks sleepers, one of them into another session.
fn forker(group: &Group) -> Child {
    let script = "read go; sleep 300 & setsid sleep 300 & while :; do sleep 0.01; done";
    let mut child = Command::new("sh")
        .args(["-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    group.add_process(child.id().cast_signed()).unwrap();
    use std::io::Write;
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    let started = std::time::Instant::now();
    while group.pids().len() < 3 && started.elapsed() < LIMIT {
        std::thread::sleep(Duration::from_millis(5));
    }
    child
}

#[tokio::test]
async fn a_real_group_is_killed_with_all_it_forks_and_removed() {
    let Some(group) = real("kill") else { return };
    let sub = Group::new(&Layout::detect().unwrap(), &format!("{}/sub", group.path())).unwrap();
    let mut child = forker(&group);
    assert!(group.pids().len() >= 3);
    assert!(group.metrics().is_ok());
    let busy = group.remove(Duration::from_millis(20)).await.unwrap_err();
    assert_eq!(busy.kind(), Kind::Busy, "{busy}");
    // Removing went as far as it could: put back what a later run of a runtime would have made.
    group.create().unwrap();
    sub.create().unwrap();
    group.kill_all(LIMIT).await.unwrap();
    assert!(group.pids().is_empty());
    let _ = child.wait();
    group.remove(LIMIT).await.unwrap();
    assert!(!group.exists() && !sub.exists());
}

#[tokio::test]
async fn a_real_v2_group_is_killed_by_the_kernel_in_one_step() {
    let Some(group) = real("once") else { return };
    let able = group
        .dir_of("")
        .is_some_and(|dir| dir.join("cgroup.kill").exists());
    let mut child = forker(&group);
    assert_eq!(kill::at_once(&group), group.v2 && able);
    group.kill_all(LIMIT).await.unwrap();
    let _ = child.wait();
    group.remove(LIMIT).await.unwrap();
}

#[tokio::test]
async fn statistics_of_a_real_group_count_what_runs_in_it() {
    let Some(group) = real("stat") else { return };
    let mut child = forker(&group);
    let packed = group.metrics().unwrap();
    let (pids, cpu, memory) = if group.v2 {
        let m = any::unpack::<cgroup2::metrics::Metrics>(&packed, any::CGROUP2_METRICS);
        let m = m.unwrap().unwrap();
        (m.pids.current, m.cpu.usage_usec, m.memory.usage)
    } else {
        let m = any::unpack::<cgroup1::metrics::Metrics>(&packed, any::CGROUP1_METRICS);
        let m = m.unwrap().unwrap();
        (m.pids.current, m.cpu.usage.total, m.memory.usage.usage)
    };
    assert!(pids >= 3 && cpu > 0 && memory > 0, "{pids} {cpu} {memory}");
    group.kill_all(LIMIT).await.unwrap();
    let _ = child.wait();
    group.remove(LIMIT).await.unwrap();
}

#[tokio::test]
async fn a_frozen_real_group_is_killed_too() {
    let Some(group) = real("frozen") else { return };
    let mut child = forker(&group);
    let freezer = group.dir_of(if group.v2 { "" } else { "freezer" }).unwrap();
    let (file, on) = if group.v2 {
        ("cgroup.freeze", "1")
    } else {
        ("freezer.state", "FROZEN")
    };
    write(&freezer, file, on).unwrap();
    group.kill_all(LIMIT).await.unwrap();
    let _ = child.wait();
    group.remove(LIMIT).await.unwrap();
}

#[tokio::test]
async fn a_real_process_is_found_where_it_was_put() {
    let Some(group) = real("of") else { return };
    let mut child = forker(&group);
    let found = Group::of_process(&Layout::detect().unwrap(), child.id().cast_signed()).unwrap();
    assert_eq!((found.path(), found.dirs()), (group.path(), group.dirs()));
    found.kill_all(LIMIT).await.unwrap();
    let _ = child.wait();
    found.remove(LIMIT).await.unwrap();
    assert!(!group.exists());
    let gone = Group::of_process(&Layout::detect().unwrap(), child.id().cast_signed());
    assert!(gone.unwrap_err().is_gone());
}

/// Needs more memory than the limit it is given; in `group`, or in one below it.
fn hog(group: &Group, limited: &Group) -> Child {
    let dir = limited
        .dir_of(if group.v2 { "" } else { "memory" })
        .unwrap();
    for file in ["memory.limit_in_bytes", "memory.max", "memory.swap.max"] {
        let bytes = if file == "memory.swap.max" {
            "0"
        } else {
            "33554432"
        };
        if dir.join(file).exists() {
            write(&dir, file, bytes).unwrap();
        }
    }
    let script = "read go; exec dd if=/dev/zero of=/dev/null bs=100M count=1 2>/dev/null";
    let mut child = Command::new("sh")
        .args(["-c", script])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    group.add_process(child.id().cast_signed()).unwrap();
    use std::io::Write;
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    child
}

#[tokio::test]
async fn a_kill_for_want_of_memory_wakes_who_watches_a_real_group() {
    let Some(group) = real("oom") else { return };
    // The kernel's hint to where the limit was hit: the group's own, then its parent's.
    let leaf = Group::new(
        &Layout::detect().unwrap(),
        &format!("{}/leaf", group.path()),
    )
    .unwrap();
    leaf.create().unwrap();
    for (limited, own_limit) in [(&leaf, true), (&group, false)] {
        let mut count = OomCount::of(&leaf);
        let watch = OomWatch::of(&leaf).unwrap();
        // The kernel holds word of what happened before back for a moment, so that there is not too much of it.
        let mut words = 0;
        while tokio::time::timeout(Duration::from_millis(50), watch.fired())
            .await
            .is_ok()
        {
            words += 1;
            assert!(words < 20, "nothing happens any more");
        }
        let mut child = hog(&leaf, limited);
        tokio::time::timeout(LIMIT * 6, watch.fired())
            .await
            .expect("word of the kill");
        let mut news = count.news(&leaf);
        while news.kills == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
            news = count.news(&leaf);
        }
        assert_eq!((news.kills, news.own_limit), (1, own_limit));
        assert!(!child.wait().unwrap().success());
        assert_eq!(count.news(&leaf), OomNews::default(), "told once");
        // The next limit is hit first.
        let dir = leaf.dir_of(if leaf.v2 { "" } else { "memory" }).unwrap();
        for (file, none) in [("memory.limit_in_bytes", "-1"), ("memory.max", "max")] {
            if dir.join(file).exists() {
                write(&dir, file, none).unwrap();
            }
        }
    }
    group.kill_all(LIMIT).await.unwrap();
    group.remove(LIMIT).await.unwrap();
    assert_eq!(OomWatch::of(&leaf).unwrap_err().kind(), Kind::NotFound);
    assert_eq!(OomCount::default().news(&leaf), OomNews::default());
}

#[test]
fn a_test_that_fails_leaves_no_group() {
    let path = std::sync::OnceLock::new();
    let failed = std::panic::catch_unwind(|| {
        let Some(group) = real("failed") else { return };
        let sub = Group::new(&Layout::detect().unwrap(), &format!("{}/sub", group.path())).unwrap();
        sub.create().unwrap();
        let children = [forker(&group), forker(&sub)];
        path.set((group.dirs(), children)).unwrap();
        panic!("as a failed assertion does");
    });
    if let Some((dirs, children)) = path.into_inner() {
        assert!(failed.is_err());
        assert!(!dirs.is_empty() && dirs.iter().all(|dir| !dir.exists()));
        for mut child in children {
            assert!(!child.wait().unwrap().success());
        }
    }
}
