//! What a `PodSandboxConfig` says of the pod.

use super::{Plan, invalid};
use crate::error::Result;
use crate::infra::{self, Dns, IdMapping, LabelOptions, Namespace};
use crate::network::PortMapping;
use crate::pod::resources::Resources;
use crate::proto::cri::sandbox_config::{
    NamespaceMode, NamespaceOption, PodSandboxConfig, Protocol, UserNamespace,
};

impl Plan {
    pub(super) fn take_pod(&mut self, pod: &PodSandboxConfig) -> Result<()> {
        if let Some(meta) = pod.metadata.as_ref() {
            self.name = meta.name.clone();
            self.pod_namespace = meta.namespace.clone();
            self.uid = meta.uid.clone();
            self.attempt = meta.attempt;
        }
        let wanted = if pod.hostname.is_empty() {
            &self.name
        } else {
            &pod.hostname
        };
        if !wanted.is_empty() {
            self.hostname = infra::hostname(wanted);
        }
        self.log_directory = pod.log_directory.clone();
        self.labels.extend(pod.labels.clone());
        self.annotations.extend(pod.annotations.clone());
        self.dns = pod.dns_config.as_ref().map(|dns| Dns {
            servers: dns.servers.clone(),
            searches: dns.searches.clone(),
            options: dns.options.clone(),
        });
        for port in &pod.port_mappings {
            self.ports.extend(port_mapping(
                port.protocol.enum_value_or_default(),
                port.host_port,
                port.container_port,
                &port.host_ip,
            )?);
        }
        let Some(linux) = pod.linux.as_ref() else {
            return Ok(());
        };
        if !linux.cgroup_parent.is_empty() {
            self.cgroup_parent = Some(linux.cgroup_parent.clone());
        }
        let boxed = |given| Box::new(Resources::from(given));
        self.resources = linux.resources.as_ref().map(boxed);
        self.overhead = linux.overhead.as_ref().map(boxed);
        self.infra.sysctls.extend(linux.sysctls.clone());
        if let Some(options) = linux.security_context.selinux_options.as_ref() {
            self.selinux = LabelOptions {
                user: options.user.clone(),
                role: options.role.clone(),
                kind: options.type_.clone(),
                level: options.level.clone(),
                privileged: linux.security_context.privileged,
            };
            // Also where SELinux is off: a pod is wrong on every node, or on none.
            self.selinux.check()?;
        }
        if let Some(options) = linux.security_context.namespace_options.as_ref() {
            self.take_namespaces(options)?;
        }
        Ok(())
    }

    pub(super) fn note_for_cri(&mut self, id: &str) {
        let notes = [
            ("container-type", "sandbox".to_owned()),
            ("sandbox-id", id.to_owned()),
            ("sandbox-name", self.name.clone()),
            ("sandbox-namespace", self.pod_namespace.clone()),
            ("sandbox-uid", self.uid.clone()),
            ("sandbox-log-directory", self.log_directory.clone()),
        ];
        self.cri_annotations = notes
            .into_iter()
            .map(|(key, value)| (format!("io.kubernetes.cri.{key}"), value))
            .collect();
    }

    fn take_namespaces(&mut self, options: &NamespaceOption) -> Result<()> {
        let node = |mode: protobuf::EnumOrUnknown<NamespaceMode>| {
            mode.enum_value_or_default() == NamespaceMode::NODE
        };
        if node(options.network) {
            // The host's network has no uts namespace of its own either: its hostname is the host's.
            self.infra.network = Namespace::Host;
            self.infra.uts = Namespace::Host;
        }
        if node(options.ipc) {
            self.infra.ipc = Namespace::Host;
        }
        if node(options.pid) {
            self.infra.pid = Namespace::Host;
        }
        if let Some(user) = options.userns_options.as_ref() {
            self.take_user(user)?;
        }
        Ok(())
    }

    fn take_user(&mut self, user: &UserNamespace) -> Result<()> {
        let pod = user.mode.enum_value_or_default() == NamespaceMode::POD;
        if !pod {
            if user.uids.is_empty() && user.gids.is_empty() {
                return Ok(());
            }
            return Err(invalid(
                "id mappings need a user namespace of the pod; leave them out or use mode POD",
            ));
        }
        let (uids, gids) = (user.uids.as_slice(), user.gids.as_slice());
        let ([uid], [gid]) = (uids, gids) else {
            return Err(invalid(
                "a pod's user namespace needs exactly one uid range and one gid range",
            ));
        };
        if uid.length == 0 || gid.length == 0 {
            return Err(invalid(
                "a range of a pod's user namespace needs a length of at least 1",
            ));
        }
        self.infra.user = Namespace::New;
        let map = |m: &crate::proto::cri::sandbox_config::IDMapping| IdMapping {
            container_id: m.container_id,
            host_id: m.host_id,
            size: m.length,
        };
        self.infra.uid_mappings = vec![map(uid)];
        self.infra.gid_mappings = vec![map(gid)];
        Ok(())
    }
}

/// One CRI port mapping; host port 0 publishes nothing.
fn port_mapping(
    protocol: Protocol,
    host: i32,
    container: i32,
    ip: &str,
) -> Result<Option<PortMapping>> {
    if host == 0 {
        return Ok(None);
    }
    let port = |n: i32| {
        u16::try_from(n)
            .ok()
            .filter(|n| *n > 0)
            .ok_or_else(|| invalid(&format!("port {n} is not between 1 and 65535")))
    };
    Ok(Some(PortMapping {
        host_port: port(host)?,
        container_port: port(container)?,
        protocol: match protocol {
            Protocol::TCP => "tcp",
            Protocol::UDP => "udp",
            Protocol::SCTP => "sctp",
        }
        .to_owned(),
        host_ip: ip.to_owned(),
    }))
}
