//! What an OCI spec in the bundle says of the pod.

use super::Plan;
use crate::error::{Error, Kind, Result};
use crate::infra::{self, Namespace};
use crate::spec::Spec;

/// Annotations with the pod's metadata begin so.
const METADATA: &str = "io.kubernetes.cri.sandbox-";

impl Plan {
    pub(super) fn take_spec(&mut self, spec: &Spec) -> Result<()> {
        let listed = spec.namespaces();
        if listed.iter().any(|(kind, _)| kind == "user") {
            return Err(Error::new(
                Kind::Unsupported,
                "make the pod's user namespace from an OCI spec: not built yet; send a PodSandboxConfig with userns_options",
            ));
        }
        let of = |kind: &str| match listed.iter().find(|(k, _)| k == kind) {
            None => Namespace::Host,
            Some((_, None)) => Namespace::New,
            Some((_, Some(path))) => Namespace::Path(path.clone()),
        };
        self.infra.network = of("network");
        self.infra.ipc = of("ipc");
        self.infra.uts = of("uts");
        self.infra.pid = of("pid");
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
}
