//! The command line of a shim, in the style of Go's `flag` package.
//!
//! Promises: `-x v`, `-x=v` and `--x` alike; flags end at the first word without a dash or at `--`; an unknown flag is
//! an error. General parsers read `-namespace` as a bundle of short flags, hence these few lines. Must never touch the
//! system.

use crate::error::{Error, Kind, Result};

/// How it is called, for error texts.
pub const USAGE: &str = "usage: containerd-shim-podvisor-v1 -namespace NS -id ID [-address SOCKET] \
[-publish-binary FILE] [-bundle DIR] [-debug] start|delete, or -v, or -info";

/// What to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Action {
    /// Launch (or join) a supervisor and print its address.
    Start,
    /// Clean up after a supervisor.
    Delete,
    /// Print the version.
    Version,
    /// Print what the shim can do.
    Info,
    /// No action word was given.
    #[default]
    None,
}

/// The flags, empty and false where not given. Strings are not checked yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// containerd namespace.
    pub namespace: String,
    /// Sandbox or container id.
    pub id: String,
    /// The daemon's gRPC socket, a bare path. Absent when the caller is no containerd.
    pub address: String,
    /// The daemon's executable.
    pub publish_binary: String,
    /// Bundle directory (`delete`).
    pub bundle: String,
    /// Socket to serve on; accepted for compatibility, the path is always the hashed one.
    pub socket: String,
    /// Socket for debugging; accepted for compatibility, nothing listens there.
    pub debug_socket: String,
    /// Log more.
    pub debug: bool,
    /// `-v` or `-version`.
    pub version: bool,
    /// `-info`.
    pub info: bool,
    /// The action.
    pub action: Action,
}

/// Where a flag's value goes.
enum Target {
    Text(fn(&mut Flags) -> &mut String),
    Switch(fn(&mut Flags) -> &mut bool),
}

/// Every flag there is.
const TABLE: &[(&str, Target)] = &[
    ("namespace", Target::Text(|f| &mut f.namespace)),
    ("id", Target::Text(|f| &mut f.id)),
    ("address", Target::Text(|f| &mut f.address)),
    ("publish-binary", Target::Text(|f| &mut f.publish_binary)),
    ("bundle", Target::Text(|f| &mut f.bundle)),
    ("socket", Target::Text(|f| &mut f.socket)),
    ("debug-socket", Target::Text(|f| &mut f.debug_socket)),
    ("debug", Target::Switch(|f| &mut f.debug)),
    ("v", Target::Switch(|f| &mut f.version)),
    ("version", Target::Switch(|f| &mut f.version)),
    ("info", Target::Switch(|f| &mut f.info)),
];

/// Parses the arguments after the program's name.
///
/// # Errors
/// Invalid, with the usage, for an unknown flag, a missing or impossible value, an unknown or a second action word.
pub fn parse<I: IntoIterator<Item = String>>(args: I) -> Result<Flags> {
    let mut flags = Flags::default();
    let mut args = args.into_iter();
    let mut words = Vec::new();
    while let Some(arg) = args.next() {
        if arg == "--" {
            words.extend(args);
            break;
        }
        let Some(flag) = arg.strip_prefix('-').filter(|rest| !rest.is_empty()) else {
            words.push(arg);
            words.extend(args);
            break;
        };
        let flag = flag.strip_prefix('-').unwrap_or(flag);
        let (name, inline) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (flag, None),
        };
        let Some((_, target)) = TABLE.iter().find(|(known, _)| *known == name) else {
            return Err(usage(&format!("unknown flag {arg:?}")));
        };
        match target {
            Target::Text(place) => {
                let value = inline.or_else(|| args.next());
                *place(&mut flags) =
                    value.ok_or_else(|| usage(&format!("flag -{name} needs a value")))?;
            }
            // A switch never takes the next word; Go accepts exactly these spellings after '='.
            Target::Switch(place) => {
                *place(&mut flags) = match inline.as_deref() {
                    None | Some("1" | "t" | "T" | "true" | "TRUE" | "True") => true,
                    Some("0" | "f" | "F" | "false" | "FALSE" | "False") => false,
                    Some(other) => {
                        return Err(usage(&format!(
                            "flag -{name} is true or false, not {other:?}"
                        )));
                    }
                }
            }
        }
    }
    flags.action = action(&flags, &words)?;
    Ok(flags)
}

fn action(flags: &Flags, words: &[String]) -> Result<Action> {
    if flags.version {
        return Ok(Action::Version);
    }
    if flags.info {
        return Ok(Action::Info);
    }
    match words {
        [] => Ok(Action::None),
        [word] if word == "start" => Ok(Action::Start),
        [word] if word == "delete" => Ok(Action::Delete),
        [word] => Err(usage(&format!("unknown action {word:?}"))),
        [_, second, ..] => Err(usage(&format!(
            "unexpected word {second:?} after the action"
        ))),
    }
}

fn usage(what: &str) -> Error {
    Error::new(
        Kind::Invalid,
        format!("read the command line: {what}; {USAGE}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Flags> {
        parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn the_command_lines_of_daemons_are_read() {
        // 1.6, then 2.1's delete, then a daemon that is no containerd.
        let start = read("-namespace k8s.io -address /run/c.sock -publish-binary /usr/bin/containerd -id x start").unwrap();
        assert_eq!(start.action, Action::Start);
        assert_eq!(
            (start.namespace.as_str(), start.id.as_str(), start.debug),
            ("k8s.io", "x", false)
        );
        let delete =
            read("-namespace n -address a -publish-binary p -id x -bundle /b -debug delete")
                .unwrap();
        assert_eq!(
            (delete.action, delete.bundle.as_str(), delete.debug),
            (Action::Delete, "/b", true)
        );
        let other = read("-namespace default -id x start").unwrap();
        assert_eq!(other.address, "");
    }

    #[test]
    fn one_or_two_dashes_and_equals_signs_are_the_same() {
        let wanted = read("-namespace n -id a=b -debug start").unwrap();
        for line in [
            "--namespace=n --id=a=b --debug start",
            "-namespace=n -id a=b -debug=true start",
        ] {
            assert_eq!(read(line).unwrap(), wanted, "{line}");
        }
    }

    #[test]
    fn a_value_may_look_like_a_flag_or_be_empty() {
        assert_eq!(read("-id -rf start").unwrap().id, "-rf");
        assert_eq!(
            parse(["-id".into(), String::new(), "start".into()])
                .unwrap()
                .id,
            ""
        );
    }

    #[test]
    fn queries_need_no_action_word() {
        for (line, action) in [
            ("-v", Action::Version),
            ("--version", Action::Version),
            ("-info", Action::Info),
        ] {
            assert_eq!(read(line).unwrap().action, action);
        }
    }

    #[test]
    fn what_is_not_understood_is_refused_with_the_usage() {
        for line in [
            "-nope start",
            "-id",
            "stop",
            "start delete",
            "-debug=maybe start",
            "start -debug",
            "---id x",
            "-=x",
        ] {
            let error = read(line).unwrap_err();
            assert!(error.to_string().contains("usage:"), "{line}: {error}");
        }
    }
}
