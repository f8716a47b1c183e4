//! Records as a power cut or a kill may leave them.

use super::*;
use crate::network::slot::{OWNER, RESULT, STARTED, STOPPED};
use crate::network::{PortMapping, cache, conf};
use serde_json::{Map, json};

const TEXT: &str = r#"{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge"},{"type":"portmap","capabilities":{"portMappings":true}}]}"#;

struct Place {
    _dir: tempfile::TempDir,
    config: Config,
    conf: NetworkConf,
}

fn place() -> Place {
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config {
        state_root: dir.path().join("state"),
        runtime_root: dir.path().join("run"),
        ..Config::default()
    };
    config.cni.cache_dir = dir.path().join("cache");
    config.cni.conf_dir = dir.path().join("net.d");
    let conf = conf::parse(Path::new("/etc/cni/net.d/10-pods.conflist"), TEXT.into()).unwrap();
    Place {
        _dir: dir,
        config,
        conf,
    }
}

fn attachment(id: &str) -> Attachment {
    Attachment {
        container_id: id.into(),
        netns: "/run/podvisor/netns/x".into(),
        ifname: "eth0".into(),
        args: vec![("K8S_POD_NAME".into(), "web".into())],
        port_mappings: vec![PortMapping {
            host_port: 80,
            container_port: 80,
            protocol: "tcp".into(),
            host_ip: String::new(),
        }],
        capabilities: Map::new(),
    }
}

#[test]
fn del_is_owed_from_begin_to_stopped_and_add_is_refused_in_between() {
    let p = place();
    let record = NetworkRecord::at(&p.config, "default", "a");
    assert!(!record.owes_del() && !record.dir().exists());
    record.begin(&p.conf, &attachment("a")).unwrap();
    assert!(record.owes_del());
    assert_eq!(
        record
            .begin(&p.conf, &attachment("a"))
            .map_err(|e| e.kind()),
        Err(Kind::State)
    );
    assert_eq!(record.remove().map_err(|e| e.kind()), Err(Kind::State));
    record.slot("eth0").set_stopped().unwrap();
    assert!(!record.owes_del());
    record.begin(&p.conf, &attachment("a")).unwrap();
    assert!(record.owes_del());
    record.slot("eth0").set_stopped().unwrap();
    record.remove().unwrap();
    record.remove().unwrap();
    assert!(!record.dir().exists());
}

/// `delete`, `podvisor gc` and a keeper may come to it in one moment: each finds it done, and to nobody it seems owed.
#[test]
fn a_record_that_many_remove_at_once_is_removed_for_all_of_them() {
    let p = place();
    for round in 0..60 {
        let record = NetworkRecord::at(&p.config, "default", "a");
        record.begin(&p.conf, &attachment("a")).unwrap();
        record.slot("eth0").set_stopped().unwrap();
        std::thread::scope(|scope| {
            let removals: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        assert!(!record.owes_del());
                        record.remove()
                    })
                })
                .collect();
            for removal in removals {
                let removed = removal.join().unwrap();
                assert!(removed.is_ok(), "round {round}: {removed:?}");
            }
        });
        assert!(!record.dir().exists());
    }
}

#[test]
fn the_owed_del_has_the_configuration_arguments_and_result_of_its_add() {
    let p = place();
    let record = NetworkRecord::at(&p.config, "default", "a");
    record.begin(&p.conf, &attachment("a")).unwrap();
    record
        .slot("eth0")
        .keep_partial(&json!({"cniVersion": "1.0.0", "dns": {}}))
        .unwrap();
    let owed = record.slot("eth0").owed(&p.config).unwrap();
    assert_eq!(
        owed[0].previous,
        Some(json!({"cniVersion": "1.0.0", "dns": {}}))
    );
    record
        .slot("eth0")
        .finish(&AddResult {
            ips: vec!["10.0.0.2/24".into()],
            raw: json!({"cniVersion": "1.0.0"}),
            ..AddResult::default()
        })
        .unwrap();
    let owed = record.slot("eth0").owed(&p.config).unwrap();
    assert_eq!(owed.len(), 1);
    assert_eq!(owed[0].conf.bytes, TEXT.as_bytes());
    assert_eq!(
        owed[0].attachment.port_mappings,
        attachment("a").port_mappings
    );
    assert_eq!(owed[0].previous, Some(json!({"cniVersion": "1.0.0"})));
    assert_eq!(record.read_result().unwrap().ips, ["10.0.0.2/24"]);
}

#[test]
fn a_record_cut_to_nothing_or_in_half_still_owes_its_del() {
    for (file, cached) in [
        (STARTED, true),
        (STARTED, false),
        (OWNER, false),
        (RESULT, true),
        (STOPPED, true),
    ] {
        for keep in [0.0, 0.5] {
            let p = place();
            let record = NetworkRecord::at(&p.config, "default", "a");
            record.begin(&p.conf, &attachment("a")).unwrap();
            record.slot("eth0").finish(&AddResult::default()).unwrap();
            if cached {
                cache::write(
                    &p.config.cni.cache_dir,
                    &p.conf,
                    &attachment("a"),
                    &json!({}),
                )
                .unwrap();
            } else {
                fs::create_dir_all(&p.config.cni.conf_dir).unwrap();
                fs::write(p.config.cni.conf_dir.join("10-pods.conflist"), TEXT).unwrap();
                fs::write(
                    p.config.cni.conf_dir.join("20-other.conflist"),
                    TEXT.replace("pods", "other"),
                )
                .unwrap();
            }
            let path = record.dir().join(file);
            let text = fs::read(&path).unwrap_or_default();
            fs::write(&path, &text[..(text.len() as f64 * keep) as usize]).unwrap();
            // network-stopped alone needs no content: it is renamed into place after the DEL.
            assert_eq!(record.owes_del(), file != STOPPED, "{file}");
            let owed = record.slot("eth0").owed(&p.config).unwrap();
            assert_eq!(owed.len(), 1, "{file} {keep}");
            assert_eq!(
                (
                    owed[0].conf.name.as_str(),
                    owed[0].attachment.container_id.as_str()
                ),
                ("pods", "a")
            );
            assert_eq!(NetworkRecord::list(&p.config)[0].1, "a", "{file}");
        }
    }
}

#[test]
fn a_record_of_which_nothing_can_be_read_is_listed_and_an_error() {
    let p = place();
    let record = NetworkRecord::at(&p.config, "default", "a");
    record.begin(&p.conf, &attachment("a")).unwrap();
    for file in [OWNER, STARTED] {
        fs::write(record.dir().join(file), "").unwrap();
    }
    let listed = NetworkRecord::list(&p.config);
    assert_eq!((listed[0].0.as_str(), listed[0].1.len()), ("", 32));
    assert!(listed[0].2.owes_del());
    assert_eq!(
        listed[0]
            .2
            .slot("eth0")
            .owed(&p.config)
            .map_err(|e| e.kind())
            .unwrap_err(),
        Kind::State
    );
    // By its place it is still known; the cache then has the rest.
    cache::write(
        &p.config.cni.cache_dir,
        &p.conf,
        &attachment("a"),
        &json!({}),
    )
    .unwrap();
    assert_eq!(record.slot("eth0").owed(&p.config).unwrap().len(), 1);
}

#[test]
fn two_processes_do_not_work_on_one_record() {
    let p = place();
    let record = NetworkRecord::at(&p.config, "default", "a");
    record.begin(&p.conf, &attachment("a")).unwrap();
    let held = record.lock().unwrap();
    assert_eq!(record.lock().map_err(|e| e.kind()).unwrap_err(), Kind::Busy);
    drop(held);
    record.lock().unwrap();
}

#[test]
fn a_state_root_that_others_can_write_to_is_refused_before_anything_runs() {
    use std::os::unix::fs::PermissionsExt;
    let p = place();
    fs::create_dir_all(&p.config.state_root).unwrap();
    fs::set_permissions(&p.config.state_root, fs::Permissions::from_mode(0o777)).unwrap();
    let record = NetworkRecord::at(&p.config, "default", "a");
    assert_eq!(
        record
            .begin(&p.conf, &attachment("a"))
            .map_err(|e| e.kind()),
        Err(Kind::Denied)
    );
    assert!(!record.owes_del());
}

#[test]
fn the_hash_keeps_namespaces_and_ids_apart() {
    assert_ne!(hash("a", "b-c"), hash("a-b", "c"));
    assert_eq!(hash("a", "b").len(), 32);
}

#[test]
fn attachments_have_files_of_their_own_and_keep_their_order() {
    let p = place();
    let record = NetworkRecord::at(&p.config, "default", "a");
    let on = |ifname: &str| Attachment {
        ifname: ifname.into(),
        ..attachment("a")
    };
    let names = |record: &NetworkRecord| -> Vec<String> {
        record.attachments().into_iter().map(|a| a.ifname).collect()
    };
    for ifname in ["net9", "eth0", "eth1"] {
        record.begin(&p.conf, &on(ifname)).unwrap();
    }
    let again = record.begin(&p.conf, &on("eth1"));
    assert_eq!(again.map_err(|e| e.kind()), Err(Kind::State));
    assert_eq!(names(&record), ["net9", "eth0", "eth1"]);
    for ifname in ["eth1", "eth0"] {
        record.slot(ifname).set_stopped().unwrap();
        assert!(record.owes_del());
    }
    // Cut to nothing, it is still known whose it was.
    let dir = record.dir().join("if-net9");
    fs::write(dir.join(STARTED), "").unwrap();
    fs::write(dir.join(OWNER), "").unwrap();
    cache::write(&p.config.cni.cache_dir, &p.conf, &on("net9"), &json!({})).unwrap();
    cache::write(&p.config.cni.cache_dir, &p.conf, &on("eth1"), &json!({})).unwrap();
    let owed = record.slot("net9").owed(&p.config).unwrap();
    assert_eq!(
        (owed.len(), owed[0].attachment.ifname.as_str()),
        (1, "net9")
    );
    assert_eq!(record.remove().map_err(|e| e.kind()), Err(Kind::State));
    record.slot("net9").set_stopped().unwrap();
    // A new life knows nothing of the old one's attachments.
    record.begin(&p.conf, &on("eth0")).unwrap();
    assert_eq!(names(&record), ["eth0"]);
    record.slot("eth0").set_stopped().unwrap();
    record.remove().unwrap();
    assert!(!record.dir().exists());
}
