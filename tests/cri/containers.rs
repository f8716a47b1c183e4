//! What is a container's: its life, how it ends, its logs, its volumes.

use std::fs;
use std::time::Duration;

use protobuf::{EnumOrUnknown, MessageField};

use crate::kubelet::{Pod, container, log, mode, sleeper};
use crate::node::Side;
use crate::support::{eventually, sh};
use crate::wire::api::*;
use crate::wire::sandbox_config::*;

fn pod(side: &mut Side<'_>, name: &str) -> Pod {
    let config = side.config(name, |_, _| {});
    side.kubelet.run(&config, 1).unwrap()
}

fn shown(side: &mut Side<'_>, key: &str, id: &str) {
    let status = side.kubelet.status(id).unwrap();
    let ordered = match status.finished_at {
        0 => status.created_at <= status.started_at || status.started_at == 0,
        // The daemon looks at its clock once more after the start of what may have ended by then.
        end => status.created_at <= status.started_at && status.created_at <= end,
    };
    let text = format!(
        "{:?} {} {:?} {:?} created {} started {} finished {} in order {ordered}",
        status.state.enum_value_or_default(),
        status.exit_code,
        status.reason,
        status.message,
        status.created_at > 0,
        status.started_at > 0,
        status.finished_at > 0,
    );
    side.say(key, text);
}

pub fn life(side: &mut Side<'_>) {
    let pod = pod(side, "life");
    let mut config = sleeper("a");
    config.working_dir = "/etc".into();
    config.envs.push(KeyValue {
        key: "COLOUR".into(),
        value: "blue".into(),
        ..Default::default()
    });
    config.labels = [("a".to_owned(), "b".to_owned())].into();
    let id = side.kubelet.create(&pod, &config).unwrap();
    shown(side, "created", &id);
    side.kubelet.of_container("StartContainer", &id).unwrap();
    shown(side, "started", &id);
    side.sees("environment", &id, "env | grep -vE 'SHLVL|PWD' | sort");
    side.sees("directory", &id, "pwd");
    side.sees("user", &id, "id");
    side.sees(
        "mounted root",
        &id,
        "grep ' / ' /proc/mounts | cut -d' ' -f3",
    );
    let request = ListContainersRequest {
        filter: MessageField::some(ContainerFilter {
            pod_sandbox_id: pod.id.clone(),
            ..Default::default()
        }),
        ..Default::default()
    };
    let listed: ListContainersResponse = side.kubelet.ask("ListContainers", &request).unwrap();
    side.say("listed", listed.containers.len());
    // Its trap ends it in good order.
    side.kubelet.stop(&id, 20).unwrap();
    shown(side, "stopped", &id);
    let stubborn = side
        .kubelet
        .launch(
            &pod,
            &container("b", "trap '' TERM; while :; do sleep 0.1; done"),
        )
        .unwrap();
    side.kubelet.stop(&stubborn, 1).unwrap();
    shown(side, "killed", &stubborn);
    let never = side.kubelet.create(&pod, &sleeper("c")).unwrap();
    for id in [&id, &stubborn, &never] {
        side.kubelet.of_container("RemoveContainer", id).unwrap();
    }
    let listed: ListContainersResponse = side.kubelet.ask("ListContainers", &request).unwrap();
    side.say("listed when removed", listed.containers.len());
    side.kubelet.end(&pod.id);
}

pub fn ends(side: &mut Side<'_>) {
    // The first process of a pid namespace is spared its own signals: here that is the pod's.
    let config = side.config("ends", |options, _| options.pid = mode(NamespaceMode::POD));
    let pod = side.kubelet.run(&config, 1).unwrap();
    for (key, script) in [
        ("success", "exit 0"),
        ("exit code 7", "exit 7"),
        ("SIGKILL of itself", "kill -9 $$; sleep 9"),
        ("SIGTERM of itself", "kill -15 $$; sleep 9"),
        ("a short life", "true"),
    ] {
        let name = key.replace(' ', "-").to_lowercase();
        let id = side
            .kubelet
            .launch(&pod, &container(&name, script))
            .unwrap();
        side.kubelet.ended(&id);
        shown(side, key, &id);
    }
    let mut missing = container("missing", "");
    missing.command = vec!["/bin/no-such".into()];
    let id = side.kubelet.create(&pod, &missing).unwrap();
    let started = side
        .kubelet
        .of_container("StartContainer", &id)
        .unwrap_err();
    side.say("a program that is not there", started.code);
    let status = side.kubelet.status(&id).unwrap();
    side.say(
        "its status",
        format!(
            "{:?} {} {} says so {}",
            status.state.enum_value_or_default(),
            status.exit_code,
            status.reason,
            status.message.contains("no such file")
        ),
    );
    let mut hungry = container(
        "hungry",
        "x=$(tr '\\0' x < /dev/zero | head -c 200000000); echo ${#x}",
    );
    let resources = hungry
        .linux
        .mut_or_insert_default()
        .resources
        .mut_or_insert_default();
    resources.memory_limit_in_bytes = 32 << 20;
    resources.memory_swap_limit_in_bytes = 32 << 20;
    let id = side.kubelet.launch(&pod, &hungry).unwrap();
    side.kubelet.ended(&id);
    // A child of the shell was killed, or the shell: the reason is the same, the daemon hears of it in its own time.
    let reason = eventually(Duration::from_secs(5), "the reason", || {
        let status = side.kubelet.status(&id).unwrap();
        (!status.reason.is_empty()).then_some(status.reason)
    });
    side.say("out of memory", reason);
    side.kubelet.end(&pod.id);
}

pub fn logs(side: &mut Side<'_>) {
    let pod = pod(side, "logs");
    let long = "head -c 40000 /dev/zero | tr '\\0' y; echo";
    for (name, script) in [
        ("plain", "echo one; echo two; echo three"),
        ("errors", "echo bad >&2; echo worse >&2"),
        ("unfinished", "printf 'no newline'"),
        ("empty", "true"),
        (
            "lines",
            "i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done",
        ),
        ("long", long),
        ("bytes", "printf 'a\\tb\\001\\303\\274\\n'"),
    ] {
        let id = side.kubelet.launch(&pod, &container(name, script)).unwrap();
        side.kubelet.ended(&id);
        let mut seen = log(&pod, name);
        eventually(Duration::from_secs(10), "the log is whole", || {
            let before = std::mem::replace(&mut seen, log(&pod, name));
            (before == seen).then_some(())
        });
        let shown = match seen.len() {
            0..200 => seen.clone(),
            length => format!(
                "{length} bytes, {} lines, {:x}",
                seen.lines().count(),
                crc(&seen)
            ),
        };
        side.say(name, shown);
    }
    let mut terminal = container(
        "terminal",
        "echo out; echo err >&2; test -t 0 && test -t 1 && tty",
    );
    terminal.tty = true;
    let id = side.kubelet.launch(&pod, &terminal).unwrap();
    side.kubelet.ended(&id);
    side.say("terminal", log(&pod, "terminal").replace('\r', "\\r"));
    // A log that is rotated goes on in the new file.
    let id = side
        .kubelet
        .launch(
            &pod,
            &container("rotated", "while :; do echo tick; sleep 0.05; done"),
        )
        .unwrap();
    let file = format!("{}/rotated.log", pod.config.log_directory);
    let lines = |file: &str| fs::read_to_string(file).unwrap_or_default().lines().count();
    eventually(Duration::from_secs(20), "a line", || {
        (lines(&file) > 0).then_some(())
    });
    fs::rename(&file, format!("{file}.1")).unwrap();
    side.kubelet
        .of_container("ReopenContainerLog", &id)
        .unwrap();
    eventually(Duration::from_secs(20), "a line of the new file", || {
        (lines(&file) > 2).then_some(())
    });
    side.say("goes on when rotated", true);
    side.kubelet.end(&pod.id);
}

/// Tells texts apart.
fn crc(text: &str) -> u64 {
    text.bytes()
        .fold(14_695_981_039_346_656_037, |sum: u64, byte| {
            (sum ^ u64::from(byte)).wrapping_mul(1_099_511_628_211)
        })
}

pub fn volumes(side: &mut Side<'_>) {
    let dir = format!("/run/volumes-{}", side.kubelet.handler);
    for name in ["rw", "ro", "private", "slave", "shared"] {
        fs::create_dir_all(format!("{dir}/{name}")).unwrap();
    }
    sh(&format!(
        "mount --bind {dir} {dir}; mount --make-shared {dir}"
    ));
    fs::write(format!("{dir}/rw/note"), "of the node").unwrap();
    fs::write(format!("{dir}/file"), "a file").unwrap();
    let config = side.config("volumes", |_, linux| {
        linux.security_context.mut_or_insert_default().privileged = true;
    });
    let pod = side.kubelet.run(&config, 1).unwrap();
    let mount = |from: &str, to: &str, propagation, readonly| Mount {
        host_path: format!("{dir}/{from}"),
        container_path: to.into(),
        propagation: EnumOrUnknown::new(propagation),
        readonly,
        ..Default::default()
    };
    let mut config = sleeper("a");
    config.mounts = vec![
        mount("rw", "/rw", MountPropagation::PROPAGATION_PRIVATE, false),
        mount("ro", "/ro", MountPropagation::PROPAGATION_PRIVATE, true),
        mount(
            "file",
            "/etc/file",
            MountPropagation::PROPAGATION_PRIVATE,
            true,
        ),
        mount(
            "private",
            "/private",
            MountPropagation::PROPAGATION_PRIVATE,
            false,
        ),
        mount(
            "slave",
            "/slave",
            MountPropagation::PROPAGATION_HOST_TO_CONTAINER,
            false,
        ),
        mount(
            "shared",
            "/shared",
            MountPropagation::PROPAGATION_BIDIRECTIONAL,
            false,
        ),
    ];
    let security = config.linux.mut_or_insert_default();
    let security = security.security_context.mut_or_insert_default();
    security.privileged = true;
    let id = side.kubelet.launch(&pod, &config).unwrap();
    side.sees("read", &id, "cat /rw/note /etc/file");
    side.sees(
        "write",
        &id,
        "echo back > /rw/back; echo x > /ro/x; echo x > /etc/file",
    );
    side.say(
        "written",
        fs::read_to_string(format!("{dir}/rw/back"))
            .unwrap_or_default()
            .trim(),
    );
    for name in ["private", "slave", "shared"] {
        sh(&format!(
            "mkdir {dir}/{name}/m; mount -t tmpfs m {dir}/{name}/m; touch {dir}/{name}/m/seen"
        ));
        side.sees(
            &format!("of the node, {name}"),
            &id,
            &format!("ls /{name}/m"),
        );
        side.kubelet.sh(
            &id,
            &format!("mkdir /{name}/c; mount -t tmpfs c /{name}/c; touch /{name}/c/seen"),
        );
        let seen = fs::exists(format!("{dir}/{name}/c/seen")).unwrap();
        side.say(&format!("of the container, {name}"), seen);
    }
    let bad = side.kubelet.create(&pod, &{
        let mut config = sleeper("b");
        config.mounts = vec![mount(
            "none/such",
            "/x",
            MountPropagation::PROPAGATION_PRIVATE,
            false,
        )];
        config
    });
    // CRI makes what is missing.
    side.say("a source that is not there", bad.is_ok());
    side.kubelet.end(&pod.id);
    sh(&format!("umount -R {dir}; rm -rf {dir}"));
}
