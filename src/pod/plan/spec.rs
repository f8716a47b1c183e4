//! What an OCI spec in the bundle says of the pod.

use super::{Plan, invalid};
use crate::error::Result;
use crate::infra::{self, IdMapping, Namespace};
use crate::spec::{IdRange, Spec};

/// Annotations with the pod's metadata begin so.
const METADATA: &str = "io.kubernetes.cri.sandbox-";

impl Plan {
    pub(super) fn take_spec(&mut self, spec: &Spec) -> Result<()> {
        let listed = spec.namespaces();
        let of = |kind: &str| match listed.iter().find(|(k, _)| k == kind) {
            None => Namespace::Host,
            Some((_, None)) => Namespace::New,
            Some((_, Some(path))) => Namespace::Path(path.clone()),
        };
        self.infra.network = of("network");
        self.infra.ipc = of("ipc");
        self.infra.uts = of("uts");
        self.infra.pid = of("pid");
        self.take_user_namespace(spec, of("user"))?;
        self.infra.sysctls = spec.sysctls();
        if !spec.hostname().is_empty() {
            self.hostname = infra::hostname(spec.hostname());
        }
        self.cgroups_path = spec.cgroups_path().map(str::to_owned);
        self.annotations.extend(spec.annotations());
        self.take_metadata();
        Ok(())
    }

    /// The pod's metadata as CRI writes it into a sandbox' spec: what its key is made of.
    fn take_metadata(&mut self) {
        let of = |name: &str| {
            let value = self.annotations.get(&format!("{METADATA}{name}"));
            value.cloned().unwrap_or_default()
        };
        let (name, namespace, uid) = (of("name"), of("namespace"), of("uid"));
        let attempt = of("attempt").parse().unwrap_or(0);
        self.name = name;
        self.pod_namespace = namespace;
        self.uid = uid;
        self.attempt = attempt;
    }

    /// One by path has its maps already; those in the spec are for runtimes that have to know them.
    fn take_user_namespace(&mut self, spec: &Spec, user: Namespace) -> Result<()> {
        let (uids, gids) = (spec.uid_mappings()?, spec.gid_mappings()?);
        match &user {
            Namespace::Host if uids.is_empty() && gids.is_empty() => {}
            Namespace::Host => {
                return Err(invalid(
                    "linux.uidMappings and gidMappings need a namespace of type user in linux.namespaces",
                ));
            }
            Namespace::Path(path) if path.is_absolute() => {}
            Namespace::Path(path) => {
                return Err(invalid(&format!(
                    "path {} of the user namespace is not absolute",
                    path.display()
                )));
            }
            Namespace::New => {
                self.infra.uid_mappings = mappings(&uids, "uid")?;
                self.infra.gid_mappings = mappings(&gids, "gid")?;
            }
        }
        self.infra.user = user;
        Ok(())
    }
}

fn mappings(ranges: &[IdRange], kind: &str) -> Result<Vec<IdMapping>> {
    // The infra process is root inside.
    if !ranges.iter().any(|r| r.container_id == 0) || ranges.iter().any(|r| r.size == 0) {
        return Err(invalid(&format!(
            "a new user namespace needs linux.{kind}Mappings with id 0 of the container among them, and no empty range"
        )));
    }
    let map = |r: &IdRange| IdMapping {
        container_id: r.container_id,
        host_id: r.host_id,
        size: r.size,
    };
    Ok(ranges.iter().map(map).collect())
}
