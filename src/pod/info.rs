//! What a pod says of itself: status, the verbose `info` document, the OCI spec of the infra process, and what its
//! containers are given. All from the record in memory; nothing waits (law 7).

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::SystemTime;

use serde_json::{Map, Value, json};

use super::Pod;
use super::plan::Plan;
use super::record::{Record, State};
use crate::clock;
use crate::container::{Containers, PodContext};
use crate::error::Result;
use crate::infra::Namespace;
use crate::network::Address;

/// What SandboxStatus answers.
#[derive(Debug, Clone)]
pub struct Status {
    /// Host pid of the infra process; kept after its end.
    pub pid: u32,
    /// True: `SANDBOX_READY`.
    pub ready: bool,
    /// When CreateSandbox was accepted.
    pub created_at: SystemTime,
    /// When the infra process ended.
    pub exited_at: Option<SystemTime>,
    /// Verbose only: key `info`, a JSON document in the shape of CRI's `SandboxInfo`.
    pub info: HashMap<String, String>,
}

impl Pod {
    /// SandboxStatus. Cheap: CRI asks before every event of every container.
    pub fn status(&self, id: &str, verbose: bool) -> Result<Status> {
        self.check_sandbox(id)?;
        let plan = self.lock().plan.clone();
        let creations = match verbose {
            true => creations(&self.shared.containers),
            false => Value::Null,
        };
        Ok(self.shared.journal.with(|r| Status {
            pid: r.infra.and_then(|i| u32::try_from(i.pid).ok()).unwrap_or(0),
            ready: r.state == State::Ready,
            created_at: clock::from_unix_nanos(r.created_at),
            exited_at: r.exited_at.map(clock::from_unix_nanos),
            info: match (verbose, plan) {
                (true, Some(plan)) => {
                    let mut info = info(r, &plan);
                    info["podvisor"]["waiters"] = self.shared.journal.waiting().into();
                    info["podvisor"]["creations"] = creations.clone();
                    HashMap::from([("info".to_owned(), info.to_string())])
                }
                _ => HashMap::new(),
            },
        }))
    }

    /// The infra process as an OCI spec with stable namespace paths, for NRI and for callers that build containers
    /// from paths instead of a pid.
    pub fn spec(&self) -> Value {
        let plan = self.lock().plan.clone();
        self.shared.journal.with(|r| spec(r, plan.as_deref()))
    }
}

/// What a container of the pod gets: namespaces to join where its spec lists them without a path, and the pod's files.
pub(super) fn pod_context(record: &Record) -> PodContext {
    let mut context = PodContext::default();
    for (kind, path) in namespaces(record) {
        // A private pid namespace is the container's own choice; mount and user are never the pod's to give.
        if let (Some(path), "network" | "ipc" | "uts") = (path, kind) {
            context.join.push((kind.to_owned(), path));
        }
    }
    if let Some(files) = &record.files {
        let bind = |to: &str, from: &PathBuf, options: &[&str]| {
            (
                PathBuf::from(to),
                from.clone(),
                options.iter().map(|o| (*o).to_owned()).collect(),
            )
        };
        context.files = vec![
            bind(
                "/etc/hostname",
                &files.hostname,
                &["rbind", "rprivate", "rw"],
            ),
            bind("/etc/hosts", &files.hosts, &["rbind", "rprivate", "rw"]),
            bind(
                "/etc/resolv.conf",
                &files.resolv_conf,
                &["rbind", "rprivate", "rw"],
            ),
            bind("/dev/shm", &files.shm, &["rbind", "rprivate", "rw"]),
        ];
    }
    context
}

/// Namespaces that are not the host's, by path: a caller's, or our pin. None where the pin is not there (yet, or any
/// more): through the infra process it would be another's once the pid has come round.
fn namespaces(record: &Record) -> Vec<(&'static str, Option<PathBuf>)> {
    let Some(spec) = record
        .infra_spec
        .as_ref()
        .filter(|_| record.infra.is_some())
    else {
        return Vec::new();
    };
    let of = |kind, file: &str, namespace: &Namespace| match namespace {
        Namespace::Host => None,
        Namespace::Path(path) => Some((kind, Some(path.clone()))),
        Namespace::New => Some((kind, record.pins.as_ref().map(|pins| pins.join(file)))),
    };
    [
        of("network", "net", &spec.network),
        of("ipc", "ipc", &spec.ipc),
        of("uts", "uts", &spec.uts),
        of("pid", "pid", &spec.pid),
        of("user", "user", &spec.user),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn spec(record: &Record, plan: Option<&Plan>) -> Value {
    let mut annotations = record.annotations.clone();
    let notes = plan.map(|p| &p.cri_annotations).filter(|n| !n.is_empty());
    if let Some(notes) = notes {
        annotations.extend(notes.clone());
        annotations.extend(record.resources.iter().flat_map(|r| r.notes()));
    }
    let namespaces: Vec<Value> = namespaces(record)
        .into_iter()
        .map(|(kind, path)| match path {
            Some(path) => json!({"type": kind, "path": path}),
            None => json!({"type": kind}),
        })
        .chain([json!({"type": "mount"})])
        .collect();
    let mounts: Vec<Value> = pod_context(record)
        .files
        .into_iter()
        .map(|(to, from, options)| json!({"destination": to, "type": "bind", "source": from, "options": options}))
        .collect();
    let mut spec = json!({
        "ociVersion": "1.1.0",
        "process": {"cwd": "/", "args": ["podvisor-infra"], "user": {"uid": 0, "gid": 0}, "noNewPrivileges": true},
        "root": {"path": "/", "readonly": true},
        "hostname": record.hostname,
        "mounts": mounts,
        "annotations": annotations,
        "linux": {
            "namespaces": namespaces,
            "cgroupsPath": record.infra_cgroup,
            "sysctl": record.infra_spec.as_ref().map(|s| s.sysctls.clone()).unwrap_or_default(),
        },
    });
    // What was given, so that who goes by the spec can give containers the same.
    if let Some(labels) = &record.selinux {
        spec["linux"]["mountLabel"] = json!(labels.files);
        if let Some(process) = &labels.process {
            spec["process"]["selinuxLabel"] = json!(process);
        }
    }
    spec
}

/// Keys and types are those CRI decodes since 2.3; what a shim cannot know is left out.
fn info(record: &Record, plan: &Plan) -> Value {
    let closed = record
        .network
        .netns
        .as_ref()
        .is_some_and(|p| !crate::network::netns::is_pinned(p) && !p.starts_with("/proc"));
    json!({
        "pid": record.infra.map_or(0, |i| i.pid),
        "processStatus": match record.state {
            State::Ready | State::Parked => "running",
            State::Created | State::Starting => "created",
            _ => "stopped",
        },
        "netNamespaceClosed": closed,
        "runtimeType": "io.containerd.podvisor.v1",
        "config": config(record, plan),
        "runtimeSpec": spec(record, Some(plan)),
        "cniResult": cni_result(record),
        "overhead": record.overhead,
        "resources": record.resources,
        "podvisor": {
            "key": record.key(),
            "state": record.state,
            "activity": record.activity().name(),
            "activity_seconds": record.activity_age().as_secs_f64(),
            "reason": record.reason,
            "network": record.network,
            "network_taken_over": record.taken_over(),
            "stages": record.stages,
            "history": record.history,
        },
    })
}

/// Containers that nobody has been given yet, and how often a request joined such a creation, by stage.
fn creations(containers: &Containers) -> Value {
    let open: Vec<Value> = containers
        .creations()
        .iter()
        .map(|c| {
            json!({
                "id": c.id,
                "stage": c.stage,
                "age_seconds": c.age.as_secs_f64(),
                "parked": c.parked,
                "watchers": c.watchers,
            })
        })
        .collect();
    json!({ "open": open, "joined_at_stage": containers.joined() })
}

fn config(record: &Record, plan: &Plan) -> Value {
    json!({
        "metadata": {"name": plan.name, "uid": plan.uid, "namespace": plan.pod_namespace, "attempt": plan.attempt},
        "hostname": plan.hostname,
        "log_directory": plan.log_directory,
        "dns_config": plan.dns.as_ref().map(|d| json!({"servers": d.servers, "searches": d.searches, "options": d.options})),
        "port_mappings": plan.ports.iter().map(|p| json!({
            "protocol": match p.protocol.as_str() { "udp" => 1, "sctp" => 2, _ => 0 },
            "container_port": p.container_port,
            "host_port": p.host_port,
            "host_ip": p.host_ip,
        })).collect::<Vec<_>>(),
        "labels": plan.labels,
        "annotations": record.annotations,
        "linux": {
            "cgroup_parent": plan.cgroup_parent.clone().unwrap_or_default(),
            "sysctls": plan.infra.sysctls,
            "overhead": record.overhead,
            "resources": record.resources,
        },
    })
}

/// In the shape of go-cni's result, which has no JSON tags itself; what it holds of CNI's has.
fn cni_result(record: &Record) -> Value {
    let attachments = &record.network.attachments;
    if attachments.is_empty() {
        return Value::Null;
    }
    let mut interfaces = Map::new();
    for one in attachments {
        let facts = &one.facts;
        for (index, interface) in facts.interfaces.iter().enumerate() {
            let own = facts
                .addresses
                .iter()
                .filter(|a| a.interface == Some(index));
            interfaces.insert(
                interface.name.clone(),
                json!({"IPConfigs": own.map(ip_config).collect::<Vec<_>>(), "Mac": interface.mac, "Sandbox": interface.sandbox}),
            );
        }
        // Addresses without a reference are the attachment's own.
        let mut loose = facts
            .addresses
            .iter()
            .filter(|a| a.interface.is_none())
            .peekable();
        if loose.peek().is_some() {
            interfaces.insert(
                one.ifname.clone(),
                json!({"IPConfigs": loose.map(ip_config).collect::<Vec<_>>(), "Mac": "", "Sandbox": record.network.netns}),
            );
        }
    }
    let dns: Vec<_> = attachments.iter().map(|a| &a.facts.dns).collect();
    let routes: Vec<_> = attachments.iter().flat_map(|a| &a.facts.routes).collect();
    json!({"Interfaces": interfaces, "DNS": dns, "Routes": routes})
}

fn ip_config(address: &Address) -> Value {
    let bare = address.address.split('/').next().unwrap_or_default();
    json!({"IP": bare, "Gateway": address.gateway})
}
