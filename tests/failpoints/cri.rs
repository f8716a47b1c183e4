//! A client of containerd's CRI service: the few calls that a kubelet makes about a pod, messages by hand (field numbers
//! of `runtime.v1`).
#![allow(dead_code, reason = "each test file uses its own part of this module")]

use std::time::Duration;

use crate::support::grpc::{Answer, Connection, Message, Status};
use crate::support::{Containerd, eventually};

const RUNTIME: &str = "/runtime.v1.RuntimeService";
const IMAGES: &str = "/runtime.v1.ImageService";
const BOUND: Duration = Duration::from_secs(60);

/// A pod as it is listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    pub id: String,
    pub name: String,
    pub uid: String,
    pub ready: bool,
}

/// One connection.
#[derive(Debug)]
pub struct Cri(Connection);

impl Cri {
    /// Connects, and waits until the service is up: it comes after the daemon's others.
    pub fn of(daemon: &Containerd) -> Self {
        let mut cri = Self(Connection::open(&daemon.address, "k8s.io"));
        eventually(BOUND, "CRI answers", || {
            cri.call("ListPodSandbox", &Message::new()).ok()
        });
        cri
    }

    /// RunPodSandbox; the pod's id.
    pub fn run(
        &mut self,
        name: &str,
        handler: &str,
        annotations: &[(String, String)],
    ) -> Result<String, Status> {
        let config = Self::config(name, annotations);
        let request = Message::new().message(1, &config).text(2, handler);
        self.call("RunPodSandbox", &request).map(|a| a.string(1))
    }

    /// RunPodSandbox with a deadline.
    pub fn run_within(
        &mut self,
        config: &Message,
        handler: &str,
        bound: Duration,
    ) -> Result<String, Status> {
        let request = Message::new().message(1, config).text(2, handler);
        let method = format!("{RUNTIME}/RunPodSandbox");
        self.0.call(&method, &request, bound).map(|a| a.string(1))
    }

    /// A method of the runtime service with messages of the reader's.
    pub fn ask<Q: protobuf::Message, A: protobuf::Message>(
        &mut self,
        method: &str,
        request: &Q,
        bound: Duration,
    ) -> Result<A, Status> {
        let request = Message::of(request.write_to_bytes().unwrap());
        let answer = self
            .0
            .call(&format!("{RUNTIME}/{method}"), &request, bound)?;
        Ok(A::parse_from_bytes(&answer.into_bytes()).unwrap())
    }

    /// PodSandboxStats: whether there are any.
    pub fn has_stats(&mut self, id: &str) -> Result<bool, Status> {
        let answer = self.call("PodSandboxStats", &Message::new().text(1, id))?;
        Ok(!answer.bytes(1).is_empty())
    }

    /// PortForward: where its stream can be had.
    pub fn port_forward(&mut self, id: &str, port: u16) -> Result<String, Status> {
        let request = Message::new().text(1, id).varint(2, port.into());
        self.call("PortForward", &request).map(|a| a.string(1))
    }

    /// PodSandboxStatus: every address.
    pub fn addresses(&mut self, id: &str) -> Result<Vec<String>, Status> {
        let answer = self.call("PodSandboxStatus", &Message::new().text(1, id))?;
        let network = answer.message(1).message(5);
        let more = network.messages(2).into_iter().map(|ip| ip.string(1));
        Ok(std::iter::once(network.string(1)).chain(more).collect())
    }

    /// ListPodSandbox.
    pub fn list(&mut self) -> Vec<Listed> {
        let answer = self.call("ListPodSandbox", &Message::new()).unwrap();
        answer.messages(1).iter().map(listed).collect()
    }

    /// PodSandboxStatus: as listed, and the address.
    pub fn status(&mut self, id: &str) -> Result<(Listed, String), Status> {
        let answer = self.call("PodSandboxStatus", &Message::new().text(1, id))?;
        let status = answer.message(1);
        Ok((listed(&status), status.message(5).string(1)))
    }

    /// StopPodSandbox.
    pub fn stop(&mut self, id: &str) -> Result<(), Status> {
        self.call("StopPodSandbox", &Message::new().text(1, id))
            .map(drop)
    }

    /// RemovePodSandbox.
    pub fn remove(&mut self, id: &str) -> Result<(), Status> {
        self.call("RemovePodSandbox", &Message::new().text(1, id))
            .map(drop)
    }

    /// CreateContainer in the pod that [`run`](Self::run) made under this name; `config` is a ContainerConfig.
    pub fn create_container(
        &mut self,
        pod: &str,
        name: &str,
        config: &Message,
    ) -> Result<String, Status> {
        let sandbox = Self::config(name, &[]);
        let request = Message::new()
            .text(1, pod)
            .message(2, config)
            .message(3, &sandbox);
        self.call("CreateContainer", &request).map(|a| a.string(1))
    }

    /// StartContainer.
    pub fn start_container(&mut self, id: &str) -> Result<(), Status> {
        self.call("StartContainer", &Message::new().text(1, id))
            .map(drop)
    }

    /// UpdateContainerResources: memory in bytes, and CPU shares.
    pub fn update_container(&mut self, id: &str, memory: u64, shares: u64) -> Result<(), Status> {
        let linux = Message::new().varint(3, shares).varint(4, memory);
        let request = Message::new().text(1, id).message(2, &linux);
        self.call("UpdateContainerResources", &request).map(drop)
    }

    /// StopContainer, without grace.
    pub fn stop_container(&mut self, id: &str) -> Result<(), Status> {
        self.call("StopContainer", &Message::new().text(1, id))
            .map(drop)
    }

    /// ExecSync: both outputs and the exit code.
    pub fn exec_sync(&mut self, id: &str, words: &[&str]) -> Result<(String, String, u64), Status> {
        let request = words
            .iter()
            .fold(Message::new().text(1, id), |m, word| m.text(2, word))
            .varint(3, BOUND.as_secs());
        let answer = self.call("ExecSync", &request)?;
        Ok((answer.string(1), answer.string(2), answer.number(3)))
    }

    /// PodSandboxConfig of a pod in the namespace `apps`.
    pub fn config(name: &str, annotations: &[(String, String)]) -> Message {
        let metadata = Message::new()
            .text(1, name)
            .text(2, &format!("uid-{name}"))
            .text(3, "apps");
        let mut config = Message::new()
            .message(1, &metadata)
            .text(2, name)
            .text(3, "/run/pod-logs");
        for (key, value) in annotations {
            config = config.message(7, &Message::new().text(1, key).text(2, value));
        }
        config.message(8, &Message::new())
    }

    /// ImageStatus: whether it is there.
    pub fn has_image(&mut self, name: &str) -> bool {
        let image = Message::new().text(1, name);
        let request = Message::new().message(1, &image);
        let answer = self
            .0
            .call(&format!("{IMAGES}/ImageStatus"), &request, BOUND);
        answer.is_ok_and(|a| !a.message(1).string(1).is_empty())
    }

    fn call(&mut self, method: &str, request: &Message) -> Result<Answer, Status> {
        self.0.call(&format!("{RUNTIME}/{method}"), request, BOUND)
    }
}

/// The fields that PodSandbox and PodSandboxStatus have in common.
fn listed(pod: &Answer) -> Listed {
    let metadata = pod.message(2);
    Listed {
        id: pod.string(1),
        name: metadata.string(1),
        uid: metadata.string(2),
        ready: pod.number(3) == 0,
    }
}
