//! Time: the wall clock only for what people read, the boot id to tell a reboot. Timeouts use tokio's monotonic clock.

use std::fs;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::time::{ClockId, clock_gettime};

/// Nanoseconds since 1970; 0 for anything before (clocks that start in the past must not crash formatting).
pub fn unix_nanos(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH)
        .map(|d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX))
        .unwrap_or(0)
}

/// The inverse of [`unix_nanos`].
pub fn from_unix_nanos(nanos: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_nanos(nanos)
}

/// RFC 3339 in UTC with nanoseconds: `2026-11-30T13:33:12.000000001Z`.
pub fn rfc3339(at: SystemTime) -> String {
    let nanos = unix_nanos(at);
    let (secs, sub) = (nanos / 1_000_000_000, nanos % 1_000_000_000);
    let (days, rest) = (secs / 86_400, secs % 86_400);
    let (y, m, d) = civil(days);
    format!(
        "{y:04}-{m:02}-{d:02}T{:02}:{:02}:{:02}.{sub:09}Z",
        rest / 3600,
        rest % 3600 / 60,
        rest % 60
    )
}

/// Time since the boot, suspended or not: for ages and ends that others compute from what we write down. The same for
/// every process of one boot, and set by no clock.
pub fn uptime() -> Duration {
    // Only an unknown clock is an error.
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from)
}

/// The kernel's boot id, or an empty string where /proc has none.
///
/// Builds with debug assertions take `$PODVISOR_BOOT_ID` for it, so that a test can have a reboot.
pub fn boot_id() -> String {
    #[cfg(debug_assertions)]
    if let Ok(id) = std::env::var("PODVISOR_BOOT_ID") {
        return id;
    }
    static READ: OnceLock<String> = OnceLock::new();
    // No process lives through a boot.
    let read = || fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    READ.get_or_init(|| read().trim().to_owned()).clone()
}

/// Days since 1970-01-01 to (year, month, day) of the proleptic Gregorian calendar.
fn civil(days: u64) -> (u64, u64, u64) {
    // Counted from 0000-03-01, so that a leap day is the last day of its year.
    let z = days + 719_468;
    let era = z / 146_097;
    let doe = z % 146_097;
    let yoe = (doe - doe / 1_460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let day = doy - (153 * mp + 2) / 5 + 1;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    let year = yoe + era * 400 + u64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rfc3339_knows_leap_days_and_never_goes_below_the_epoch() {
        let leap = UNIX_EPOCH + Duration::from_secs(1_709_164_800);
        assert_eq!(rfc3339(leap), "2024-02-29T00:00:00.000000000Z");
        let before = UNIX_EPOCH - Duration::from_secs(5);
        assert_eq!(rfc3339(before), "1970-01-01T00:00:00.000000000Z");
    }
}
