//! Whose network the pod gets, and which networks by name.

use std::path::Path;

use serde_json::Map;

use super::{NETWORK_ANNOTATION, NetworkPlan, Plan, Wanted, invalid};
use crate::error::Result;
use crate::id;
use crate::infra::Namespace;
use crate::network;

/// Most networks of one pod: all of them share the bound of one DEL.
const MAX_NETWORKS: usize = 16;

impl Plan {
    pub(super) fn choose_network(&mut self, netns_path: &str) -> Result<()> {
        if !netns_path.is_empty() {
            if !Path::new(netns_path).is_absolute() {
                return Err(invalid(&format!(
                    "netns_path {netns_path:?} is not absolute"
                )));
            }
            self.infra.network = Namespace::Path(netns_path.into());
        }
        let name = self
            .annotations
            .get(NETWORK_ANNOTATION)
            .cloned()
            .unwrap_or_default();
        self.network = match &self.infra.network {
            Namespace::Host => NetworkPlan::Host,
            Namespace::Path(path) => NetworkPlan::Given(path.clone()),
            Namespace::New if name == "none" => NetworkPlan::Loopback,
            Namespace::New => {
                let mut wanted = networks(&name)?;
                let ifnames: Vec<&str> = wanted.iter().map(|w| w.ifname.as_str()).collect();
                let wishes = network::wishes(&self.annotations, &ifnames)?;
                for (wanted, wishes) in wanted.iter_mut().zip(wishes) {
                    wanted.capabilities = wishes;
                }
                NetworkPlan::Ours(wanted)
            }
        };
        if !self.ports.is_empty() && !matches!(self.network, NetworkPlan::Ours(_)) {
            if matches!(self.network, NetworkPlan::Given(_)) {
                // CRI has published them through its own CNI call already.
                self.ports.clear();
            } else {
                return Err(invalid(
                    "ports can only be published on a pod network of ours; leave them out with host or no network",
                ));
            }
        }
        Ok(())
    }
}

/// The networks that the annotation names.
fn networks(text: &str) -> Result<Vec<Wanted>> {
    let mut wanted: Vec<Wanted> = Vec::new();
    for (n, part) in text.split(',').map(str::trim).enumerate() {
        let (network, ifname) = match part.split_once('@') {
            Some((network, ifname)) => (network, ifname.to_owned()),
            None => (part, format!("eth{n}")),
        };
        if !text.is_empty() {
            id::check_network(network)?;
        }
        id::check_interface(&ifname)?;
        if matches!(network, "none" | "host") || ifname == "lo" {
            return Err(invalid(&format!(
                "annotation {NETWORK_ANNOTATION} = {text:?}: \"none\" and \"host\" cannot be among other networks, and lo is the pod's own"
            )));
        }
        if wanted.iter().any(|w| w.ifname == ifname) {
            return Err(invalid(&format!(
                "annotation {NETWORK_ANNOTATION} = {text:?}: interface {ifname} comes twice"
            )));
        }
        wanted.push(Wanted {
            network: network.to_owned(),
            ifname,
            capabilities: Map::new(),
        });
    }
    if wanted.len() > MAX_NETWORKS {
        return Err(invalid(&format!(
            "annotation {NETWORK_ANNOTATION} names {} networks; {MAX_NETWORKS} are the most",
            wanted.len()
        )));
    }
    Ok(wanted)
}
