//! UpdateSandbox: what is new about a pod that is there, into its record.
//!
//! Promises all or nothing, on disk before it is answered, and that the same again changes nothing. Must never touch the
//! pod's cgroup: it is the kubelet's, which has set the limits there by the time that it tells of them.

use std::collections::BTreeMap;

use protobuf::well_known_types::any::Any;

use super::resources::Resources;
use super::{Phase, Pod, gone};
use crate::error::{Error, Kind, Result};
use crate::proto::any;

/// Annotations with these beginnings were acted on when the pod was made: another value would tell of a pod that is not.
const SETTLED: [&str; 2] = ["io.podvisor.", "io.kubernetes.cri."];

impl Pod {
    /// UpdateSandbox: `annotations` are added to the pod's, or take the place of those with the same key; `resources`
    /// (nothing: they stay) take the place of all of the pod's.
    ///
    /// # Errors
    /// NotFound: no such sandbox. State: it is stopped, or its infra process has ended. Invalid: resources of a type that
    /// is not known, another value for an annotation that was acted on. Nothing has changed then.
    pub fn update(
        &self,
        id: &str,
        resources: Option<&Any>,
        annotations: BTreeMap<String, String>,
    ) -> Result<()> {
        self.check_sandbox(id)?;
        let resources = resources
            .filter(|r| !any::is_nothing(r))
            .map(|r| Resources::read(id, r).map(Box::new))
            .transpose()?;
        self.check_updatable(id)?;
        let journal = &self.shared.journal;
        let before = journal.with(|r| (r.resources.clone(), r.annotations.clone()));
        check_settled(id, &before.1, &annotations)?;
        let written = journal.update(|r| {
            r.annotations.extend(annotations);
            if resources.is_some() {
                r.resources = resources;
            }
        });
        written.inspect_err(|_| {
            // Told as refused, so it must not show; the disk, where it can be written again, says the same.
            journal.note(|r| (r.resources, r.annotations) = before);
        })
    }

    fn check_updatable(&self, id: &str) -> Result<()> {
        let why = match self.lock().phase {
            Phase::Ending => return Err(gone()),
            Phase::Down => "its infra process has ended",
            Phase::Stopping | Phase::Stopped => "it is stopped",
            _ => return Ok(()),
        };
        Err(Error::new(
            Kind::State,
            format!("update sandbox {id}: {why}; remove it and make another"),
        ))
    }
}

fn check_settled(
    id: &str,
    before: &BTreeMap<String, String>,
    after: &BTreeMap<String, String>,
) -> Result<()> {
    let settled = |key: &str| SETTLED.iter().any(|s| key.starts_with(s));
    let wrong = after
        .iter()
        .find(|(key, value)| settled(key) && before.get(*key) != Some(value));
    match wrong {
        None => Ok(()),
        Some((key, _)) => Err(Error::new(
            Kind::Invalid,
            format!(
                "update sandbox {id}: annotation {key} was acted on when the pod was made; leave it out or make another pod"
            ),
        )),
    }
}
