//! `--filter`: which pods of a list are shown.
//!
//! Values for one key are alternatives, different keys must all hold. Promises that a key nobody knows is an error.

use std::collections::BTreeMap;

/// One `KEY=VALUE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Filter {
    /// State as the list shows it: `not ready` or `not_ready`.
    State(String),
    /// Name; `*` stands for any characters.
    Name(String),
    /// Beginning of the id.
    Id(String),
    /// A network the pod is on.
    Network(String),
    /// A label, with this value where one is given.
    Label(String, Option<String>),
}

/// What is known of a pod in a list.
#[derive(Debug)]
pub struct Listed<'a> {
    pub state: &'a str,
    pub name: &'a str,
    pub id: &'a str,
    pub networks: Vec<&'a str>,
    pub labels: Option<&'a BTreeMap<String, String>>,
}

/// A filter as it is typed.
pub fn parse(text: &str) -> Result<Filter, String> {
    let usage = || {
        format!(
            "{text:?} is no filter: write state=, name=, id=, network=, label=KEY or label=KEY=VALUE"
        )
    };
    let (key, value) = text.split_once('=').ok_or_else(usage)?;
    if value.is_empty() {
        return Err(usage());
    }
    let owned = value.to_owned();
    match key {
        "state" => Ok(Filter::State(value.replace('_', " "))),
        "name" => Ok(Filter::Name(owned)),
        "id" => Ok(Filter::Id(owned)),
        "network" => Ok(Filter::Network(owned)),
        "label" => Ok(match value.split_once('=') {
            Some((key, value)) => Filter::Label(key.to_owned(), Some(value.to_owned())),
            None => Filter::Label(owned, None),
        }),
        _ => Err(usage()),
    }
}

/// True when the pod passes all of them.
pub fn passes(filters: &[Filter], pod: &Listed<'_>) -> bool {
    filters.iter().all(|one| match one {
        // Each label is a key of its own: all that are asked for have to be there.
        Filter::Label(..) => one.fits(pod),
        _ => filters.iter().any(|f| f.is_like(one) && f.fits(pod)),
    })
}

impl Filter {
    fn is_like(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }

    fn fits(&self, pod: &Listed<'_>) -> bool {
        match self {
            Self::State(state) => pod.state.replace('_', " ") == *state,
            Self::Name(pattern) => matches(pattern, pod.name),
            Self::Id(start) => pod.id.starts_with(start.as_str()),
            Self::Network(name) => pod.networks.contains(&name.as_str()),
            Self::Label(key, value) => pod.labels.is_some_and(|labels| {
                let found = labels.get(key);
                found.is_some_and(|f| value.as_ref().is_none_or(|v| f == v))
            }),
        }
    }
}

/// `*` is any characters, everything else is itself.
fn matches(pattern: &str, text: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else {
        return pattern == text;
    };
    let Some(mut left) = text.strip_prefix(first) else {
        return false;
    };
    let parts: Vec<&str> = rest.split('*').collect();
    let (last, middle) = parts.split_last().unwrap_or((&"", &[]));
    for part in middle {
        match left.find(part) {
            Some(at) => left = left.get(at + part.len()..).unwrap_or_default(),
            None => return false,
        }
    }
    left.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_joined_by_and_values_by_or() {
        let labels: BTreeMap<String, String> = [
            ("app".to_owned(), "web".to_owned()),
            ("tier".to_owned(), "a".to_owned()),
        ]
        .into();
        let pod = Listed {
            state: "not ready",
            name: "web-1",
            id: "abc",
            networks: vec!["n1", "n2"],
            labels: Some(&labels),
        };
        let passes = |texts: &[&str]| {
            let all: Vec<Filter> = texts.iter().map(|t| parse(t).unwrap()).collect();
            super::passes(&all, &pod)
        };
        for good in [
            &[][..],
            &["state=not_ready"],
            &["state=ready", "state=not ready"],
            &["name=web-1"],
            &["name=web*", "label=app"],
            &["label=app=web", "label=tier=a"],
            &["id=ab", "network=n2"],
        ] {
            assert!(passes(good), "{good:?}");
        }
        for bad in [
            &["state=ready"][..],
            &["name=web"],
            &["label=app=web", "label=tier=b"],
            &["label=other"],
            &["id=b"],
            &["name=web*", "state=ready"],
        ] {
            assert!(!passes(bad), "{bad:?}");
        }
        for none in ["", "state", "state=", "colour=red"] {
            assert!(parse(none).is_err(), "{none}");
        }
    }

    #[test]
    fn stars_stand_for_anything() {
        for (pattern, text, fits) in [
            ("*", "", true),
            ("a*", "abc", true),
            ("*c", "abc", true),
            ("a*c", "abc", true),
            ("a*b*c", "axbyc", true),
            ("a*c", "ac", true),
            ("ab*bc", "abc", false),
            ("a", "ab", false),
        ] {
            assert_eq!(matches(pattern, text), fits, "{pattern} {text}");
        }
    }
}
