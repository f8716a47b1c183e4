//! A client of the daemon's streaming server for PortForward: the WebSocket protocol (RFC 6455), as far as one needs it,
//! with Kubernetes' subprotocol `v4.channel.k8s.io`: each frame begins with the number of its channel, a port has one for
//! data and one for errors, and each channel begins with the port's number.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::cri::Cri;

/// Longest wait for a piece of the answer.
const BOUND: Duration = Duration::from_secs(30);

/// Opcodes.
const BINARY: u8 = 2;
const CLOSE: u8 = 8;

/// What the port of the pod says: until it closes the connection, or has said `enough` bytes. The daemon's words when it
/// cannot connect.
pub fn ask(cri: &mut Cri, pod: &str, port: u16, enough: usize) -> Result<String, String> {
    let url = cri.port_forward(pod, port).unwrap();
    let (host, path) = url
        .strip_prefix("http://")
        .and_then(|rest| rest.split_once('/'))
        .unwrap_or_else(|| panic!("{url}"));
    let mut stream = TcpStream::connect(host).unwrap();
    stream.set_read_timeout(Some(BOUND)).unwrap();
    let request = format!(
        "GET /{path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\
         Sec-WebSocket-Protocol: v4.channel.k8s.io\r\nOrigin: http://{host}\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let head = head(&mut stream);
    assert!(
        head.starts_with("HTTP/1.1 101") && head.contains("v4.channel.k8s.io"),
        "{head}"
    );
    let number = port.to_le_bytes();
    let (mut data, mut errors) = (Vec::new(), Vec::new());
    while data.len() < number.len() + enough && errors.len() <= number.len() {
        let Some((opcode, body)) = frame(&mut stream) else {
            break;
        };
        match (opcode, body.split_first()) {
            (BINARY, Some((0, rest))) => data.extend(rest),
            (BINARY, Some((1, rest))) => errors.extend(rest),
            (CLOSE, _) => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(data.get(..2), Some(&number[..]), "{errors:?}");
    let text =
        |bytes: Vec<u8>| String::from_utf8_lossy(bytes.get(2..).unwrap_or_default()).into_owned();
    match text(errors) {
        error if error.is_empty() => Ok(text(data)),
        error => Err(error),
    }
}

/// The answer's head.
fn head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    String::from_utf8(head).unwrap()
}

/// Opcode and body; None at the end of the connection.
fn frame(stream: &mut TcpStream) -> Option<(u8, Vec<u8>)> {
    let mut head = [0; 2];
    stream.read_exact(&mut head).ok()?;
    let length = match head[1] & 0x7f {
        126 => {
            let mut long = [0; 2];
            stream.read_exact(&mut long).ok()?;
            usize::from(u16::from_be_bytes(long))
        }
        127 => panic!("a frame of more than 64 KiB"),
        short => usize::from(short),
    };
    let mut body = vec![0; length];
    stream.read_exact(&mut body).ok()?;
    Some((head[0] & 0x0f, body))
}
