//! cgroup v2 files into `io.containerd.cgroups.v2.Metrics`.

use protobuf::MessageField;

use super::{Files, Group, device, pairs};
use crate::proto::cgroup2::metrics::{
    CPUStat, HugeTlbStat, IOEntry, IOStat, MemoryEvents, MemoryStat, Metrics, PSIData, PSIStats,
    PidsStat, RdmaEntry, RdmaStat,
};

pub(super) fn metrics(group: &Group) -> Metrics {
    let files = Files(group.dir_of(""));
    Metrics {
        pids: pids(&files).into(),
        cpu: cpu(&files).into(),
        memory: memory(&files).into(),
        rdma: rdma(&files).into(),
        io: io(&files).into(),
        hugetlb: huge(&files),
        memory_events: events(&files).into(),
        ..Metrics::default()
    }
}

fn pids(files: &Files) -> Option<PidsStat> {
    let current = files.number("pids.current")?;
    // containerd: no limit is 0.
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

fn cpu(files: &Files) -> Option<CPUStat> {
    let stat = files.keyed("cpu.stat");
    if stat.is_empty() {
        return None;
    }
    Some(CPUStat {
        usage_usec: stat.get("usage_usec"),
        user_usec: stat.get("user_usec"),
        system_usec: stat.get("system_usec"),
        nr_periods: stat.get("nr_periods"),
        nr_throttled: stat.get("nr_throttled"),
        throttled_usec: stat.get("throttled_usec"),
        nr_bursts: stat.get("nr_bursts"),
        burst_usec: stat.get("burst_usec"),
        psi: pressure(files, "cpu.pressure"),
        ..CPUStat::default()
    })
}

fn memory(files: &Files) -> Option<MemoryStat> {
    let stat = files.keyed("memory.stat");
    let usage = files.number("memory.current");
    if stat.is_empty() && usage.is_none() {
        return None;
    }
    let number = |file| files.number(file).unwrap_or(0);
    // One refault counter became two in 5.9.
    let summed = |key: &str| {
        stat.find(key)
            .unwrap_or_else(|| stat.get(&format!("{key}_anon")) + stat.get(&format!("{key}_file")))
    };
    Some(MemoryStat {
        anon: stat.get("anon"),
        file: stat.get("file"),
        kernel_stack: stat.get("kernel_stack"),
        slab: stat.get("slab"),
        sock: stat.get("sock"),
        shmem: stat.get("shmem"),
        file_mapped: stat.get("file_mapped"),
        file_dirty: stat.get("file_dirty"),
        file_writeback: stat.get("file_writeback"),
        anon_thp: stat.get("anon_thp"),
        inactive_anon: stat.get("inactive_anon"),
        active_anon: stat.get("active_anon"),
        inactive_file: stat.get("inactive_file"),
        active_file: stat.get("active_file"),
        unevictable: stat.get("unevictable"),
        slab_reclaimable: stat.get("slab_reclaimable"),
        slab_unreclaimable: stat.get("slab_unreclaimable"),
        pgfault: stat.get("pgfault"),
        pgmajfault: stat.get("pgmajfault"),
        workingset_refault: summed("workingset_refault"),
        workingset_activate: summed("workingset_activate"),
        workingset_nodereclaim: stat.get("workingset_nodereclaim"),
        pgrefill: stat.get("pgrefill"),
        pgscan: stat.get("pgscan"),
        pgsteal: stat.get("pgsteal"),
        pgactivate: stat.get("pgactivate"),
        pgdeactivate: stat.get("pgdeactivate"),
        pglazyfree: stat.get("pglazyfree"),
        pglazyfreed: stat.get("pglazyfreed"),
        thp_fault_alloc: stat.get("thp_fault_alloc"),
        thp_collapse_alloc: stat.get("thp_collapse_alloc"),
        usage: usage.unwrap_or(0),
        usage_limit: number("memory.max"),
        swap_usage: number("memory.swap.current"),
        swap_limit: number("memory.swap.max"),
        max_usage: number("memory.peak"),
        swap_max_usage: number("memory.swap.peak"),
        psi: pressure(files, "memory.pressure"),
        ..MemoryStat::default()
    })
}

fn events(files: &Files) -> Option<MemoryEvents> {
    let events = files.keyed("memory.events");
    if events.is_empty() {
        return None;
    }
    Some(MemoryEvents {
        low: events.get("low"),
        high: events.get("high"),
        max: events.get("max"),
        oom: events.get("oom"),
        oom_kill: events.get("oom_kill"),
        ..MemoryEvents::default()
    })
}

fn io(files: &Files) -> Option<IOStat> {
    let text = files.text("io.stat")?;
    let usage = text
        .lines()
        .filter_map(|line| {
            let (name, rest) = line.split_once(' ')?;
            let (major, minor) = device(name)?;
            let of = |key: &str| {
                pairs(rest)
                    .find(|(k, _)| *k == key)
                    .and_then(|(_, v)| v.parse().ok())
                    .unwrap_or(0)
            };
            Some(IOEntry {
                major,
                minor,
                rbytes: of("rbytes"),
                wbytes: of("wbytes"),
                rios: of("rios"),
                wios: of("wios"),
                ..IOEntry::default()
            })
        })
        .collect();
    Some(IOStat {
        usage,
        psi: pressure(files, "io.pressure"),
        ..IOStat::default()
    })
}

fn huge(files: &Files) -> Vec<HugeTlbStat> {
    let sizes = files.huge_pages("current");
    let each = sizes.into_iter().map(|pagesize| HugeTlbStat {
        current: files
            .number(&format!("hugetlb.{pagesize}.current"))
            .unwrap_or(0),
        max: files
            .number(&format!("hugetlb.{pagesize}.max"))
            .unwrap_or(0),
        pagesize,
        ..HugeTlbStat::default()
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

/// "some avg10=0.00 avg60=0.00 avg300=0.00 total=0"; reading fails (EOPNOTSUPP) where pressure is switched off.
fn pressure(files: &Files, file: &str) -> MessageField<PSIStats> {
    let Some(text) = files.text(file) else {
        return MessageField::none();
    };
    let of = |kind: &str| {
        let line = text
            .lines()
            .find_map(|l| l.strip_prefix(kind))
            .unwrap_or_default();
        let word = |key: &str| pairs(line).find(|(k, _)| *k == key).map_or("", |(_, v)| v);
        MessageField::some(PSIData {
            avg10: word("avg10").parse().unwrap_or(0.0),
            avg60: word("avg60").parse().unwrap_or(0.0),
            avg300: word("avg300").parse().unwrap_or(0.0),
            total: word("total").parse().unwrap_or(0),
            ..PSIData::default()
        })
    };
    MessageField::some(PSIStats {
        some: of("some "),
        full: of("full "),
        ..PSIStats::default()
    })
}
