//! Changes to a spec: namespaces, mounts and limits, by the names a container room thinks in.
//!
//! Promises to touch exactly the entry asked for and to make missing parents. Must never drop or reorder other entries.

use std::path::{Component, Path, PathBuf};

use serde_json::{Map, Value, json};

use super::Spec;

impl Spec {
    /// Gives the namespace `kind` ("network", "ipc", ...) this path; adds the entry when the spec has none.
    pub fn set_namespace_path(&mut self, kind: &str, path: &Path) {
        let entry = json!({ "type": kind, "path": path.to_string_lossy() });
        let list = array(self.child("linux"), "namespaces");
        match list
            .iter_mut()
            .find(|e| e.get("type").and_then(Value::as_str) == Some(kind))
        {
            Some(found) => *found = entry,
            None => list.push(entry),
        }
    }

    /// Takes the namespace `kind` out of the list: the container then shares the runtime's. False when it had none.
    pub fn remove_namespace(&mut self, kind: &str) -> bool {
        let list = array(self.child("linux"), "namespaces");
        let before = list.len();
        list.retain(|e| e.get("type").and_then(Value::as_str) != Some(kind));
        list.len() != before
    }

    /// The last mount at `destination` (the one that is seen), compared as a path: `/dev/shm/` is `/dev/shm`.
    pub fn find_mount(&self, destination: &Path) -> Option<&Value> {
        self.list("/mounts")
            .iter()
            .rev()
            .find(|m| is_at(m, destination))
    }

    /// Appends a mount.
    pub fn add_mount(&mut self, destination: &Path, source: &Path, kind: &str, options: &[String]) {
        let entry = mount(destination, source, kind, options);
        self.mounts().push(entry);
    }

    /// Puts a mount in the place of the last one at `destination`, or appends it.
    pub fn replace_mount(
        &mut self,
        destination: &Path,
        source: &Path,
        kind: &str,
        options: &[String],
    ) {
        let entry = mount(destination, source, kind, options);
        let list = self.mounts();
        match list.iter_mut().rev().find(|m| is_at(m, destination)) {
            Some(found) => *found = entry,
            None => list.push(entry),
        }
    }

    /// Sets `linux.cgroupsPath`.
    pub fn set_cgroups_path(&mut self, path: &str) {
        self.child("linux")
            .insert("cgroupsPath".into(), path.into());
    }

    /// Adds a limit to `process.rlimits` unless the spec has one of this kind ("RLIMIT_NOFILE") or no process; true when
    /// it was added.
    pub fn add_missing_rlimit(&mut self, kind: &str, soft: u64, hard: u64) -> bool {
        if !self.json.get("process").is_some_and(Value::is_object) {
            return false;
        }
        let list = array(self.child("process"), "rlimits");
        let listed = list
            .iter()
            .any(|e| e.get("type").and_then(Value::as_str) == Some(kind));
        if !listed {
            list.push(json!({ "type": kind, "soft": soft, "hard": hard }));
        }
        !listed
    }

    /// Sets `annotations.<key>`.
    pub fn set_annotation(&mut self, key: &str, value: &str) {
        self.child("annotations").insert(key.into(), value.into());
    }

    fn mounts(&mut self) -> &mut Vec<Value> {
        let top = object(&mut self.json);
        array(top, "mounts")
    }

    fn child(&mut self, name: &str) -> &mut Map<String, Value> {
        object(object(&mut self.json).entry(name).or_insert(Value::Null))
    }
}

fn mount(destination: &Path, source: &Path, kind: &str, options: &[String]) -> Value {
    json!({
        "destination": destination.to_string_lossy(),
        "type": kind,
        "source": source.to_string_lossy(),
        "options": options,
    })
}

fn is_at(mount: &Value, destination: &Path) -> bool {
    let given = mount.get("destination").and_then(Value::as_str);
    given.is_some_and(|given| clean(Path::new(given)) == clean(destination))
}

/// `/a//b/./` is `/a/b`; a relative destination counts from the root, as runtimes take it.
fn clean(path: &Path) -> PathBuf {
    let mut out = PathBuf::from("/");
    for part in path.components() {
        match part {
            Component::Normal(name) => out.push(name),
            Component::ParentDir => {
                out.pop();
            }
            _ => {}
        }
    }
    out
}

/// The object at this place; what is no object there (null) becomes an empty one.
fn object(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    match value {
        Value::Object(map) => map,
        _ => unreachable!("made an object above"),
    }
}

fn array<'a>(parent: &'a mut Map<String, Value>, name: &str) -> &'a mut Vec<Value> {
    let value = parent.entry(name).or_insert(Value::Null);
    if !value.is_array() {
        *value = Value::Array(Vec::new());
    }
    match value {
        Value::Array(list) => list,
        _ => unreachable!("made an array above"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespace_path_is_set_in_place_or_added() {
        let mut spec =
            Spec::parse(br#"{"linux":{"namespaces":[{"type":"ipc"},{"type":"mount"}]}}"#).unwrap();
        spec.set_namespace_path("ipc", Path::new("/proc/7/ns/ipc"));
        spec.set_namespace_path("network", Path::new("/run/n"));
        let kinds = spec.namespaces();
        assert_eq!(kinds[0], ("ipc".into(), Some("/proc/7/ns/ipc".into())));
        assert_eq!(kinds[1], ("mount".into(), None));
        assert_eq!(kinds[2], ("network".into(), Some("/run/n".into())));
        assert!(spec.remove_namespace("ipc") && !spec.remove_namespace("ipc"));
    }

    #[test]
    fn a_limit_is_added_once_and_only_where_there_is_a_process() {
        let mut spec = Spec::parse(br#"{"process":{"rlimits":null}}"#).unwrap();
        assert!(spec.add_missing_rlimit("RLIMIT_NOFILE", 1, 2));
        assert!(!spec.add_missing_rlimit("RLIMIT_NOFILE", 3, 4));
        let limit = json!([{"type": "RLIMIT_NOFILE", "soft": 1, "hard": 2}]);
        assert_eq!(spec.json["process"]["rlimits"], limit);
        let mut spec = Spec::parse(b"{}").unwrap();
        assert!(!spec.add_missing_rlimit("RLIMIT_NOFILE", 1, 2));
        assert_eq!(spec.json, json!({}));
    }

    #[test]
    fn mounts_are_found_by_path_and_replaced_in_place() {
        let text = br#"{"mounts":[{"destination":"/proc","type":"proc"},{"destination":"/dev//shm/","type":"tmpfs"},{"destination":"/x"}]}"#;
        let mut spec = Spec::parse(text).unwrap();
        assert!(spec.find_mount(Path::new("/dev/shm")).is_some());
        assert!(spec.find_mount(Path::new("/dev")).is_none());
        let options = ["rbind".to_owned()];
        spec.replace_mount(
            Path::new("/dev/shm"),
            Path::new("/run/shm"),
            "bind",
            &options,
        );
        spec.replace_mount(
            Path::new("/etc/hosts"),
            Path::new("/run/hosts"),
            "bind",
            &options,
        );
        spec.add_mount(Path::new("/y"), Path::new("/z"), "bind", &[]);
        let order: Vec<_> = spec.json["mounts"]
            .as_array()
            .unwrap()
            .iter()
            .map(|m| m["destination"].as_str().unwrap())
            .collect();
        assert_eq!(order, ["/proc", "/dev/shm", "/x", "/etc/hosts", "/y"]);
        assert_eq!(spec.json["mounts"][1]["source"], "/run/shm");
    }

    #[test]
    fn parents_are_made_when_missing() {
        let mut spec = Spec::parse(br#"{"linux":null}"#).unwrap();
        spec.set_cgroups_path("/a");
        spec.set_annotation("k", "v");
        spec.add_mount(Path::new("/y"), Path::new("/z"), "bind", &[]);
        assert_eq!(spec.cgroups_path(), Some("/a"));
        assert_eq!(spec.annotations().len(), 1);
        assert!(spec.find_mount(Path::new("/y")).is_some());
    }
}
