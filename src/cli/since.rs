//! Times on the command line: a moment, or how long ago.
//!
//! Times are texts in RFC 3339, in UTC, as logs and documents have them, and are compared as such.

use std::time::SystemTime;

use crate::clock;

use super::parse;

/// `2026-11-30T13:33:12[.fraction]Z`, `2026-11-30T13:33:12`, `2026-11-30`, or a time span up to 24 h as in 10m: that long ago.
pub fn since(text: &str) -> Result<String, String> {
    if let Ok(span) = parse::span(text) {
        let at = SystemTime::now().checked_sub(span);
        return Ok(clock::rfc3339(at.unwrap_or(SystemTime::UNIX_EPOCH)));
    }
    let bare = text.strip_suffix(['Z', 'z']).unwrap_or(text);
    let (day, time) = bare.split_once(['T', 't']).unwrap_or((bare, "00:00:00"));
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let in_range = |text: &str, least: u32, most: u32, length: usize| {
        let digits = text.len() == length && text.bytes().all(|b| b.is_ascii_digit());
        digits && text.parse().is_ok_and(|n| (least..=most).contains(&n))
    };
    let day_fits = matches!(day.split('-').collect::<Vec<_>>()[..], [y, m, d]
        if in_range(y, 1970, 9999, 4) && in_range(m, 1, 12, 2) && in_range(d, 1, 31, 2));
    let time_fits = matches!(time.split(':').collect::<Vec<_>>()[..], [h, m, s]
        if in_range(h, 0, 23, 2) && in_range(m, 0, 59, 2) && in_range(s, 0, 60, 2));
    let digits = (1..=9).contains(&fraction.len()) && fraction.bytes().all(|b| b.is_ascii_digit());
    match day_fits && time_fits && digits {
        true => Ok(format!("{day}T{time}.{fraction:0<9}Z")),
        false => Err(format!(
            "{text:?} is no time: write it in UTC as in 2026-11-30T13:33:12Z, or how long ago as in 10m"
        )),
    }
}

/// Both in RFC 3339 and UTC; what is no time is before none.
pub fn is_before(at: &str, since: &str) -> bool {
    // The fractions may have different lengths: without their ends the digits compare as texts.
    let bare = |text: &str| text.trim_end_matches('Z').to_owned();
    bare(at) < bare(since)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_and_how_long_ago() {
        for (text, at) in [
            ("2026-11-30T13:33:12Z", "2026-11-30T13:33:12.000000000Z"),
            ("2026-11-30T13:33:12.5", "2026-11-30T13:33:12.500000000Z"),
            ("2026-11-30", "2026-11-30T00:00:00.000000000Z"),
        ] {
            assert_eq!(since(text).as_deref(), Ok(at), "{text}");
        }
        let ago = since("10m").unwrap();
        let now = clock::rfc3339(SystemTime::now());
        assert!(is_before(&ago, &now) && ago.len() == now.len(), "{ago}");
        for text in [
            "",
            "x",
            "2026-13-30",
            "2026-11-30T25:00:00Z",
            "2026-11-30T13:33:12+01:00",
            "26-11-30",
            "-10m",
            "25h",
        ] {
            assert!(since(text).is_err(), "{text:?}");
        }
    }
}
