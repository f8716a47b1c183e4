//! Checks of everything that becomes part of a path, before any file call sees it (law 10: ids are hostile).

use crate::error::{Error, Kind, Result};

/// Longest id or namespace; containerd's own limit for identifiers.
pub const MAX: usize = 76;

/// Kernel limit of an interface name, without the closing NUL.
pub const MAX_INTERFACE: usize = 15;

/// Directories of the runtime root that are no namespaces: sockets, pinned netns, state of OCI runtimes, jobs of the CNI
/// plugin.
pub const RESERVED: [&str; 4] = ["s", "netns", "oci", "cni"];

/// Lower-case hexadecimal digits, two for each byte: how digests become names.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Checks a containerd namespace: an id that is none of our own directories' names.
pub fn check_namespace(namespace: &str) -> Result<&str> {
    check("namespace", namespace)?;
    if RESERVED.contains(&namespace) {
        return Err(invalid(
            "namespace",
            namespace,
            "podvisor keeps other things under this name; choose another",
        ));
    }
    Ok(namespace)
}

/// Checks a sandbox, container or exec id, or a namespace.
///
/// Shape: letters and digits, in groups joined by a single `.`, `_` or `-`; 1 to 76 characters. It therefore never is
/// `..`, never starts with `-`, and holds no `/`, space, newline or NUL.
pub fn check<'a>(what: &str, id: &'a str) -> Result<&'a str> {
    if id.is_empty() {
        return Err(invalid(what, id, "it is empty"));
    }
    if id.len() > MAX {
        return Err(invalid(
            what,
            id,
            &format!("it has {} characters and the limit is {MAX}", id.len()),
        ));
    }
    let mut joined = true; // a separator may not come first
    for c in id.chars() {
        match c {
            'a'..='z' | 'A'..='Z' | '0'..='9' => joined = false,
            '.' | '_' | '-' if !joined => joined = true,
            _ => {
                return Err(invalid(
                    what,
                    id,
                    "use letters and digits, joined by single '.', '_' or '-'",
                ));
            }
        }
    }
    if joined {
        return Err(invalid(what, id, "it ends with a separator"));
    }
    Ok(id)
}

/// Checks the name of a CNI network (the CNI specification's rule: a letter or digit first, then also `_ . -`).
pub fn check_network(name: &str) -> Result<&str> {
    let mut chars = name.chars();
    let first = chars.next().is_some_and(|c| c.is_ascii_alphanumeric());
    let rest = chars.all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'));
    if first && rest && name.len() <= 255 {
        return Ok(name);
    }
    Err(invalid(
        "network name",
        name,
        "use a letter or digit first, then letters, digits, '_', '.' or '-'",
    ))
}

/// Checks an interface name by the kernel's rules.
pub fn check_interface(name: &str) -> Result<&str> {
    let bad = name.is_empty()
        || name.len() > MAX_INTERFACE
        || name == "."
        || name == ".."
        || name
            .chars()
            .any(|c| c == '/' || c == ':' || c.is_whitespace() || c.is_control());
    if bad {
        return Err(invalid(
            "interface name",
            name,
            "use 1 to 15 characters without '/', ':' or space",
        ));
    }
    Ok(name)
}

fn invalid(what: &str, id: &str, why: &str) -> Error {
    let shown: String = id.chars().take(80).collect();
    Error::new(Kind::Invalid, format!("check {what} {shown:?}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_ids_are_refused() {
        let long = "a".repeat(300);
        for id in [
            "", ".", "..", "a/b", "-rf", "a\nb", "a b", "a..b", "a-", "\0", "é", &long,
        ] {
            assert!(check("sandbox id", id).is_err(), "{id:?}");
        }
    }

    #[test]
    fn usual_ids_pass() {
        let hex = "0".repeat(64);
        for id in ["a", "web-1", "k8s.io", "moby", "a_b.c-d", &hex] {
            assert!(check("sandbox id", id).is_ok(), "{id:?}");
        }
    }

    #[test]
    fn interface_names_follow_the_kernel() {
        assert!(check_interface("eth0").is_ok());
        for name in ["", ".", "..", "a/b", "a:1", "sixteen-letters-", "a b"] {
            assert!(check_interface(name).is_err(), "{name:?}");
        }
    }
}
