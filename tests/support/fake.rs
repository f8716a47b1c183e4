//! Fakes that fail on demand: a CNI plugin and an OCI runtime, each a script that logs every call and behaves as told.
//!
//! Behaviour is set per verb (`ADD`, `DEL`, ...; a runtime's in capitals too, `CREATE`) and may change between calls.
//! What is not set is done by the real program the fake stands in front of, or answered with a plain success.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// A CNI plugin `name` in `dir`, answering ADD with `10.99.0.2/24` when nothing else is said.
pub fn plugin(dir: &Path, name: &str) -> Fake {
    Fake::make("plugin", dir, name, None)
}

/// A CNI plugin in front of a real one (`/usr/lib/cni/bridge`).
pub fn plugin_before(dir: &Path, name: &str, real: &Path) -> Fake {
    Fake::make("plugin", dir, name, Some(real))
}

/// An OCI runtime in front of a real one (`runc`).
pub fn runtime_before(dir: &Path, name: &str, real: &Path) -> Fake {
    Fake::make("runtime", dir, name, Some(real))
}

/// What a fake may do at a verb.
#[derive(Debug, Clone)]
pub enum Act {
    /// Take this many seconds first (`0.5`).
    Sleep(f64),
    /// Block until this file exists.
    WaitFor(PathBuf),
    /// Print this on stdout and end (exit 0 unless `Exit` says otherwise).
    Print(String),
    /// Print this on stderr and go on.
    Stderr(String),
    /// End with this code, after doing nothing.
    Exit(i32),
    /// Die by this signal (`KILL`).
    Signal(String),
    /// Let the real program do its work before `Exit` or `Signal`.
    AfterReal,
    /// Apply `Exit` (1 unless said), `Signal`, `Stderr` only to this many first calls of the verb.
    OnlyFirst(u32),
    /// Ignore SIGTERM.
    IgnoreTerm,
    /// Leave a child behind that holds stdout for this many seconds.
    Grandchild(u32),
}

/// One call the fake got.
#[derive(Debug, Clone)]
pub struct Call {
    pub verb: String,
    pub args: Vec<String>,
    pub env: Vec<(String, String)>,
    pub stdin: String,
    pub pid: i32,
    /// Exit code or signal name; `None` while it runs, was killed, or was replaced by the real runtime.
    pub end: Option<String>,
}

impl Call {
    /// A variable it was called with (`CNI_NETNS`), empty when it was not set.
    pub fn var(&self, name: &str) -> &str {
        self.env
            .iter()
            .find(|(key, _)| key == name)
            .map_or("", |(_, value)| value)
    }
}

/// An installed fake.
#[derive(Debug)]
pub struct Fake {
    /// The script.
    pub path: PathBuf,
    dir: tempfile::TempDir,
}

impl Fake {
    /// Sets what happens at a verb from the next call on; replaces what was set for it, `&[]` makes it normal again.
    pub fn on(&self, verb: &str, acts: &[Act]) -> &Self {
        let file = self.dir.path().join("behave");
        let old = fs::read_to_string(&file).unwrap();
        let prefix = format!("{verb}_");
        let kept = old.split_inclusive('\u{1}').filter(|entry| {
            !entry
                .trim_start_matches(['#', '\n', '\u{1}'])
                .starts_with(&prefix)
        });
        let mut text: String = kept.collect();
        for act in acts {
            let (knob, value) = act.knob();
            text.push_str(&format!(
                "{prefix}{knob}='{}'\n#\u{1}\n",
                value.replace('\'', r"'\''")
            ));
        }
        // A call that starts meanwhile reads the old or the new text, never half of it.
        let new = self.dir.path().join(".behave");
        fs::write(&new, text).unwrap();
        fs::rename(new, file).unwrap();
        self
    }

    /// Every call so far, in order.
    pub fn calls(&self) -> Vec<Call> {
        let calls = self.dir.path().join("calls");
        (0..)
            .map(|n: u32| calls.join(n.to_string()))
            .take_while(|dir| dir.exists())
            .filter_map(|dir| read_call(&dir))
            .collect()
    }

    /// The calls of one verb, in order.
    pub fn calls_of(&self, verb: &str) -> Vec<Call> {
        self.calls()
            .into_iter()
            .filter(|call| call.verb == verb)
            .collect()
    }

    /// How often a verb was called.
    pub fn count(&self, verb: &str) -> usize {
        self.calls_of(verb).len()
    }

    /// Forgets every call: a fake that is called thousands of times looks through all that it remembers. None may be
    /// under way.
    pub fn forget(&self) {
        let calls = self.dir.path().join("calls");
        fs::remove_dir_all(&calls).unwrap();
        fs::create_dir(&calls).unwrap();
    }

    fn make(kind: &str, bin: &Path, name: &str, real: Option<&Path>) -> Self {
        let dir = tempfile::Builder::new()
            .prefix("pvtest-fake-")
            .tempdir()
            .unwrap();
        fs::create_dir_all(dir.path().join("calls")).unwrap();
        fs::write(dir.path().join("behave"), "").unwrap();
        fs::create_dir_all(bin).unwrap();
        let head = if kind == "plugin" { PLUGIN } else { RUNTIME };
        let real = real
            .map(|path| path.display().to_string())
            .unwrap_or_default();
        let script = format!(
            "#!/bin/bash\nkind={kind}\nhere='{}'\nreal='{real}'\n{head}\n{}",
            dir.path().display(),
            include_str!("fake.sh")
        );
        // Written beside and moved: a file open for writing cannot be executed, and another thread may be forking.
        let (path, new) = (bin.join(name), bin.join(format!(".{name}.new")));
        fs::write(&new, script).unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(new, &path).unwrap();
        Self { path, dir }
    }
}

impl Act {
    fn knob(&self) -> (&'static str, String) {
        match self {
            Self::Sleep(seconds) => ("SLEEP", seconds.to_string()),
            Self::WaitFor(file) => ("WAIT_FILE", file.display().to_string()),
            Self::Print(text) => ("PRINT", text.clone()),
            Self::Stderr(text) => ("STDERR", text.clone()),
            Self::Exit(code) => ("EXIT", code.to_string()),
            Self::Signal(name) => ("SIGNAL", name.clone()),
            Self::AfterReal => ("AFTER", "1".into()),
            Self::OnlyFirst(calls) => ("FAIL_FIRST", calls.to_string()),
            Self::IgnoreTerm => ("IGNORE_TERM", "1".into()),
            Self::Grandchild(seconds) => ("GRANDCHILD", seconds.to_string()),
        }
    }
}

/// `None` for a call that has not written its verb yet.
fn read_call(dir: &Path) -> Option<Call> {
    let text = |name: &str| fs::read_to_string(dir.join(name)).unwrap_or_default();
    let verb = fs::read_to_string(dir.join("verb")).ok()?.trim().to_owned();
    let pair = |line: &str| {
        line.split_once('=')
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
    };
    Some(Call {
        verb,
        args: text("args").lines().map(str::to_owned).collect(),
        env: text("env").lines().filter_map(pair).collect(),
        stdin: text("stdin"),
        pid: text("pid").trim().parse().unwrap_or(0),
        end: fs::read_to_string(dir.join("end"))
            .ok()
            .map(|end| end.trim().to_owned()),
    })
}

const PLUGIN: &str = r#"
verb=${CNI_COMMAND:-NONE}
feed() { "$real" "$@" <"$call/stdin"; }
default_answer() {
    local version
    version=$(tr -d '\n' <"$call/stdin" | sed -n 's/.*"cniVersion" *: *"\([^"]*\)".*/\1/p')
    case $verb in
        ADD) printf '{"cniVersion":"%s","interfaces":[{"name":"%s","sandbox":"%s"}],"ips":[{"address":"10.99.0.2/24","interface":0}]}' "${version:-1.0.0}" "${CNI_IFNAME-}" "${CNI_NETNS-}" ;;
        VERSION) printf '{"cniVersion":"1.0.0","supportedVersions":["0.3.1","0.4.0","1.0.0","1.1.0"]}' ;;
    esac
}
"#;

/// The verb is the first word that is neither an option nor an option's value.
const RUNTIME: &str = r#"
verb=NONE skip=
for word in "$@"; do
    if [ -n "$skip" ]; then skip=; continue; fi
    case $word in
        --root|--log|--log-format|--criu|--rootless|--cgroup-manager) skip=1 ;;
        -*) ;;
        *) verb=$(printf '%s' "$word" | tr a-z- A-Z_); break ;;
    esac
done
feed() { "$real" "$@"; }
default_answer() { :; }
"#;
