//! SELinux options of a pod, where the kernel has no SELinux. Where it has: `tests/lab/selinux.rs`.

use std::path::Path;

use podvisor::proto::cri::sandbox_config::{NamespaceOption, PodSandboxConfig, SELinuxOption};
use protobuf::MessageField;
use serde_json::Value;
use ttrpc::Code;

use crate::kit::*;
use crate::support::{Snapshot, sandboxed};

fn asking(options: SELinuxOption) -> PodSandboxConfig {
    let mut config = config_with("p", NamespaceOption::default(), &[]);
    let security = &mut config.linux.mut_or_insert_default().security_context;
    security.mut_or_insert_default().selinux_options = MessageField::some(options);
    config
}

#[test]
fn options_that_are_no_label_are_refused_and_leave_nothing() {
    sandboxed(
        "labels::options_that_are_no_label_are_refused_and_leave_nothing",
        || {
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("p");
                let client = pod.connect().await;
                let with = |edit: fn(&mut SELinuxOption)| {
                    let mut options = SELinuxOption::new();
                    edit(&mut options);
                    asking(options)
                };
                for (word, config) in [
                    ("type", with(|o| o.type_ = "a:b".into())),
                    ("user", with(|o| o.user = "a\nb".into())),
                    ("role", with(|o| o.role = "a\0b".into())),
                    ("type", with(|o| o.type_ = "a\",uid=0,x=\"".into())),
                    ("level", with(|o| o.level = "s0:c1,\n".into())),
                    ("level", with(|o| o.level = "top secret".into())),
                ] {
                    let refused = code(create(&client, &pod.request(Some(&config))).await);
                    assert_eq!(refused.0, Code::INVALID_ARGUMENT, "{}", refused.1);
                    let wanted = format!("selinux_options: {word}");
                    assert!(refused.1.contains(&wanted), "{}", refused.1);
                    assert!(!Path::new("/run/podvisor/test/p/files").exists());
                }
                // The id is free, and the supervisor is that of a pod that has not been asked for yet.
                pod.up(&client, &config("p")).await;
                pod.shut(&client).await;
            });
            before.assert_unchanged();
        },
    );
}

#[test]
fn options_are_ignored_where_there_is_no_selinux() {
    sandboxed(
        "labels::options_are_ignored_where_there_is_no_selinux",
        || {
            if Path::new("/sys/fs/selinux/enforce").exists() {
                println!("skipped: this machine has SELinux");
                return;
            }
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("p");
                let client = pod.connect().await;
                let config = asking(SELinuxOption {
                    user: "nobody_u".into(),
                    role: "nobody_r".into(),
                    type_: "nobody_t".into(),
                    level: "s0:c1,c2".into(),
                    ..Default::default()
                });
                create(&client, &pod.request(Some(&config))).await.unwrap();
                let started = start(&client, "p").await.unwrap();
                let spec: Value = serde_json::from_slice(&started.spec.value).unwrap();
                assert_eq!(spec["process"]["selinuxLabel"], Value::Null);
                assert_eq!(spec["linux"]["mountLabel"], Value::Null);
                pod.shut(&client).await;
            });
            before.assert_unchanged();
        },
    );
}
