//! How a verb fails: an exit code and, unless it has been said already, what to print.
//!
//! Promises the codes listed in the room's first lines. Must never look into an error's text, with one exception that
//! has no other source: whether an OCI runtime could not find, or not execute, the workload's command.

use crate::error::{Error, Kind};

/// podvisor itself failed.
pub const PODVISOR_FAILED: u8 = 125;
/// The command is there and cannot be run.
pub const CANNOT_RUN: u8 = 126;
/// The command is not there.
pub const NOT_FOUND: u8 = 127;
/// What was named is not there, or not in a state that allows it.
pub const NO_SUCH: u8 = 1;

/// See the module.
#[derive(Debug)]
pub struct Failure {
    code: u8,
    error: Option<Error>,
}

impl Failure {
    /// Fails with `code` and says why.
    pub fn new(code: u8, error: Error) -> Self {
        Self {
            code,
            error: Some(error),
        }
    }

    /// The pod or container named is not there, or cannot do that now.
    pub fn no_such(kind: Kind, message: impl Into<String>) -> Self {
        Self::new(NO_SUCH, Error::new(kind, message))
    }

    /// Everything has been said already.
    pub fn silent(code: u8) -> Self {
        Self { code, error: None }
    }

    /// `command` could not be started in a container: 127 and 126 as shells use them, else 125. Not every runtime says
    /// which command it was.
    pub fn of_start(command: &str, error: Error) -> Self {
        let code = start_code(&error.to_string());
        let why = match code {
            NOT_FOUND => "no such command in the container's root file system",
            CANNOT_RUN => "it is there and cannot be executed",
            _ => return Self::new(code, error),
        };
        Self::new(code, error.within(format!("run {command:?}: {why}")))
    }

    /// The exit code.
    pub fn code(&self) -> u8 {
        self.code
    }

    /// What to print, if anything.
    pub fn text(&self) -> Option<String> {
        self.error.as_ref().map(ToString::to_string)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::new(PODVISOR_FAILED, error)
    }
}

/// What runc, crun and youki write when execve of the workload fails; other texts are podvisor's or the runtime's own trouble.
fn start_code(text: &str) -> u8 {
    let text = text.to_ascii_lowercase();
    let missing = [
        "executable file not found",
        "not found in $path",
        "executable path not found",
    ];
    if missing.iter().any(|m| text.contains(m))
        || (text.contains("exec") && text.contains("` not found"))
    {
        return NOT_FOUND;
    }
    let about_exec =
        text.contains("exec: \"") || text.contains("exec `") || text.contains("open executable");
    if about_exec && text.contains("no such file or directory") {
        return NOT_FOUND;
    }
    // crun says "not permitted" of a directory.
    let refused = text.contains("permission denied")
        || text.contains("is a directory")
        || text.contains("open executable: operation not permitted");
    if text.contains("exec format error") || (refused && text.contains("exec")) {
        return CANNOT_RUN;
    }
    PODVISOR_FAILED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtimes_texts_become_the_shells_codes() {
        for (text, code) in [
            (r#"exec: "nope": executable file not found in $PATH"#, 127),
            (
                r#"exec: "/bin/nope": stat /bin/nope: no such file or directory"#,
                127,
            ),
            (
                "executable file `nope` not found in $PATH: No such file or directory",
                127,
            ),
            ("open executable: No such file or directory", 127),
            (r#"exec: "/etc/passwd": permission denied"#, 126),
            (r#"exec: "/bin": is a directory: permission denied"#, 126),
            ("exec /x: Exec format error", 126),
            ("crun create: open executable: Operation not permitted", 126),
            ("make cgroup: permission denied", 125),
            ("open /run/x: No such file or directory", 125),
        ] {
            assert_eq!(start_code(text), code, "{text}");
        }
    }
}
