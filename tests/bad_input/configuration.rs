//! What can be wrong with the configuration, the networks, the plugins and the runtimes.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::json;

use crate::support::bin::PODVISOR;
use crate::support::fake::{self, Act};
use crate::support::{self, Output, cni, podvisor};
use crate::{nothing_left, refused, run};

const CONFIG: &str = "/etc/podvisor/config.toml";

#[test]
fn a_network_that_is_not_configured_is_named_with_those_that_are() {
    nothing_left(
        "configuration::a_network_that_is_not_configured_is_named_with_those_that_are",
        |rootfs| {
            let on = |net: &str| run(&["--rootfs", rootfs.str(), "--net", net]);
            refused(&on("nope"), &["\"nope\"", "testnet", cni::CONFIGS]);
            for name in ["", "..", "../../etc/x", "a b", "-x"] {
                let flag = format!("--net={name}");
                refused(&run(&["--rootfs", rootfs.str(), &flag]), &["network name"]);
            }
            fs::remove_file(format!("{}/10-testnet.conflist", cni::CONFIGS)).unwrap();
            refused(
                &run(&["--rootfs", rootfs.str()]),
                &[cni::CONFIGS, "--net none"],
            );
        },
    );
}

#[test]
fn a_broken_conflist_is_named_when_it_is_the_one_asked_for() {
    nothing_left(
        "configuration::a_broken_conflist_is_named_when_it_is_the_one_asked_for",
        |rootfs| {
            let on = |net: &str| run(&["--rootfs", rootfs.str(), "--net", net]);
            let whole = cni::bridge("broken", "pvt0", "10.87.2.0/24")
                .json()
                .to_string();
            let file = format!("{}/05-broken.conflist", cni::CONFIGS);
            let texts = [
                whole[..whole.len() - 9].to_owned(),
                r#"{"cniVersion":"1.0.0","name":"broken","plugins":[]}"#.to_owned(),
                r#"{"cniVersion":"1.0.0","name":"broken","plugins":"x"}"#.to_owned(),
                r#"{"cniVersion":"1.0.0","name":"broken","plugins":[{"type":"../bridge"}]}"#
                    .to_owned(),
            ];
            for text in &texts {
                fs::write(&file, text).unwrap();
                refused(&on("broken"), &["broken", &file]);
                // The others are as good as ever, the first of them is the default.
                on("testnet").ok();
                run(&["--rootfs", rootfs.str()]).ok();
            }
            fs::write(&file, "").unwrap();
            refused(&on("broken"), &["\"broken\""]);
        },
    );
}

#[test]
fn a_missing_plugin_is_named_with_the_places_it_was_looked_for() {
    nothing_left(
        "configuration::a_missing_plugin_is_named_with_the_places_it_was_looked_for",
        |rootfs| {
            cni::network("odd", vec![json!({ "type": "nosuchplugin" })]).write();
            refused(
                &run(&["--rootfs", rootfs.str(), "--net", "odd"]),
                &["\"nosuchplugin\"", "\"odd\"", cni::PLUGINS, "install it"],
            );
            let ipam =
                json!({ "type": "bridge", "bridge": "pvt0", "ipam": { "type": "nosuchipam" } });
            cni::network("ipam", vec![ipam]).write();
            refused(
                &run(&["--rootfs", rootfs.str(), "--net", "ipam"]),
                &["\"nosuchipam\"", "\"ipam\""],
            );
        },
    );
}

#[test]
fn a_plugin_that_fails_is_told_in_its_own_words() {
    nothing_left(
        "configuration::a_plugin_that_fails_is_told_in_its_own_words",
        |rootfs| {
            let plugin = fake::plugin(Path::new(cni::PLUGINS), "odd");
            cni::network("odd", vec![json!({ "type": "odd" })]).write();
            let error = r#"{"cniVersion":"1.0.0","code":11,"msg":"no address left in the pool","details":"10.9.0.0/24"}"#;
            plugin.on("ADD", &[Act::Print(error.into()), Act::Exit(1)]);
            refused(
                &run(&["--rootfs", rootfs.str(), "--net", "odd"]),
                &["odd", "no address left in the pool"],
            );
            plugin.on("ADD", &[Act::Print("no json".into())]);
            refused(&run(&["--rootfs", rootfs.str(), "--net", "odd"]), &["odd"]);
        },
    );
}

#[test]
fn a_missing_runtime_is_named() {
    nothing_left("configuration::a_missing_runtime_is_named", |rootfs| {
        let flags = ["--net", "none", "--rootfs", rootfs.str()];
        for wanted in ["nosuchruntime", "/nowhere/runc", "/etc/passwd"] {
            fs::write(CONFIG, format!("runtime = {wanted:?}\n")).unwrap();
            refused(&run(&flags), &[wanted, "runtime", "configuration"]);
        }
        // A runtime that is no runtime: found out by the first container, which leaves nothing.
        fs::write(CONFIG, "runtime = \"/bin/false\"\n").unwrap();
        refused(&run(&flags), &["/bin/false"]);
        fs::remove_file(CONFIG).unwrap();
        fs::create_dir("/run/empty").unwrap();
        let mut command = Command::new(PODVISOR);
        command.env("PATH", "/run/empty").args([
            "run",
            "--net",
            "none",
            "--rootfs",
            rootfs.str(),
            "--",
            "true",
        ]);
        refused(
            &support::run(&mut command, Duration::from_secs(60)),
            &["neither crun nor runc"],
        );
    });
}

#[test]
fn a_broken_configuration_is_told_with_file_and_place() {
    nothing_left(
        "configuration::a_broken_configuration_is_told_with_file_and_place",
        |rootfs| {
            let verbs: [&[&str]; 3] = [
                &["run", "--rootfs", rootfs.str(), "--", "true"],
                &["ps"],
                &["rm", "-f", "x"],
            ];
            for (text, words) in [
                ("runtime = [", "line 1"),
                ("runtim = \"runc\"", "runtim"),
                ("idle_timeout = \"x\"", "line 1"),
                ("[cni]\nadd_timeout = -1.0", "cni.add_timeout"),
                ("cgroup_parent = \"x/..\"", "cgroup_parent"),
            ] {
                fs::write(CONFIG, text).unwrap();
                for verb in verbs {
                    refused(&podvisor(verb), &[CONFIG, words]);
                }
            }
            fs::write(CONFIG, [0xff, 0xfe]).unwrap();
            refused(&podvisor(&["ps"]), &[CONFIG]);
            fs::remove_file(CONFIG).unwrap();
            refused(&with_config("/nowhere.toml", &["ps"]), &["/nowhere.toml"]);
            refused(&with_config("/etc", &["ps"]), &["/etc"]);
        },
    );
}

#[test]
fn a_socket_path_that_is_too_long_is_told_with_its_length() {
    nothing_left(
        "configuration::a_socket_path_that_is_too_long_is_told_with_its_length",
        |rootfs| {
            let root = format!("/run/podvisor/{}", "d".repeat(90));
            let file = "/run/long.toml";
            fs::write(file, format!("runtime_root = {root:?}\n")).unwrap();
            let line = [
                "run",
                "--net",
                "none",
                "--name",
                "long",
                "--rootfs",
                rootfs.str(),
                "--",
                "true",
            ];
            refused(
                &with_config(file, &line),
                &["bytes", "limit is 107", "shorter"],
            );
            assert_eq!(with_config(file, &["ps", "-aq"]).ok().stdout, "");
            // Our own empty directories.
            fs::remove_dir_all("/run/podvisor").unwrap();
            fs::remove_file(file).unwrap();
        },
    );
}

fn with_config(file: &str, args: &[&str]) -> Output {
    let mut command = Command::new(PODVISOR);
    command.env("PODVISOR_CONFIG", file).args(args);
    support::run(&mut command, Duration::from_secs(60))
}
