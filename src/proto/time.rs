//! Points in time on the wire.
//!
//! Owns the conversion between the system's clock and `google.protobuf.Timestamp`. Promises that a time on either side
//! of 1970 survives the way there and back to the nanosecond. Must never read a clock.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use protobuf::well_known_types::timestamp::Timestamp;

const NANOS_PER_SECOND: u32 = 1_000_000_000;

/// The message for `time`. Nanoseconds count forward from the second, before 1970 too.
#[must_use]
pub fn timestamp(time: SystemTime) -> Timestamp {
    let (seconds, nanos) = match time.duration_since(UNIX_EPOCH) {
        Ok(after) => (seconds_of(after), after.subsec_nanos()),
        Err(before) => {
            let before = before.duration();
            match before.subsec_nanos() {
                0 => (-seconds_of(before), 0),
                part => (-seconds_of(before) - 1, NANOS_PER_SECOND - part),
            }
        }
    };
    Timestamp {
        seconds,
        nanos: i32::try_from(nanos).unwrap_or(0),
        ..Timestamp::default()
    }
}

/// The time a message stands for; `None` when its nanoseconds are not below one second or the clock cannot hold it.
#[must_use]
pub fn system_time(stamp: &Timestamp) -> Option<SystemTime> {
    let nanos = u32::try_from(stamp.nanos)
        .ok()
        .filter(|n| *n < NANOS_PER_SECOND)?;
    let whole = Duration::from_secs(stamp.seconds.unsigned_abs());
    let second = if stamp.seconds < 0 {
        UNIX_EPOCH.checked_sub(whole)
    } else {
        UNIX_EPOCH.checked_add(whole)
    };
    second?.checked_add(Duration::from_nanos(u64::from(nanos)))
}

fn seconds_of(span: Duration) -> i64 {
    i64::try_from(span.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_survives_both_ways() {
        for (sign, span) in [
            (1, 0),
            (1, 1),
            (1, 1_700_000_000_123_456_789),
            (-1, 1),
            (-1, 1_500_000_000),
            (-1, 2_000_000_000),
        ] {
            let span = Duration::from_nanos(span);
            let time = if sign < 0 {
                UNIX_EPOCH - span
            } else {
                UNIX_EPOCH + span
            };
            let stamp = timestamp(time);
            assert!((0..1_000_000_000).contains(&stamp.nanos), "{stamp:?}");
            assert_eq!(system_time(&stamp), Some(time));
        }
    }

    #[test]
    fn an_impossible_message_is_no_time() {
        for (seconds, nanos) in [(0, -1), (0, 1_000_000_000), (i64::MAX, 0), (i64::MIN, 0)] {
            let stamp = Timestamp {
                seconds,
                nanos,
                ..Timestamp::default()
            };
            // The extremes may or may not fit the clock; they must not panic.
            let time = system_time(&stamp);
            assert!(nanos == 0 || time.is_none());
        }
    }
}
