//! `--container`: a container in the form of CRI's `ContainerConfig`, as `crictl create` takes it.
//!
//! Promises that each field is honoured, told of, or refused; docs/command.md has the list.

use std::path::Path;

use serde_json::{Value, json};

use crate::error::{Error, Kind, Result};

use super::given::{self, Object};
use super::user::{self, User};
use super::workload::Workload;
use super::{capability, given_pod, mounts, plan};

/// Reads it over `base`; with the container's name where it has one.
///
/// # Errors
/// Invalid and Unsupported, with what and where.
pub fn read(path: &Path, base: Workload) -> Result<(Option<String>, Workload)> {
    given::read(path, |file| whole(file, base))
}

fn whole(mut file: Object<'_>, base: Workload) -> Result<(Option<String>, Workload)> {
    let mut work = base;
    let mut meta = file.object("metadata")?;
    let name = given_pod::name(&mut meta)?;
    meta.unused("attempt", "a container is made once");
    meta.end();
    file.unused(
        "image",
        "podvisor has no images, the files are those of --rootfs",
    );
    file.unused("log_path", "`podvisor logs` has what containers write");
    file.unused("labels", "pods have labels, containers have none");
    file.unused("stdin_once", "input ends with its writer");
    work.args = file.texts("command")?;
    work.args.extend(file.texts("args")?);
    work.cwd = file.text("working_dir")?;
    for mut variable in file.objects("envs")? {
        let (key, value) = (variable.text("key")?, variable.text("value")?);
        if key.is_empty() || key.contains('=') {
            return Err(variable.wrong("key", "give the name of a variable"));
        }
        work.env.push(format!("{key}={value}"));
        variable.end();
    }
    for one in file.objects("mounts")? {
        work.mounts.push(mount(one)?);
    }
    for (key, value) in file.map("annotations")? {
        plan::check_annotation(&key)?;
        work.annotations.insert(key, value);
    }
    work.interactive = file.flag("stdin")?;
    work.tty = file.flag("tty")?;
    let mut linux = file.object("linux")?;
    resources(linux.object("resources")?, &mut work)?;
    security(linux.object("security_context")?, &mut work)?;
    linux.end();
    file.end();
    Ok((name, work))
}

fn mount(mut one: Object<'_>) -> Result<Value> {
    const PROPAGATIONS: [&str; 3] = [
        "PROPAGATION_PRIVATE",
        "PROPAGATION_HOST_TO_CONTAINER",
        "PROPAGATION_BIDIRECTIONAL",
    ];
    let (host, container) = (one.text("host_path")?, one.text("container_path")?);
    let read_only = one.flag("readonly")?;
    let propagation = match one.choice("propagation", &PROPAGATIONS)? {
        None | Some(0) => "rprivate",
        Some(1) => "rslave",
        Some(_) => "rshared",
    };
    let made = mounts::bind(&host, &container, read_only, propagation);
    let made = made.map_err(|why| one.wrong("host_path", &why));
    one.end();
    made
}

/// CRI's names to those of the OCI specification.
fn resources(mut given: Object<'_>, work: &mut Workload) -> Result<()> {
    let made = &mut work.resources;
    for (field, group, name) in [
        ("cpu_period", "cpu", "period"),
        ("cpu_quota", "cpu", "quota"),
        ("cpu_shares", "cpu", "shares"),
        ("memory_limit_in_bytes", "memory", "limit"),
        ("memory_swap_limit_in_bytes", "memory", "swap"),
    ] {
        if let Some(number) = given.number(field)?.filter(|n| *n != 0) {
            made[group][name] = json!(number);
        }
    }
    for (field, name) in [("cpuset_cpus", "cpus"), ("cpuset_mems", "mems")] {
        match given.text(field)?.as_str() {
            "" => {}
            list => made["cpu"][name] = json!(list),
        }
    }
    let unified = given.map("unified")?;
    if !unified.is_empty() {
        made["unified"] = json!(unified);
    }
    let mut pages = Vec::new();
    for mut limit in given.objects("hugepage_limits")? {
        let (size, most) = (limit.text("page_size")?, limit.number("limit")?);
        pages.push(json!({ "pageSize": size, "limit": most.unwrap_or(0) }));
        limit.end();
    }
    if !pages.is_empty() {
        made["hugepageLimits"] = json!(pages);
    }
    work.oom_score_adj = given.number("oom_score_adj")?.unwrap_or(0);
    given.end();
    Ok(())
}

fn security(mut given: Object<'_>, work: &mut Workload) -> Result<()> {
    let mut caps = given.object("capabilities")?;
    let (add, drop) = (
        names(&mut caps, "add_capabilities")?,
        names(&mut caps, "drop_capabilities")?,
    );
    capability::change(&mut work.capabilities, &add, &drop)?;
    let ambient = names(&mut caps, "add_ambient_capabilities")?;
    // The kernel gives none that is not permitted too.
    capability::change(&mut work.capabilities, &ambient, &[])?;
    capability::change(&mut work.ambient, &ambient, &[])?;
    caps.end();
    given.unused("namespace_options", "the pod's hold");
    work.user = whom(&mut given, &work.rootfs)?;
    work.read_only = given.flag("readonly_rootfs")?;
    work.no_new_privileges = given.flag("no_new_privs")?;
    for (field, paths) in [
        ("masked_paths", &mut work.masked),
        ("readonly_paths", &mut work.write_protected),
    ] {
        let list = given.texts(field)?;
        if !list.is_empty() {
            *paths = Some(list);
        }
    }
    given_pod::unconfined(&mut given)?;
    match given.text("apparmor_profile")?.as_str() {
        "" | "unconfined" => {}
        other => given.refuse("apparmor_profile", other),
    }
    given.end();
    Ok(())
}

fn names(caps: &mut Object<'_>, field: &str) -> Result<Vec<String>> {
    let list = caps.texts(field)?;
    let checked = list.iter().map(|n| capability::name(n)).collect();
    let checked: std::result::Result<Vec<_>, _> = checked;
    checked.map_err(|why| caps.wrong(field, &why))
}

fn whom(given: &mut Object<'_>, rootfs: &Path) -> Result<User> {
    const POLICIES: [&str; 2] = ["Merge", "Strict"];
    let id = |given: &mut Object<'_>, field: &str| -> Result<Option<u32>> {
        let number = given.number(field)?;
        let fits = |n: i64| u32::try_from(n).ok().filter(|n| *n != u32::MAX);
        match number.map(fits) {
            Some(None) => Err(given.wrong(field, "give a number from 0 to 4294967294")),
            other => Ok(other.flatten()),
        }
    };
    let (number, group) = (id(given, "run_as_user")?, id(given, "run_as_group")?);
    let name = given.text("run_as_username")?;
    let who = match (number, name.as_str()) {
        (Some(_), name) if !name.is_empty() => {
            return Err(given.wrong("run_as_username", "give it or run_as_user, not both"));
        }
        (Some(number), _) => user::find(rootfs, &number.to_string())?,
        (None, "") if group.is_some() => {
            return Err(given.wrong("run_as_group", "a group needs a user"));
        }
        (None, "") => User::default(),
        (None, name) => user::find(rootfs, name)?,
    };
    let strict = given.choice("supplemental_groups_policy", &POLICIES)? == Some(1);
    let mut groups = if strict { Vec::new() } else { who.groups };
    for number in given.numbers("supplemental_groups")? {
        let number = u32::try_from(number).map_err(|_| {
            let what = "use a supplemental group: give numbers from 0 to 4294967295";
            Error::new(Kind::Invalid, what)
        })?;
        groups.push(number);
    }
    groups.sort_unstable();
    groups.dedup();
    Ok(User {
        uid: who.uid,
        gid: group.unwrap_or(who.gid),
        groups,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn given(text: &str) -> Result<(Option<String>, Workload)> {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("etc")).unwrap();
        fs::write(root.path().join("etc/passwd"), "web:x:33:34::/:/bin/sh\n").unwrap();
        fs::write(root.path().join("etc/group"), "log:x:40:web\n").unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        read(file.path(), Workload::at(root.path()).unwrap())
    }

    #[test]
    fn a_container_as_crictl_has_it() {
        let (name, work) = given(
            r#"{"metadata": {"name": "busybox", "attempt": 0}, "image": {"image": "busybox"}, "command": ["/bin/sh"], "args": ["-c", "true"],
            "working_dir": "/tmp", "envs": [{"key": "A", "value": "b"}], "log_path": "busybox.0.log", "tty": true,
            "mounts": [{"host_path": "/", "container_path": "/host", "readonly": true, "propagation": 1}], "annotations": {"a": "b"},
            "linux": {"resources": {"cpu_period": 100000, "cpu_quota": "50000", "memory_limit_in_bytes": 67108864, "oom_score_adj": 7, "cpuset_cpus": "0"},
              "security_context": {"run_as_username": "web", "run_as_group": {"value": 7}, "supplemental_groups": [50], "readonly_rootfs": true, "no_new_privs": true,
                "capabilities": {"add_capabilities": ["NET_ADMIN"], "drop_capabilities": ["ALL"]}, "masked_paths": ["/proc/x"]}}}"#,
        )
        .unwrap();
        assert_eq!(name.as_deref(), Some("busybox"));
        assert_eq!(
            (&work.args[..], work.cwd.as_str()),
            (&["/bin/sh", "-c", "true"].map(str::to_owned)[..], "/tmp")
        );
        assert_eq!(work.env, ["A=b"]);
        assert_eq!(work.mounts[0]["options"], json!(["rbind", "ro", "rslave"]));
        assert_eq!(
            work.resources,
            json!({"cpu": {"period": 100_000, "quota": 50_000, "cpus": "0"}, "memory": {"limit": 67_108_864}})
        );
        assert_eq!(
            (work.user.uid, work.user.gid, &work.user.groups[..]),
            (33, 7, &[40, 50][..])
        );
        assert_eq!(work.capabilities, ["CAP_NET_ADMIN"]);
        assert!(work.tty && work.read_only && work.no_new_privileges && work.oom_score_adj == 7);
        assert_eq!(work.masked, Some(vec!["/proc/x".to_owned()]));
    }

    #[test]
    fn what_is_not_honoured_is_refused() {
        for (text, part) in [
            (r#"{"comand": ["x"]}"#, "comand"),
            (r#"{"devices": [{"host_path": "/dev/x"}]}"#, "devices"),
            (r#"{"CDI_devices": [{"name": "x"}]}"#, "cdi_devices"),
            (
                r#"{"mounts": [{"host_path": "/", "container_path": "/x", "selinux_relabel": true}]}"#,
                "mounts[0].selinux_relabel",
            ),
            (
                r#"{"mounts": [{"host_path": "x", "container_path": "/x"}]}"#,
                "absolute",
            ),
            (
                r#"{"linux": {"security_context": {"privileged": true}}}"#,
                "privileged",
            ),
            (
                r#"{"linux": {"security_context": {"apparmor_profile": "runtime/default"}}}"#,
                "apparmor_profile",
            ),
            (
                r#"{"linux": {"security_context": {"run_as_user": {"value": -1}}}}"#,
                "run_as_user",
            ),
            (
                r#"{"linux": {"security_context": {"run_as_group": 1}}}"#,
                "needs a user",
            ),
            (
                r#"{"linux": {"security_context": {"capabilities": {"add_capabilities": ["NOPE"]}}}}"#,
                "NOPE",
            ),
            (
                r#"{"linux": {"resources": {"pids_limit": 5}}}"#,
                "pids_limit",
            ),
            (
                r#"{"annotations": {"io.podvisor.sandbox-id": "x"}}"#,
                "io.podvisor",
            ),
        ] {
            let error = given(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
