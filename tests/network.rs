//! The network room against the reference plugins and against plugins that misbehave, each test on a machine of its own.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests panic where they cannot go on"
)]

#[path = "network/pod.rs"]
mod pod;
mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use pod::{LIMIT, Pod, ip, supervised, tool};
use podvisor::config::Config;
use podvisor::error::Kind;
use podvisor::network::{self, netns};
use serde_json::{Value, json};
use support::fake::{self, Act, Fake};
use support::{Scope, cni, eventually, sandboxed};

/// A chain of fakes, one per name.
fn fakes<const N: usize>(network: &str, names: [&str; N]) -> [Fake; N] {
    let made = names.map(|name| fake::plugin(Path::new(cni::PLUGINS), name));
    cni::network(
        network,
        names.iter().map(|name| json!({ "type": name })).collect(),
    )
    .write();
    made
}

fn pin_count() -> usize {
    fs::read_to_string("/proc/self/mountinfo")
        .unwrap()
        .lines()
        .filter(|l| l.contains(" - nsfs "))
        .count()
}

fn netns_links() -> usize {
    fs::read_dir("/run/netns").map(|d| d.count()).unwrap_or(0)
}

fn stdin_of(fake: &Fake, verb: &str) -> Value {
    serde_json::from_str(&fake.calls_of(verb).last().unwrap().stdin).unwrap()
}

#[test]
fn a_real_chain_gives_an_address_and_a_published_port_and_leaves_nothing() {
    supervised(
        "a_real_chain_gives_an_address_and_a_published_port_and_leaves_nothing",
        async |reaper| {
            cni::bridge("pods", "pvt0", "10.87.1.0/24")
                .portmap()
                .write();
            let before = Scope::default().take();
            let pod = Pod::on("pods", "a").publish(18080, 80);
            let result = pod.add(&reaper).await.unwrap();
            assert_eq!(result.ips, ["10.87.1.2/24"]);
            assert_eq!(pod.record.read_result().unwrap().ips, result.ips);

            let name = format!(
                "podvisor-{}",
                pod.attachment.netns.file_name().unwrap().to_str().unwrap()
            );
            let inside = ip(&["netns", "exec", &name, "ip", "-br", "addr"]);
            assert!(
                inside.contains("10.87.1.2/24")
                    && inside.contains("lo")
                    && inside.contains("127.0.0.1/8"),
                "{inside}"
            );
            assert!(rules().contains("18080"));
            let cached: Value =
                serde_json::from_slice(&fs::read("/var/lib/cni/results/pods-a-eth0").unwrap())
                    .unwrap();
            assert_eq!(
                (cached["kind"].as_str(), cached["networkName"].as_str()),
                (Some("cniCacheV1"), Some("pods"))
            );
            assert!(Path::new("/var/lib/cni/networks/pods/10.87.1.2").exists());

            pod.gone(&reaper).await;
            assert!(!rules().contains("18080"));
            before.assert_unchanged();
        },
    );
}

fn rules() -> String {
    tool("iptables-save", &["-t", "nat"])
}

#[test]
fn del_with_the_netns_gone_passes_none_and_still_frees_the_lease() {
    supervised(
        "del_with_the_netns_gone_passes_none_and_still_frees_the_lease",
        async |reaper| {
            let seen = fake::plugin_before(
                Path::new(cni::PLUGINS),
                "seen",
                &cni::real_plugins().unwrap().join("tuning"),
            );
            cni::bridge("pods", "pvt0", "10.87.1.0/24")
                .plugin(json!({ "type": "seen" }))
                .write();
            let pod = Pod::on("pods", "a");
            pod.add(&reaper).await.unwrap();
            netns::unpin(&pod.attachment.netns).unwrap();
            pod.del(&reaper).await.unwrap();
            let call = &seen.calls_of("DEL")[0];
            assert_eq!(call.var("CNI_NETNS"), "");
            assert!(
                call.env.iter().any(|(k, _)| k == "CNI_NETNS"),
                "the variable is set, and empty"
            );
            assert!(!Path::new("/var/lib/cni/networks/pods/10.87.1.2").exists());
            pod.gone(&reaper).await;
        },
    );
}

#[test]
fn a_plugin_sees_only_cnis_environment_and_what_its_add_was_given_comes_back_at_del() {
    supervised(
        "a_plugin_sees_only_cnis_environment_and_what_its_add_was_given_comes_back_at_del",
        async |reaper| {
            let [one, two] = fakes("pods", ["one", "two"]);
            let pod = Pod::on("pods", "a");
            pod.add(&reaper).await.unwrap();
            // Another configuration under the same name must not reach the DEL, nor must an empty directory.
            fs::remove_dir_all(cni::CONFIGS).ok();
            pod.del(&reaper).await.unwrap();
            for (fake, verb) in [(&one, "ADD"), (&two, "ADD"), (&two, "DEL"), (&one, "DEL")] {
                let calls = fake.calls_of(verb);
                assert_eq!(calls.len(), 1, "{verb}");
                let own = ["PWD", "SHLVL", "_", "PATH"];
                let foreign: Vec<_> = calls[0]
                    .env
                    .iter()
                    .filter(|(k, _)| !k.starts_with("CNI_") && !own.contains(&k.as_str()))
                    .collect();
                assert!(foreign.is_empty(), "{foreign:?}");
                assert_eq!(calls[0].var("CNI_ARGS"), "IgnoreUnknown=1;K8S_POD_NAME=web");
                assert_eq!(calls[0].var("CNI_CONTAINERID"), "a");
            }
            assert!(stdin_of(&one, "ADD").get("prevResult").is_none());
            let result = stdin_of(&two, "ADD")["prevResult"].clone();
            assert_eq!(result["ips"][0]["address"], "10.99.0.2/24");
            assert!(stdin_of(&one, "DEL")["prevResult"]["ips"].is_array());
            // A second DEL finds nothing owed.
            pod.del(&reaper).await.unwrap();
            assert_eq!(one.count("DEL"), 1);
            pod.gone(&reaper).await;
        },
    );
}

#[test]
fn a_chain_that_fails_half_way_is_deleted_in_reverse_with_the_result_so_far() {
    supervised(
        "a_chain_that_fails_half_way_is_deleted_in_reverse_with_the_result_so_far",
        async |reaper| {
            let [one, two, three] = fakes("pods", ["one", "two", "three"]);
            two.on(
                "ADD",
                &[
                    Act::Print(json!({"code": 7, "msg": "no room"}).to_string()),
                    Act::Exit(1),
                ],
            );
            let pod = Pod::on("pods", "a");
            let error = pod.add(&reaper).await.unwrap_err().to_string();
            assert!(
                error.contains("\"two\" (ADD)") && error.contains("error 7: no room"),
                "{error}"
            );
            assert!(pod.record.owes_del() && pod.record.read_result().is_none());
            assert_eq!(three.count("ADD"), 0);
            // A second ADD has to wait for the DEL.
            assert_eq!(pod.add(&reaper).await.unwrap_err().kind(), Kind::State);
            assert_eq!(one.count("ADD"), 1);

            pod.del(&reaper).await.unwrap();
            // In a pid namespace as young as this one a higher pid means later.
            let pid = |fake: &Fake| fake.calls_of("DEL")[0].pid;
            assert!(
                pid(&three) < pid(&two) && pid(&two) < pid(&one),
                "reverse order"
            );
            assert_eq!(
                stdin_of(&three, "DEL")["prevResult"]["ips"][0]["address"],
                "10.99.0.2/24"
            );

            two.on("ADD", &[]);
            pod.add(&reaper).await.unwrap();
            pod.gone(&reaper).await;
        },
    );
}

#[test]
fn at_the_bound_the_whole_group_is_killed_and_del_works_after() {
    supervised(
        "at_the_bound_the_whole_group_is_killed_and_del_works_after",
        async |reaper| {
            let [quick, slow] = fakes("pods", ["quick", "slow"]);
            slow.on(
                "ADD",
                &[
                    Act::Stderr("waiting for the agent".into()),
                    Act::IgnoreTerm,
                    Act::Grandchild(600),
                    Act::Sleep(600.0),
                ],
            );
            let before = Scope::default().take();
            let mut pod = Pod::on("pods", "a");
            pod.config.cni.add_timeout = 1.0;
            let begun = Instant::now();
            let error = pod.add(&reaper).await.unwrap_err();
            assert_eq!(error.kind(), Kind::Deadline);
            assert!(
                begun.elapsed() >= Duration::from_secs(1)
                    && begun.elapsed() < Duration::from_secs(15),
                "{:?}",
                begun.elapsed()
            );
            let text = error.to_string();
            assert!(
                text.contains("\"slow\" (ADD)")
                    && text.contains("killed")
                    && text.contains("may take 1.0 s"),
                "{text}"
            );
            pod.del(&reaper).await.unwrap();
            assert_eq!((quick.count("DEL"), slow.count("DEL")), (1, 1));
            pod.gone(&reaper).await;
            // Also the sleep that it had left in its group.
            before.assert_unchanged();
        },
    );
}

#[test]
fn crashes_noise_and_silence_name_the_plugin_and_how_it_ended() {
    supervised(
        "crashes_noise_and_silence_name_the_plugin_and_how_it_ended",
        async |reaper| {
            let [odd] = fakes("pods", ["odd"]);
            let good =
                json!({"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.2/24"}]}).to_string();
            let cases: [(&[Act], &[&str]); 6] = [
                (
                    &[
                        Act::Stderr("stack smashed".into()),
                        Act::Signal("SEGV".into()),
                    ],
                    &["signal 11 (SIGSEGV)", "stack smashed"],
                ),
                (
                    &[Act::Stderr("no agent".into()), Act::Exit(3)],
                    &["exited with 3", "no agent"],
                ),
                (
                    &[Act::Print(format!(
                        "level=info one\nlevel=info two\n{good}"
                    ))],
                    &["not one result in JSON", "level=info one"],
                ),
                (
                    &[Act::Print(format!("{good}\n{good}"))],
                    &["not one result in JSON"],
                ),
                (&[Act::Print(" ".into())], &["printed no result"]),
                (
                    &[Act::Print(json!({"cniVersion": "9.9.9"}).to_string())],
                    &["cniVersion \"9.9.9\""],
                ),
            ];
            let pod = Pod::on("pods", "a");
            for (acts, words) in cases {
                odd.on("ADD", acts);
                let error = pod.add(&reaper).await.unwrap_err();
                let text = error.to_string();
                for word in words.iter().chain(&["\"odd\"", "\"pods\"", "\"a\""]) {
                    assert!(text.contains(word), "{word} in {text}");
                }
                assert!(!error.is_gone());
                pod.del(&reaper).await.unwrap();
            }
            // Without cniVersion a result is read as one of the version that was asked for.
            odd.on(
                "ADD",
                &[Act::Print(
                    json!({"ips": [{"address": "10.0.0.2/24"}]}).to_string(),
                )],
            );
            assert_eq!(pod.add(&reaper).await.unwrap().raw["cniVersion"], "1.0.0");
            pod.gone(&reaper).await;
        },
    );
}

#[test]
fn a_failing_del_stays_owed_keeps_the_cache_and_the_next_one_runs_the_whole_list() {
    supervised(
        "a_failing_del_stays_owed_keeps_the_cache_and_the_next_one_runs_the_whole_list",
        async |reaper| {
            let [one, two] = fakes("pods", ["one", "two"]);
            one.on("DEL", &[Act::OnlyFirst(2)]);
            let pod = Pod::on("pods", "a");
            pod.add(&reaper).await.unwrap();
            for _ in 0..2 {
                pod.del(&reaper).await.unwrap_err();
                assert!(pod.record.owes_del());
                assert!(Path::new("/var/lib/cni/results/pods-a-eth0").exists());
                assert_eq!(pod.record.remove().unwrap_err().kind(), Kind::State);
            }
            // Its bound is the caller's, and one that hangs is killed at it.
            two.on("DEL", &[Act::Sleep(600.0)]);
            let bound = Duration::from_millis(500);
            let error = network::del(&pod.config, &reaper, &pod.record, bound)
                .await
                .unwrap_err();
            assert_eq!(error.kind(), Kind::Deadline, "{error}");
            assert!(pod.record.owes_del());
            two.on("DEL", &[]);
            // A plugin that is not installed any more is no reason to forget it either.
            let moved = two.path.with_extension("away");
            fs::rename(&two.path, &moved).unwrap();
            let error = pod.del(&reaper).await.unwrap_err();
            assert!(
                !error.is_gone() && error.to_string().contains("find CNI plugin \"two\""),
                "{error}"
            );
            fs::rename(&moved, &two.path).unwrap();
            pod.del(&reaper).await.unwrap();
            assert_eq!((two.count("DEL"), one.count("DEL")), (4, 3));
            assert!(!Path::new("/var/lib/cni/results/pods-a-eth0").exists());
            pod.gone(&reaper).await;
        },
    );
}

#[test]
fn every_file_of_the_record_may_be_cut_off_and_the_lease_is_still_freed() {
    supervised(
        "every_file_of_the_record_may_be_cut_off_and_the_lease_is_still_freed",
        async |reaper| {
            cni::bridge("pods", "pvt0", "10.87.1.0/24").write();
            let before = Scope::default().take();
            let files =
                ["owner.json", "add-started.json", "result.json"].map(|f| format!("RECORD/{f}"));
            for file in files
                .iter()
                .map(String::as_str)
                .chain(["/var/lib/cni/results/pods-a-eth0"])
            {
                for half in [false, true] {
                    let pod = Pod::on("pods", "a");
                    pod.add(&reaper).await.unwrap();
                    let file =
                        PathBuf::from(file.replace("RECORD", pod.record.dir().to_str().unwrap()));
                    let text = fs::read(&file).unwrap();
                    fs::write(&file, &text[..if half { text.len() / 2 } else { 0 }]).unwrap();
                    pod.gone(&reaper).await;
                    before.assert_unchanged();
                }
            }
        },
    );
}

#[test]
fn what_is_refused_before_the_first_plugin_leaves_nothing_owed() {
    supervised(
        "what_is_refused_before_the_first_plugin_leaves_nothing_owed",
        async |reaper| {
            let [one] = fakes("pods", ["one"]);
            let pod = Pod::on("pods", "a").publish(8080, 80);
            let error = pod.add(&reaper).await.unwrap_err();
            assert!(
                error.kind() == Kind::Invalid && error.to_string().contains("portMappings"),
                "{error}"
            );

            cni::network(
                "gap",
                vec![json!({"type": "one"}), json!({"type": "absent"})],
            )
            .write();
            let gap = Pod::on("gap", "b");
            let error = gap.add(&reaper).await.unwrap_err().to_string();
            assert!(
                error.contains("\"absent\"") && error.contains("/opt/cni/bin"),
                "{error}"
            );

            let mut hostile = Pod::on("gap", "c");
            hostile.attachment.container_id = "../../etc".into();
            assert_eq!(
                hostile.add(&reaper).await.unwrap_err().kind(),
                Kind::Invalid
            );

            let mut plain = Pod::on("pods", "d");
            netns::unpin(&plain.attachment.netns).unwrap();
            fs::write(&plain.attachment.netns, "").unwrap();
            plain.attachment.port_mappings.clear();
            assert_eq!(plain.add(&reaper).await.unwrap_err().kind(), Kind::State);

            for pod in [pod, gap, hostile, plain] {
                assert!(!pod.record.owes_del() && !pod.record.dir().exists());
                pod.gone(&reaper).await;
            }
            assert_eq!(one.calls().len(), 0);
        },
    );
}

/// rust-notes C.2 25: descriptors of pipes, locks and netns.
#[test]
fn sixty_adds_and_dels_leave_no_descriptor() {
    supervised("sixty_adds_and_dels_leave_no_descriptor", async |reaper| {
        let [one] = fakes("pods", ["one"]);
        let fds = || fs::read_dir("/proc/self/fd").unwrap().count();
        let mut before = 0;
        for n in 0..60 {
            let pod = Pod::on("pods", "a");
            if n % 3 == 0 {
                one.on("ADD", &[Act::Exit(1)]);
                pod.add(&reaper).await.unwrap_err();
                one.on("ADD", &[]);
            } else {
                pod.add(&reaper).await.unwrap();
            }
            pod.gone(&reaper).await;
            if n == 1 {
                before = fds();
            }
        }
        assert_eq!(fds(), before);
    });
}

#[test]
fn a_hundred_pins_made_and_taken_away_leave_nothing() {
    sandboxed("a_hundred_pins_made_and_taken_away_leave_nothing", || {
        let config = Config::default();
        let before = Scope::default().take();
        let (pins, links, fds) = (
            pin_count(),
            netns_links(),
            fs::read_dir("/proc/self/fd").unwrap().count(),
        );
        for n in 0..100 {
            let path = netns::path(&config, "test", &format!("p{n}"));
            netns::make(&path).unwrap();
            assert!(netns::is_pinned(&path));
            assert_eq!(netns::make(&path).unwrap_err().kind(), Kind::Exists);
            netns::unpin(&path).unwrap();
            netns::unpin(&path).unwrap();
        }
        assert_eq!((pin_count(), netns_links()), (pins, links));
        assert_eq!(fs::read_dir("/proc/self/fd").unwrap().count(), fds);
        before.assert_unchanged();
    });
}

#[test]
fn a_pin_that_another_mount_namespace_holds_is_taken_away() {
    sandboxed(
        "a_pin_that_another_mount_namespace_holds_is_taken_away",
        || {
            tool("mount", &["--make-rshared", "/"]);
            let path = netns::path(&Config::default(), "test", "a");
            for propagation in ["private", "slave", "shared"] {
                netns::make(&path).unwrap();
                let mut holder = Command::new("unshare")
                    .args(["-m", "--propagation", propagation, "sleep", "600"])
                    .spawn()
                    .unwrap();
                let theirs = || {
                    fs::read_to_string(format!("/proc/{}/mountinfo", holder.id()))
                        .unwrap_or_default()
                };
                let asleep = || {
                    fs::read_to_string(format!("/proc/{}/comm", holder.id()))
                        .is_ok_and(|c| c.trim() == "sleep")
                };
                eventually(LIMIT, "the holder sleeps", || asleep().then_some(()));
                assert!(
                    theirs().contains(" - nsfs "),
                    "{propagation}: it holds a copy"
                );
                netns::unpin(&path).unwrap();
                assert!(!path.exists() && pin_count() == 0);
                assert!(
                    !theirs().contains(" - nsfs "),
                    "{propagation}: {}",
                    theirs()
                );
                holder.kill().unwrap();
                holder.wait().unwrap();
            }
        },
    );
}

#[test]
fn pins_stay_valid_beside_ip_netns_and_under_stacked_mounts() {
    sandboxed(
        "pins_stay_valid_beside_ip_netns_and_under_stacked_mounts",
        || {
            let config = Config::default();
            let paths = ["a", "b"].map(|id| netns::path(&config, "test", id));
            netns::make(&paths[0]).unwrap();
            ip(&["netns", "add", "x"]);
            netns::make(&paths[1]).unwrap();
            for path in &paths {
                let name = format!("podvisor-{}", path.file_name().unwrap().to_str().unwrap());
                ip(&["netns", "exec", &name, "true"]);
                tool("nsenter", &[&format!("--net={}", path.display()), "true"]);
            }
            // Somebody binds another netns over the path, twice.
            for _ in 0..2 {
                tool(
                    "mount",
                    &["--bind", "/run/netns/x", paths[0].to_str().unwrap()],
                );
            }
            for path in &paths {
                netns::unpin(path).unwrap();
                assert!(!path.exists());
            }
            assert!(
                fs::read_dir("/run/podvisor/netns")
                    .unwrap()
                    .next()
                    .is_none()
            );
            ip(&["netns", "exec", "x", "true"]);
            ip(&["netns", "del", "x"]);
        },
    );
}
