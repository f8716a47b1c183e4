//! Update: new limits for a container that lives, through its OCI runtime.

use std::sync::Arc;

use protobuf::well_known_types::any::Any;
use serde_json::Value;

use super::kill::living_init;
use super::state::Inner;
use super::table::{Container, Shared};
use crate::error::{Error, Kind, Result};
use crate::proto::any;

/// See [`super::Containers::update`].
pub(super) async fn update(
    shared: &Shared,
    container: &Arc<Container>,
    resources: &Any,
) -> Result<()> {
    let fixed = &container.fixed;
    let document = document(&fixed.id, resources)?;
    let _turn = container.verbs.lock().await;
    may_update(container)?;
    let update = fixed
        .runtime
        .update(&shared.reaper, &fixed.bundle, &fixed.id, document);
    container.unless_cancelled(update).await.map_err(|e| {
        // Ended meanwhile: however the runtime words that.
        may_update(container).err().unwrap_or_else(|| {
            let kind = if e.is_gone() { Kind::Other } else { e.kind() };
            e.as_kind(kind)
                .within(format!("update container {}", fixed.id))
        })
    })
}

/// Only while init lives. The kernel is asked, too: between its death and its reaping it is in the root's cgroup already,
/// and a runtime that looks there would set the machine's limits.
fn may_update(container: &Container) -> Result<()> {
    let alive = living_init(container).is_ok_and(|init| init.identity.is_alive());
    let inner = container.inner();
    if inner.removed {
        return Err(Inner::absent(&container.fixed.id));
    }
    match alive {
        true => Ok(()),
        false => Err(inner.refusal("update", "its init process has ended")),
    }
}

/// The bytes as they came: a field that we do not know is the runtime's business.
fn document(id: &str, resources: &Any) -> Result<Vec<u8>> {
    let refuse = |why: String| {
        Error::new(
            Kind::Invalid,
            format!("update container {id}: {why}; send linux.resources of an OCI spec as JSON"),
        )
    };
    if !any::is(resources, any::OCI_RESOURCES) {
        return Err(refuse(format!(
            "resources of type {:?}",
            resources.type_url
        )));
    }
    match serde_json::from_slice(&resources.value) {
        Ok(Value::Object(_)) => Ok(resources.value.clone()),
        Ok(_) => Err(refuse("the resources are no object".into())),
        Err(e) => Err(refuse(format!("the resources cannot be read: {e}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_object_of_the_right_type_is_passed_on_and_as_it_is() {
        let with = |name: &str, text: &str| any::raw(name, text.as_bytes().to_vec());
        let text = r#"{"memory":{"limit":1},"vendor":1.50}"#;
        let passed = document("c", &with(any::OCI_RESOURCES, text)).unwrap();
        assert_eq!(passed, text.as_bytes());
        for bad in [
            with(any::OCI_RESOURCES, ""),
            with(any::OCI_RESOURCES, "[]"),
            with(any::OCI_RESOURCES, "{\"memory\":"),
            with(any::OCI_SPEC, "{}"),
            Any::default(),
        ] {
            assert_eq!(document("c", &bad).unwrap_err().kind(), Kind::Invalid);
        }
    }
}
