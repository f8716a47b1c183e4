//! What `scripts/try-containerd` shows: one pod in each sandboxer mode, seen the way `kubectl` and `ps` see it.

use crate::kubelet::{self, Kubelet, container, log};
use crate::node::{self, snapshot};
use crate::support::{Sandbox, eventually, run};

fn title(text: &str) {
    println!("\n== {text}");
}

fn shown(script: &str) {
    println!("# {script}");
    let mut command = std::process::Command::new("bash");
    let done = run(
        command.args(["-c", script]),
        std::time::Duration::from_secs(30),
    );
    println!("{}", done.stdout.trim_end());
}

#[test]
#[ignore = "for scripts/try-containerd"]
fn slow_demo_of_a_pod_in_both_modes() {
    Sandbox::new("demo::slow_demo_of_a_pod_in_both_modes").run(|| {
        let Some(daemon) = node::start("containerd-2.1", "") else {
            return;
        };
        let before = snapshot();
        for (handler, mode) in [("podvisor", "shim"), ("podvisor-pod", "podsandbox")] {
            title(&format!("A pod of two containers, runtime handler {handler} (sandboxer {mode})"));
            let mut kubelet = Kubelet::of(&daemon, handler);
            let pod = kubelet.pod(&format!("demo-{handler}"));
            let server = container(
                "server",
                "hostname > /dev/shm/index.html; exec httpd -f -v -p 8080 -h /dev/shm",
            );
            let client = container(
                "client",
                "while ! wget -q -O - http://127.0.0.1:8080/; do sleep 0.1; done; while :; do sleep 0.1; done",
            );
            let ids = [server, client].map(|c| kubelet.launch(&pod, &c).unwrap());
            let status = kubelet.pod_status(&pod.id).unwrap().status.unwrap();
            println!("POD {} {:?} {}", status.metadata.name, status.state.enum_value_or_default(), status.network.ip);
            for id in &ids {
                let status = kubelet.status(id).unwrap();
                println!("  CONTAINER {} {:?}", status.metadata.name, status.state.enum_value_or_default());
            }
            eventually(kubelet::BOUND, "the page", || {
                (!log(&pod, "client").is_empty()).then_some(())
            });
            println!("  the log of client, who asked for the server's page: {}", log(&pod, "client"));
            println!("  exec in server: {}", kubelet.sh(&ids[0], "head -n 2 /etc/resolv.conf | xargs; ip -4 -o addr show eth0 | cut -c1-40"));
            let answer = run(
                std::process::Command::new("busybox").args(["wget", "-q", "-O", "-", &format!("http://{}:8080/", status.network.ip)]),
                kubelet::BOUND,
            );
            println!("  the page, from the node: {}", answer.stdout.trim());
            title("Its processes");
            shown("ps -eo pid,ppid,args | grep -E 'podvisor|httpd|sleep 100000|/bin/sh' | grep -vE 'grep|exact' | cut -c1-110");
            title("Its removal");
            kubelet.end(&pod.id);
            println!("stopped and removed; pods left: {}", kubelet.pods().len());
        }
        before.assert_unchanged();
        println!("\nNo process, mount, cgroup, netns, address, link, socket or file is left.");
    });
}
