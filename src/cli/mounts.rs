//! Mounts of a container as people write them, as OCI mounts.
//!
//! Text to value; only [`check`] looks at the machine. Promises that a mount says each thing once, and where.

use std::path::{Component, Path};

use serde_json::{Value, json};

use crate::error::{Error, Kind, Result};

use super::parse;

/// `type=bind,src=DIR,dst=DIR[,ro][,propagation=MODE]`, `type=tmpfs,dst=DIR[,size=SIZE][,mode=OCTAL][,ro]`.
pub fn flag(text: &str) -> std::result::Result<Value, String> {
    let usage = |why: &str| {
        format!("{text:?}: {why}; write type=bind,src=DIR,dst=DIR[,ro] or type=tmpfs,dst=DIR")
    };
    let (mut kind, mut source, mut target) = (None, None, None);
    let (mut read_only, mut size, mut mode, mut propagation) = (false, None, None, None);
    for part in text.split(',') {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        let once = |slot: &mut Option<String>| match slot.replace(value.to_owned()) {
            _ if value.is_empty() => Err(usage(&format!("{key:?} needs a value"))),
            None => Ok(()),
            Some(_) => Err(usage(&format!("{key:?} is said twice"))),
        };
        match key {
            "type" => once(&mut kind)?,
            "src" | "source" => once(&mut source)?,
            "dst" | "target" | "destination" => once(&mut target)?,
            "size" | "tmpfs-size" => once(&mut size)?,
            "mode" | "tmpfs-mode" => once(&mut mode)?,
            "propagation" | "bind-propagation" => once(&mut propagation)?,
            "ro" | "readonly" => {
                read_only = match value {
                    "" | "true" => true,
                    "false" => false,
                    _ => return Err(usage(&format!("{key:?} is true or false"))),
                }
            }
            _ => return Err(usage(&format!("{key:?} is no key of a mount"))),
        }
    }
    let target = target.ok_or_else(|| usage("dst is missing"))?;
    match (kind.as_deref(), source) {
        (None | Some("bind"), Some(source)) if size.is_none() && mode.is_none() => {
            let propagation = propagation.as_deref().unwrap_or("rprivate");
            if !PROPAGATIONS.contains(&propagation) {
                return Err(usage(&format!("{propagation:?} is no propagation")));
            }
            bind(&source, &target, read_only, propagation)
        }
        (None | Some("bind"), Some(_)) => Err(usage("size and mode are for tmpfs")),
        (Some("tmpfs"), None) if propagation.is_none() => {
            tmpfs(&target, read_only, size.as_deref(), mode.as_deref())
        }
        (Some("tmpfs"), _) => Err(usage("src and propagation are for bind")),
        (None | Some("bind"), None) => Err(usage("src is missing")),
        (Some(other), _) => Err(usage(&format!("{other:?} is no type"))),
    }
}

const PROPAGATIONS: [&str; 6] = [
    "private", "rprivate", "shared", "rshared", "slave", "rslave",
];

/// `HOST:CTR[:ro|rw]`.
pub fn volume(text: &str) -> std::result::Result<Value, String> {
    let parts: Vec<&str> = text.split(':').collect();
    let (source, target, read_only) = match parts[..] {
        [source, target] | [source, target, "rw"] => (source, target, false),
        [source, target, "ro"] => (source, target, true),
        _ => {
            return Err(format!(
                "{text:?}: write HOST:CTR or HOST:CTR:ro, both absolute paths"
            ));
        }
    };
    bind(source, target, read_only, "rprivate")
}

/// A directory or file of the host at `target`.
pub fn bind(
    source: &str,
    target: &str,
    read_only: bool,
    propagation: &str,
) -> std::result::Result<Value, String> {
    if !source.starts_with('/') {
        return Err(format!("{source:?}: give an absolute path on the host"));
    }
    place(target)?;
    let access = if read_only { "ro" } else { "rw" };
    Ok(
        json!({ "destination": target, "type": "bind", "source": source,
        "options": ["rbind", access, propagation] }),
    )
}

fn tmpfs(
    target: &str,
    read_only: bool,
    size: Option<&str>,
    mode: Option<&str>,
) -> std::result::Result<Value, String> {
    place(target)?;
    let mut options = vec!["nosuid".to_owned(), "nodev".to_owned()];
    if read_only {
        options.push("ro".to_owned());
    }
    let mode = mode.unwrap_or("1777");
    if u32::from_str_radix(mode, 8).map_or(true, |m| m > 0o7777) {
        return Err(format!(
            "{mode:?} is no mode: write octal digits, as in 1777"
        ));
    }
    options.push(format!("mode={mode}"));
    if let Some(size) = size {
        options.push(format!("size={}", parse::size(size)?));
    }
    Ok(json!({ "destination": target, "type": "tmpfs", "source": "tmpfs", "options": options }))
}

/// Somewhere below the root, named without a way up.
fn place(target: &str) -> std::result::Result<(), String> {
    let path = Path::new(target);
    let plain = |c: Component<'_>| matches!(c, Component::RootDir | Component::Normal(_));
    let below = path.components().count() > 1;
    match path.is_absolute() && below && path.components().all(plain) && !target.contains('\0') {
        true => Ok(()),
        false => Err(format!(
            "{target:?}: give an absolute path below / in the container, without `..`"
        )),
    }
}

/// What is to be bound is there, and no place is taken twice.
pub fn check(mounts: &[Value]) -> Result<()> {
    let text = |m: &Value, key: &str| m[key].as_str().unwrap_or_default().to_owned();
    for (i, mount) in mounts.iter().enumerate() {
        let (source, target) = (text(mount, "source"), text(mount, "destination"));
        if mount["type"] == "bind" && !Path::new(&source).exists() {
            let what = format!("mount {source} at {target}: it is not there; make it first");
            return Err(Error::new(Kind::NotFound, what));
        }
        let same = |m: &Value| {
            Path::new(&text(m, "destination"))
                .components()
                .eq(Path::new(&target).components())
        };
        if mounts.iter().take(i).any(same) {
            let what = format!("mount {source} at {target}: the place is given twice");
            return Err(Error::new(Kind::Invalid, what));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_in_both_spellings() {
        let bound = json!({"destination": "/d", "type": "bind", "source": "/s", "options": ["rbind", "ro", "rprivate"]});
        for text in [
            "type=bind,src=/s,dst=/d,ro",
            "source=/s,target=/d,readonly=true",
        ] {
            assert_eq!(flag(text), Ok(bound.clone()), "{text}");
        }
        assert_eq!(volume("/s:/d:ro"), Ok(bound));
        assert_eq!(volume("/s:/d").unwrap()["options"][1], "rw");
        let tmpfs = flag("type=tmpfs,dst=/t,size=1m,mode=700").unwrap();
        assert_eq!(
            tmpfs["options"],
            json!(["nosuid", "nodev", "mode=700", "size=1048576"])
        );
    }

    #[test]
    fn what_is_no_mount_is_refused() {
        for text in [
            "",
            "type=bind,src=/s",
            "type=bind,dst=/d",
            "type=bind,src=s,dst=/d",
            "type=bind,src=/s,dst=d",
            "type=bind,src=/s,dst=/",
            "type=bind,src=/s,dst=/a/../b",
            "type=bind,src=/s,dst=/d,dst=/e",
            "type=bind,src=/s,dst=/d,size=1m",
            "type=bind,src=/s,dst=/d,propagation=x",
            "type=bind,src=/s,dst=/d,ro=maybe",
            "type=tmpfs,src=/s,dst=/d",
            "type=tmpfs,dst=/d,mode=999",
            "type=tmpfs,dst=/d,size=x",
            "type=volume,src=/s,dst=/d",
            "type=bind,src=/s,dst=/d,what=1",
        ] {
            assert!(flag(text).is_err(), "{text}");
        }
        for text in ["", "/s", ":/d", "/s:", "/s:/d:x", "/s:/d:ro:rw", "name:/d"] {
            assert!(volume(text).is_err(), "{text}");
        }
        let twice = [volume("/:/d").unwrap(), volume("/:/d/").unwrap()];
        assert!(check(&twice[..1]).is_ok() && check(&twice).is_err());
        assert!(check(&[volume("/nowhere/at/all:/d").unwrap()]).is_err());
    }
}
