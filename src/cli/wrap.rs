//! `podvisor network wrap` and `unwrap`: the CNI plugin in front of a network, or not.

use crate::error::Kind;
use crate::network::{self, Asked};

use super::failure::{Failure, NO_SUCH};
use super::host::Host;
use super::output;

/// Checks that the network works and that the plugin is installed; then puts it in front.
pub async fn wrap(host: &Host, name: &str) -> Result<u8, Failure> {
    let conf =
        network::load_conf(&host.config, Some(name)).map_err(|e| Failure::new(NO_SUCH, e))?;
    let reaper = host.reaper().await?;
    let spoken = network::versions(&host.config, reaper, network::PLUGIN).await?;
    if !spoken.contains(&conf.cni_version) {
        return Err(Failure::no_such(
            Kind::Invalid,
            format!(
                "wrap network {name}: {} speaks versions {}, and the network's cniVersion is {}",
                network::PLUGIN,
                spoken.join(", "),
                conf.cni_version
            ),
        ));
    }
    let asked = network::status(&host.config, reaper, &conf).await?;
    let changed = network::wrap(&conf)?;
    let done = if changed {
        "wrapped"
    } else {
        "was wrapped already"
    };
    output::line(format!("{name}: {done} ({})", conf.path.display()));
    if let Asked::NotAsked(why) = asked {
        output::complain(format!("its plugins are there; whether they work: {why}"));
    }
    for plugin in &conf.plugins {
        let kind = plugin["type"].as_str().unwrap_or_default();
        if let Some(note) = network::agent_note(kind) {
            output::complain(format!("plugin {kind}: {note}"));
        }
    }
    Ok(0)
}

/// Takes it away.
pub fn unwrap(host: &Host, name: &str) -> Result<u8, Failure> {
    let conf =
        network::load_conf(&host.config, Some(name)).map_err(|e| Failure::new(NO_SUCH, e))?;
    let changed = network::unwrap(&conf)?;
    let done = if changed {
        "unwrapped"
    } else {
        "was not wrapped"
    };
    output::line(format!("{name}: {done} ({})", conf.path.display()));
    Ok(0)
}
