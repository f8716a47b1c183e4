//! A kubelet in small: its order of calls, its deadlines, a new attempt after a pod that could not be made, log
//! directories, and the streams of exec, attach and port-forward.

use std::fs;
use std::path::Path;
use std::time::Duration;

use protobuf::{EnumOrUnknown, MessageField};

use crate::cri::Cri;
use crate::image::PAUSE;
use crate::support::grpc::{Connection, Message, Status};
use crate::support::{Containerd, eventually};
use crate::wire::api::*;
use crate::wire::sandbox_config::*;

/// For everything but long work.
pub const BOUND: Duration = Duration::from_secs(90);
/// What a kubelet gives RunPodSandbox.
const RUN_BOUND: Duration = Duration::from_secs(240);
/// Below it each pod has a directory of logs.
pub const LOGS: &str = "/run/pod-logs";

/// One connection, and the runtime handler its pods get.
#[derive(Debug)]
pub struct Kubelet {
    cri: Cri,
    pub handler: String,
    /// How long RunPodSandbox may take.
    pub patience: Duration,
}

/// A pod that was made.
#[derive(Debug, Clone)]
pub struct Pod {
    pub id: String,
    pub config: PodSandboxConfig,
}

impl Kubelet {
    pub fn of(daemon: &Containerd, handler: &str) -> Self {
        Self {
            cri: Cri::of(daemon),
            handler: handler.into(),
            patience: RUN_BOUND,
        }
    }

    /// What is left of attempts at a pod is stopped and removed.
    pub fn clean(&mut self, name: &str) {
        for left in self.pods().iter().filter(|p| p.metadata.name == name) {
            self.end(&left.id);
        }
    }

    /// RunPodSandbox with logs in place; a pod that could not be made is stopped and removed, and comes again as the next
    /// attempt, as often as `tries` says.
    pub fn run(&mut self, config: &PodSandboxConfig, tries: u32) -> Result<Pod, Status> {
        let mut config = config.clone();
        fs::create_dir_all(&config.log_directory).unwrap();
        loop {
            let request = RunPodSandboxRequest {
                config: MessageField::some(config.clone()),
                runtime_handler: self.handler.clone(),
                ..Default::default()
            };
            let made: Result<RunPodSandboxResponse, _> =
                self.cri.ask("RunPodSandbox", &request, self.patience);
            match made {
                Ok(answer) => {
                    return Ok(Pod {
                        id: answer.pod_sandbox_id,
                        config,
                    });
                }
                Err(status) if config.metadata.attempt + 1 >= tries => return Err(status),
                Err(status) => println!("{}: {status:?}", config.metadata.name),
            }
            self.clean(&config.metadata.name);
            config.metadata.as_mut().unwrap().attempt += 1;
        }
    }

    /// A pod of this name with the usual settings.
    pub fn pod(&mut self, name: &str) -> Pod {
        self.run(&pod(name), 1).unwrap()
    }

    /// CreateContainer; with the pod's namespace modes where the container says nothing of them.
    pub fn create(&mut self, pod: &Pod, config: &ContainerConfig) -> Result<String, Status> {
        let mut config = config.clone();
        let security = config.linux.mut_or_insert_default();
        let security = security.security_context.mut_or_insert_default();
        if security.namespace_options.is_none() {
            let pods = &pod.config.linux.security_context;
            security.namespace_options = pods.namespace_options.clone();
        }
        let request = CreateContainerRequest {
            pod_sandbox_id: pod.id.clone(),
            config: MessageField::some(config),
            sandbox_config: MessageField::some(pod.config.clone()),
            ..Default::default()
        };
        self.cri
            .ask::<_, CreateContainerResponse>("CreateContainer", &request, BOUND)
            .map(|answer| answer.container_id)
    }

    /// CreateContainer and StartContainer.
    pub fn launch(&mut self, pod: &Pod, config: &ContainerConfig) -> Result<String, Status> {
        let id = self.create(pod, config)?;
        self.of_container("StartContainer", &id).map(|()| id)
    }

    /// A verb that needs a container's id alone.
    pub fn of_container(&mut self, verb: &str, id: &str) -> Result<(), Status> {
        let request = ContainerRequest {
            container_id: id.into(),
            ..Default::default()
        };
        self.cri.ask::<_, Nothing>(verb, &request, BOUND).map(drop)
    }

    /// A verb that needs a pod's id alone.
    pub fn of_pod(&mut self, verb: &str, id: &str) -> Result<(), Status> {
        let request = PodSandboxRequest {
            pod_sandbox_id: id.into(),
            ..Default::default()
        };
        self.cri.ask::<_, Nothing>(verb, &request, BOUND).map(drop)
    }

    /// StopContainer.
    pub fn stop(&mut self, id: &str, seconds: i64) -> Result<(), Status> {
        let request = StopContainerRequest {
            container_id: id.into(),
            timeout: seconds,
            ..Default::default()
        };
        self.cri
            .ask::<_, Nothing>("StopContainer", &request, BOUND)
            .map(drop)
    }

    /// Stop and remove, again until both succeed.
    pub fn end(&mut self, id: &str) {
        for verb in ["StopPodSandbox", "RemovePodSandbox"] {
            eventually(BOUND, verb, || match self.of_pod(verb, id) {
                Ok(()) => Some(()),
                Err(status) => {
                    println!("{verb} {id}: {status:?}");
                    std::thread::sleep(Duration::from_millis(300));
                    None
                }
            });
        }
    }

    /// Every answer of a method that this kit has no name for.
    pub fn ask<Q: protobuf::Message, A: protobuf::Message>(
        &mut self,
        method: &str,
        request: &Q,
    ) -> Result<A, Status> {
        self.cri.ask(method, request, BOUND)
    }

    /// The daemon's version.
    pub fn version(&mut self) -> String {
        let answer: VersionResponse = self.ask("Version", &VersionRequest::new()).unwrap();
        answer.runtime_version
    }

    /// ListPodSandbox.
    pub fn pods(&mut self) -> Vec<PodSandbox> {
        let all = ListPodSandboxRequest::new();
        let answer: ListPodSandboxResponse = self.ask("ListPodSandbox", &all).unwrap();
        answer.items
    }

    /// PodSandboxStatus, verbose.
    pub fn pod_status(&mut self, id: &str) -> Result<PodSandboxStatusResponse, Status> {
        let request = PodSandboxStatusRequest {
            pod_sandbox_id: id.into(),
            verbose: true,
            ..Default::default()
        };
        self.ask("PodSandboxStatus", &request)
    }

    /// ContainerStatus.
    pub fn status(&mut self, id: &str) -> Result<ContainerStatus, Status> {
        let request = ContainerStatusRequest {
            container_id: id.into(),
            ..Default::default()
        };
        self.ask::<_, ContainerStatusResponse>("ContainerStatus", &request)
            .map(|answer| answer.status.unwrap_or_default())
    }

    /// The status of a container once it has ended.
    pub fn ended(&mut self, id: &str) -> ContainerStatus {
        eventually(BOUND, "the container ends", || {
            let status = self.status(id).unwrap();
            (status.state.enum_value_or_default() == ContainerState::CONTAINER_EXITED)
                .then_some(status)
        })
    }

    /// ExecSync of a script.
    pub fn exec(
        &mut self,
        id: &str,
        script: &str,
        seconds: i64,
    ) -> Result<ExecSyncResponse, Status> {
        let request = ExecSyncRequest {
            container_id: id.into(),
            cmd: ["sh", "-c", script].map(str::to_owned).to_vec(),
            timeout: seconds,
            ..Default::default()
        };
        self.ask("ExecSync", &request)
    }

    /// What a script prints on both outputs, and its exit code if that is not 0; or the error's code.
    pub fn sh(&mut self, id: &str, script: &str) -> String {
        match self.exec(id, script, 60) {
            Ok(done) => {
                let mut seen = String::from_utf8_lossy(&done.stdout).trim_end().to_owned();
                seen += String::from_utf8_lossy(&done.stderr).trim_end();
                if done.exit_code != 0 {
                    seen += &format!(" (exit {})", done.exit_code);
                }
                seen
            }
            Err(status) => format!("error {} {}", status.code, status.message),
        }
    }

    /// Where the streams of an exec, an attach or a port-forward are.
    pub fn url<Q: protobuf::Message>(&mut self, verb: &str, request: &Q) -> String {
        self.ask::<_, StreamingResponse>(verb, request).unwrap().url
    }
}

/// GetContainerEvents in a thread of its own, from now on: `id type ready` of each until the receiver is dropped.
pub fn events(daemon: &Containerd) -> std::sync::mpsc::Receiver<ContainerEventResponse> {
    let connection = Connection::open(&daemon.address, "k8s.io");
    let (send, receive) = std::sync::mpsc::sync_channel(1024);
    std::thread::spawn(move || {
        let method = "/runtime.v1.RuntimeService/GetContainerEvents";
        connection.listen(method, &Message::new(), RUN_BOUND, |answer| {
            let event = protobuf::Message::parse_from_bytes(&answer.into_bytes()).unwrap();
            send.send(event).is_ok()
        });
    });
    receive
}

/// A pod of the namespace `apps`.
pub fn pod(name: &str) -> PodSandboxConfig {
    PodSandboxConfig {
        metadata: MessageField::some(PodSandboxMetadata {
            name: name.into(),
            uid: format!("uid-{name}"),
            namespace: "apps".into(),
            ..Default::default()
        }),
        hostname: name.into(),
        log_directory: format!("{LOGS}/{name}"),
        dns_config: MessageField::some(DNSConfig {
            servers: vec!["10.96.0.10".into(), "10.96.0.11".into()],
            searches: vec!["apps.svc.cluster.local".into(), "cluster.local".into()],
            options: vec!["ndots:5".into()],
            ..Default::default()
        }),
        linux: MessageField::some(LinuxPodSandboxConfig::new()),
        ..Default::default()
    }
}

/// The same with other namespaces.
pub fn pod_with(
    name: &str,
    options: impl FnOnce(&mut NamespaceOption, &mut LinuxPodSandboxConfig),
) -> PodSandboxConfig {
    let mut config = pod(name);
    let linux = config.linux.as_mut().unwrap();
    let mut namespaces = NamespaceOption::new();
    // What kubelets send for a pod that does not share its processes.
    namespaces.pid = mode(NamespaceMode::CONTAINER);
    options(&mut namespaces, linux);
    linux
        .security_context
        .mut_or_insert_default()
        .namespace_options = MessageField::some(namespaces);
    config
}

/// A namespace mode as a field has it.
pub fn mode(mode: NamespaceMode) -> EnumOrUnknown<NamespaceMode> {
    EnumOrUnknown::new(mode)
}

/// A container in which the image's shell runs a script.
pub fn container(name: &str, script: &str) -> ContainerConfig {
    ContainerConfig {
        metadata: MessageField::some(ContainerMetadata {
            name: name.into(),
            ..Default::default()
        }),
        image: MessageField::some(ImageSpec {
            image: PAUSE.into(),
            ..Default::default()
        }),
        command: ["/bin/sh", "-c", script].map(str::to_owned).to_vec(),
        log_path: format!("{name}.log"),
        linux: MessageField::some(LinuxContainerConfig::new()),
        ..Default::default()
    }
}

/// A container that stays until it is stopped.
pub fn sleeper(name: &str) -> ContainerConfig {
    container(name, "trap 'exit 0' TERM; while :; do sleep 0.1; done")
}

/// A log's lines without their times.
pub fn log(pod: &Pod, name: &str) -> String {
    let file = Path::new(&pod.config.log_directory).join(format!("{name}.log"));
    let text = fs::read_to_string(file).unwrap_or_default();
    let line = |line: &str| {
        line.split_once(' ')
            .map_or("?", |(_, rest)| rest)
            .to_owned()
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}
