//! VERSION: which versions of the specification a plugin speaks, asked once for each state of its executable.
//!
//! The answers are kept for the boot in `<runtime_root>/.plugin-versions`, so that not every pod asks again.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::chain::type_of;
use super::plugin::{self, Call, Command};
use super::{NetworkConf, kept};
use crate::config::Config;
use crate::error::{Context, Error, Kind, Result};
use crate::process::Reaper;

const FILE: &str = ".plugin-versions";

/// VERSION does no work: more means that the plugin hangs.
const LIMIT: Duration = Duration::from_secs(5);

/// One executable in one state.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct State {
    dev: u64,
    inode: u64,
    modified: (i64, i64),
    size: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    state: State,
    versions: Vec<String>,
}

/// Versions that the plugin of type `plugin` speaks, as it lists them. Errors: State when it is not installed, else what
/// became of it.
pub async fn versions(config: &Config, reaper: &Reaper, plugin: &str) -> Result<Vec<String>> {
    let program = plugin::find(plugin, &config.cni.plugin_dirs)?;
    of_program(config, reaper, plugin, &program).await
}

/// State error when a plugin says that it does not speak the configuration's version. One that does not answer is given
/// the benefit of the doubt, once asked it is not asked again by this process.
pub(super) async fn require(
    config: &Config,
    reaper: &Reaper,
    conf: &NetworkConf,
    programs: &[PathBuf],
) -> Result<()> {
    static SILENT: Mutex<Option<HashSet<State>>> = Mutex::new(None);
    let silent = || SILENT.lock().unwrap_or_else(PoisonError::into_inner);
    for (plugin, program) in conf.plugins.iter().zip(programs) {
        let name = type_of(plugin);
        let state = state(program)?;
        if silent().as_ref().is_some_and(|s| s.contains(&state)) {
            continue;
        }
        match of_program(config, reaper, name, program).await {
            Ok(spoken) if spoken.contains(&conf.cni_version) => {}
            Ok(spoken) => {
                return Err(Error::new(
                    Kind::State,
                    format!(
                        "check CNI plugin {name:?} ({}): it speaks versions {} and the network's cniVersion is {}; install a plugin that speaks it, or change {}",
                        program.display(),
                        spoken.join(", "),
                        conf.cni_version,
                        conf.path.display()
                    ),
                ));
            }
            Err(error) => {
                tracing::warn!(plugin = name, %error, "plugin does not tell its versions");
                silent().get_or_insert_default().insert(state);
            }
        }
    }
    Ok(())
}

async fn of_program(
    config: &Config,
    reaper: &Reaper,
    name: &str,
    program: &Path,
) -> Result<Vec<String>> {
    let state = state(program)?;
    let key = program.to_string_lossy().into_owned();
    let mut answers: BTreeMap<String, Answer> = kept::read(config, FILE);
    if let Some(known) = answers.get(&key).filter(|a| a.state == state) {
        return Ok(known.versions.clone());
    }
    let call = Call {
        command: Command::Version,
        name,
        program,
        search: &config.cni.plugin_dirs,
        attachment: None,
        netns: Path::new(""),
        conf: json!({"cniVersion": "1.1.0"}).to_string().into_bytes(),
        left: LIMIT,
        bound: LIMIT,
    };
    let versions = read(&plugin::run(reaper, call).await?).ok_or_else(|| {
        Error::new(
            Kind::Other,
            format!(
                "run CNI plugin {name:?} (VERSION): its answer has no list of supportedVersions"
            ),
        )
    })?;
    answers.retain(|path, _| Path::new(path).exists());
    answers.insert(
        key,
        Answer {
            state,
            versions: versions.clone(),
        },
    );
    kept::write(config, FILE, &answers);
    Ok(versions)
}

fn read(answer: &Value) -> Option<Vec<String>> {
    let listed = answer["supportedVersions"].as_array()?;
    let versions: Vec<String> = listed
        .iter()
        .filter_map(|v| v.as_str().map(str::to_owned))
        .collect();
    (!versions.is_empty()).then_some(versions)
}

fn state(program: &Path) -> Result<State> {
    // What is executed is what a link points at.
    let meta = fs::metadata(program)
        .context(|| format!("look at {}", program.display()))
        .map_err(|e| e.as_kind(Kind::State))?;
    Ok(State {
        dev: meta.dev(),
        inode: meta.ino(),
        modified: (meta.mtime(), meta.mtime_nsec()),
        size: meta.size(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_list_of_versions_is_an_answer() {
        let good = json!({"cniVersion": "1.0.0", "supportedVersions": ["0.4.0", "1.0.0"]});
        assert_eq!(read(&good).unwrap(), ["0.4.0", "1.0.0"]);
        for bad in [
            json!({}),
            json!({"supportedVersions": []}),
            json!(null),
            json!({"supportedVersions": [1]}),
        ] {
            assert!(read(&bad).is_none(), "{bad}");
        }
    }
}
