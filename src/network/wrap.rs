//! Putting the CNI plugin in front of a network that is configured, and taking it away again.
//!
//! Promises that a daemon that reads the file meanwhile sees the old or the new text, and that what is taken away is what
//! was put there: the real plugins' objects are moved, not changed.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use serde_json::{Map, Value, json};

use super::{NetworkConf, disk};
use crate::error::{Context, Error, Kind, Result};

/// The plugin's name in configurations, and its executable's.
pub const PLUGIN: &str = "podvisor-cni";

/// Puts the real plugins of a list into the places of ours. False: ours is not there, or names its network.
pub(super) fn expand(list: &mut Map<String, Value>) -> bool {
    let Some(Value::Array(plugins)) = list.get_mut("plugins") else {
        return false;
    };
    if !plugins.iter().any(|p| inner(p).is_some()) {
        return false;
    }
    let each = std::mem::take(plugins).into_iter();
    *plugins = each
        .flat_map(|p| inner(&p).map(<[Value]>::to_vec).unwrap_or_else(|| vec![p]))
        .collect();
    true
}

/// The real plugins behind ours; None: it is another plugin, or names its network.
fn inner(plugin: &Value) -> Option<&[Value]> {
    if plugin["type"] != PLUGIN {
        return None;
    }
    plugin["plugins"].as_array().map(Vec::as_slice)
}

/// Puts the plugin in front of all plugins of the network. False: it is there already.
pub fn wrap(conf: &NetworkConf) -> Result<bool> {
    rewrite(&conf.path, wrapped)
}

/// Takes it away. False: it is not there.
pub fn unwrap(conf: &NetworkConf) -> Result<bool> {
    rewrite(&conf.path, unwrapped)
}

/// What is known of networks whose agents look at a pod's netns, or write their configuration themselves. By the type of
/// the plugin; the facts are in docs/cni-plugin.md.
pub fn agent_note(kind: &str) -> Option<&'static str> {
    match kind {
        "calico" => Some(
            "Calico's install container writes its configuration anew when it starts: wrap again then. Its plugin and agent know a pod by names and host interface; not tried together",
        ),
        "cilium-cni" => Some(
            "Cilium's agent writes its configuration anew and moves others away (cni.exclusive); it keeps the netns' cookie and path of each endpoint. Not tried together",
        ),
        "flannel" => Some(
            "flannel's own plugin only calls bridge and host-local; its daemon set writes the configuration anew when it starts: wrap again then",
        ),
        "aws-cni" => Some(
            "the AWS VPC CNI's agent writes its configuration anew when it starts, and knows a pod by container id and interface: with this plugin that is the id of the first attempt. Not tried together",
        ),
        "multus" | "multus-shim" => Some(
            "put the plugin behind Multus, in front of the network that it delegates to: in front of Multus, its annotations name the first attempt's netns. Multus writes its configuration anew when it starts",
        ),
        _ => None,
    }
}

fn wrapped(mut top: Map<String, Value>) -> Option<Map<String, Value>> {
    let Some(Value::Array(plugins)) = top.get("plugins") else {
        // A single plugin: it keeps the file, and becomes a list of one behind ours.
        let mut ours = Map::new();
        for key in ["cniVersion", "name"] {
            if let Some(value) = top.shift_remove(key) {
                ours.insert(key.into(), value);
            }
        }
        let plugins = [Value::Object(top)];
        let front = in_front(&plugins);
        ours.extend(front);
        return Some(ours);
    };
    if top.get("type").is_some_and(|t| t == PLUGIN) || plugins.iter().any(|p| p["type"] == PLUGIN) {
        return None;
    }
    let front = Value::Object(in_front(plugins));
    top.insert("plugins".into(), json!([front]));
    Some(top)
}

/// Our object: it declares what the real ones declare, or nobody would hand it to us.
fn in_front(plugins: &[Value]) -> Map<String, Value> {
    let mut capabilities = Map::new();
    for plugin in plugins {
        let declared = plugin["capabilities"].as_object().into_iter().flatten();
        for (name, _) in declared.filter(|(_, on)| **on == Value::Bool(true)) {
            capabilities.insert(name.clone(), true.into());
        }
    }
    let mut ours = Map::new();
    ours.insert("type".into(), PLUGIN.into());
    if !capabilities.is_empty() {
        ours.insert("capabilities".into(), Value::Object(capabilities));
    }
    ours.insert("plugins".into(), plugins.into());
    ours
}

fn unwrapped(mut top: Map<String, Value>) -> Option<Map<String, Value>> {
    if top.get("type").is_some_and(|t| t == PLUGIN) {
        let Some(Value::Array(plugins)) = top.shift_remove("plugins") else {
            return None;
        };
        let Some(Value::Object(only)) = plugins.into_iter().next() else {
            return None;
        };
        top.retain(|key, _| key == "cniVersion" || key == "name");
        top.extend(only);
        return Some(top);
    }
    expand(&mut top).then_some(top)
}

fn rewrite(
    path: &Path,
    change: impl FnOnce(Map<String, Value>) -> Option<Map<String, Value>>,
) -> Result<bool> {
    let what = || format!("rewrite network configuration {}", path.display());
    let text = disk::read(path).context(what)?;
    let top: Map<String, Value> =
        serde_json::from_slice(&text).map_err(|e| Error::caused(Kind::Invalid, what(), e))?;
    let Some(changed) = change(top) else {
        return Ok(false);
    };
    let mut text =
        serde_json::to_vec_pretty(&changed).map_err(|e| Error::caused(Kind::Other, what(), e))?;
    text.push(b'\n');
    let mode = fs::metadata(path).context(what)?.permissions().mode();
    // A name that no daemon reads as a configuration.
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temp = path.with_file_name(format!(".{name}.podvisor"));
    disk::remove_file(&temp)?;
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode & 0o777)
        .open(&temp)
        .and_then(|mut file| {
            file.set_permissions(fs::Permissions::from_mode(mode & 0o777))?;
            file.write_all(&text)?;
            file.sync_all()
        })
        .and_then(|()| fs::rename(&temp, path))
        .context(what);
    if written.is_err() {
        let _ = fs::remove_file(&temp);
    }
    written?;
    let dir = path.parent().unwrap_or(path);
    File::open(dir)
        .and_then(|dir| dir.sync_all())
        .context(what)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(value: Value) -> Map<String, Value> {
        value.as_object().cloned().unwrap()
    }

    #[test]
    fn what_is_put_in_front_declares_what_the_real_ones_do_and_comes_off_again() {
        let list = object(
            json!({"cniVersion": "1.0.0", "name": "pods", "disableCheck": true, "plugins": [
            {"type": "bridge", "capabilities": {"ips": true}},
            {"type": "portmap", "capabilities": {"portMappings": true, "mac": false}}]}),
        );
        let front = wrapped(list.clone()).unwrap();
        assert_eq!(
            front["plugins"][0]["capabilities"],
            json!({"ips": true, "portMappings": true})
        );
        assert_eq!(front["disableCheck"], true);
        assert!(wrapped(front.clone()).is_none(), "once");
        assert_eq!(unwrapped(front).unwrap(), list);
        assert!(unwrapped(list).is_none());
    }

    #[test]
    fn a_single_plugin_keeps_its_file() {
        let single =
            object(json!({"cniVersion": "0.4.0", "name": "x", "type": "bridge", "ipam": {}}));
        let front = wrapped(single.clone()).unwrap();
        assert_eq!(
            (&front["type"], &front["plugins"][0]["type"]),
            (&json!(PLUGIN), &json!("bridge"))
        );
        assert!(wrapped(front.clone()).is_none());
        assert_eq!(unwrapped(front).unwrap(), single);
    }

    #[test]
    fn the_file_is_replaced_whole_and_keeps_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("10-x.conflist");
        let list = json!({"cniVersion": "1.0.0", "name": "x", "plugins": [{"type": "bridge"}]});
        fs::write(&path, list.to_string()).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let conf = super::super::conf::load(&path, list.to_string().into()).unwrap();
        assert!(wrap(&conf).unwrap() && !wrap(&conf).unwrap());
        let text = fs::read(&path).unwrap();
        let now = super::super::conf::load(&path, text).unwrap();
        assert_eq!(
            now.plugins, conf.plugins,
            "for our own pods it is not there"
        );
        assert!(unwrap(&conf).unwrap() && !unwrap(&conf).unwrap());
        let back: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(back, list);
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o640
        );
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
