//! Labels of a pod, on a kernel that enforces a policy: that of the lab, where `PODVISOR_SELINUX` says so. The policy is
//! `scripts/lab.d/_policy.conf`: containers are `box_t`, their files `box_file_t`.

use std::ffi::CString;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use podvisor::client::Client;
use podvisor::proto::cri::sandbox_config::{
    IDMapping, LinuxSandboxSecurityContext, NamespaceMode, NamespaceOption, PodSandboxConfig,
    SELinuxOption, UserNamespace,
};
use podvisor::sys::xattr;
use protobuf::MessageField;
use serde_json::{Value, json};
use ttrpc::Code;

use crate::pod_kit::*;
use crate::support::{Snapshot, require, sandboxed};

/// Who starts containers, and all else of the machine.
const HOST: &str = "system_u:system_r:host_t:s0-s0:c0.c3";
const FILES: [&str; 3] = ["hostname", "hosts", "resolv.conf"];

#[test]
fn nothing_is_labelled_before_a_policy_is_loaded() {
    in_lab("nothing_is_labelled_before_a_policy_is_loaded", async {
        let pod = Pod::launch("p");
        let client = pod.connect().await;
        let (_, spec) = start_of(&pod, &client, &asking(|o| o.level = "s0:c1".into())).await;
        assert_eq!(labels_of(&spec), (None, None));
        pod.shut(&client).await;
    });
}

#[test]
fn a_policy_that_knows_no_containers_labels_nothing() {
    in_lab("a_policy_that_knows_no_containers_labels_nothing", async {
        let pod = Pod::launch("p");
        let client = pod.connect().await;
        let asked = asking(|o| o.level = "s0:c1".into());
        let (refused, text) = code(create(&client, &pod.request(Some(&asked))).await);
        assert_eq!(refused, Code::FAILED_PRECONDITION, "{text}");
        assert!(text.contains("install a policy for containers"), "{text}");
        assert!(!files(&pod).exists());
        let (_, spec) = start_of(&pod, &client, &config("p")).await;
        assert_eq!(labels_of(&spec), (None, None));
        let hosts = label_of(&files(&pod).join("hosts"));
        assert_eq!(hosts, "system_u:object_r:host_file_t:s0");
        pod.shut(&client).await;
    });
}

#[test]
fn files_and_shm_are_for_all_containers_of_the_pod() {
    in_lab("files_and_shm_are_for_all_containers_of_the_pod", async {
        let label = "system_u:object_r:box_file_t:s0";
        let pod = Pod::launch("p");
        let client = pod.connect().await;
        let (infra, spec) = start_of(&pod, &client, &config("p")).await;
        assert_eq!(labels_of(&spec), (None, Some(label)));
        assert_eq!(process_label(infra), HOST, "the policy decides");
        for name in FILES {
            assert_eq!(label_of(&files(&pod).join(name)), label, "{name}");
        }
        assert_eq!(label_of(&files(&pod).join("shm")), label);
        let reads = "cat /etc/hosts /etc/hostname /etc/resolv.conf";
        let writes = format!("{reads} && echo hi >/dev/shm/from-a");
        assert_eq!(ends(&client, "a", "s0:c1,c2", &writes).await, 0);
        // Another pair: what the pod shares it has, what belongs to the first pair or to the machine it has not.
        let all = format!("{reads} /dev/shm/from-a && echo hi >>/dev/shm/from-a");
        let other = format!("{all} && ! cat /pair && ! cat /host");
        assert_eq!(ends(&client, "b", "s0:c2,c3", &other).await, 0);
        assert_eq!(ends(&client, "c", "s0:c1", "cat /pair").await, 0);
        pod.shut(&client).await;
    });
}

#[test]
fn the_pods_level_and_its_other_options_are_used() {
    in_lab("the_pods_level_and_its_other_options_are_used", async {
        let pod = Pod::launch("p");
        let client = pod.connect().await;
        let asked = asking(|o| {
            o.user = "guest_u".into();
            o.level = "s0:c1,c2".into();
        });
        let (infra, spec) = start_of(&pod, &client, &asked).await;
        let process = "guest_u:system_r:box_t:s0:c1,c2";
        let label = "guest_u:object_r:box_file_t:s0:c1,c2";
        assert_eq!(labels_of(&spec), (Some(process), Some(label)));
        assert_eq!(process_label(infra), process);
        for name in FILES.iter().chain(&["shm"]) {
            assert_eq!(label_of(&files(&pod).join(name)), label, "{name}");
        }
        let reads = "cat /etc/hosts && echo hi >/dev/shm/x";
        assert_eq!(ends(&client, "a", "s0:c1,c2", reads).await, 0);
        let refused = "! cat /etc/hosts && ! touch /dev/shm/y && ! cat /dev/shm/x";
        assert_eq!(ends(&client, "b", "s0:c1,c3", refused).await, 0);
        stop(&client, "p", 5).await.unwrap();
        pod.shut(&client).await;

        // By way of the user namespace that it joins.
        let pod = Pod::launch("u");
        let client = pod.connect().await;
        let mut asked = asking(|o| o.level = "s0:c1".into());
        security_of(&mut asked).namespace_options = MessageField::some(users());
        let (infra, _) = start_of(&pod, &client, &asked).await;
        assert_eq!(process_label(infra), "system_u:system_r:box_t:s0:c1");
        pod.shut(&client).await;

        // Its processes are not confined, its files are.
        let pod = Pod::launch("q");
        let client = pod.connect().await;
        let mut asked = asking(|o| o.level = "s0:c1".into());
        security_of(&mut asked).privileged = true;
        let (infra, spec) = start_of(&pod, &client, &asked).await;
        let label = "system_u:object_r:box_file_t:s0:c1";
        assert_eq!(labels_of(&spec), (None, Some(label)));
        assert_eq!(process_label(infra), HOST);
        pod.shut(&client).await;
    });
}

/// FL-086j.
#[test]
fn the_hosts_shm_is_never_labelled() {
    in_lab("the_hosts_shm_is_never_labelled", async {
        let shm = Path::new("/dev/shm");
        fs::write(shm.join("mine"), "").unwrap();
        let both = || (label_of(shm), label_of(&shm.join("mine")), mounted(shm));
        let before = both();
        let pod = Pod::launch("p");
        let client = pod.connect().await;
        let mut asked = asking(|o| o.level = "s0:c1".into());
        security_of(&mut asked).namespace_options = MessageField::some(NamespaceOption {
            ipc: NamespaceMode::NODE.into(),
            ..Default::default()
        });
        start_of(&pod, &client, &asked).await;
        assert_eq!(both(), before);
        assert_eq!(
            label_of(&files(&pod).join("hosts")),
            "system_u:object_r:box_file_t:s0:c1"
        );
        pod.shut(&client).await;
        assert_eq!(both(), before);
        fs::remove_file(shm.join("mine")).unwrap();
    });
}

#[test]
fn what_the_policy_refuses_is_told_and_leaves_nothing() {
    in_lab(
        "what_the_policy_refuses_is_told_and_leaves_nothing",
        async {
            let pod = Pod::launch("p");
            let client = pod.connect().await;
            for (asked, word) in [
                (asking(|o| o.type_ = "nosuch_t".into()), "type nosuch_t"),
                (asking(|o| o.user = "nosuch_u".into()), "user nosuch_u"),
                (asking(|o| o.level = "s0:c1,c9".into()), "level s0:c1,c9"),
            ] {
                let (refused, text) = code(create(&client, &pod.request(Some(&asked))).await);
                assert_eq!(refused, Code::INVALID_ARGUMENT, "{text}");
                assert!(text.contains("has no such label"), "{text}");
                assert!(text.contains(word), "{text}");
                assert!(!files(&pod).exists());
            }
            // There is such a label, and nobody may become it.
            let asked = asking(|o| o.type_ = "stranger_t".into());
            create(&client, &pod.request(Some(&asked))).await.unwrap();
            let (refused, text) = code(start(&client, "p").await);
            assert_eq!(refused, Code::PERMISSION_DENIED, "{text}");
            for part in ["system_u:system_r:stranger_t:s0", "policy", "audit", HOST] {
                assert!(text.contains(part), "{part}: {text}");
            }
            assert_eq!(
                status(&client, "p").await.unwrap().state,
                "SANDBOX_NOTREADY"
            );
            pod.shut(&client).await;
        },
    );
}

#[test]
fn a_policy_without_a_list_has_the_usual_names() {
    in_lab("a_policy_without_a_list_has_the_usual_names", async {
        fs::remove_file("/etc/selinux/lab/contexts/lxc_contexts").unwrap();
        let pod = Pod::launch("p");
        let client = pod.connect().await;
        let (_, spec) = start_of(&pod, &client, &config("p")).await;
        let label = "system_u:object_r:container_file_t:s0";
        assert_eq!(labels_of(&spec), (None, Some(label)));
        assert_eq!(label_of(&files(&pod).join("hosts")), label);
        pod.shut(&client).await;
    });
}

/// Runs `body` in a sandbox of the lab; elsewhere nothing.
fn in_lab(name: &str, body: impl Future<Output = ()>) {
    if std::env::var_os("PODVISOR_SELINUX").is_none() {
        println!("not in the lab: scripts/lab --selinux has a kernel for this");
        return;
    }
    sandboxed(&format!("selinux::{name}"), || {
        let before = Snapshot::take();
        on(body);
        let _ = fs::remove_dir_all("/run/bundles");
        before.assert_unchanged();
    });
}

fn asking(edit: impl FnOnce(&mut SELinuxOption)) -> PodSandboxConfig {
    let mut config = config_with("p", NamespaceOption::default(), &[]);
    let mut options = SELinuxOption::new();
    edit(&mut options);
    security_of(&mut config).selinux_options = MessageField::some(options);
    config
}

fn security_of(config: &mut PodSandboxConfig) -> &mut LinuxSandboxSecurityContext {
    let linux = config.linux.mut_or_insert_default();
    linux.security_context.mut_or_insert_default()
}

/// A user namespace of the pod's.
fn users() -> NamespaceOption {
    let map = IDMapping {
        container_id: 0,
        host_id: 100_000,
        length: 65_536,
        ..Default::default()
    };
    NamespaceOption {
        userns_options: MessageField::some(UserNamespace {
            mode: NamespaceMode::POD.into(),
            uids: vec![map.clone()],
            gids: vec![map],
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// Created and started: the infra process, and the spec that start answers.
async fn start_of(pod: &Pod, client: &Client, config: &PodSandboxConfig) -> (i32, Value) {
    create(client, &pod.request(Some(config))).await.unwrap();
    let started = start(client, &pod.id).await.unwrap();
    let pid = i32::try_from(started.pid).unwrap();
    (pid, serde_json::from_slice(&started.spec.value).unwrap())
}

/// Of a process, and of files.
fn labels_of(spec: &Value) -> (Option<&str>, Option<&str>) {
    let text = |of: &'static str| spec.pointer(of).and_then(Value::as_str);
    (text("/process/selinuxLabel"), text("/linux/mountLabel"))
}

/// How a container of this level ends. In its root `/pair` is of the level s0:c1, `/host` of the machine.
async fn ends(client: &Client, id: &str, level: &str, script: &str) -> u32 {
    let label = format!("system_u:system_r:box_t:{level}");
    let container = Container::new(id, script, |spec| {
        spec["process"]["selinuxLabel"] = json!(label);
    });
    let mut request = container.request();
    // Both runtimes.
    if id == "b" {
        request = container.request_of(&require::find("crun").unwrap());
    }
    let root = PathBuf::from(&request.rootfs[0].source);
    for name in ["pair", "host"] {
        fs::write(root.join(name), name).unwrap();
    }
    label_all(&root, "system_u:object_r:box_file_t:s0");
    label_all(&root.join("pair"), "system_u:object_r:box_file_t:s0:c1");
    label_all(&root.join("host"), "system_u:object_r:host_file_t:s0");
    client.task().create(soon(), &request).await.unwrap();
    container.start(client, "").await;
    let status = container.wait(client, "").await.unwrap();
    container.delete(client, "").await.unwrap();
    println!("{id}: {}", container.printed(""));
    status
}

/// Everything from here on but links.
fn label_all(path: &Path, label: &str) {
    let kind = fs::symlink_metadata(path).unwrap().file_type();
    if kind.is_symlink() {
        return;
    }
    let file = File::open(path).unwrap();
    xattr::set(file.as_fd(), c"security.selinux", label.as_bytes()).unwrap();
    if kind.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            label_all(&entry.unwrap().path(), label);
        }
    }
}

fn files(pod: &Pod) -> PathBuf {
    Path::new("/run/podvisor/test").join(&pod.id).join("files")
}

fn process_label(pid: i32) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/attr/current")).unwrap();
    text.trim_end_matches(['\0', '\n']).to_owned()
}

/// The line of the mount at `path`.
fn mounted(path: &Path) -> String {
    let table = fs::read_to_string("/proc/self/mounts").unwrap();
    let at = format!(" {} ", path.display());
    table.lines().filter(|l| l.contains(&at)).collect()
}

#[allow(unsafe_code, reason = "nothing wraps this call")]
fn label_of(path: &Path) -> String {
    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    let mut label = [0_u8; 256];
    // SAFETY: both strings are NUL-terminated; the kernel writes at most as many bytes as it is told.
    let length = unsafe {
        libc::lgetxattr(
            name.as_ptr(),
            c"security.selinux".as_ptr(),
            label.as_mut_ptr().cast(),
            label.len(),
        )
    };
    let length = usize::try_from(length).expect("a label");
    let text = String::from_utf8_lossy(&label[..length]).into_owned();
    text.trim_end_matches('\0').to_owned()
}
