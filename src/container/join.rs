//! Create as its callers see it: one creation job per container, and requests that wait for it, take its result or are
//! told who has it (docs/retry.md).

use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::table::{Making, Shared};
use super::{CreateRequest, PodContext, create, parking};
use crate::error::{Error, Kind, Result};
use crate::job::{self, Ask, Job, Phase, Waiter};
use crate::spec::Spec;

/// How long the one whose creation failed is kept from trying again, while what it did is undone.
const UNDO_PATIENCE: Duration = Duration::from_secs(4);

/// What a request is to the creation.
enum Role {
    /// It began it.
    First(Job<u32>, Waiter<u32>),
    Watcher(Waiter<u32>),
    /// It has, or gets, a container with this pid.
    Live(u32),
}

/// See [`super::Containers::create_within`].
pub(super) async fn create(
    shared: &Arc<Shared>,
    request: CreateRequest,
    limit: Option<Duration>,
    admit: impl Future<Output = Result<Option<PodContext>>> + Send + 'static,
) -> Result<u32> {
    crate::id::check("container id", &request.id)
        .map_err(|e| e.within(format!("create container {}", request.id)))?;
    let hold = shared.config.parking.hold_waiters;
    let mut ask = Ask::new(format!("create container {}", request.id), limit, hold);
    let waiter = match join_or_begin(shared, &request, &ask)? {
        Role::Live(pid) => return Ok(pid),
        Role::Watcher(waiter) => waiter,
        Role::First(job, waiter) => {
            // Bounded by the runtime's own limit, which may be longer than a watcher's patience.
            ask = Ask::patient(ask.what, limit, hold);
            let (shared, work) = (Arc::clone(shared), job.clone());
            job.run(async move { create::work(&shared, request, work, admit).await });
            let made = told(&waiter, &ask).await;
            if matches!(job.phase(), Phase::Failed(..)) {
                waiter.undone(&ask, UNDO_PATIENCE).await;
            }
            return made;
        }
    };
    told(&waiter, &ask).await
}

async fn told(waiter: &Waiter<u32>, ask: &Ask) -> Result<u32> {
    let stage = || waiter.job().stage().0.to_owned();
    waiter.answer(ask, stage, std::future::pending()).await
}

fn join_or_begin(shared: &Arc<Shared>, request: &CreateRequest, ask: &Ask) -> Result<Role> {
    let digest = digest(request, Spec::read_bytes(&request.bundle).ok().as_deref());
    let mut creations = shared.creations();
    if let Some(making) = creations.get(&request.id) {
        if !making.digests.contains(&digest) {
            return Err(other_request(ask, making, &digest));
        }
        let job = making.job.clone();
        if let Some(error) = job.rolling_back(&ask.what, job.stage().0) {
            return Err(error);
        }
        match job.phase() {
            Phase::Working => {
                let stage = job.stage().0;
                shared.count_joined(stage);
                tracing::info!(id = %request.id, step = stage, age_ms = millis(job.age()), "a request joined the creation of a container");
                return Ok(Role::Watcher(job.watch()));
            }
            // Its caller has left: it must not be the one to own the container.
            Phase::Parked(_) if ask.is_late => return Err(job::ready_for_the_next(&ask.what)),
            Phase::Parked(_) => {
                if let Some(pid) = job.take() {
                    drop(creations);
                    parking::claimed(shared, &request.id);
                    return Ok(Role::Live(pid));
                }
            }
            Phase::Committed(pid) => {
                let ended = shared.any(&request.id).is_some_and(|c| c.inner().ending);
                return match ended {
                    false => Ok(Role::Live(pid)),
                    true => Err(Error::new(
                        Kind::Exists,
                        format!(
                            "{}: there is one, and it has ended; delete it first",
                            ask.what
                        ),
                    )),
                };
            }
            // Undone: this request begins anew.
            Phase::Failed(..) | Phase::Gone => {}
        }
    }
    let (job, waiter) = Job::begin();
    let making = Making {
        job: job.clone(),
        digests: vec![digest],
    };
    creations.insert(request.id.clone(), making);
    Ok(Role::First(job, waiter))
}

/// The request will find its config.json as we are about to write it: it stays the same request.
pub(super) fn also_known_as(shared: &Shared, request: &CreateRequest, written: &[u8]) {
    let as_it_came = CreateRequest {
        pod: None,
        ..request.clone()
    };
    let digest = digest(&as_it_came, Some(written));
    if let Some(making) = shared.creations().get_mut(&request.id) {
        making.digests.push(digest);
    }
}

/// Of what the caller sends, and of the spec in the bundle. Never leaves this process: only equality counts.
fn digest(request: &CreateRequest, spec: Option<&[u8]>) -> String {
    let mut hash = Sha256::new();
    let fields = format!("{request:?}");
    hash.update(fields.len().to_le_bytes());
    hash.update(fields);
    hash.update([u8::from(spec.is_some())]);
    hash.update(spec.unwrap_or_default());
    crate::id::hex(&hash.finalize())
}

fn other_request(ask: &Ask, making: &Making, new: &str) -> Error {
    let short = |digest: &str| digest.chars().take(12).collect::<String>();
    let old = making.digests.first().map_or("", String::as_str);
    Error::new(
        Kind::Exists,
        format!(
            "{}: there is one of this id, made by request {}; this is request {}: delete it first or use another id",
            ask.what,
            short(old),
            short(new)
        ),
    )
}

/// For log lines.
pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_of_the_request_and_of_its_spec() {
        let request = |id: &str, stdout: &str| CreateRequest {
            id: id.into(),
            stdout: stdout.into(),
            ..Default::default()
        };
        let one = digest(&request("c", "o"), Some(b"{}"));
        assert_eq!(one, digest(&request("c", "o"), Some(b"{}")));
        for other in [
            digest(&request("c", "p"), Some(b"{}")),
            digest(&request("c", "o"), Some(b"{ }")),
            digest(&request("c", "o"), Some(b"")),
            digest(&request("c", "o"), None),
        ] {
            assert_ne!(one, other);
        }
    }
}
