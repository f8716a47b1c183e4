//! Security contexts of containers and of pods.

use protobuf::{EnumOrUnknown, MessageField};
use serde_json::json;

use crate::kubelet::{mode, sleeper};
use crate::node::Side;
use crate::wire::api::*;
use crate::wire::sandbox_config::*;

const SHOWN: &str = "id; grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status | xargs; \
    touch /x && echo writable; mkdir /tmp-y 2>&1; cat /proc/kcore 2>&1 | head -c 1 | wc -c; \
    echo 1 2>&1 > /proc/sys/net/ipv4/ip_forward && echo settable; ls /dev | wc -l";

type Edit = fn(&mut LinuxContainerSecurityContext);

const CONTEXTS: [(&str, Edit); 13] = [
    ("default", |_| {}),
    ("user and group", |s| {
        s.run_as_user = number(1000);
        s.run_as_group = number(1001);
    }),
    ("user by name", |s| s.run_as_username = "web".into()),
    ("more groups", |s| {
        s.run_as_user = number(1000);
        s.supplemental_groups = vec![7, 8];
    }),
    ("those groups alone", |s| {
        s.run_as_user = number(1000);
        s.supplemental_groups = vec![7];
        s.supplemental_groups_policy = EnumOrUnknown::new(SupplementalGroupsPolicy::Strict);
    }),
    ("more capabilities", |s| {
        s.capabilities.mut_or_insert_default().add_capabilities = vec!["NET_ADMIN".into()];
    }),
    ("all capabilities dropped", |s| {
        s.capabilities.mut_or_insert_default().drop_capabilities = vec!["ALL".into()];
    }),
    ("privileged", |s| s.privileged = true),
    ("root is read-only", |s| s.readonly_rootfs = true),
    ("no new privileges", |s| s.no_new_privs = true),
    ("masked and read-only paths", |s| {
        s.masked_paths = vec!["/proc/kcore".into(), "/etc".into()];
        s.readonly_paths = vec!["/proc/sys".into()];
    }),
    ("the daemon's seccomp profile", |s| {
        s.seccomp = profile(security_profile::ProfileType::RuntimeDefault, "");
    }),
    ("a seccomp profile of the node's", |s| {
        s.seccomp = profile(security_profile::ProfileType::Localhost, PROFILE);
    }),
];

const PROFILE: &str = "/run/no-mkdir.json";

fn number(value: i64) -> MessageField<Int64Value> {
    MessageField::some(Int64Value {
        value,
        ..Default::default()
    })
}

fn profile(kind: security_profile::ProfileType, of: &str) -> MessageField<SecurityProfile> {
    MessageField::some(SecurityProfile {
        profile_type: EnumOrUnknown::new(kind),
        localhost_ref: of.into(),
        ..Default::default()
    })
}

pub fn contexts(side: &mut Side<'_>) {
    let no_mkdir = json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
        {"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}]});
    std::fs::write(PROFILE, no_mkdir.to_string()).unwrap();
    let config = side.config("contexts", |_, linux| {
        // A privileged container needs a pod that may have such.
        linux.security_context.mut_or_insert_default().privileged = true;
    });
    let pod = side.kubelet.run(&config, 1).unwrap();
    for (key, edit) in CONTEXTS {
        let mut config = sleeper(&key.replace([' ', '\''], "-"));
        let security = config.linux.mut_or_insert_default();
        edit(security.security_context.mut_or_insert_default());
        match side.kubelet.launch(&pod, &config) {
            Ok(id) => {
                side.sees(key, &id, SHOWN);
                side.kubelet.of_container("RemoveContainer", &id).unwrap();
            }
            Err(status) => side.say(key, format!("error {} {}", status.code, status.message)),
        }
    }
    side.kubelet.end(&pod.id);
    of_the_pod(side);
}

/// Settings of the pod's own first process change nothing in its containers.
fn of_the_pod(side: &mut Side<'_>) {
    let config = side.config("secure", |options, linux| {
        options.pid = mode(NamespaceMode::POD);
        let security = linux.security_context.mut_or_insert_default();
        security.run_as_user = number(1000);
        security.run_as_group = number(1001);
        security.supplemental_groups = vec![7];
        security.readonly_rootfs = true;
        security.seccomp = profile(security_profile::ProfileType::RuntimeDefault, "");
        security.selinux_options = MessageField::none();
    });
    let pod = side.kubelet.run(&config, 1).unwrap();
    let id = side.kubelet.launch(&pod, &sleeper("a")).unwrap();
    side.sees(
        "in a pod with a context",
        &id,
        "id; touch /x && echo writable",
    );
    side.kubelet.end(&pod.id);
}
