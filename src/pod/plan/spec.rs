//! What an OCI spec in the bundle says of the pod.

use super::Plan;
use crate::error::{Error, Kind, Result};
use crate::infra::{self, Namespace};
use crate::spec::Spec;

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
        Ok(())
    }
}
