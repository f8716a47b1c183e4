//! A network whose plugin does to each pod what that pod's history wants, quickly: thousands of calls a minute.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::support::cni;

const STATE: &str = "/run/chaos";
const LEASES: &str = "/var/lib/cni/networks/chaos";

/// `$1` of a mood's text does the plugin's work.
const SCRIPT: &str = r#"#!/bin/sh
cat >/dev/null
id=$CNI_CONTAINERID d=/run/chaos/$CNI_CONTAINERID lease=/var/lib/cni/networks/chaos/$CNI_CONTAINERID
case $CNI_COMMAND in
VERSION) echo '{"cniVersion":"1.0.0","supportedVersions":["0.4.0","1.0.0"]}'; exit;;
ADD|DEL) ;;
*) exit;;
esac
echo "$CNI_COMMAND" >>"$d/calls"
work() {
    case $CNI_COMMAND in
    ADD)
        [ ! -e "$lease" ] || echo "$id: an ADD on top of another" >>/run/chaos/wrong
        echo "$id" >"$lease";;
    DEL) rm -f "$lease";;
    esac
}
[ ! -r "$d/$CNI_COMMAND" ] || . "$d/$CNI_COMMAND"
[ ! -r "/run/chaos/all-$CNI_COMMAND" ] || . "/run/chaos/all-$CNI_COMMAND"
work
[ "$CNI_COMMAND" != ADD ] || echo '{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"'$CNI_NETNS'"}],"ips":[{"interface":0,"address":"10.99.0.2/24"}]}'
"#;

/// What a plugin does at a verb.
#[derive(Debug, Clone, Copy)]
pub enum Mood {
    Well,
    Slow(u64),
    Fails,
    FailsOnce,
    Dies,
    Hangs,
    /// Does its work, and fails all the same.
    FailsLate,
    DiesLate,
}

impl Mood {
    fn text(self) -> String {
        match self {
            Self::Well => String::new(),
            Self::Slow(ms) => format!("sleep {}.{:03}", ms / 1000, ms % 1000),
            Self::Fails => "exit 1".into(),
            Self::FailsOnce => "rm -f \"$d/$CNI_COMMAND\"; exit 1".into(),
            Self::Dies => "kill -9 $$".into(),
            Self::Hangs => "sleep 60".into(),
            Self::FailsLate => "work; exit 1".into(),
            Self::DiesLate => "work; kill -9 $$".into(),
        }
    }
}

/// The network `chaos`.
pub fn install() {
    let path = Path::new(cni::PLUGINS).join("chaos");
    fs::write(&path, SCRIPT).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir_all(STATE).unwrap();
    fs::create_dir_all(LEASES).unwrap();
    cni::network("chaos", vec![json!({"type": "chaos"})]).write();
}

fn place(id: &str) -> PathBuf {
    Path::new(STATE).join(id)
}

/// What `verb` does for this pod from its next call on.
pub fn mood(id: &str, verb: &str, mood: Mood) {
    let dir = place(id);
    fs::create_dir_all(&dir).unwrap();
    let new = dir.join(format!(".{verb}"));
    fs::write(&new, mood.text()).unwrap();
    fs::rename(new, dir.join(verb)).unwrap();
}

/// What `verb` does for all of them.
pub fn mood_of_all(verb: &str, mood: Mood) {
    fs::write(format!("{STATE}/all-{verb}"), mood.text()).unwrap();
}

/// Calls of `verb` for this pod.
pub fn count(id: &str, verb: &str) -> usize {
    let calls = fs::read_to_string(place(id).join("calls")).unwrap_or_default();
    calls.lines().filter(|line| *line == verb).count()
}

pub fn has_lease(id: &str) -> bool {
    Path::new(LEASES).join(id).exists()
}

/// What the plugin should never have been asked for.
pub fn wrong() -> String {
    fs::read_to_string(format!("{STATE}/wrong")).unwrap_or_default()
}
