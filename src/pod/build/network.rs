//! The network of a creation: the DEL that is owed, the netns, and CNI ADD of each network the pod wants.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::error::{Kind, Result};
use crate::failpoint;
use crate::infra::{IdMapping, Namespace, PodFiles};
use crate::network::userns::{self, IdRange, Owner};
use crate::network::{self, Attachment, NetworkConf, NetworkRecord, netns};
use crate::pod::Pod;
use crate::pod::handover::Place;
use crate::pod::journal::files_dir;
use crate::pod::plan::{Plan, Wanted};
use crate::pod::record::{Attached, Effect};

/// Between looks at a network that another process is at.
const BUSY_PAUSE: Duration = Duration::from_millis(100);

impl Pod {
    /// The netns with everything in it. None: another supervisor of the same pod is at it.
    pub(super) async fn make_network(
        &self,
        plan: &Plan,
        wanted: &[Wanted],
    ) -> Result<Option<PathBuf>> {
        let (config, reaper, journal) = (self.config(), &self.shared.reaper, &self.shared.journal);
        // Read first: an unknown network must not cost a netns.
        let load = |w: &Wanted| {
            let name = Some(w.network.as_str()).filter(|n| !n.is_empty());
            network::load_conf(config, name)
        };
        let confs: Vec<NetworkConf> = wanted.iter().map(load).collect::<Result<_>>()?;
        let asked: Vec<Attachment> = wanted
            .iter()
            .enumerate()
            .map(|(n, wanted)| self.attachment(plan, wanted, n == 0, PathBuf::new()))
            .collect();
        // On disk, so that the netns and the network have an owner whatever becomes of the runtime directory.
        failpoint::hit("network.hold.before")?;
        let Some(Place { record, whole }) = self.own_network(plan, &confs, &asked).await? else {
            return Ok(None);
        };
        failpoint::hit("network.hold.after")?;
        if whole {
            self.write_hosts(&journal.with(|r| r.network.ips.clone()));
            return Ok(Some(self.netns_path()));
        }
        let path = self.make_netns(plan)?;
        journal.end_stage(None);
        journal.begin_stage("cni-add", false)?;
        journal.update(|r| {
            r.network.name = confs.first().map(|c| c.name.clone()).unwrap_or_default();
            r.network.attachments.clear();
            r.effects.cni = Effect::Intent;
        })?;
        for (n, (wanted, conf)) in wanted.iter().zip(&confs).enumerate() {
            let mut attachment = self.attachment(plan, wanted, n == 0, path.clone());
            attachment.container_id = self.container_id(&record);
            let result = network::add(config, reaper, &record, conf, &attachment).await?;
            journal.update(|r| {
                if r.network.attachments.iter().all(|a| a.ips.is_empty()) {
                    r.network.ips = result.ips.clone();
                }
                r.network.attachments.push(Attached {
                    name: conf.name.clone(),
                    ifname: wanted.ifname.clone(),
                    ips: result.ips,
                    facts: result.facts,
                    timings: result.timings,
                });
            })?;
        }
        journal.update(|r| r.effects.cni = Effect::Done)?;
        self.write_hosts(&journal.with(|r| r.network.ips.clone()));
        journal.end_stage(None);
        Ok(Some(path))
    }

    /// What is left in the network's place from an earlier life of the pod: its DEL, then its netns.
    pub(in crate::pod) async fn settle_before_add(&self, record: &NetworkRecord) -> Result<()> {
        if !record.owes_del() && !record.netns_is_left(self.config()) {
            return Ok(());
        }
        let journal = &self.shared.journal;
        journal.begin_stage("cni-del", false)?;
        self.del_before_add(record).await?;
        journal.end_stage(None);
        Ok(())
    }

    /// The DEL that an earlier life of the pod owes. A keeper or `podvisor gc` may be at it just now.
    async fn del_before_add(&self, record: &NetworkRecord) -> Result<()> {
        let limit = self.config().del_timeout();
        let end = Instant::now() + limit;
        loop {
            let sent = network::del(self.config(), &self.shared.reaper, record, limit).await;
            match sent {
                Err(e) if e.kind() == Kind::Busy && Instant::now() < end => sleep(BUSY_PAUSE).await,
                Err(e) => return Err(e),
                Ok(()) => return netns::unpin(&self.netns_path()),
            }
        }
    }

    pub(super) fn netns_path(&self) -> PathBuf {
        netns::of_record(self.config(), &self.network_record())
    }

    pub(super) fn make_netns(&self, plan: &Plan) -> Result<PathBuf> {
        let path = self.netns_path();
        let journal = &self.shared.journal;
        journal.begin_stage("netns", false)?;
        journal.update(|r| {
            r.network.netns = Some(path.clone());
            r.effects.netns = Effect::Intent;
        })?;
        let infra = &plan.infra;
        let [uids, gids] = [&infra.uid_mappings, &infra.gid_mappings].map(|m| ranges(m));
        let owner = match &infra.user {
            Namespace::Host => None,
            Namespace::New => Some(Owner::New(&uids, &gids)),
            Namespace::Path(user) => Some(Owner::Given(user)),
        };
        failpoint::hit("netns.make.before")?;
        match owner {
            Some(owner) => userns::make(&self.shared.reaper, &path, &owner)?,
            None => netns::make(&path)?,
        }
        failpoint::hit("netns.make.after")?;
        journal.update(|r| r.effects.netns = Effect::Done)?;
        Ok(path)
    }

    /// CNI_CONTAINERID of a new network: the sandbox id, unless another sandbox has the network that was made for this
    /// id. Plugins know an attachment by it, and a DEL of the one would free the other's address.
    pub(in crate::pod) fn container_id(&self, record: &NetworkRecord) -> String {
        let o = &self.shared.options;
        let usual = NetworkRecord::at(&o.config, &o.namespace, &o.group);
        if usual.dir() == record.dir() || !usual.dir().exists() || usual.is_mine() {
            return o.group.clone();
        }
        record.place().to_owned()
    }

    /// Ports are published on the pod's first network: on two, each would take the other's.
    fn attachment(&self, plan: &Plan, wanted: &Wanted, first: bool, netns: PathBuf) -> Attachment {
        let id = &self.shared.options.group;
        let or = |text: &str, other: &str| {
            if text.is_empty() {
                other.to_owned()
            } else {
                text.to_owned()
            }
        };
        let mut capabilities = wanted.capabilities.clone();
        if let Some(dns) = &plan.dns {
            capabilities.insert(
                "dns".into(),
                json!({"servers": dns.servers, "searches": dns.searches, "options": dns.options}),
            );
        }
        if let Some(cgroup) = self.shared.journal.with(|r| r.cgroup.clone()) {
            capabilities.insert("cgroupPath".into(), cgroup.into());
        }
        capabilities.insert(
            "io.kubernetes.cri.pod-annotations".into(),
            json!(plan.annotations),
        );
        Attachment {
            container_id: id.clone(),
            netns,
            ifname: wanted.ifname.clone(),
            args: vec![
                ("IgnoreUnknown".into(), "1".into()),
                (
                    "K8S_POD_NAMESPACE".into(),
                    or(&plan.pod_namespace, &self.shared.options.namespace),
                ),
                ("K8S_POD_NAME".into(), or(&plan.name, id)),
                ("K8S_POD_INFRA_CONTAINER_ID".into(), id.clone()),
                ("K8S_POD_UID".into(), plan.uid.clone()),
            ],
            port_mappings: if first {
                plan.ports.clone()
            } else {
                Vec::new()
            },
            capabilities,
        }
    }

    /// The pod's own hosts file; containers bind it, so it is told of addresses in place. Not worth failing a pod for.
    fn write_hosts(&self, ips: &[String]) {
        let hostname = self.shared.journal.with(|r| r.hostname.clone());
        let files = PodFiles {
            hostname,
            dns: None,
            host_network: false,
            host_ipc: false,
            shm_size: 0,
            // It has its label.
            label: None,
        };
        let bare: Vec<String> = ips
            .iter()
            .map(|ip| ip.split('/').next().unwrap_or(ip).to_owned())
            .collect();
        if let Err(error) = files.set_addresses(&files_dir(self.shared.journal.dir()), &bare) {
            tracing::warn!(%error, "write the pod's addresses to its hosts file");
        }
    }
}

fn ranges(maps: &[IdMapping]) -> Vec<IdRange> {
    let range = |m: &IdMapping| IdRange {
        inside: m.container_id,
        outside: m.host_id,
        size: m.size,
    };
    maps.iter().map(range).collect()
}
