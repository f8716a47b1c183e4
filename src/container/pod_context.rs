//! What a pod adds to a container's config.json: its namespaces and its files.
//!
//! Only what is named here is touched; everything else of the document passes through. Applying it twice is applying it
//! once, because a retry finds the document that the first try wrote.

use std::path::Path;

use serde_json::Value;

use super::PodContext;
use crate::spec::Spec;

/// Namespaces a container may share with its pod. Mount, user and cgroup namespaces are never joined.
const SHARED: [&str; 4] = ["network", "ipc", "uts", "pid"];
/// The one place where a pod's mount takes the place of the spec's.
const SHM: &str = "/dev/shm";

/// Edits `spec`; false when there was nothing to do.
pub(super) fn apply(spec: &mut Spec, pod: &PodContext) -> bool {
    let joined = join(spec, pod);
    let files = bind(spec, pod);
    joined || files
}

/// Gives a path to each namespace that is listed without one. One that is not listed is the host's, as asked for.
fn join(spec: &mut Spec, pod: &PodContext) -> bool {
    let mut changed = false;
    for (kind, path) in spec.namespaces() {
        let shared = pod
            .join
            .iter()
            .find(|(k, _)| *k == kind && SHARED.contains(&k.as_str()));
        let (None, Some((_, pods))) = (path, shared) else {
            continue;
        };
        spec.set_namespace_path(&kind, pods);
        changed = true;
        if let ("uts", Some(root)) = (kind.as_str(), spec.json.as_object_mut()) {
            // The runtime would set these names in the pod's own namespace, for all of its containers.
            root.shift_remove("hostname");
            root.shift_remove("domainname");
        }
    }
    changed
}

fn bind(spec: &mut Spec, pod: &PodContext) -> bool {
    let mut changed = false;
    for (destination, source, options) in &pod.files {
        match spec.find_mount(destination) {
            Some(old) if destination == Path::new(SHM) && is_fresh_tmpfs(old) => {}
            Some(_) => continue,
            None => {}
        }
        spec.replace_mount(destination, source, "bind", options);
        changed = true;
    }
    changed
}

fn is_fresh_tmpfs(mount: &Value) -> bool {
    mount.get("type").and_then(Value::as_str) == Some("tmpfs")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn context() -> PodContext {
        let bind = |to: &str, from: &str| {
            (
                to.into(),
                from.into(),
                vec!["rbind".to_owned(), "rw".to_owned()],
            )
        };
        PodContext {
            join: ["network", "ipc", "uts", "mount", "user", "cgroup"]
                .map(|kind| (kind.to_owned(), format!("/pod/{kind}").into()))
                .to_vec(),
            files: vec![
                bind("/etc/hosts", "/pod/hosts"),
                bind("/etc/resolv.conf", "/pod/resolv.conf"),
                bind("/dev/shm", "/pod/shm"),
            ],
        }
    }

    fn spec(json: Value) -> Spec {
        Spec { json }
    }

    #[test]
    fn only_private_shareable_namespaces_are_joined() {
        let mut spec = spec(
            json!({"hostname": "h", "vendor": {"x": [1.5]}, "linux": {"namespaces": [
            {"type": "pid"}, {"type": "network", "path": "/given"}, {"type": "ipc", "path": ""}, {"type": "uts"},
            {"type": "mount"}, {"type": "user"}, {"type": "cgroup"}]}}),
        );
        assert!(apply(
            &mut spec,
            &PodContext {
                files: vec![],
                ..context()
            }
        ));
        assert_eq!(
            spec.json,
            json!({"vendor": {"x": [1.5]}, "linux": {"namespaces": [
                {"type": "pid"}, {"type": "network", "path": "/given"}, {"type": "ipc", "path": "/pod/ipc"},
                {"type": "uts", "path": "/pod/uts"}, {"type": "mount"}, {"type": "user"}, {"type": "cgroup"}]}})
        );
    }

    #[test]
    fn a_pid_namespace_is_joined_only_where_the_pod_shares_one() {
        let mut spec = spec(json!({"linux": {"namespaces": [{"type": "pid"}]}}));
        assert!(!apply(&mut spec, &context().with_files(vec![])));
        let shared = PodContext {
            join: vec![("pid".into(), "/pod/pid".into())],
            files: vec![],
        };
        assert!(apply(&mut spec, &shared));
        assert_eq!(
            spec.json.pointer("/linux/namespaces/0/path"),
            Some(&json!("/pod/pid"))
        );
    }

    #[test]
    fn what_the_spec_mounts_itself_stays() {
        let mut spec = spec(json!({"mounts": [
            {"destination": "/etc/hosts/", "type": "bind", "source": "/kubelet/hosts"},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm"}]}));
        assert!(apply(&mut spec, &context()));
        let mounts = spec.json["mounts"]
            .as_array()
            .map(|m| m.iter().map(|m| m["source"].clone()).collect::<Vec<_>>());
        assert_eq!(
            mounts,
            Some(vec![
                json!("/kubelet/hosts"),
                json!("/pod/shm"),
                json!("/pod/resolv.conf")
            ])
        );
    }

    #[test]
    fn applying_twice_is_applying_once() {
        for start in [
            json!({}),
            json!({"mounts": null, "linux": {}}),
            json!({"mounts": [{"destination": "/dev/shm", "type": "tmpfs"}], "linux": {"namespaces": [{"type": "uts"}]}}),
        ] {
            let mut spec = spec(start);
            assert!(apply(&mut spec, &context()));
            let once = spec.json.clone();
            assert!(!apply(&mut spec, &context()));
            assert_eq!(spec.json, once);
        }
    }

    impl PodContext {
        fn with_files(
            mut self,
            files: Vec<(std::path::PathBuf, std::path::PathBuf, Vec<String>)>,
        ) -> Self {
            self.files = files;
            self
        }
    }
}
