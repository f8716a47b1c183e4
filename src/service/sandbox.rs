//! `containerd.runtime.sandbox.v1.Sandbox`, its nine methods and UpdateSandbox.

use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use protobuf::MessageField;
use protobuf::well_known_types::any::Any;
use ttrpc::asynchronous::TtrpcContext;

use super::guard;
use crate::error::{Error, Kind, Result};
use crate::pod::Pod;
use crate::pod::plan;
use crate::proto::any;
use crate::proto::cri::sandbox_config::PodSandboxConfig;
use crate::proto::sandbox::sandbox as wire;
use crate::proto::sandbox::sandbox_ttrpc::Sandbox;
use crate::proto::time::timestamp;
use crate::proto::types::metrics::Metric;
use crate::proto::types::platform::Platform;
use crate::spec::Spec;

/// How long ShutdownSandbox waits for its work before it answers and lets it finish alone. containerd gives 5 s.
const SHUTDOWN_REPLY: Duration = Duration::from_secs(4);

/// The service over one pod.
pub struct SandboxService {
    pod: Pod,
}

impl SandboxService {
    /// A service over `pod`.
    pub fn new(pod: Pod) -> Self {
        Self { pod }
    }
}

#[async_trait]
impl Sandbox for SandboxService {
    async fn create_sandbox(
        &self,
        _: &TtrpcContext,
        req: wire::CreateSandboxRequest,
    ) -> ttrpc::Result<wire::CreateSandboxResponse> {
        let pod = self.pod.clone();
        #[cfg(feature = "failpoint")]
        if let Err(error) = arm_failpoints(&req) {
            return guard::refused(&error);
        }
        guard::detached("CreateSandbox", async move {
            pod.create(decode(req)?).await?;
            Ok(wire::CreateSandboxResponse::new())
        })
        .await
    }

    async fn start_sandbox(
        &self,
        ctx: &TtrpcContext,
        req: wire::StartSandboxRequest,
    ) -> ttrpc::Result<wire::StartSandboxResponse> {
        let limit = guard::limit(ctx);
        // Only a wait: the creation is a job of the pod's, and that this future is dropped tells it that its caller left.
        guard::waiting("StartSandbox", async move {
            let started = self.pod.start(&req.sandbox_id, limit).await?;
            Ok(wire::StartSandboxResponse {
                pid: started.pid,
                created_at: MessageField::some(timestamp(started.created_at)),
                spec: MessageField::some(any::raw(
                    any::OCI_SPEC,
                    self.pod.spec().to_string().into_bytes(),
                )),
                ..Default::default()
            })
        })
        .await
    }

    async fn platform(
        &self,
        _: &TtrpcContext,
        req: wire::PlatformRequest,
    ) -> ttrpc::Result<wire::PlatformResponse> {
        guard::waiting("Platform", async move {
            // The same before it is created.
            self.pod.check_id(&req.sandbox_id)?;
            let platform = Platform {
                os: "linux".to_owned(),
                architecture: go_architecture().to_owned(),
                ..Default::default()
            };
            Ok(wire::PlatformResponse {
                platform: MessageField::some(platform),
                ..Default::default()
            })
        })
        .await
    }

    async fn stop_sandbox(
        &self,
        _: &TtrpcContext,
        req: wire::StopSandboxRequest,
    ) -> ttrpc::Result<wire::StopSandboxResponse> {
        let pod = self.pod.clone();
        guard::detached("StopSandbox", async move {
            // CRI never names a time; 0 is its way to say so.
            let grace = Some(req.timeout_secs).filter(|s| *s > 0);
            pod.stop(
                &req.sandbox_id,
                grace.map(|s| Duration::from_secs(u64::from(s))),
            )
            .await?;
            Ok(wire::StopSandboxResponse::new())
        })
        .await
    }

    async fn update_sandbox(
        &self,
        _: &TtrpcContext,
        req: wire::UpdateSandboxRequest,
    ) -> ttrpc::Result<wire::UpdateSandboxResponse> {
        let pod = self.pod.clone();
        guard::detached("UpdateSandbox", async move {
            let annotations = req.annotations.into_iter().collect();
            pod.update(&req.sandbox_id, req.resources.as_ref(), annotations)?;
            Ok(wire::UpdateSandboxResponse::new())
        })
        .await
    }

    async fn wait_sandbox(
        &self,
        _: &TtrpcContext,
        req: wire::WaitSandboxRequest,
    ) -> ttrpc::Result<wire::WaitSandboxResponse> {
        guard::waiting("WaitSandbox", async move {
            let (exit_status, at) = self.pod.wait(&req.sandbox_id).await?;
            Ok(wire::WaitSandboxResponse {
                exit_status,
                exited_at: MessageField::some(timestamp(at)),
                ..Default::default()
            })
        })
        .await
    }

    async fn sandbox_status(
        &self,
        _: &TtrpcContext,
        req: wire::SandboxStatusRequest,
    ) -> ttrpc::Result<wire::SandboxStatusResponse> {
        guard::waiting("SandboxStatus", async move {
            let status = self.pod.status(&req.sandbox_id, req.verbose)?;
            Ok(wire::SandboxStatusResponse {
                // CRI takes the id from here from now on.
                sandbox_id: req.sandbox_id,
                pid: status.pid,
                state: if status.ready {
                    "SANDBOX_READY"
                } else {
                    "SANDBOX_NOTREADY"
                }
                .to_owned(),
                info: status.info,
                created_at: MessageField::some(timestamp(status.created_at)),
                exited_at: status.exited_at.map(timestamp).into(),
                ..Default::default()
            })
        })
        .await
    }

    async fn ping_sandbox(
        &self,
        _: &TtrpcContext,
        req: wire::PingRequest,
    ) -> ttrpc::Result<wire::PingResponse> {
        guard::waiting("PingSandbox", async move {
            self.pod.check_id(&req.sandbox_id)?;
            Ok(wire::PingResponse::new())
        })
        .await
    }

    async fn shutdown_sandbox(
        &self,
        _: &TtrpcContext,
        req: wire::ShutdownSandboxRequest,
    ) -> ttrpc::Result<wire::ShutdownSandboxResponse> {
        let pod = self.pod.clone();
        let work = guard::detached("ShutdownSandbox", async move {
            pod.shutdown(&req.sandbox_id).await?;
            Ok(wire::ShutdownSandboxResponse::new())
        });
        // Slow work is finished by the pod alone; the supervisor leaves when it is done.
        match tokio::time::timeout(SHUTDOWN_REPLY, work).await {
            Ok(answer) => answer,
            Err(_) => Ok(wire::ShutdownSandboxResponse::new()),
        }
    }

    async fn sandbox_metrics(
        &self,
        _: &TtrpcContext,
        req: wire::SandboxMetricsRequest,
    ) -> ttrpc::Result<wire::SandboxMetricsResponse> {
        guard::waiting("SandboxMetrics", async move {
            let data = self.pod.metrics(&req.sandbox_id)?;
            let metric = Metric {
                timestamp: MessageField::some(timestamp(std::time::SystemTime::now())),
                id: req.sandbox_id,
                data: MessageField::some(data),
                ..Default::default()
            };
            Ok(wire::SandboxMetricsResponse {
                metrics: MessageField::some(metric),
                ..Default::default()
            })
        })
        .await
    }
}

/// What the annotations of the request and of its pod say; those of a `config.json` were read at the start.
#[cfg(feature = "failpoint")]
fn arm_failpoints(req: &wire::CreateSandboxRequest) -> Result<()> {
    let config = pod_config(req.options.as_ref())?.unwrap_or_default();
    crate::failpoint::arm(config.annotations.iter().chain(&req.annotations))
}

fn decode(req: wire::CreateSandboxRequest) -> Result<plan::Request> {
    crate::id::check("sandbox id", &req.sandbox_id)?;
    let bundle = Path::new(&req.bundle_path);
    // In shim mode the bundle holds no config.json; containerd's sandbox API puts one there.
    let spec = match Spec::read(bundle) {
        Ok(spec) => Some(spec),
        Err(error) if error.kind() == Kind::NotFound => None,
        Err(error) => return Err(error),
    };
    Ok(plan::Request {
        id: req.sandbox_id,
        bundle: bundle.to_owned(),
        netns_path: req.netns_path,
        annotations: req.annotations.into_iter().collect(),
        config: pod_config(req.options.as_ref())?,
        spec,
    })
}

fn pod_config(options: Option<&Any>) -> Result<Option<PodSandboxConfig>> {
    let Some(options) = options.filter(|o| !any::is_nothing(o)) else {
        return Ok(None);
    };
    match any::unpack::<PodSandboxConfig>(options, any::POD_SANDBOX_CONFIG) {
        Ok(Some(config)) => Ok(Some(config)),
        Ok(None) => Err(Error::new(
            Kind::Invalid,
            format!(
                "read the sandbox' options: type {:?} is not known; send runtime.v1.PodSandboxConfig, or none",
                options.type_url
            ),
        )),
        Err(error) => Err(Error::caused(
            Kind::Invalid,
            "read the sandbox' PodSandboxConfig",
            error,
        )),
    }
}

/// GOARCH of this build; containerd compares it with its own.
fn go_architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" if cfg!(target_endian = "little") => "ppc64le",
        "loongarch64" => "loong64",
        other => other,
    }
}
