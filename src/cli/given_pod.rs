//! `--config`: a pod in the form of CRI's `PodSandboxConfig`, as `crictl runp` takes it.
//!
//! Promises that each field is honoured, told of, or refused; docs/command.md has the list.

use std::path::Path;

use protobuf::MessageField;

use crate::error::Result;
use crate::network::PortMapping;
use crate::proto::cri::sandbox_config as cri;

use super::given::{self, Object};
use super::{parse, plan};

/// Who shares a namespace.
pub const MODES: [&str; 3] = ["POD", "CONTAINER", "NODE"];

const NODE: usize = 2;

/// What the file says.
#[derive(Debug, Default)]
pub struct GivenPod {
    /// Name of the pod.
    pub name: Option<String>,
    /// Everything that goes to the supervisor as it is.
    pub pod: cri::PodSandboxConfig,
    /// Published ports.
    pub ports: Vec<PortMapping>,
    /// It is to have the host's network.
    pub host_network: bool,
}

/// Reads it.
///
/// # Errors
/// Invalid and Unsupported, with what and where.
pub fn read(path: &Path) -> Result<GivenPod> {
    given::read(path, whole)
}

fn whole(mut file: Object<'_>) -> Result<GivenPod> {
    let mut made = GivenPod::default();
    let mut meta = file.object("metadata")?;
    made.name = name(&mut meta)?;
    let pod = &mut made.pod;
    let attempt = meta.number("attempt")?.unwrap_or(0);
    pod.metadata = MessageField::some(cri::PodSandboxMetadata {
        uid: meta.text("uid")?,
        namespace: meta.text("namespace")?,
        attempt: u32::try_from(attempt)
            .map_err(|_| meta.wrong("attempt", "give a number from 0"))?,
        ..Default::default()
    });
    meta.end();
    pod.hostname = file.text("hostname")?;
    if !pod.hostname.is_empty() {
        plan::hostname(&pod.hostname).map_err(|why| file.wrong("hostname", &why))?;
    }
    file.unused("log_directory", "`podvisor logs` has what containers write");
    let mut dns = file.object("dns_config")?;
    let config = cri::DNSConfig {
        servers: dns.texts("servers")?,
        searches: dns.texts("searches")?,
        options: dns.texts("options")?,
        ..Default::default()
    };
    if config != cri::DNSConfig::default() {
        pod.dns_config = MessageField::some(config);
    }
    dns.end();
    for port in file.objects("port_mappings")? {
        made.ports.extend(mapping(port)?);
    }
    pod.labels = file.map("labels")?.into_iter().collect();
    pod.annotations = annotations(&mut file)?;
    made.host_network = linux(file.object("linux")?, pod)?;
    file.end();
    Ok(made)
}

/// A pod's or a container's, by the rule of names.
pub fn name(meta: &mut Object<'_>) -> Result<Option<String>> {
    match meta.text("name")?.as_str() {
        "" => Ok(None),
        name => parse::name(name)
            .map(Some)
            .map_err(|why| meta.wrong("name", &why)),
    }
}

/// Networks may be chosen by theirs; what else is ours is not for files.
fn annotations(file: &mut Object<'_>) -> Result<std::collections::HashMap<String, String>> {
    let all = file.map("annotations")?;
    for key in all.keys().filter(|key| *key != plan::NETWORK_ANNOTATION) {
        plan::check_annotation(key)?;
    }
    Ok(all.into_iter().collect())
}

/// One published port; `None` where no port of the host is named.
fn mapping(mut port: Object<'_>) -> Result<Option<PortMapping>> {
    const PROTOCOLS: [&str; 3] = ["TCP", "UDP", "SCTP"];
    let protocol = port.choice("protocol", &PROTOCOLS)?.unwrap_or(0);
    let (host, container) = (port.number("host_port")?, port.number("container_port")?);
    let ip = port.text("host_ip")?;
    let host = host.filter(|n| *n != 0);
    let made = host.map(|host| {
        let ip = match ip.as_str() {
            "" => String::new(),
            v6 if v6.contains(':') => format!("[{v6}]:"),
            v4 => format!("{v4}:"),
        };
        let container = container.unwrap_or(0);
        let name = PROTOCOLS.get(protocol).copied().unwrap_or_default();
        parse::port(&format!("{ip}{host}:{container}/{name}"))
    });
    let made = made
        .transpose()
        .map_err(|why| port.wrong("host_port", &why));
    port.end();
    made
}

/// True: the host's network.
fn linux(mut linux: Object<'_>, pod: &mut cri::PodSandboxConfig) -> Result<bool> {
    let mut made = cri::LinuxPodSandboxConfig::new();
    made.cgroup_parent = linux.text("cgroup_parent")?;
    made.sysctls = linux.map("sysctls")?.into_iter().collect();
    let mut security = linux.object("security_context")?;
    let mut spaces = security.object("namespace_options")?;
    let network = spaces.choice("network", &MODES)?.unwrap_or(0);
    let mut options = cri::NamespaceOption::new();
    if spaces.choice("ipc", &MODES)? == Some(NODE) {
        options.ipc = cri::NamespaceMode::NODE.into();
    }
    match spaces.choice("pid", &MODES)? {
        Some(0) => spaces.refuse("pid", "POD (containers have pid namespaces of their own)"),
        Some(NODE) => options.pid = cri::NamespaceMode::NODE.into(),
        _ => {}
    }
    spaces.end();
    for field in [
        "run_as_user",
        "run_as_group",
        "supplemental_groups",
        "readonly_rootfs",
    ] {
        security.unused(
            field,
            "the process that holds the pod's namespaces has no files and no user's rights",
        );
    }
    unconfined(&mut security)?;
    security.end();
    linux.end();
    let mut context = cri::LinuxSandboxSecurityContext::new();
    context.namespace_options = MessageField::some(options);
    made.security_context = MessageField::some(context);
    pod.linux = MessageField::some(made);
    Ok(network == NODE)
}

/// Profiles are not supported; that there is to be none is.
pub fn unconfined(security: &mut Object<'_>) -> Result<()> {
    const PROFILES: [&str; 3] = ["RuntimeDefault", "Unconfined", "Localhost"];
    for field in ["seccomp", "apparmor"] {
        let mut profile = security.object(field)?;
        match profile.choice("profile_type", &PROFILES)? {
            None | Some(1) => {}
            Some(kind) => profile.refuse("profile_type", PROFILES.get(kind).unwrap_or(&"")),
        }
        profile.end();
    }
    match security.text("seccomp_profile_path")?.as_str() {
        "" | "unconfined" => {}
        other => security.refuse("seccomp_profile_path", other),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn given(text: &str) -> Result<GivenPod> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        read(file.path())
    }

    #[test]
    fn a_pod_as_crictl_has_it() {
        let made = given(
            r#"{"metadata": {"name": "nginx-sandbox", "namespace": "default", "attempt": 1, "uid": "hdishd83djaidwnduwk28bcsb"},
            "hostname": "h", "log_directory": "/tmp", "dns_config": {"servers": ["192.0.2.1"], "searches": ["a.b"]},
            "port_mappings": [{"container_port": 80, "host_port": 8080, "protocol": 1}, {"container_port": 81}],
            "labels": {"A": "b"}, "annotations": {"x/Y": "z"},
            "linux": {"sysctls": {"net.core.somaxconn": "512"}, "security_context": {"namespace_options": {"network": 2, "pid": 1}}}}"#,
        )
        .unwrap();
        assert_eq!(made.name.as_deref(), Some("nginx-sandbox"));
        let (pod, meta) = (&made.pod, &made.pod.metadata);
        assert_eq!(
            (meta.uid.as_str(), meta.attempt),
            ("hdishd83djaidwnduwk28bcsb", 1)
        );
        assert_eq!(made.ports, [parse::port("8080:80/udp").unwrap()]);
        assert!(made.host_network);
        assert_eq!(pod.labels.get("A").map(String::as_str), Some("b"));
        assert_eq!(pod.annotations.get("x/Y").map(String::as_str), Some("z"));
        assert_eq!(pod.dns_config.searches, ["a.b"]);
        assert_eq!(pod.linux.sysctls.len(), 1);
    }

    #[test]
    fn what_is_not_honoured_is_refused() {
        for (text, part) in [
            (r#"{"hostnam": "x"}"#, "hostnam"),
            (r#"{"metadata": {"name": "../x"}}"#, "metadata.name"),
            (r#"{"hostname": "A_b"}"#, "hostname"),
            (r#"{"windows": {"x": 1}}"#, "windows"),
            (
                r#"{"linux": {"overhead": {"cpu_quota": 1}}}"#,
                "linux.overhead",
            ),
            (
                r#"{"linux": {"security_context": {"privileged": true}}}"#,
                "privileged",
            ),
            (
                r#"{"linux": {"security_context": {"namespace_options": {"pid": 0}}}}"#,
                "pid = POD",
            ),
            (
                r#"{"linux": {"security_context": {"seccomp": {"profile_type": 0}}}}"#,
                "RuntimeDefault",
            ),
            (
                r#"{"port_mappings": [{"host_port": 70000, "container_port": 1}]}"#,
                "port_mappings[0]",
            ),
            (
                r#"{"annotations": {"io.podvisor.run": "x"}}"#,
                "io.podvisor.run",
            ),
        ] {
            let error = given(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        assert!(given("{}").is_ok());
        assert!(
            given(r#"{"linux": {"security_context": {"seccomp": {"profile_type": 1}}}}"#).is_ok()
        );
    }
}
