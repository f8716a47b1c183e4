//! Limits of a whole pod as CRI counts them. Known and told, never set: the pod's cgroup is the kubelet's.

use std::collections::BTreeMap;

use protobuf::well_known_types::any::Any;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::proto::any;
use crate::proto::cri::sandbox_config::LinuxContainerResources;

/// `runtime.v1.LinuxContainerResources` with the JSON names of CRI's own structure. 0 and "" mean not given and are left
/// out; microseconds and bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Resources {
    /// Microseconds.
    #[serde(skip_serializing_if = "is_zero")]
    pub cpu_period: i64,
    /// Microseconds of each period.
    #[serde(skip_serializing_if = "is_zero")]
    pub cpu_quota: i64,
    /// Relative weight.
    #[serde(skip_serializing_if = "is_zero")]
    pub cpu_shares: i64,
    /// Bytes.
    #[serde(skip_serializing_if = "is_zero")]
    pub memory_limit_in_bytes: i64,
    /// −1000 to 1000.
    #[serde(skip_serializing_if = "is_zero")]
    pub oom_score_adj: i64,
    /// As in `cpuset.cpus`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cpuset_cpus: String,
    /// As in `cpuset.mems`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cpuset_mems: String,
    /// One for each page size.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hugepage_limits: Vec<HugepageLimit>,
    /// Files of cgroup v2 with their text.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub unified: BTreeMap<String, String>,
    /// Bytes, memory and swap together.
    #[serde(skip_serializing_if = "is_zero")]
    pub memory_swap_limit_in_bytes: i64,
}

/// Limit of the huge pages of one size.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HugepageLimit {
    /// `2MB`, `1GB`.
    pub page_size: String,
    /// Bytes.
    pub limit: u64,
}

impl Resources {
    /// From CRI's own message, or `linux.resources` of an OCI spec as JSON, of which CRI has no more than these fields.
    ///
    /// # Errors
    /// Invalid: another type, or bytes that are not of that type.
    pub fn read(id: &str, resources: &Any) -> Result<Self> {
        let refuse = |why: String| {
            Error::new(
                Kind::Invalid,
                format!(
                    "update sandbox {id}: {why}; send runtime.v1.LinuxContainerResources, or linux.resources of an OCI spec as JSON"
                ),
            )
        };
        let message = any::unpack::<LinuxContainerResources>(resources, any::CRI_RESOURCES)
            .map_err(|e| refuse(format!("the resources cannot be read: {e}")))?;
        if let Some(message) = message {
            return Ok(Self::from(&message));
        }
        if !any::is(resources, any::OCI_RESOURCES) {
            return Err(refuse(format!(
                "resources of type {:?}",
                resources.type_url
            )));
        }
        serde_json::from_slice::<Oci>(&resources.value)
            .map(Self::from)
            .map_err(|e| refuse(format!("the resources cannot be read: {e}")))
    }

    /// The sums that CRI's own controller notes on the spec of a pod's first process.
    pub fn notes(&self) -> [(String, String); 4] {
        [
            ("cpu-period", self.cpu_period),
            ("cpu-quota", self.cpu_quota),
            ("cpu-shares", self.cpu_shares),
            ("memory", self.memory_limit_in_bytes),
        ]
        .map(|(key, value)| {
            (
                format!("io.kubernetes.cri.sandbox-{key}"),
                value.to_string(),
            )
        })
    }
}

impl From<&LinuxContainerResources> for Resources {
    fn from(from: &LinuxContainerResources) -> Self {
        Self {
            cpu_period: from.cpu_period,
            cpu_quota: from.cpu_quota,
            cpu_shares: from.cpu_shares,
            memory_limit_in_bytes: from.memory_limit_in_bytes,
            oom_score_adj: from.oom_score_adj,
            cpuset_cpus: from.cpuset_cpus.clone(),
            cpuset_mems: from.cpuset_mems.clone(),
            hugepage_limits: from
                .hugepage_limits
                .iter()
                .map(|l| HugepageLimit {
                    page_size: l.page_size.clone(),
                    limit: l.limit,
                })
                .collect(),
            unified: from.unified.clone().into_iter().collect(),
            memory_swap_limit_in_bytes: from.memory_swap_limit_in_bytes,
        }
    }
}

/// What of an OCI spec's `linux.resources` CRI has a field for.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Oci {
    memory: Option<OciMemory>,
    cpu: Option<OciCpu>,
    hugepage_limits: Option<Vec<OciHugepages>>,
    unified: Option<BTreeMap<String, String>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct OciMemory {
    limit: Option<i64>,
    swap: Option<i64>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct OciCpu {
    shares: Option<i64>,
    quota: Option<i64>,
    period: Option<i64>,
    cpus: Option<String>,
    mems: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct OciHugepages {
    page_size: String,
    limit: u64,
}

impl From<Oci> for Resources {
    fn from(from: Oci) -> Self {
        let (memory, cpu) = (
            from.memory.unwrap_or_default(),
            from.cpu.unwrap_or_default(),
        );
        Self {
            cpu_period: cpu.period.unwrap_or(0),
            cpu_quota: cpu.quota.unwrap_or(0),
            cpu_shares: cpu.shares.unwrap_or(0),
            memory_limit_in_bytes: memory.limit.unwrap_or(0),
            oom_score_adj: 0,
            cpuset_cpus: cpu.cpus.unwrap_or_default(),
            cpuset_mems: cpu.mems.unwrap_or_default(),
            hugepage_limits: from
                .hugepage_limits
                .unwrap_or_default()
                .into_iter()
                .map(|l| HugepageLimit {
                    page_size: l.page_size,
                    limit: l.limit,
                })
                .collect(),
            unified: from.unified.unwrap_or_default(),
            memory_swap_limit_in_bytes: memory.swap.unwrap_or(0),
        }
    }
}

#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "the signature that serde calls"
)]
fn is_zero(number: &i64) -> bool {
    *number == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn both_spellings_say_the_same_and_nothing_that_was_not_given() {
        let message = LinuxContainerResources {
            cpu_quota: 50_000,
            memory_limit_in_bytes: 64 << 20,
            ..Default::default()
        };
        let cri = any::pack(any::CRI_RESOURCES, &message).unwrap();
        let text = json!({
            "cpu": {"quota": 50_000, "shares": null},
            "memory": {"limit": 64 << 20},
            "devices": [{"allow": false}],
        });
        let oci = any::raw(any::OCI_RESOURCES, text.to_string().into_bytes());
        let wanted = json!({"cpu_quota": 50_000, "memory_limit_in_bytes": 64 << 20});
        for any in [cri, oci] {
            let read = Resources::read("p", &any).unwrap();
            assert_eq!(serde_json::to_value(&read).unwrap(), wanted);
            let back: Resources = serde_json::from_value(wanted.clone()).unwrap();
            assert_eq!(back, read);
        }
    }

    #[test]
    fn what_is_of_another_type_or_damaged_is_refused() {
        for bad in [
            any::raw(any::CRI_RESOURCES, vec![0xff]),
            any::raw(any::OCI_RESOURCES, b"{\"cpu\":".to_vec()),
            any::raw(
                any::OCI_RESOURCES,
                b"{\"cpu\": {\"quota\": \"much\"}}".to_vec(),
            ),
            any::raw(any::OCI_SPEC, b"{}".to_vec()),
        ] {
            let error = Resources::read("p", &bad).unwrap_err();
            assert_eq!(error.kind(), Kind::Invalid, "{error}");
            assert!(error.to_string().contains("LinuxContainerResources"));
        }
    }
}
