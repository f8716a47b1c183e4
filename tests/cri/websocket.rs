//! The client's half of a web socket, for the daemon's streaming server: channels as Kubernetes has them (0 input,
//! 1 output, 2 errors, 3 the end, 4 the window's size), one byte before each message.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

#[derive(Debug)]
pub struct Socket(BufReader<TcpStream>);

impl Socket {
    /// Opens `http://host:port/path` and asks for the protocol of channels.
    pub fn open(url: &str) -> Self {
        let rest = url.strip_prefix("http://").unwrap();
        let (host, path) = rest.split_once('/').unwrap();
        let mut stream = TcpStream::connect(host).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        let request = format!(
            "GET /{path} HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\
             Sec-WebSocket-Protocol: v4.channel.k8s.io\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut socket = Self(BufReader::new(stream));
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert_ne!(socket.0.read_line(&mut head).unwrap(), 0, "{head}");
        }
        assert!(head.starts_with("HTTP/1.1 101"), "{head}");
        socket
    }

    pub fn send(&mut self, channel: u8, bytes: &[u8]) {
        // A final binary frame, masked with zeros.
        let mut frame = vec![0x82];
        let length = bytes.len() + 1;
        match u8::try_from(length) {
            Ok(short) if short < 126 => frame.push(0x80 | short),
            _ => {
                frame.push(0x80 | 126);
                frame.extend(u16::try_from(length).unwrap().to_be_bytes());
            }
        }
        frame.extend([0; 4]);
        frame.push(channel);
        frame.extend(bytes);
        self.0.get_mut().write_all(&frame).unwrap();
    }

    /// The next message that is not empty; nothing after the end.
    pub fn receive(&mut self) -> Option<(u8, Vec<u8>)> {
        loop {
            let mut head = [0; 2];
            self.0.read_exact(&mut head).ok()?;
            let length = match head[1] & 0x7f {
                126 => u64::from(u16::from_be_bytes(self.take())),
                127 => u64::from_be_bytes(self.take()),
                short => u64::from(short),
            };
            let mut body = vec![0; usize::try_from(length).unwrap()];
            self.0.read_exact(&mut body).ok()?;
            match head[0] & 0xf {
                8 => return None,
                1 | 2 if body.len() > 1 => return Some((body[0], body[1..].to_vec())),
                _ => {}
            }
        }
    }

    /// All bytes of a channel from now until they end with `last`.
    pub fn until(&mut self, channel: u8, last: &str) -> String {
        let mut seen = String::new();
        while !seen.ends_with(last) {
            let Some((from, bytes)) = self.receive() else {
                panic!("the end after {seen:?}");
            };
            if from == channel {
                seen += &String::from_utf8_lossy(&bytes);
            }
        }
        seen
    }

    /// Everything until the end, by channel.
    pub fn rest(&mut self) -> [String; 4] {
        let mut all = [const { String::new() }; 4];
        while let Some((channel, bytes)) = self.receive() {
            all[usize::from(channel)] += &String::from_utf8_lossy(&bytes);
        }
        all
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }
}
