//! Versions of the CNI specification: which there are, which of two is newer, and since when something exists.

/// Versions that are spoken here, oldest first.
pub(super) const VERSIONS: [&str; 7] = [
    "0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0",
];

/// What the specification says of a configuration without `cniVersion`.
pub(super) const UNSTATED: &str = "0.1.0";

/// Since when DEL is given prevResult.
pub(super) const PREV_RESULT_ON_DEL: &str = "0.4.0";

/// Since when there is CHECK.
pub(super) const CHECK: &str = "0.4.0";

/// Since when there are STATUS and GC.
pub(super) const STATUS_AND_GC: &str = "1.1.0";

/// The shape of a result; within one the versions differ only in optional fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// 0.1, 0.2: `ip4` and `ip6`.
    Pair,
    /// 0.3, 0.4: lists, each address with its `version`.
    Marked,
    /// 1.0 and later: lists.
    Plain,
}

/// True when `version` (one of [`VERSIONS`]) is `floor` or newer.
pub(super) fn at_least(version: &str, floor: &str) -> bool {
    rank(version) >= rank(floor)
}

/// True for a version that is spoken here.
pub(super) fn is_known(version: &str) -> bool {
    rank(version).is_some()
}

/// The newest of `offered` that is spoken here.
pub(super) fn newest<'a>(offered: impl Iterator<Item = &'a str>) -> Option<&'static str> {
    let best = offered.filter_map(rank).max()?;
    VERSIONS.get(best).copied()
}

/// The shape of results of `version`.
pub(super) fn shape(version: &str) -> Shape {
    if at_least(version, "1.0.0") {
        Shape::Plain
    } else if at_least(version, "0.3.0") {
        Shape::Marked
    } else {
        Shape::Pair
    }
}

fn rank(version: &str) -> Option<usize> {
    VERSIONS.iter().position(|v| *v == version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_common_version_is_found_whatever_the_order() {
        assert_eq!(
            newest(["1.0.0", "7.0.0", "0.3.1"].into_iter()),
            Some("1.0.0")
        );
        assert_eq!(newest(["7.0.0", "x"].into_iter()), None);
    }

    #[test]
    fn an_unknown_version_is_older_than_all() {
        assert!(at_least("0.4.0", CHECK) && !at_least("0.3.1", CHECK));
        assert!(!at_least("x", "0.1.0") && !is_known("1.0"));
    }
}
