//! Who answers whom: servers and clients in any netns, and another machine on the wire.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::sched::{CloneFlags, setns};

use crate::kit::BOUND;
use crate::place::tool;
use crate::support::eventually;

/// An answer that takes longer is none.
const PATIENCE: Duration = Duration::from_secs(2);

/// The netns of the test.
pub const HOST: &str = "/proc/self/ns/net";

/// The protocol of a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Via {
    Tcp,
    Udp,
}

/// A server on a port in a netns, TCP and UDP, both families: answers with its name and the address of who asks.
pub struct Server {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    pub fn start(netns: &Path, name: &str, port: u16) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (tcp, udp) = within(netns, || {
            let any = SocketAddr::new(IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED), port);
            (
                TcpListener::bind(any).unwrap(),
                UdpSocket::bind(any).unwrap(),
            )
        });
        let threads = vec![
            {
                let (stop, name) = (stop.clone(), name.to_owned());
                std::thread::spawn(move || serve_tcp(&tcp, &name, &stop))
            },
            {
                let (stop, name) = (stop.clone(), name.to_owned());
                std::thread::spawn(move || serve_udp(&udp, &name, &stop))
            },
        ];
        Self { stop, threads }
    }
}

impl Drop for Server {
    /// An open socket would keep the netns.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn serve_tcp(listener: &TcpListener, name: &str, stop: &AtomicBool) {
    listener.set_nonblocking(true).unwrap();
    while !stop.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((mut stream, from)) => {
                let _ = stream.write_all(answer(name, from).as_bytes());
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(e) => panic!("accept: {e}"),
        }
    }
}

fn serve_udp(socket: &UdpSocket, name: &str, stop: &AtomicBool) {
    socket
        .set_read_timeout(Some(Duration::from_millis(50)))
        .unwrap();
    let mut buffer = [0; 64];
    while !stop.load(Ordering::Relaxed) {
        if let Ok((_, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(answer(name, from).as_bytes(), from);
        }
    }
}

fn answer(name: &str, from: SocketAddr) -> String {
    format!("{name} to {}", from.ip().to_canonical())
}

/// Asks from a netns; `None` when there is no answer.
pub fn ask(from: &Path, via: Via, to: &str, port: u16) -> Option<String> {
    let to = SocketAddr::new(to.parse().unwrap(), port);
    within(from, || match via {
        Via::Tcp => ask_tcp(to).ok(),
        Via::Udp => ask_udp(to).ok(),
    })
}

/// Asks until there is an answer: a neighbour may have to be found first.
#[track_caller]
pub fn answered(from: &Path, via: Via, to: &str, port: u16) -> String {
    eventually(
        BOUND,
        &format!("an answer by {via:?} from {to} port {port}"),
        || ask(from, via, to, port),
    )
}

fn ask_tcp(to: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&to, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

fn ask_udp(to: SocketAddr) -> std::io::Result<String> {
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    // Not connected: what answers has to be whom was asked.
    socket.send_to(b"?", to)?;
    let mut buffer = [0; 256];
    let (length, from) = socket.recv_from(&mut buffer)?;
    assert_eq!(from, to, "another one answers");
    Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
}

/// Runs it on a thread in this netns.
#[allow(
    clippy::disallowed_methods,
    reason = "the thread ends afterwards, and the test owes nothing to the product's own way"
)]
pub fn within<T: Send>(netns: &Path, body: impl FnOnce() -> T + Send) -> T {
    let file = File::open(netns).unwrap();
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            setns(&file, CloneFlags::CLONE_NEWNET).unwrap();
            drop(file);
            body()
        });
        thread.join().unwrap()
    })
}

/// Another machine on the wire `ext0`: 192.0.2.2 and 2001:db8::2, where the host is 192.0.2.1 and 2001:db8::1.
pub struct Neighbour(Child);

impl Neighbour {
    pub fn new() -> Self {
        let child = Command::new("unshare")
            .args(["--net", "sleep", "1000"])
            .spawn()
            .unwrap();
        let pid = child.id().to_string();
        let own = fs::read_link(HOST).unwrap();
        eventually(BOUND, "a network namespace of its own", || {
            let theirs = fs::read_link(format!("/proc/{pid}/ns/net")).ok()?;
            (theirs != own).then_some(())
        });
        let script = format!(
            "set -e; ip link add ext0 type veth peer name ext1 netns {pid}; ip addr add 192.0.2.1/24 dev ext0; \
             ip addr add 2001:db8::1/64 dev ext0 nodad; ip link set ext0 up; nsenter -t {pid} -n sh -c '\
             ip link set lo up; ip addr add 192.0.2.2/24 dev ext1; ip addr add 2001:db8::2/64 dev ext1 nodad; \
             ip link set ext1 up; ip route add default via 192.0.2.1; ip -6 route add default via 2001:db8::1'"
        );
        tool("sh", &["-c", &script]);
        Self(child)
    }

    pub fn netns(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.0.id()).into()
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
        // The wire goes with the netns of its other end, a moment later.
        let _ = Command::new("ip").args(["link", "del", "ext0"]).output();
    }
}
