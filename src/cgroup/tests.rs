//! Groups on plain directories that look like cgroups, and on this machine's own where it lets us.

use super::*;
use crate::proto::{any, cgroup1, cgroup2};
use std::process::{Child, Command, Stdio};

const LIMIT: Duration = Duration::from_secs(10);

fn put(dir: &Path, files: &[(&str, &str)]) {
    fs::create_dir_all(dir).unwrap();
    for (name, text) in files {
        fs::write(dir.join(name), text).unwrap();
    }
}

fn v1_layout(base: &Path) -> Layout {
    let trees = [
        ["cpu", "cpuacct"].as_slice(),
        &["cpuset"],
        &["memory"],
        &["pids"],
        &["freezer"],
        &["blkio"],
        &["name=systemd"],
    ];
    let trees = trees.map(|names| {
        let mount = base.join(names.join(","));
        fs::create_dir_all(&mount).unwrap();
        (names.iter().map(|n| (*n).to_owned()).collect(), mount)
    });
    Layout::V1 {
        trees: trees.into(),
        unified: Some(base.join("unified")),
    }
}

#[test]
fn v2_enables_the_parents_controllers_and_not_its_own() {
    let base = tempfile::tempdir().unwrap();
    let root = base.path().to_owned();
    let control = [
        ("cgroup.controllers", "cpu memory pids\n"),
        ("cgroup.subtree_control", "cpu\n"),
    ];
    put(&root, &control);
    put(
        &root.join("podvisor"),
        &[
            ("cgroup.controllers", "pids\n"),
            ("cgroup.subtree_control", ""),
        ],
    );
    let group = Group::new(&Layout::V2 { root: root.clone() }, "/podvisor/x").unwrap();
    assert!(!group.exists());
    group.create().unwrap();
    group.create().unwrap();
    assert!(group.exists());
    assert_eq!(group.dirs(), [root.join("podvisor/x")]);
    // A plain file keeps what was written over its start: the last of "+memory", "+pids".
    let written = fs::read_to_string(root.join("cgroup.subtree_control")).unwrap();
    assert!(written.starts_with("+pids"), "{written:?}");
    assert_eq!(
        fs::read_to_string(root.join("podvisor/cgroup.subtree_control")).unwrap(),
        "+pids"
    );
    assert!(!root.join("podvisor/x/cgroup.subtree_control").exists());
}

#[tokio::test]
async fn v1_makes_and_removes_a_directory_in_every_tree() {
    let base = tempfile::tempdir().unwrap();
    let layout = v1_layout(base.path());
    let group = Group::from_spec(&layout, "a-b.slice:p:n").unwrap();
    assert_eq!(group.path(), "/a.slice/a-b.slice/p-n.scope");
    group.create().unwrap();
    assert_eq!(group.dirs().len(), 7);
    assert!(group.dirs().iter().all(|d| d.is_dir()));
    assert!(!base.path().join("unified").exists());
    fs::create_dir_all(base.path().join("unified/a.slice/a-b.slice/p-n.scope/sub")).unwrap();
    fs::create_dir_all(group.dirs()[0].join("child/grandchild")).unwrap();
    group.remove(LIMIT).await.unwrap();
    assert!(!group.exists() && base.path().join("memory/a.slice/a-b.slice").is_dir());
    group.remove(LIMIT).await.unwrap();
    group.kill_all(LIMIT).await.unwrap();
}

#[test]
fn a_cpuset_inherits_on_the_way_down() {
    let base = tempfile::tempdir().unwrap();
    put(
        base.path(),
        &[("cpuset.cpus", "0-1\n"), ("cpuset.mems", "0\n")],
    );
    put(
        &base.path().join("a"),
        &[("cpuset.cpus", "1\n"), ("cpuset.mems", "\n")],
    );
    put(
        &base.path().join("a/b"),
        &[("cpuset.cpus", "\n"), ("cpuset.mems", "\n")],
    );
    inherit_cpuset(base.path(), &base.path().join("a")).unwrap();
    inherit_cpuset(&base.path().join("a"), &base.path().join("a/b")).unwrap();
    let read = |file: &str| {
        fs::read_to_string(base.path().join(file))
            .unwrap()
            .trim()
            .to_owned()
    };
    assert_eq!(
        (read("a/cpuset.cpus"), read("a/cpuset.mems")),
        ("1".into(), "0".into())
    );
    assert_eq!(
        (read("a/b/cpuset.cpus"), read("a/b/cpuset.mems")),
        ("1".into(), "0".into())
    );
}

#[tokio::test]
async fn a_process_moved_in_one_tree_does_not_drag_that_tree_along() {
    let base = tempfile::tempdir().unwrap();
    let layout = v1_layout(base.path());
    let text = "7:pids:/pod/c\n6:freezer:/pod/c\n5:memory:/else:where\n4:cpuset:/\n3:cpu,cpuacct:/pod/c\n1:name=systemd:/pod/c\n0::/\n";
    let group = Group::from_proc(&layout, text).unwrap();
    assert_eq!(group.path(), "/pod/c");
    assert!(
        group
            .dirs()
            .contains(&base.path().join("memory/else:where"))
    );
    put(
        &base.path().join("memory/else:where"),
        &[("cgroup.procs", "1\n")],
    );
    put(
        &base.path().join("pids/pod/c/sub"),
        &[("cgroup.procs", "7\n5\n0\n")],
    );
    assert_eq!(group.pids(), [5, 7]);
    assert!(
        !group
            .owned()
            .iter()
            .any(|d| d.starts_with(base.path().join("memory")))
    );

    let root = Group::from_proc(&layout, "1:pids:/\n2:freezer:/\n0::/x\n").unwrap();
    assert!(root.is_root());
    assert_eq!(
        root.kill_all(LIMIT).await.unwrap_err().kind(),
        Kind::Invalid
    );
    assert_eq!(root.remove(LIMIT).await.unwrap_err().kind(), Kind::Invalid);
    assert!(Group::from_proc(&layout, "0::/x\n").is_err());
}

#[test]
fn v2_of_a_process_is_one_path() {
    let layout = Layout::V2 { root: "/cg".into() };
    let group = Group::from_proc(&layout, "1:name=systemd:/other\n0::/a/b:c\n").unwrap();
    assert_eq!(
        (group.path(), group.dirs()),
        ("/a/b:c", vec![PathBuf::from("/cg/a/b:c")])
    );
}

#[tokio::test]
async fn a_group_that_holds_us_is_not_killed() {
    let base = tempfile::tempdir().unwrap();
    put(
        &base.path().join("x"),
        &[("cgroup.procs", &format!("{}\n", std::process::id()))],
    );
    let group = Group::new(
        &Layout::V2 {
            root: base.path().into(),
        },
        "x",
    )
    .unwrap();
    let text = group.kill_all(LIMIT).await.unwrap_err().to_string();
    assert!(text.contains("we are in it ourselves"), "{text}");
}

#[test]
fn v2_statistics_are_read_in_full() {
    let base = tempfile::tempdir().unwrap();
    let root = base.path().to_owned();
    put(
        &root.join("x"),
        &[
            ("pids.current", "3\n"),
            ("pids.max", "max\n"),
            (
                "cpu.stat",
                "usage_usec 10\nuser_usec 6\nsystem_usec 4\nnr_periods 2\nnr_throttled 1\nthrottled_usec 9\nnr_bursts 0\nburst_usec 0\n",
            ),
            (
                "cpu.pressure",
                "some avg10=1.50 avg60=0.00 avg300=0.00 total=77\nfull avg10=0.00 avg60=0.25 avg300=0.00 total=5\n",
            ),
            (
                "memory.stat",
                "anon 100\nfile 200\nslab 30\nworkingset_refault_anon 1\nworkingset_refault_file 2\npgfault 8\n",
            ),
            ("memory.current", "4096\n"),
            ("memory.max", "max\n"),
            ("memory.peak", "8192\n"),
            ("memory.swap.max", "1024\n"),
            (
                "memory.events",
                "low 0\nhigh 0\nmax 5\noom 2\noom_kill 1\noom_group_kill 0\n",
            ),
            (
                "io.stat",
                "8:16 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=0 dios=0\nbroken\n254:0 rbytes=9\n",
            ),
            ("hugetlb.2MB.current", "0\n"),
            ("hugetlb.2MB.max", "max\n"),
            ("hugetlb.2MB.rsvd.current", "0\n"),
            ("rdma.current", "mlx4_0 hca_handle=2 hca_object=2000\n"),
            ("rdma.max", "mlx4_0 hca_handle=max hca_object=max\n"),
        ],
    );
    let layout = Layout::V2 { root };
    let packed = Group::new(&layout, "/x").unwrap().metrics().unwrap();
    assert_eq!(packed.type_url, "io.containerd.cgroups.v2.Metrics");
    let m: cgroup2::metrics::Metrics = any::unpack(&packed, any::CGROUP2_METRICS).unwrap().unwrap();
    assert_eq!((m.pids.current, m.pids.limit), (3, 0));
    assert_eq!(
        (m.cpu.usage_usec, m.cpu.throttled_usec, m.cpu.psi.some.total),
        (10, 9, 77)
    );
    assert_eq!((m.cpu.psi.some.avg10, m.cpu.psi.full.avg60), (1.5, 0.25));
    assert_eq!(
        (m.memory.anon, m.memory.workingset_refault, m.memory.usage),
        (100, 3, 4096)
    );
    assert_eq!(
        (
            m.memory.usage_limit,
            m.memory.max_usage,
            m.memory.swap_limit
        ),
        (u64::MAX, 8192, 1024)
    );
    assert_eq!((m.memory_events.max, m.memory_events.oom_kill), (5, 1));
    let io: Vec<_> =
        m.io.usage
            .iter()
            .map(|e| (e.major, e.minor, e.rbytes, e.wios))
            .collect();
    assert_eq!(io, [(8, 16, 1, 4), (254, 0, 9, 0)]);
    assert_eq!(
        (
            m.hugetlb.len(),
            m.hugetlb[0].pagesize.as_str(),
            m.hugetlb[0].max
        ),
        (1, "2MB", u64::MAX)
    );
    assert_eq!(
        (m.rdma.current[0].hca_objects, m.rdma.limit[0].hca_handles),
        (2000, u32::MAX)
    );
    assert_eq!(
        Group::new(&layout, "/no")
            .unwrap()
            .metrics()
            .unwrap_err()
            .kind(),
        Kind::NotFound
    );
}

#[test]
fn v1_statistics_come_from_every_tree() {
    let base = tempfile::tempdir().unwrap();
    let layout = v1_layout(base.path());
    let dir = |tree: &str| base.path().join(tree).join("x");
    put(
        &dir("pids"),
        &[("pids.current", "2\n"), ("pids.max", "100\n")],
    );
    put(
        &dir("cpu,cpuacct"),
        &[
            ("cpuacct.usage", "5000\n"),
            ("cpuacct.usage_percpu", "2000 3000 \n"),
            ("cpuacct.stat", "user 3\nsystem 2\n"),
            (
                "cpu.stat",
                "nr_periods 4\nnr_throttled 3\nthrottled_time 12\n",
            ),
        ],
    );
    put(
        &dir("memory"),
        &[
            (
                "memory.stat",
                "cache 1\nrss 2\npgpgin 3\ntotal_cache 4\nhierarchical_memsw_limit 9\n",
            ),
            ("memory.usage_in_bytes", "77\n"),
            ("memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory.max_usage_in_bytes", "88\n"),
            ("memory.failcnt", "1\n"),
            (
                "memory.oom_control",
                "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
            ),
        ],
    );
    put(
        &dir("blkio"),
        &[
            (
                "blkio.throttle.io_service_bytes",
                "8:0 Read 10\n8:0 Write 20\n8:0 Total 30\nTotal 30\n",
            ),
            ("blkio.bfq.io_serviced_recursive", "8:16 Read 1\n"),
            ("blkio.throttle.io_serviced", "8:0 Read 9\n"),
        ],
    );
    let packed = Group::new(&layout, "x").unwrap().metrics().unwrap();
    assert_eq!(packed.type_url, "io.containerd.cgroups.v1.Metrics");
    let m: cgroup1::metrics::Metrics = any::unpack(&packed, any::CGROUP1_METRICS).unwrap().unwrap();
    assert_eq!((m.pids.current, m.pids.limit), (2, 100));
    assert_eq!(
        (m.cpu.usage.total, m.cpu.usage.user, m.cpu.usage.kernel),
        (5000, 30_000_000, 20_000_000)
    );
    assert_eq!(
        (m.cpu.usage.per_cpu.clone(), m.cpu.throttling.throttled_time),
        (vec![2000, 3000], 12)
    );
    assert_eq!(
        (
            m.memory.cache,
            m.memory.pg_pg_in,
            m.memory.total_cache,
            m.memory.hierarchical_swap_limit
        ),
        (1, 3, 4, 9)
    );
    assert_eq!(
        (
            m.memory.usage.usage,
            m.memory.usage.max,
            m.memory.usage.failcnt
        ),
        (77, 88, 1)
    );
    assert!(m.memory.swap.is_none());
    assert_eq!(m.memory_oom_control.oom_kill, 3);
    let bytes: Vec<_> = m
        .blkio
        .io_service_bytes_recursive
        .iter()
        .map(|e| (e.op.as_str(), e.value))
        .collect();
    assert_eq!(bytes, [("Read", 10), ("Write", 20), ("Total", 30)]);
    assert_eq!(m.blkio.io_serviced_recursive[0].minor, 16);
}

/// A group of this machine, removed at the end; None (said) where it gives none to us.
fn real(name: &str) -> Option<Group> {
    let made = Layout::detect().and_then(|layout| {
        let group = Group::new(
            &layout,
            &format!("/podvisor-test-{}-{name}", std::process::id()),
        )?;
        group.create()?;
        Ok(group)
    });
    made.inspect_err(|e| eprintln!("skipped: this machine gives us no cgroup: {e}"))
        .ok()
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
fn counters_of_other_groups_are_nobodys_news() {
    let base = tempfile::tempdir().unwrap();
    let layout = v1_layout(base.path());
    let control = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n";
    put(
        &base.path().join("memory/else"),
        &[("memory.oom_control", control)],
    );
    let moved = Group::from_proc(&layout, "2:memory:/else\n1:pids:/pod/c\n").unwrap();
    assert_eq!(
        OomCount::default().news(&moved),
        OomNews::default(),
        "moved away"
    );
    let own = Group::new(&layout, "/else").unwrap();
    put(
        &base.path().join("memory/else/below"),
        &[
            ("memory.oom_control", control),
            ("memory.max_usage_in_bytes", "33000000\n"),
            ("memory.limit_in_bytes", "33554432\n"),
        ],
    );
    let mut count = OomCount::default();
    let news = count.news(&own);
    assert_eq!((news.kills, news.own_limit, news.stuck), (4, true, false));
    assert_eq!(count.news(&own).kills, 0);
    let stuck = "oom_kill_disable 1\nunder_oom 1\noom_kill 2\n";
    put(
        &base.path().join("memory/else"),
        &[("memory.oom_control", stuck)],
    );
    assert!(count.news(&own).stuck);
}
