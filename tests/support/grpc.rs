//! containerd's own gRPC sandbox services, for what `ctr` cannot ask: unary calls over its socket, messages by hand
//! (field numbers of `containerd.services.sandbox.v1`).

use super::Containerd;
use bytes::Bytes;
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

const STORE: &str = "/containerd.services.sandbox.v1.Store";
const CONTROLLER: &str = "/containerd.services.sandbox.v1.Controller";
const SPEC_TYPE: &str = "types.containerd.io/opencontainers/runtime-spec/1/Spec";
/// Who makes the sandbox: the shim itself.
const SANDBOXER: &str = "shim";

/// Sandboxes of one namespace of a containerd (2.1 or newer).
#[derive(Debug)]
pub struct Sandboxes {
    connection: Connection,
    runtime: String,
}

impl Sandboxes {
    /// Connects; sandboxes are made with this runtime (`io.containerd.podvisor.v1`).
    pub fn of(daemon: &Containerd, namespace: &str, runtime: &str) -> Self {
        Self {
            connection: Connection::open(&daemon.address, namespace),
            runtime: runtime.into(),
        }
    }

    /// Registers a sandbox in the store and creates it in the shim.
    pub fn create(&mut self, id: &str, spec: &Value) -> Result<(), Status> {
        let spec = Message::new()
            .text(1, SPEC_TYPE)
            .bytes(2, spec.to_string().as_bytes());
        let runtime = Message::new().text(1, &self.runtime);
        let sandbox = Message::new()
            .text(1, id)
            .message(2, &runtime)
            .message(3, &spec)
            .text(10, SANDBOXER);
        self.connection.call(
            &format!("{STORE}/Create"),
            &Message::new().message(1, &sandbox),
            BOUND,
        )?;
        let create = Message::new()
            .text(1, id)
            .message(6, &sandbox)
            .text(10, SANDBOXER);
        self.connection
            .call(&format!("{CONTROLLER}/Create"), &create, BOUND)
            .map(drop)
    }

    /// Starts it; the process id of what holds its namespaces.
    pub fn start(&mut self, id: &str) -> Result<u32, Status> {
        self.start_within(id, BOUND)
    }

    /// [`start`](Self::start) with a deadline of the caller's.
    pub fn start_within(&mut self, id: &str, bound: Duration) -> Result<u32, Status> {
        let answer = self.controller("Start", Message::new().text(1, id), bound)?;
        Ok(answer.number(2).try_into().unwrap())
    }

    /// Stops it, with this many seconds for its processes.
    pub fn stop(&mut self, id: &str, seconds: u32) -> Result<(), Status> {
        self.controller(
            "Stop",
            Message::new().text(1, id).varint(2, seconds.into()),
            BOUND,
        )
        .map(drop)
    }

    /// Its exit status, once it ended.
    pub fn wait(&mut self, id: &str, bound: Duration) -> Result<u32, Status> {
        let answer = self.controller("Wait", Message::new().text(1, id), bound)?;
        Ok(answer.number(1).try_into().unwrap())
    }

    /// State (`SANDBOX_READY`) and process id.
    pub fn status(&mut self, id: &str) -> Result<(String, u32), Status> {
        let answer = self.controller("Status", Message::new().text(1, id).varint(2, 1), BOUND)?;
        Ok((answer.string(3), answer.number(2).try_into().unwrap()))
    }

    /// Ends the shim.
    pub fn shutdown(&mut self, id: &str) -> Result<(), Status> {
        self.controller("Shutdown", Message::new().text(1, id), BOUND)
            .map(drop)
    }

    /// Takes it out of the store.
    pub fn forget(&mut self, id: &str) -> Result<(), Status> {
        self.connection
            .call(
                &format!("{STORE}/Delete"),
                &Message::new().text(1, id),
                BOUND,
            )
            .map(drop)
    }

    fn controller(
        &mut self,
        method: &str,
        message: Message,
        bound: Duration,
    ) -> Result<Answer, Status> {
        self.connection.call(
            &format!("{CONTROLLER}/{method}"),
            &message.text(10, SANDBOXER),
            bound,
        )
    }
}

const BOUND: Duration = Duration::from_secs(60);

/// The answer of a call that did not succeed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// gRPC's number: 4 is DEADLINE_EXCEEDED, also when the deadline passed here.
    pub code: u32,
    pub message: String,
}

/// One HTTP/2 connection.
#[derive(Debug)]
pub struct Connection {
    runtime: tokio::runtime::Runtime,
    requests: h2::client::SendRequest<Bytes>,
    namespace: String,
}

impl Connection {
    /// Connects to a socket.
    pub fn open(socket: &Path, namespace: &str) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let requests = runtime.block_on(async {
            let stream = tokio::net::UnixStream::connect(socket).await.unwrap();
            let (requests, connection) = h2::client::handshake(stream).await.unwrap();
            tokio::spawn(connection);
            requests
        });
        Self {
            runtime,
            requests,
            namespace: namespace.into(),
        }
    }

    /// One unary call with a deadline the server is told.
    pub fn call(
        &mut self,
        method: &str,
        message: &Message,
        bound: Duration,
    ) -> Result<Answer, Status> {
        let request = self.request(method, bound);
        let exchange = exchange(&mut self.requests, request, message.frame());
        let late = Status {
            code: 4,
            message: format!("no answer within {bound:?}"),
        };
        self.runtime
            .block_on(async { tokio::time::timeout(bound, exchange).await })
            .unwrap_or(Err(late))
    }

    /// One call whose answers are given to `each` until it wants no more, or the bound has passed.
    pub fn listen(
        mut self,
        method: &str,
        message: &Message,
        bound: Duration,
        mut each: impl FnMut(Answer) -> bool,
    ) {
        let request = self.request(method, bound);
        let work = async {
            let (response, mut stream) = self.requests.send_request(request, false).unwrap();
            stream.send_data(message.frame(), true).unwrap();
            let mut body = response.await.unwrap().into_body();
            let mut data = Vec::new();
            while let Some(Ok(chunk)) = body.data().await {
                body.flow_control().release_capacity(chunk.len()).unwrap();
                data.extend(chunk);
                while let Some(length) = data.get(1..5) {
                    let end = 5 + u32::from_be_bytes(length.try_into().unwrap()) as usize;
                    let Some(bytes) = data.get(5..end) else { break };
                    if !each(Answer(bytes.to_vec())) {
                        return;
                    }
                    data.drain(..end);
                }
            }
        };
        let _ = self
            .runtime
            .block_on(async { tokio::time::timeout(bound, work).await });
    }

    fn request(&self, method: &str, bound: Duration) -> http::Request<()> {
        http::Request::post(format!("http://localhost{method}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("grpc-timeout", format!("{}m", bound.as_millis()))
            .header("containerd-namespace", &self.namespace)
            .body(())
            .unwrap()
    }
}

async fn exchange(
    requests: &mut h2::client::SendRequest<Bytes>,
    request: http::Request<()>,
    frame: Bytes,
) -> Result<Answer, Status> {
    let (response, mut stream) = requests.send_request(request, false).map_err(broken)?;
    stream.send_data(frame, true).map_err(broken)?;
    let (head, mut body) = response.await.map_err(broken)?.into_parts();
    let mut data = Vec::new();
    while let Some(chunk) = body.data().await {
        let chunk = chunk.map_err(broken)?;
        body.flow_control()
            .release_capacity(chunk.len())
            .map_err(broken)?;
        data.extend(chunk);
    }
    // An error without a message comes with the status in the head.
    let trailers = body
        .trailers()
        .await
        .map_err(broken)?
        .unwrap_or(head.headers);
    let text = |name: &str| {
        trailers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default()
            .to_owned()
    };
    match text("grpc-status").as_str() {
        "0" => Ok(Answer(data.get(5..).unwrap_or_default().to_vec())),
        code => Err(Status {
            code: code.parse().unwrap_or(2),
            message: text("grpc-message"),
        }),
    }
}

fn broken(error: h2::Error) -> Status {
    Status {
        code: 14,
        message: error.to_string(),
    }
}

/// A protobuf message in the making.
#[derive(Debug, Clone, Default)]
pub struct Message(Vec<u8>);

impl Message {
    pub fn new() -> Self {
        Self::default()
    }

    /// A message made elsewhere.
    pub fn of(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// As gRPC has it on the wire.
    fn frame(&self) -> Bytes {
        let mut frame = vec![0];
        frame.extend(u32::try_from(self.0.len()).unwrap().to_be_bytes());
        frame.extend(&self.0);
        frame.into()
    }

    pub fn varint(mut self, field: u32, value: u64) -> Self {
        self.push(u64::from(field) << 3);
        self.push(value);
        self
    }

    pub fn bytes(mut self, field: u32, value: &[u8]) -> Self {
        self.push(u64::from(field) << 3 | 2);
        self.push(value.len() as u64);
        self.0.extend(value);
        self
    }

    pub fn text(self, field: u32, value: &str) -> Self {
        self.bytes(field, value.as_bytes())
    }

    pub fn message(self, field: u32, value: &Message) -> Self {
        self.bytes(field, &value.0)
    }

    fn push(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

/// A received protobuf message; what is absent reads as nothing.
#[derive(Debug, Clone)]
pub struct Answer(Vec<u8>);

impl Answer {
    /// A message from elsewhere.
    pub fn of(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// All of it.
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    /// A number field.
    pub fn number(&self, field: u32) -> u64 {
        self.fields()
            .into_iter()
            .find(|(number, ..)| *number == field)
            .map_or(0, |(_, value, _)| value)
    }

    /// The bytes of a field, the first if it is repeated.
    pub fn bytes(&self, field: u32) -> Vec<u8> {
        self.fields()
            .into_iter()
            .find(|(number, ..)| *number == field)
            .map_or_else(Vec::new, |(.., bytes)| bytes)
    }

    /// A text field.
    pub fn string(&self, field: u32) -> String {
        String::from_utf8(self.bytes(field)).unwrap()
    }

    /// A message field.
    pub fn message(&self, field: u32) -> Answer {
        Answer(self.bytes(field))
    }

    /// The messages of a repeated field.
    pub fn messages(&self, field: u32) -> Vec<Answer> {
        let all = self.fields().into_iter();
        let of_field = all.filter(|(number, ..)| *number == field);
        of_field.map(|(.., bytes)| Answer(bytes)).collect()
    }

    /// Number, value and bytes of each field; fixed-size ones carry bytes.
    pub fn fields(&self) -> Vec<(u32, u64, Vec<u8>)> {
        let (mut rest, mut fields) = (self.0.as_slice(), Vec::new());
        while !rest.is_empty() {
            let tag = take_varint(&mut rest);
            let value = if matches!(tag & 7, 0 | 2) {
                take_varint(&mut rest)
            } else {
                0
            };
            let length = match tag & 7 {
                0 => 0,
                1 => 8,
                2 => usize::try_from(value).unwrap(),
                5 => 4,
                kind => panic!("wire type {kind} in an answer"),
            };
            let (bytes, after) = rest.split_at(length);
            fields.push(((tag >> 3) as u32, value, bytes.to_vec()));
            rest = after;
        }
        fields
    }
}

fn take_varint(rest: &mut &[u8]) -> u64 {
    let (mut value, mut shift) = (0, 0);
    while let Some((byte, after)) = rest.split_first() {
        *rest = after;
        value |= u64::from(byte & 0x7f) << shift;
        shift += 7;
        if byte & 0x80 == 0 {
            break;
        }
    }
    value
}
