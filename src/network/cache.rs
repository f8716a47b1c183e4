//! libcni's cache: `<cache_dir>/results/<network>-<container id>-<interface>`, in the form `cniCacheV1`.
//!
//! Other tools collect garbage by these files, so ours look exactly like libcni's (field names from its `cachedInfo`,
//! libcni/api.go), but are replaced whole: libcni truncates and writes, which a power cut turns into an empty file.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{Attachment, NetworkConf, base64, conf, disk};
use crate::error::{Context, Error, Kind, Result};

const KIND: &str = "cniCacheV1";

/// One cached attachment, whoever wrote it.
#[derive(Debug)]
pub(super) struct Cached {
    pub(super) conf: NetworkConf,
    pub(super) attachment: Attachment,
    /// Result of the ADD, where the entry has one.
    pub(super) result: Option<Value>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    kind: String,
    container_id: String,
    config: String,
    if_name: String,
    network_name: String,
    #[serde(rename = "netns", default, skip_serializing_if = "String::is_empty")]
    netns: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cni_args: Option<Vec<(String, String)>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    capability_args: Option<Map<String, Value>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    result: Option<Value>,
}

/// Writes the entry of a finished ADD.
pub(super) fn write(
    cache_dir: &Path,
    conf: &NetworkConf,
    attachment: &Attachment,
    result: &Value,
) -> Result<()> {
    let results = cache_dir.join("results");
    // Shared with every other CNI runtime of the machine: made where it is missing, its mode not ours to judge.
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&results)
        .context(|| format!("make directory {}", results.display()))?;
    let args = attachment.cni_args();
    let capabilities = attachment.capability_args();
    let entry = Entry {
        kind: KIND.into(),
        container_id: attachment.container_id.clone(),
        config: base64::encode(&conf.bytes),
        if_name: attachment.ifname.clone(),
        network_name: conf.name.clone(),
        netns: attachment.netns.to_string_lossy().into_owned(),
        cni_args: (!args.is_empty()).then_some(args),
        capability_args: (!capabilities.is_empty()).then_some(capabilities),
        result: Some(result.clone()),
    };
    let path = path(cache_dir, &conf.name, attachment);
    let text = serde_json::to_vec(&entry)
        .map_err(|e| Error::caused(Kind::Other, format!("write {}", path.display()), e))?;
    // Its loss costs nothing, the record has the same; an empty file in its place would be in other tools' way.
    disk::write_whole(&path, &text)
}

/// Removes the entry, and one whose write was cut short; absent = done.
pub(super) fn remove(cache_dir: &Path, network: &str, attachment: &Attachment) -> Result<()> {
    disk::remove_written(&path(cache_dir, network, attachment))
}

/// The entry of one attachment.
pub(super) fn read(cache_dir: &Path, network: &str, attachment: &Attachment) -> Result<Cached> {
    read_file(&path(cache_dir, network, attachment))
}

/// Every readable entry of a container, by file name; damaged ones are passed over.
pub(super) fn of_container(cache_dir: &Path, container_id: &str) -> Vec<Cached> {
    let mut paths: Vec<PathBuf> = fs::read_dir(cache_dir.join("results"))
        .map(|entries| entries.flatten().map(|e| e.path()).collect())
        .unwrap_or_default();
    // The name only narrows the search: a network's name may itself hold what looks like an id.
    let part = format!("-{container_id}-");
    paths.retain(|p| {
        p.file_name()
            .is_some_and(|n| n.to_string_lossy().contains(&part))
    });
    paths.sort();
    let read = paths.iter().filter_map(|p| read_file(p).ok());
    read.filter(|c| c.attachment.container_id == container_id)
        .collect()
}

/// One entry of a network, as far as it can be read.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) container_id: String,
    pub(super) ifname: String,
    /// None when only the file's name says whose it is.
    pub(super) cached: Option<Cached>,
}

/// Every entry of `network`, by file name, also those of other tools and damaged ones: to forget one would make its
/// attachment garbage.
pub(super) fn of_network(cache_dir: &Path, network: &str) -> Vec<Seen> {
    let entries = fs::read_dir(cache_dir.join("results"));
    let mut paths: Vec<PathBuf> = entries
        .map(|entries| entries.flatten().map(|e| e.path()).collect())
        .unwrap_or_default();
    paths.sort();
    paths
        .iter()
        .filter_map(|path| seen(path, network))
        .collect()
}

fn seen(path: &Path, network: &str) -> Option<Seen> {
    let by_name = || {
        let name = path.file_name()?.to_str()?;
        let rest = name.strip_prefix(network)?.strip_prefix('-')?;
        rest.rsplit_once('-')
    };
    let entry = disk::read(path).ok();
    let entry = entry.and_then(|text| serde_json::from_slice::<Entry>(&text).ok());
    // What calls itself something else may mean anything by these fields.
    let entry = entry.filter(|entry| entry.kind == KIND);
    let (container_id, ifname) = match &entry {
        Some(entry) if entry.network_name != network => return None,
        Some(entry) => (entry.container_id.as_str(), entry.if_name.as_str()),
        None => by_name()?,
    };
    Some(Seen {
        container_id: container_id.to_owned(),
        ifname: ifname.to_owned(),
        cached: read_file(path).ok(),
    })
}

fn path(cache_dir: &Path, network: &str, attachment: &Attachment) -> PathBuf {
    let name = format!(
        "{network}-{}-{}",
        attachment.container_id, attachment.ifname
    );
    cache_dir.join("results").join(name)
}

fn read_file(path: &Path) -> Result<Cached> {
    let invalid = |why: &str| Error::new(Kind::Invalid, format!("read {}: {why}", path.display()));
    let entry: Entry = serde_json::from_slice(&disk::read(path)?).map_err(|e| {
        Error::caused(
            Kind::Invalid,
            format!("read {}: cut off or damaged", path.display()),
            e,
        )
    })?;
    if entry.kind != KIND {
        return Err(invalid(&format!("its kind is not {KIND}")));
    }
    let bytes =
        base64::decode(&entry.config).ok_or_else(|| invalid("its configuration is not base64"))?;
    let attachment = Attachment {
        container_id: entry.container_id,
        netns: entry.netns.into(),
        ifname: entry.if_name,
        args: entry.cni_args.unwrap_or_default(),
        port_mappings: Vec::new(),
        // Published ports are among them, under their capability's name.
        capabilities: entry.capability_args.unwrap_or_default(),
    };
    Ok(Cached {
        conf: conf::parse(path, bytes)?,
        attachment,
        result: entry.result,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::PortMapping;

    // Recorded: written by the libcni in containerd 1.6.20 for `ctr run --cni` (which gives it no arguments, and whose
    // version had no `netns` yet).
    const RECORDED: &str = r#"{"kind":"cniCacheV1","containerId":"default-web","config":"eyJjbmlWZXJzaW9uIjoiMS4wLjAiLCJuYW1lIjoicG9kcyIsInBsdWdpbnMiOlt7InR5cGUiOiJicmlkZ2UiLCJicmlkZ2UiOiJicjkiLCJpc0dhdGV3YXkiOnRydWUsImlwYW0iOnsidHlwZSI6Imhvc3QtbG9jYWwiLCJyYW5nZXMiOltbeyJzdWJuZXQiOiIxMC4xLjAuMC8yNCJ9XV19fSx7InR5cGUiOiJwb3J0bWFwIiwiY2FwYWJpbGl0aWVzIjp7InBvcnRNYXBwaW5ncyI6dHJ1ZX19XX0K","ifName":"eth0","networkName":"pods","result":{"cniVersion":"1.0.0","dns":{},"interfaces":[{"mac":"62:fb:c3:12:30:11","name":"br9"},{"mac":"b2:75:5f:ea:4e:6f","name":"veth81cc3d49"},{"mac":"fe:56:c9:44:eb:e7","name":"eth0","sandbox":"/proc/68/ns/net"}],"ips":[{"address":"10.1.0.2/24","gateway":"10.1.0.1","interface":2}]}}"#;

    // Composed, in the field order of libcni 1.3: with netns, arguments and a published port.
    const COMPOSED: &str = r#"{"kind":"cniCacheV1","containerId":"8d0b","config":"eyJjbmlWZXJzaW9uIjoiMS4wLjAiLCJuYW1lIjoicG9kcyIsInBsdWdpbnMiOlt7InR5cGUiOiJicmlkZ2UifSx7ImNhcGFiaWxpdGllcyI6eyJwb3J0TWFwcGluZ3MiOnRydWV9LCJ0eXBlIjoicG9ydG1hcCJ9XX0=","ifName":"eth0","networkName":"pods","netns":"/run/netns/a","cniArgs":[["IgnoreUnknown","1"],["K8S_POD_NAME","web"]],"capabilityArgs":{"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}]},"result":{"cniVersion":"1.0.0","ips":[{"address":"10.1.0.2/24"}]}}"#;

    fn attachment() -> Attachment {
        Attachment {
            container_id: "8d0b".into(),
            netns: "/run/netns/a".into(),
            ifname: "eth0".into(),
            args: vec![("K8S_POD_NAME".into(), "web".into())],
            port_mappings: vec![PortMapping {
                host_port: 8080,
                container_port: 80,
                protocol: "tcp".into(),
                host_ip: String::new(),
            }],
            capabilities: Map::new(),
        }
    }

    #[test]
    fn an_entry_that_libcni_wrote_is_read_and_written_again_byte_for_byte() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("results/pods-default-web-eth0");
        fs::create_dir(dir.path().join("results")).unwrap();
        fs::write(&file, RECORDED).unwrap();
        let theirs = of_container(dir.path(), "default-web").remove(0);
        assert_eq!(theirs.conf.plugins[1]["type"], "portmap");
        fs::remove_file(&file).unwrap();
        let result = theirs.result.unwrap();
        write(dir.path(), &theirs.conf, &theirs.attachment, &result).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), RECORDED);
    }

    #[test]
    fn arguments_and_ports_stand_where_libcni_has_them() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("results/pods-8d0b-eth0");
        fs::create_dir(dir.path().join("results")).unwrap();
        fs::write(&file, COMPOSED).unwrap();
        let theirs = read(dir.path(), "pods", &attachment()).unwrap();
        assert_eq!(theirs.conf.plugins.len(), 2);
        assert_eq!(theirs.attachment.args.len(), 2);

        write(
            dir.path(),
            &theirs.conf,
            &attachment(),
            theirs.result.as_ref().unwrap(),
        )
        .unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), COMPOSED);

        assert_eq!(of_container(dir.path(), "8d0b").len(), 1);
        assert!(of_container(dir.path(), "d0b").is_empty());
        remove(dir.path(), "pods", &attachment()).unwrap();
        remove(dir.path(), "pods", &attachment()).unwrap();
        assert!(!file.exists());
    }

    #[test]
    fn damaged_entries_and_those_of_another_kind_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("results")).unwrap();
        let half = &COMPOSED[..COMPOSED.len() / 2];
        let other = COMPOSED.replace("cniCacheV1", "cniCacheV9");
        let coded = COMPOSED.replace("eyJj", "!!!!");
        for text in [
            "",
            half,
            &other,
            &coded,
            r#"{"cniVersion":"0.2.0","ip4":{"ip":"10.0.0.1/24"}}"#,
        ] {
            fs::write(dir.path().join("results/pods-8d0b-eth0"), text).unwrap();
            assert!(read(dir.path(), "pods", &attachment()).is_err(), "{text}");
            assert!(of_container(dir.path(), "8d0b").is_empty());
        }
    }

    #[test]
    fn every_entry_of_a_network_is_seen_also_what_others_damaged() {
        let dir = tempfile::tempdir().unwrap();
        let results = dir.path().join("results");
        fs::create_dir(&results).unwrap();
        fs::write(results.join("pods-8d0b-eth0"), COMPOSED).unwrap();
        fs::write(results.join("pods-of-ours-web-net1"), "").unwrap();
        fs::write(
            results.join("other-1-eth0"),
            COMPOSED.replace(r#""pods""#, r#""other""#),
        )
        .unwrap();
        let seen: Vec<_> = of_network(dir.path(), "pods")
            .into_iter()
            .map(|s| (s.container_id, s.ifname, s.cached.is_some()))
            .collect();
        // The second might as well be of a network "pods-of"; then it does no harm to name it.
        assert_eq!(
            seen,
            [
                ("8d0b".to_owned(), "eth0".to_owned(), true),
                ("of-ours-web".to_owned(), "net1".to_owned(), false)
            ]
        );
        assert_eq!(of_network(dir.path(), "other").len(), 1);
    }
}
