//! Over the Sandbox service: with a client of our own, which is told each failure itself, and through containerd's.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use podvisor::client::{self, Client};
use podvisor::error::{Error, Kind, Result};
use podvisor::proto::any;
use podvisor::proto::cri::sandbox_config::PodSandboxConfig;
use podvisor::proto::sandbox::sandbox as wire;
use serde_json::{Value, json};

use crate::support::bin::{self, run};
use crate::support::{Containerd, Sandboxes, Snapshot, cni, require, sandboxed};
use crate::{RUNTIME, annotations};

const BOUND: Duration = Duration::from_secs(60);

/// Where a pod says what has to fail.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// `config.json` of the bundle.
    Spec,
    /// The request's PodSandboxConfig.
    Options,
    /// The request's own annotations.
    Request,
}

/// A supervisor that fails as it is told, and a connection to it.
struct Own {
    client: Client,
    runtime: tokio::runtime::Runtime,
    request: wire::CreateSandboxRequest,
}

impl Own {
    fn start(
        id: &str,
        place: Place,
        failing: &[(&str, &str)],
    ) -> std::result::Result<Self, String> {
        let bundle = Path::new("/run/bundles").join(id);
        fs::create_dir_all(&bundle).unwrap();
        let all = annotations(failing);
        let mut request = wire::CreateSandboxRequest {
            sandbox_id: id.into(),
            bundle_path: bundle.display().to_string(),
            ..Default::default()
        };
        match place {
            Place::Spec => {
                let spec = spec(&all);
                fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
            }
            Place::Options => {
                let config = PodSandboxConfig {
                    annotations: all.into_iter().collect(),
                    ..Default::default()
                };
                let options = any::pack(any::POD_SANDBOX_CONFIG, &config).unwrap();
                request.options = Some(options).into();
            }
            Place::Request => request.annotations = all.into_iter().collect(),
        }
        let mut command = Command::new(bin::dir().join("containerd-shim-podvisor-fp-v1"));
        command.args(["-namespace", "test", "-id", id, "start"]);
        command.current_dir(&bundle);
        let started = run(&mut command, BOUND);
        if started.code != Some(0) {
            return Err(started.stderr);
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let address = started.stdout.trim();
        let client = runtime.block_on(Client::connect(address)).unwrap();
        Ok(Self {
            client,
            runtime,
            request,
        })
    }

    fn call(&self, method: &str) -> Result<()> {
        let sandbox = self.client.sandbox();
        let context = || client::context(Some(BOUND));
        let id = || self.request.sandbox_id.clone();
        macro_rules! ask {
            ($call:ident, $request:ident) => {{
                let request = wire::$request {
                    sandbox_id: id(),
                    ..Default::default()
                };
                let answer = self.runtime.block_on(sandbox.$call(context(), &request));
                answer.map(drop)
            }};
        }
        let answer = match method {
            "CreateSandbox" => {
                let create = sandbox.create_sandbox(context(), &self.request);
                self.runtime.block_on(create).map(drop)
            }
            "StartSandbox" => ask!(start_sandbox, StartSandboxRequest),
            "Platform" => ask!(platform, PlatformRequest),
            "SandboxStatus" => ask!(sandbox_status, SandboxStatusRequest),
            "UpdateSandbox" => ask!(update_sandbox, UpdateSandboxRequest),
            "PingSandbox" => ask!(ping_sandbox, PingRequest),
            "SandboxMetrics" => ask!(sandbox_metrics, SandboxMetricsRequest),
            "StopSandbox" => ask!(stop_sandbox, StopSandboxRequest),
            "WaitSandbox" => ask!(wait_sandbox, WaitSandboxRequest),
            "ShutdownSandbox" => ask!(shutdown_sandbox, ShutdownSandboxRequest),
            other => panic!("{other}"),
        };
        answer.map_err(|e| client::from_ttrpc(method, e))
    }
}

fn spec(all: &[(String, String)]) -> Value {
    let all: serde_json::Map<String, Value> = all
        .iter()
        .map(|(k, v)| (k.clone(), v.clone().into()))
        .collect();
    json!({
        "ociVersion": "1.0.2",
        "hostname": "fp",
        "annotations": all,
        "linux": {"namespaces": [{"type": "network"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}]},
    })
}

/// In the order of a pod's life; each is asked until it works.
const METHODS: [&str; 10] = [
    "CreateSandbox",
    "StartSandbox",
    "Platform",
    "SandboxStatus",
    "UpdateSandbox",
    "PingSandbox",
    "SandboxMetrics",
    "StopSandbox",
    "WaitSandbox",
    "ShutdownSandbox",
];

fn failing_once(terms: &str, place: Place) -> Vec<Error> {
    let failing: Vec<(&str, &str)> = METHODS.iter().map(|method| (*method, terms)).collect();
    let own = Own::start("p1", place, &failing).unwrap();
    let mut told = Vec::new();
    for method in METHODS {
        told.push(own.call(method).expect_err(method));
        own.call(method).unwrap();
    }
    told
}

#[test]
fn every_method_that_fails_once_works_when_it_is_called_again() {
    sandboxed(
        "sandboxes::every_method_that_fails_once_works_when_it_is_called_again",
        || {
            cni::bridge("own", "podvown0", "10.98.3.0/24").write();
            fs::create_dir_all("/run/bundles").unwrap();
            let before = Snapshot::take();
            for place in [Place::Spec, Place::Options, Place::Request] {
                for error in failing_once("1*error(not today)", place) {
                    assert_eq!(error.kind(), Kind::Other, "{place:?} {error}");
                    assert!(error.to_string().contains("not today"), "{error}");
                }
                fs::remove_dir_all("/run/bundles/p1").unwrap();
                before.assert_unchanged();
            }
            // The handler's panic is an answer, too.
            for error in failing_once("1*panic(on purpose)", Place::Spec) {
                assert!(error.to_string().contains("panicked"), "{error}");
            }
            fs::remove_dir_all("/run/bundles/p1").unwrap();
            before.assert_unchanged();
        },
    );
}

#[test]
fn bad_terms_are_refused_where_they_are_read() {
    sandboxed(
        "sandboxes::bad_terms_are_refused_where_they_are_read",
        || {
            fs::create_dir_all("/run/bundles").unwrap();
            let before = Snapshot::take();
            let bad = [("StartSandbox", "1*explode(now)")];
            let started = Own::start("p1", Place::Spec, &bad).err().unwrap();
            assert!(started.contains("failpoint StartSandbox"), "{started}");
            fs::remove_dir_all("/run/bundles/p1").unwrap();
            for place in [Place::Options, Place::Request] {
                let own = Own::start("p1", place, &bad).unwrap();
                let error = own.call("CreateSandbox").unwrap_err();
                assert_eq!(error.kind(), Kind::Invalid, "{error}");
                own.call("ShutdownSandbox").unwrap();
                fs::remove_dir_all("/run/bundles/p1").unwrap();
            }
            before.assert_unchanged();
        },
    );
}

/// The executable that is shipped has no ear for annotations, whatever it was built with.
#[test]
fn the_supervisor_of_the_ordinary_name_does_not_obey() {
    sandboxed(
        "sandboxes::the_supervisor_of_the_ordinary_name_does_not_obey",
        || {
            let Some(peer) = require::peer("containerd-2.1") else {
                return;
            };
            let daemon = Containerd::start(&peer);
            let before = Snapshot::take();
            let ordinary = "io.containerd.podvisor.v1";
            let mut sandboxes = Sandboxes::of(&daemon, "default", ordinary);
            let failing = annotations(&[("CreateSandbox", "1*error(not today)")]);
            sandboxes.create("p1", &spec(&failing)).unwrap();
            sandboxes.shutdown("p1").unwrap();
            sandboxes.forget("p1").unwrap();
            before.assert_unchanged();
        },
    );
}

#[test]
fn a_create_that_fails_leaves_nothing_in_the_way_of_the_next() {
    sandboxed(
        "sandboxes::a_create_that_fails_leaves_nothing_in_the_way_of_the_next",
        || {
            let Some(peer) = require::peer("containerd-2.1") else {
                return;
            };
            let daemon = Containerd::start(&peer);
            cni::bridge("own", "podvown0", "10.98.3.0/24").write();
            let before = Snapshot::take();
            let mut sandboxes = Sandboxes::of(&daemon, "default", RUNTIME);
            for method in ["CreateSandbox", "StartSandbox"] {
                let failing = annotations(&[
                    (method, "1*error(not today)"),
                    ("ShutdownSandbox", "1*error(please retry)"),
                ]);
                let created = sandboxes.create("p1", &spec(&failing));
                let failed = created.and_then(|()| sandboxes.start("p1").map(drop));
                let told = failed.unwrap_err().message;
                assert!(told.contains("not today"), "{told}");
                let _ = sandboxes.shutdown("p1");
                let _ = sandboxes.forget("p1");
                sandboxes.create("p1", &spec(&[])).unwrap();
                sandboxes.start("p1").unwrap();
                sandboxes.stop("p1", 1).unwrap();
                sandboxes.shutdown("p1").unwrap();
                sandboxes.forget("p1").unwrap();
            }
            before.assert_unchanged();
        },
    );
}
