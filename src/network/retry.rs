//! Which failures of a plugin are worth another try at once, and how many.
//!
//! Only for ADD, only what a plugin itself calls passing (error code 11 of the CNI specification, "try again later"), or
//! what two first pods do to each other on a bridge, a chain or a lock that is not there yet. Each further try comes
//! after a DEL of the whole chain, so a plugin that had made half of something starts from nothing; and all of them
//! share the one bound. Everything else is the caller's to repeat.

use std::time::Duration;

use serde_json::Value;

use super::limit::between;
use crate::error::{Error, Kind};

/// "Try again later", CNI specification, "Error".
const TRY_AGAIN: u64 = 11;

/// Tries of one ADD, the first one among them.
const TRIES: u32 = 3;

/// Longest pause before the second try; doubled before the third. The shortest is half of it.
const PAUSE_MS: u64 = 300;

/// What plugins, and the tools they call, say when they met another one of their kind. Compared in lower case.
const RACES: [&str; 6] = [
    "file exists",
    "already exists",
    "resource temporarily unavailable",
    "device or resource busy",
    "xtables lock",
    "try again",
];

/// True when a plugin's failure, its error object (if it gave one) and what it said otherwise, is worth another try.
pub(super) fn is_passing(printed: Option<&Value>, said: &str) -> bool {
    if printed.is_some_and(|value| value["code"].as_u64() == Some(TRY_AGAIN)) {
        return true;
    }
    let said = said.to_lowercase();
    let lock_timed_out =
        said.contains("lock") && (said.contains("timed out") || said.contains("timeout"));
    lock_timed_out || RACES.iter().any(|words| said.contains(words))
}

/// Counts the tries of one ADD.
#[derive(Debug)]
pub(super) struct Tries {
    made: u32,
}

impl Tries {
    pub(super) fn new() -> Self {
        Self { made: 1 }
    }

    /// The pause before the next try, or the failure as the caller gets it: never as one of a passing kind.
    pub(super) fn after(
        &mut self,
        error: Error,
        left: Duration,
    ) -> Result<(Duration, Error), Error> {
        if error.kind() != Kind::Busy {
            return Err(error);
        }
        let error = error.as_kind(Kind::Other);
        let longest = PAUSE_MS << (self.made - 1);
        let pause = Duration::from_millis(between(longest / 2, longest));
        if self.made == TRIES || pause >= left {
            let what = format!("the last of {} tries", self.made);
            return Err(if self.made > 1 {
                error.within(what)
            } else {
                error
            });
        }
        self.made += 1;
        Ok((pause, error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn try_again_later_and_the_races_of_first_pods_are_passing() {
        assert!(is_passing(
            Some(&json!({"code": 11, "msg": "later"})),
            "later"
        ));
        for said in [
            "could not add \"cni0\": file exists",
            "iptables: Chain already exists.",
            "Another app is currently holding the xtables lock. Perhaps you want to use the -w option?",
            "failed to acquire lock: Timed out",
            "create veth: Device or resource busy",
        ] {
            assert!(
                is_passing(Some(&json!({"code": 999, "msg": said})), said),
                "{said}"
            );
        }
        for said in [
            "no room",
            "timeout waiting for the agent",
            "unauthorized",
            "",
        ] {
            assert!(!is_passing(None, said), "{said}");
        }
    }

    #[test]
    fn there_are_three_tries_and_the_last_failure_is_an_ordinary_one() {
        let mut tries = Tries::new();
        let busy = || Error::new(Kind::Busy, "file exists");
        let hour = Duration::from_secs(3600);
        let pauses = [tries.after(busy(), hour), tries.after(busy(), hour)];
        let millis = pauses.map(|p| p.unwrap().0.as_millis());
        assert!(
            (150..=300).contains(&millis[0]) && (300..=600).contains(&millis[1]),
            "{millis:?}"
        );
        let last = tries.after(busy(), hour).unwrap_err();
        assert_eq!(last.kind(), Kind::Other);
        assert!(
            last.to_string().starts_with("the last of 3 tries: "),
            "{last}"
        );
        // No time left for another one, or a failure that will not pass.
        assert!(Tries::new().after(busy(), Duration::ZERO).is_err());
        let other = Tries::new().after(Error::new(Kind::Deadline, "x"), hour);
        assert_eq!(other.unwrap_err().kind(), Kind::Deadline);
    }
}
