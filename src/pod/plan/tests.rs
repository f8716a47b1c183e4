//! Plans of requests as callers send them.

use super::*;
use crate::proto::cri::sandbox_config::{self as cri, NamespaceMode, NamespaceOption};

fn request() -> Request {
    Request {
        id: "p1".into(),
        ..Request::default()
    }
}

fn pod(network: NamespaceMode) -> PodSandboxConfig {
    let options = NamespaceOption {
        network: network.into(),
        ..Default::default()
    };
    let context = cri::LinuxSandboxSecurityContext {
        namespace_options: Some(options).into(),
        ..Default::default()
    };
    let linux = cri::LinuxPodSandboxConfig {
        security_context: Some(context).into(),
        ..Default::default()
    };
    PodSandboxConfig {
        linux: Some(linux).into(),
        ..Default::default()
    }
}

fn plan(request: Request) -> Result<Plan> {
    Plan::new(&Config::default(), request)
}

#[test]
fn a_request_with_neither_options_nor_spec_gets_a_network_of_ours() {
    let plan = plan(request()).unwrap();
    let wanted = Wanted {
        ifname: "eth0".into(),
        ..Wanted::default()
    };
    assert_eq!(plan.network, NetworkPlan::Ours(vec![wanted]));
    assert_eq!(plan.hostname, "p1");
}

#[test]
fn the_infra_process_is_the_last_that_memory_pressure_takes() {
    assert_eq!(plan(request()).unwrap().infra.oom_score_adj, -998);
}

#[test]
fn a_netns_of_the_callers_is_the_callers() {
    let request = Request {
        netns_path: "/run/netns/cni-1".into(),
        config: Some(pod(NamespaceMode::POD)),
        ..request()
    };
    let plan = plan(request).unwrap();
    assert_eq!(plan.network, NetworkPlan::Given("/run/netns/cni-1".into()));
    assert!(!plan.owns_network());
}

#[test]
fn host_network_by_the_pods_options_or_by_a_spec_without_a_network_namespace() {
    let by_options = Request {
        config: Some(pod(NamespaceMode::NODE)),
        ..request()
    };
    let plan_options = plan(by_options).unwrap();
    assert_eq!(plan_options.network, NetworkPlan::Host);
    assert_eq!(
        plan_options.hostname, "",
        "the host's uts namespace keeps the host's name"
    );
    let spec =
        Spec::parse(br#"{"linux":{"namespaces":[{"type":"mount"},{"type":"ipc"}]}}"#).unwrap();
    let by_spec = Request {
        spec: Some(spec),
        ..request()
    };
    assert_eq!(plan(by_spec).unwrap().network, NetworkPlan::Host);
}

#[test]
fn equal_requests_have_equal_digests_whatever_the_order_of_their_maps() {
    let with = |pairs: &[(&str, &str)]| {
        let mut config = pod(NamespaceMode::POD);
        for (k, v) in pairs {
            config.labels.insert((*k).into(), (*v).into());
        }
        let request = Request {
            config: Some(config),
            ..request()
        };
        plan(request).unwrap().digest().unwrap()
    };
    let (a, b) = (("a", "1"), ("b", "2"));
    assert_eq!(with(&[a, b]), with(&[b, a]));
    assert_ne!(with(&[a, b]), with(&[a]));
}

#[test]
fn bad_ports_and_mappings_are_refused() {
    let mut config = pod(NamespaceMode::NODE);
    config.port_mappings.push(cri::PortMapping {
        host_port: 80,
        container_port: 80,
        ..Default::default()
    });
    let on_host = Request {
        config: Some(config.clone()),
        ..request()
    };
    assert_eq!(plan(on_host).unwrap_err().kind(), Kind::Invalid);
    config.linux = Default::default();
    config.port_mappings[0].container_port = 70_000;
    let too_high = Request {
        config: Some(config),
        ..request()
    };
    assert_eq!(plan(too_high).unwrap_err().kind(), Kind::Invalid);
}

#[test]
fn several_networks_have_interfaces_in_their_order_or_by_name() {
    let annotated = |pairs: &[(&str, &str)]| {
        let pairs = pairs.iter().map(|(k, v)| ((*k).into(), (*v).into()));
        plan(Request {
            annotations: pairs.collect(),
            ..request()
        })
    };
    let on = |text: &str| annotated(&[(NETWORK_ANNOTATION, text)]);
    let NetworkPlan::Ours(wanted) = on("a, b@net1,c").unwrap().network else {
        panic!("not ours");
    };
    let pairs: Vec<_> = wanted
        .iter()
        .map(|w| (w.network.as_str(), w.ifname.as_str()))
        .collect();
    assert_eq!(pairs, [("a", "eth0"), ("b", "net1"), ("c", "eth2")]);
    assert_eq!(on("none").unwrap().network, NetworkPlan::Loopback);
    for text in [
        "a,,b", "a@", "a@lo", "a@eth1,b", "a,none", "a@x/y", "../a", "@eth0", ",",
    ] {
        assert_eq!(on(text).unwrap_err().kind(), Kind::Invalid, "{text}");
    }
    let rate = ("kubernetes.io/ingress-bandwidth", "1");
    assert_eq!(annotated(&[rate]).unwrap_err().kind(), Kind::Invalid);
}

/// What CRI's own controller sets where nobody says otherwise; under CRI the netns is the daemon's, and the settings are ours.
#[test]
fn pods_with_a_network_of_their_own_get_the_settings_that_daemons_give() {
    const PORTS: (&str, &str) = ("net.ipv4.ip_unprivileged_port_start", "0");
    const PING: (&str, &str) = ("net.ipv4.ping_group_range", "0 2147483647");
    let of = |request: Request| {
        let sysctls = plan(request).unwrap().infra.sysctls;
        let pairs = sysctls
            .iter()
            .map(|(k, v)| (k.replace('/', "."), v.clone()));
        pairs.collect::<Vec<_>>()
    };
    let pairs = |pairs: &[(&str, &str)]| {
        let owned = pairs
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        owned.collect::<Vec<_>>()
    };
    let given = |config: Option<PodSandboxConfig>| Request {
        netns_path: "/run/netns/cni-1".into(),
        config,
        ..request()
    };
    assert_eq!(of(request()), pairs(&[PORTS, PING]));
    assert_eq!(
        of(given(Some(pod(NamespaceMode::POD)))),
        pairs(&[PORTS, PING])
    );
    assert_eq!(
        of(given(None)),
        [],
        "the caller's netns is as the caller wants it"
    );
    let host = Request {
        config: Some(pod(NamespaceMode::NODE)),
        ..request()
    };
    assert_eq!(of(host), []);

    let mut own = pod(NamespaceMode::POD);
    let linux = own.linux.mut_or_insert_default();
    linux
        .sysctls
        .insert("net/ipv4/ping_group_range".into(), "0 7".into());
    assert_eq!(
        of(given(Some(own))),
        pairs(&[PORTS, ("net.ipv4.ping_group_range", "0 7")])
    );

    let mut users = pod(NamespaceMode::POD);
    let range = cri::IDMapping {
        host_id: 100_000,
        length: 65_536,
        ..Default::default()
    };
    let linux = users.linux.mut_or_insert_default();
    let options = linux.security_context.mut_or_insert_default();
    let options = options.namespace_options.mut_or_insert_default();
    options.userns_options = Some(cri::UserNamespace {
        uids: vec![range.clone()],
        gids: vec![range],
        ..Default::default()
    })
    .into();
    assert_eq!(of(given(Some(users))), pairs(&[PORTS]));
}
