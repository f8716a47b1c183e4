//! cgroup v1 files into `io.containerd.cgroups.v1.Metrics`.

use super::{Files, Group, device};
use crate::proto::cgroup1::metrics::{
    BlkIOEntry, BlkIOStat, CPUStat, CPUUsage, HugetlbStat, MemoryEntry, MemoryOomControl,
    MemoryStat, Metrics, PidsStat, RdmaEntry, RdmaStat, Throttle,
};

/// Nanoseconds of one tick in `cpuacct.stat`: USER_HZ is 100 on every architecture Linux runs containers on.
const TICK: u64 = 10_000_000;

pub(super) fn metrics(group: &Group) -> Metrics {
    let files = |controller: &str| Files(group.dir_of(controller));
    let memory_files = files("memory");
    Metrics {
        pids: pids(&files("pids")).into(),
        cpu: cpu(&files("cpuacct"), &files("cpu")).into(),
        memory: memory(&memory_files).into(),
        memory_oom_control: oom(&memory_files).into(),
        blkio: blkio(&files("blkio")).into(),
        hugetlb: huge(&files("hugetlb")),
        rdma: rdma(&files("rdma")).into(),
        ..Metrics::default()
    }
}

fn pids(files: &Files) -> Option<PidsStat> {
    let current = files.number("pids.current")?;
    let limit = files
        .number("pids.max")
        .filter(|max| *max != u64::MAX)
        .unwrap_or(0);
    Some(PidsStat {
        current,
        limit,
        ..PidsStat::default()
    })
}

fn cpu(acct: &Files, cpu: &Files) -> Option<CPUStat> {
    let total = acct.number("cpuacct.usage");
    let stat = cpu.keyed("cpu.stat");
    if total.is_none() && stat.is_empty() {
        return None;
    }
    let ticks = acct.keyed("cpuacct.stat");
    let per_cpu = acct.text("cpuacct.usage_percpu").unwrap_or_default();
    let usage = CPUUsage {
        total: total.unwrap_or(0),
        kernel: ticks.get("system").saturating_mul(TICK),
        user: ticks.get("user").saturating_mul(TICK),
        per_cpu: per_cpu
            .split_whitespace()
            .filter_map(|n| n.parse().ok())
            .collect(),
        ..CPUUsage::default()
    };
    let throttling = Throttle {
        periods: stat.get("nr_periods"),
        throttled_periods: stat.get("nr_throttled"),
        throttled_time: stat.get("throttled_time"),
        ..Throttle::default()
    };
    Some(CPUStat {
        usage: Some(usage).into(),
        throttling: Some(throttling).into(),
        ..CPUStat::default()
    })
}

fn memory(files: &Files) -> Option<MemoryStat> {
    let stat = files.keyed("memory.stat");
    if stat.is_empty() {
        return None;
    }
    Some(MemoryStat {
        cache: stat.get("cache"),
        rss: stat.get("rss"),
        rss_huge: stat.get("rss_huge"),
        mapped_file: stat.get("mapped_file"),
        dirty: stat.get("dirty"),
        writeback: stat.get("writeback"),
        pg_pg_in: stat.get("pgpgin"),
        pg_pg_out: stat.get("pgpgout"),
        pg_fault: stat.get("pgfault"),
        pg_maj_fault: stat.get("pgmajfault"),
        inactive_anon: stat.get("inactive_anon"),
        active_anon: stat.get("active_anon"),
        inactive_file: stat.get("inactive_file"),
        active_file: stat.get("active_file"),
        unevictable: stat.get("unevictable"),
        hierarchical_memory_limit: stat.get("hierarchical_memory_limit"),
        hierarchical_swap_limit: stat.get("hierarchical_memsw_limit"),
        total_cache: stat.get("total_cache"),
        total_rss: stat.get("total_rss"),
        total_rss_huge: stat.get("total_rss_huge"),
        total_mapped_file: stat.get("total_mapped_file"),
        total_dirty: stat.get("total_dirty"),
        total_writeback: stat.get("total_writeback"),
        total_pg_pg_in: stat.get("total_pgpgin"),
        total_pg_pg_out: stat.get("total_pgpgout"),
        total_pg_fault: stat.get("total_pgfault"),
        total_pg_maj_fault: stat.get("total_pgmajfault"),
        total_inactive_anon: stat.get("total_inactive_anon"),
        total_active_anon: stat.get("total_active_anon"),
        total_inactive_file: stat.get("total_inactive_file"),
        total_active_file: stat.get("total_active_file"),
        total_unevictable: stat.get("total_unevictable"),
        usage: entry(files, "memory").into(),
        swap: entry(files, "memory.memsw").into(),
        kernel: entry(files, "memory.kmem").into(),
        kernel_tcp: entry(files, "memory.kmem.tcp").into(),
        ..MemoryStat::default()
    })
}

fn entry(files: &Files, prefix: &str) -> Option<MemoryEntry> {
    let of = |name: &str| files.number(&format!("{prefix}.{name}"));
    Some(MemoryEntry {
        usage: of("usage_in_bytes")?,
        limit: of("limit_in_bytes").unwrap_or(0),
        max: of("max_usage_in_bytes").unwrap_or(0),
        failcnt: of("failcnt").unwrap_or(0),
        ..MemoryEntry::default()
    })
}

fn oom(files: &Files) -> Option<MemoryOomControl> {
    let control = files.keyed("memory.oom_control");
    if control.is_empty() {
        return None;
    }
    Some(MemoryOomControl {
        oom_kill_disable: control.get("oom_kill_disable"),
        under_oom: control.get("under_oom"),
        oom_kill: control.get("oom_kill"),
        ..MemoryOomControl::default()
    })
}

fn blkio(files: &Files) -> Option<BlkIOStat> {
    files.0.as_ref()?;
    // Which of these a kernel fills depends on its scheduler: BFQ's own, CFQ's (before 5.0), the throttle layer's.
    let of = |names: &[&str]| {
        names
            .iter()
            .map(|name| entries(files, name))
            .find(|list| !list.is_empty())
            .unwrap_or_default()
    };
    Some(BlkIOStat {
        io_service_bytes_recursive: of(&[
            "blkio.bfq.io_service_bytes_recursive",
            "blkio.io_service_bytes_recursive",
            "blkio.throttle.io_service_bytes_recursive",
            "blkio.throttle.io_service_bytes",
        ]),
        io_serviced_recursive: of(&[
            "blkio.bfq.io_serviced_recursive",
            "blkio.io_serviced_recursive",
            "blkio.throttle.io_serviced_recursive",
            "blkio.throttle.io_serviced",
        ]),
        io_queued_recursive: of(&["blkio.bfq.io_queued_recursive", "blkio.io_queued_recursive"]),
        io_service_time_recursive: of(&[
            "blkio.bfq.io_service_time_recursive",
            "blkio.io_service_time_recursive",
        ]),
        io_wait_time_recursive: of(&[
            "blkio.bfq.io_wait_time_recursive",
            "blkio.io_wait_time_recursive",
        ]),
        io_merged_recursive: of(&["blkio.bfq.io_merged_recursive", "blkio.io_merged_recursive"]),
        io_time_recursive: of(&["blkio.bfq.time_recursive", "blkio.time_recursive"]),
        sectors_recursive: of(&["blkio.bfq.sectors_recursive", "blkio.sectors_recursive"]),
        ..BlkIOStat::default()
    })
}

/// "8:0 Read 4096" or, in files of one value per device, "8:0 4096"; the "Total 4096" at the end has no device.
fn entries(files: &Files, file: &str) -> Vec<BlkIOEntry> {
    let text = files.text(file).unwrap_or_default();
    text.lines()
        .filter_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let (name, op, value) = match words[..] {
                [name, op, value] => (name, op, value),
                [name, value] => (name, "", value),
                _ => return None,
            };
            let (major, minor) = device(name)?;
            Some(BlkIOEntry {
                op: op.to_owned(),
                major,
                minor,
                value: value.parse().ok()?,
                ..BlkIOEntry::default()
            })
        })
        .collect()
}

fn huge(files: &Files) -> Vec<HugetlbStat> {
    let sizes = files.huge_pages("usage_in_bytes");
    let each = sizes.into_iter().map(|pagesize| {
        let of = |name: &str| {
            files
                .number(&format!("hugetlb.{pagesize}.{name}"))
                .unwrap_or(0)
        };
        let (usage, max, failcnt) = (
            of("usage_in_bytes"),
            of("max_usage_in_bytes"),
            of("failcnt"),
        );
        HugetlbStat {
            usage,
            max,
            failcnt,
            pagesize,
            ..HugetlbStat::default()
        }
    });
    each.collect()
}

fn rdma(files: &Files) -> Option<RdmaStat> {
    let entries = |file| {
        let each = files.rdma(file).into_iter();
        each.map(|(device, hca_handles, hca_objects)| RdmaEntry {
            device,
            hca_handles,
            hca_objects,
            ..RdmaEntry::default()
        })
        .collect::<Vec<_>>()
    };
    let (current, limit) = (entries("rdma.current"), entries("rdma.max"));
    (!current.is_empty() || !limit.is_empty()).then(|| RdmaStat {
        current,
        limit,
        ..RdmaStat::default()
    })
}
