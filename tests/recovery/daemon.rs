//! containerd itself dies: pods that it made through the Sandbox service, at each moment of theirs.

use std::collections::BTreeMap;

use serde_json::json;

use crate::kit::{BOUND, Cell};
use crate::support::{Containerd, Sandboxes, eventually, require};
use crate::table::settled;

const RUNTIME: &str = "io.containerd.podvisor.v1";

/// What the daemon is asked just then.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    Create,
    Start,
    Nothing,
    Stop,
    Shutdown,
}

/// The moment's name in the table, the call, the point that holds it.
const MOMENTS: [(&str, Call, &str); 8] = [
    ("CreateSandbox", Call::Create, "files.make.after"),
    ("StartSandbox, netns made", Call::Start, "netns.make.after"),
    (
        "StartSandbox, CNI ADD",
        Call::Start,
        "cni-add.plugin.before",
    ),
    (
        "StartSandbox, infra process",
        Call::Start,
        "infra.run.before",
    ),
    ("running", Call::Nothing, ""),
    ("stop, containers", Call::Stop, "stop.containers.before"),
    ("stop, CNI DEL", Call::Stop, "cni-del.plugin.before"),
    ("remove", Call::Shutdown, "shutdown.containers.before"),
];

/// States that end by themselves, also without the daemon.
const GOING: [&str; 2] = ["starting", "parked"];

/// Outcomes by moment; none where the machine has no containerd 2.1.
pub fn outcomes(cell: &Cell<'_>) -> BTreeMap<&'static str, String> {
    let Some(peer) = require::peer("containerd-2.1") else {
        return BTreeMap::new();
    };
    let dir = cell.fault_dir().to_str().unwrap();
    let mut daemon = Containerd::builder(&peer)
        .env("PODVISOR_FAULT_DIR", dir)
        .start();
    let outcomes = MOMENTS.iter().enumerate();
    let outcomes = outcomes
        .map(|(n, (name, call, point))| {
            let outcome = outcome(cell, &mut daemon, &format!("pod{n}"), *call, point);
            (*name, outcome)
        })
        .collect();
    daemon.stop();
    // Nobody removes a daemon's sockets for it.
    std::fs::remove_file(&daemon.address).ok();
    std::fs::remove_file(daemon.state.join("c.sock.ttrpc")).ok();
    std::fs::remove_dir_all("/run/nri").ok();
    outcomes
}

fn outcome(
    cell: &Cell<'_>,
    daemon: &mut Containerd,
    id: &str,
    call: Call,
    point: &'static str,
) -> String {
    let spec = json!({
        "ociVersion": "1.0.2",
        "linux": {"namespaces": [{"type": "network"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}]},
    });
    let mut sandboxes = Sandboxes::of(daemon, &cell.namespace, RUNTIME);
    if call != Call::Create {
        sandboxes.create(id, &spec).unwrap();
    }
    if !matches!(call, Call::Create | Call::Start) {
        sandboxes.start(id).unwrap();
    }
    let before = cell.hits(point);
    if !point.is_empty() {
        cell.rules(&format!("{point}=1*hang\n"));
    }
    let said = std::thread::scope(|scope| {
        let asked = scope.spawn(|| match call {
            Call::Create => sandboxes.create(id, &spec),
            Call::Start => sandboxes.start(id).map(drop),
            Call::Stop => sandboxes.stop(id, 1),
            Call::Shutdown => sandboxes.shutdown(id),
            Call::Nothing => Ok(()),
        });
        if call != Call::Nothing {
            eventually(BOUND, point, || (cell.hits(point) > before).then_some(()));
        }
        daemon.kill();
        cell.rules("");
        match (call, asked.join().unwrap()) {
            (Call::Nothing, _) => "",
            (_, Ok(())) => "succeeds, ",
            (_, Err(_)) => "fails, ",
        }
    });
    daemon.start_again();
    let state = settled(cell, &GOING);
    let mut sandboxes = Sandboxes::of(daemon, &cell.namespace, RUNTIME);
    // As far as it remembers the pod.
    let _ = sandboxes.stop(id, 1);
    let _ = sandboxes.shutdown(id);
    let _ = sandboxes.forget(id);
    let way = match (state.as_str(), settled(cell, &GOING).as_str()) {
        ("gone", _) => "",
        (_, "gone") => "; ShutdownSandbox",
        _ => "; `rm -f`",
    };
    cell.remove();
    format!("{said}{state}{way}")
}
