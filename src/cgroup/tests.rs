//! Groups on plain directories that look like cgroups, and (`real`) on this machine's own where it lets us.

mod real;

use super::*;
use crate::proto::{any, cgroup1, cgroup2};

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
