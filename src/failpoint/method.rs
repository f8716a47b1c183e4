//! Failures of the services' methods, as the pod's annotations ask for them:
//! `io.containerd.runtime.v2.shim.failpoint.<Method>: <terms>`.
//!
//! Read once in a process, before its first method fails; the counts are the process's, for all containers together.
//! Must never be obeyed by an executable of another name than the one made for it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::term::{Act, Terms};
use crate::error::{Context, Error, Kind, Result};

/// Before the method's name in an annotation.
pub const PREFIX: &str = "io.containerd.runtime.v2.shim.failpoint.";

static OBEYED: AtomicBool = AtomicBool::new(false);
static ARMED: Mutex<BTreeMap<String, Terms>> = Mutex::new(BTreeMap::new());

/// From here on annotations count: called by the executable that is made for it.
pub fn obey_annotations() {
    OBEYED.store(true, Ordering::Relaxed);
}

/// Arms what the annotations say, unless something is armed already: a request that comes again counts on. Invalid: bad
/// terms, by annotation.
pub fn arm<'a>(annotations: impl IntoIterator<Item = (&'a String, &'a String)>) -> Result<()> {
    let mut armed = ARMED.lock().unwrap_or_else(PoisonError::into_inner);
    if !OBEYED.load(Ordering::Relaxed) || !armed.is_empty() {
        return Ok(());
    }
    *armed = read(annotations)?;
    Ok(())
}

/// What the annotations say of this method happens, before the method itself.
pub async fn call(method: &str) -> Result<()> {
    let act = {
        let mut armed = ARMED.lock().unwrap_or_else(PoisonError::into_inner);
        armed.get_mut(method).and_then(Terms::take)
    };
    match act {
        Some(Act::Error(text)) => Err(Error::new(Kind::Other, text)),
        Some(Act::Panic(text)) => panic!("{text}"),
        Some(Act::Delay(time)) => {
            tokio::time::sleep(time).await;
            Ok(())
        }
        Some(Act::Off | Act::Hang | Act::Die) | None => Ok(()),
    }
}

fn read<'a>(
    annotations: impl IntoIterator<Item = (&'a String, &'a String)>,
) -> Result<BTreeMap<String, Terms>> {
    annotations
        .into_iter()
        .filter_map(|(key, terms)| Some((key.strip_prefix(PREFIX)?, terms)))
        .map(|(method, terms)| {
            let terms = Terms::parse(terms).context(|| format!("arm failpoint {method}"))?;
            Ok((method.to_owned(), terms))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn annotations(all: &[(&str, &str)]) -> BTreeMap<String, String> {
        let owned = all.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        owned.collect()
    }

    #[test]
    fn only_annotations_of_the_prefix_are_read_by_the_methods_name() {
        let start = format!("{PREFIX}Start");
        let all = annotations(&[(&start, "1*error(no)"), ("other", "1*error(no)")]);
        let read = read(&all).unwrap();
        assert_eq!(read.keys().collect::<Vec<_>>(), ["Start"]);
    }

    #[test]
    fn bad_terms_are_an_error_that_names_the_method() {
        let kill = format!("{PREFIX}Kill");
        let error = read(&annotations(&[(&kill, "1*die")])).unwrap_err();
        assert!(error.to_string().contains("failpoint Kill"), "{error}");
    }

    /// One process, one test: what is armed is the process's.
    #[tokio::test(start_paused = true)]
    async fn an_armed_method_fails_as_often_as_it_was_said() {
        let key = format!("{PREFIX}TestMethod");
        let all = annotations(&[(&key, "1*error(no)->1*off->1*delay(60000)")]);
        arm(&all).unwrap();
        assert!(call("TestMethod").await.is_ok(), "nobody said to obey");
        obey_annotations();
        arm(&all).unwrap();
        let error = call("TestMethod").await.unwrap_err();
        assert_eq!(
            (error.kind(), error.to_string().as_str()),
            (Kind::Other, "no")
        );
        // The same request again does not begin anew.
        arm(&all).unwrap();
        assert!(call("TestMethod").await.is_ok());
        let before = tokio::time::Instant::now();
        assert!(call("TestMethod").await.is_ok());
        assert_eq!(before.elapsed().as_secs(), 60);
        assert!(call("TestMethod").await.is_ok() && call("Other").await.is_ok());
    }
}
