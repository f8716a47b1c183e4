//! A caller's deadline on the wire, and how long the caller really waits.
//!
//! ttrpc has one number for both: the client stops listening at the moment that it names to the server. An answer sent
//! shortly before a deadline, as those of a supervisor are, would on a busy machine meet an empty chair, and "still at
//! stage cni-add" would read "no answer". So the number that ttrpc knows is [`GRACE`] later than the deadline, which
//! travels in the request's metadata. A server that does not look for it there has the later moment as the deadline.

use std::collections::HashMap;
use std::time::Duration;

use ttrpc::context::Context;

/// How much longer than until its deadline a caller waits for the answer.
pub const GRACE: Duration = Duration::from_millis(500);

/// In the metadata: the deadline in nanoseconds from now, decimal.
const KEY: &str = "podvisor-deadline-nano";

/// A request's context; `None` names no deadline, and waits for ever.
pub fn context(limit: Option<Duration>) -> Context {
    limit.map_or_else(Context::default, |limit| {
        timed(limit, limit.saturating_add(GRACE))
    })
}

/// The same for a caller who has `whole` and no more: the grace is part of it, half of it at most.
pub fn context_within(whole: Duration) -> Context {
    timed(whole - GRACE.min(whole / 2), whole)
}

fn timed(deadline: Duration, waits: Duration) -> Context {
    // Zero would mean no deadline at all.
    let mut context = ttrpc::context::with_timeout(nanos(waits).max(1));
    context.set(KEY.into(), vec![nanos(deadline).max(1).to_string()]);
    context
}

/// What is left of the deadline of a request with ttrpc's number and metadata; `None`: it named none. One that has passed
/// already, or is no number that can be, is zero.
pub fn of(timeout_nano: i64, metadata: &HashMap<String, Vec<String>>) -> Option<Duration> {
    let ttrpcs = match timeout_nano {
        0 => None,
        n => Some(Duration::from_nanos(u64::try_from(n).unwrap_or(0))),
    };
    let named = metadata.get(KEY).and_then(|values| values.first());
    let named = named.and_then(|text| text.parse().ok().map(Duration::from_nanos));
    match (ttrpcs, named) {
        (Some(ttrpcs), Some(named)) => Some(ttrpcs.min(named)),
        (one, other) => one.or(other),
    }
}

fn nanos(span: Duration) -> i64 {
    i64::try_from(span.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_comes_back_and_the_caller_waits_a_little_longer() {
        for limit in [1, 1_000_000, 1_000_000_000, 300_000_000_000] {
            let limit = Duration::from_nanos(limit);
            let sent = context(Some(limit));
            assert_eq!(sent.timeout_nano, nanos(limit + GRACE));
            assert_eq!(of(sent.timeout_nano, &sent.metadata), Some(limit));
        }
    }

    #[test]
    fn who_has_no_more_than_a_time_has_the_grace_in_it() {
        for whole in [0, 1, 700, 1_000, 3_500] {
            let whole = Duration::from_millis(whole);
            let sent = context_within(whole);
            assert_eq!(sent.timeout_nano, nanos(whole).max(1));
            let deadline = of(sent.timeout_nano, &sent.metadata).unwrap();
            assert!(deadline >= whole / 2 && deadline + GRACE >= whole);
        }
    }

    #[test]
    fn a_context_never_asks_for_forever_by_accident() {
        let none = context(None);
        assert_eq!((none.timeout_nano, none.metadata.len()), (0, 0));
        let zero = context(Some(Duration::ZERO));
        let passed = of(zero.timeout_nano, &zero.metadata);
        assert_eq!(passed, Some(Duration::from_nanos(1)));
        let longest = context(Some(Duration::MAX));
        assert_eq!(longest.timeout_nano, i64::MAX);
        assert_eq!(
            of(longest.timeout_nano, &longest.metadata),
            Some(Duration::from_nanos(i64::MAX as u64))
        );
    }

    #[test]
    fn others_name_it_by_ttrpcs_number_alone_and_nonsense_lengthens_nothing() {
        let none = HashMap::new();
        assert_eq!(of(0, &none), None);
        assert_eq!(of(-5, &none), Some(Duration::ZERO));
        assert_eq!(of(7, &none), Some(Duration::from_nanos(7)));
        for (text, wanted) in [("9", 7), ("-3", 7), ("", 7), ("soon", 7), ("3", 3)] {
            let named = HashMap::from([(KEY.to_owned(), vec![text.to_owned()])]);
            assert_eq!(of(7, &named), Some(Duration::from_nanos(wanted)), "{text}");
        }
    }
}
