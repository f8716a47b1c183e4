//! `create` and `run --sandbox`: containers that share a pod.

use crate::kit::{BOUND, id_of, inspect, json, on_a_machine};
use crate::support::{eventually, podvisor};

#[test]
fn containers_of_a_pod_share_network_name_and_memory() {
    on_a_machine(
        "sharing::containers_of_a_pod_share_network_name_and_memory",
        |kit| {
            let spaces = "for n in net ipc uts; do readlink /proc/self/ns/$n; done; hostname";
            let script = format!(
                "echo shared >/dev/shm/note; ({spaces}) >/dev/shm/first; mkdir -p /tmp/w; echo local >/tmp/w/index.html; exec httpd -f -p 127.0.0.1:80 -h /tmp/w"
            );
            kit.detached(&["--name", "web"], &script);
            let fetched = eventually(BOUND, "a page over localhost", || {
                let got = kit.run(
                    &["--rm", "--sandbox", "web"],
                    "timeout 5 wget -q -O- http://127.0.0.1/",
                );
                (got.code == Some(0)).then_some(got.stdout)
            });
            assert_eq!(fetched, "local\n");
            let seen = kit.run(&["--rm", "--sandbox", "web"], &format!("cat /dev/shm/note; ({spaces}) >/dev/shm/second; cmp /dev/shm/first /dev/shm/second && cat /dev/shm/second"));
            let seen = seen.ok().stdout;
            assert!(
                seen.starts_with("shared\nnet:[") && seen.ends_with("\nweb\n"),
                "{seen}"
            );
            // Their processes are their own.
            let processes = kit.run(&["--rm", "--sandbox", "web"], "ps").ok().stdout;
            assert!(!processes.contains("httpd"), "{processes}");
            // With --rm only the container has gone.
            assert_eq!(json(&["ps", "--json"])[0]["containers"], 1);
            podvisor(&["rm", "-f", "web"]).ok();
        },
    );
}

#[test]
fn a_pod_without_containers_takes_them_later() {
    on_a_machine(
        "sharing::a_pod_without_containers_takes_them_later",
        |kit| {
            let id = id_of(&podvisor(&["create", "--name", "empty", "--publish", "8080:80"]).ok());
            let pod = inspect("empty");
            assert_eq!(
                (&pod["id"], &pod["state"]),
                (&id.as_str().into(), &"ready".into())
            );
            for verb in [&["exec", "empty", "true"][..], &["logs", "empty"]] {
                podvisor(verb)
                    .code_is(1)
                    .fails_with("podvisor run --sandbox");
            }
            let made = kit
                .run(
                    &["-d", "--sandbox", "empty", "--name", "job"],
                    "echo hi; sleep 1000",
                )
                .ok();
            assert_eq!(made.stdout, format!("{}-job\n", &id[..12]));
            // The only container is meant when none is named.
            crate::kit::wait_for_log("empty", "hi");
            podvisor(&["exec", "empty/job", "true"]).ok();
            kit.run(&["-d", "--sandbox", "empty", "--name", "job"], "true")
                .code_is(125)
                .fails_with("choose another");
            kit.run(&["--sandbox", "empty", "--name", "second"], "exit 4")
                .code_is(4);
            assert_eq!(podvisor(&["wait", "empty/second"]).ok().stdout, "4\n");
            podvisor(&["logs", "empty"])
                .code_is(1)
                .fails_with("job, second");
            podvisor(&["stop", "-t", "1", "empty"]).ok();
            kit.run(&["--sandbox", "empty"], "true")
                .code_is(1)
                .fails_with("not ready");
            podvisor(&["rm", "empty"]).ok();
        },
    );
}

#[test]
fn a_container_that_does_not_start_leaves_the_pod_as_it_was() {
    on_a_machine(
        "sharing::a_container_that_does_not_start_leaves_the_pod_as_it_was",
        |kit| {
            kit.detached(&["--name", "web", "--net", "none"], "sleep 1000");
            let line = [
                "run",
                "--sandbox",
                "web",
                "--name",
                "side",
                "--rootfs",
                kit.rootfs.str(),
                "--",
                "/bin/nope",
            ];
            podvisor(&line).code_is(127);
            let pod = inspect("web");
            assert_eq!(pod["containers"].as_object().unwrap().len(), 1, "{pod:#}");
            kit.run(&["--rm", "--sandbox", "web", "--name", "side"], "exit 5")
                .code_is(5);
            podvisor(&["rm", "-f", "web"]).ok();
        },
    );
}
