//! A proxy on a supervisor's socket that cuts connections where it is told to.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use protobuf::Message;

/// Where a connection is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Before the request is passed on.
    Before,
    /// As soon as it has been passed on.
    Passed,
    /// When its reply has come, which is thrown away.
    Handled,
    /// When its reply has been passed on.
    Answered,
}

pub const CUTS: [Cut; 4] = [Cut::Before, Cut::Passed, Cut::Handled, Cut::Answered];

/// What is cut, and how often.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// Method; empty: every one.
    pub method: &'static str,
    pub cut: Cut,
    pub times: usize,
}

/// In front of a supervisor until that is gone.
pub struct Proxy {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    socket: PathBuf,
    real: PathBuf,
    rule: Rule,
    cuts: AtomicUsize,
    over: AtomicBool,
    asked: Mutex<Vec<String>>,
}

impl Proxy {
    /// Takes the place of the socket that `supervisor` serves; the one behind it keeps its connections.
    pub fn before(socket: &Path, supervisor: i32, rule: Rule) -> Self {
        let real = socket.with_extension("real");
        fs::rename(socket, &real).unwrap();
        let listener = UnixListener::bind(socket).unwrap();
        listener.set_nonblocking(true).unwrap();
        let shared = Arc::new(Shared {
            socket: socket.into(),
            real,
            rule,
            cuts: AtomicUsize::new(0),
            over: AtomicBool::new(false),
            asked: Mutex::new(Vec::new()),
        });
        let thread = std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || serve(&listener, &shared, supervisor)
        });
        Self {
            shared,
            thread: Some(thread),
        }
    }

    /// How many connections were cut.
    pub fn cuts(&self) -> usize {
        self.shared.cuts.load(Ordering::SeqCst)
    }

    /// Methods in the order in which they came.
    pub fn asked(&self) -> Vec<String> {
        self.shared.asked.lock().unwrap().clone()
    }

    /// The supervisor has its socket back, if it still is there.
    pub fn end(mut self) {
        self.shared.over.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::SeqCst);
    }
}

fn serve(listener: &UnixListener, shared: &Arc<Shared>, supervisor: i32) {
    while !shared.over.load(Ordering::SeqCst) && crate::rig::alive(supervisor) {
        match listener.accept() {
            Ok((client, _)) => {
                client.set_nonblocking(false).unwrap();
                // Who is refused behind is refused here.
                let Ok(server) = UnixStream::connect(&shared.real) else {
                    continue;
                };
                pass(client, server, shared);
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(e) => panic!("{e}"),
        }
    }
    if crate::rig::alive(supervisor) && shared.real.exists() {
        let _ = fs::rename(&shared.real, &shared.socket);
        return;
    }
    // As a supervisor does that leaves, or whoever removes the socket of a dead one.
    let _ = fs::remove_file(&shared.real);
    let _ = fs::remove_file(&shared.socket);
}

/// Both directions of one connection, each in a thread of its own.
fn pass(client: UnixStream, server: UnixStream, shared: &Arc<Shared>) {
    let methods = Arc::new(Mutex::new(HashMap::new()));
    let ways = [
        (client.try_clone().unwrap(), server.try_clone().unwrap()),
        (server, client),
    ];
    for (forth, (mut from, mut to)) in [true, false].into_iter().zip(ways) {
        let (shared, methods) = (Arc::clone(shared), Arc::clone(&methods));
        std::thread::spawn(move || {
            while let Ok(frame) = frame(&mut from) {
                let stream = u32::from_be_bytes(frame[4..8].try_into().unwrap());
                let method = if forth {
                    let method = method(&frame);
                    shared.asked.lock().unwrap().push(method.clone());
                    methods.lock().unwrap().insert(stream, method.clone());
                    method
                } else {
                    let known = methods.lock().unwrap().get(&stream).cloned();
                    known.unwrap_or_default()
                };
                let (held, passed) = match forth {
                    true => (Cut::Before, Cut::Passed),
                    false => (Cut::Handled, Cut::Answered),
                };
                if shared.cuts(&method, held) {
                    break;
                }
                if to.write_all(&frame).is_err() || shared.cuts(&method, passed) {
                    break;
                }
            }
            let _ = from.shutdown(Shutdown::Both);
            let _ = to.shutdown(Shutdown::Both);
        });
    }
}

impl Shared {
    fn cuts(&self, method: &str, cut: Cut) -> bool {
        let Rule {
            method: wanted,
            cut: place,
            times,
        } = self.rule;
        if place != cut || !(wanted.is_empty() || wanted == method) {
            return false;
        }
        let more = |done: usize| (done < times).then_some(done + 1);
        let counted = self
            .cuts
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, more);
        counted.is_ok()
    }
}

/// Length, stream, type, flags, and as much as the length says.
fn frame(from: &mut UnixStream) -> io::Result<Vec<u8>> {
    let mut frame = vec![0; 10];
    from.read_exact(&mut frame)?;
    let length = u32::from_be_bytes(frame[..4].try_into().unwrap()) as usize;
    frame.resize(10 + length, 0);
    from.read_exact(&mut frame[10..])?;
    Ok(frame)
}

fn method(frame: &[u8]) -> String {
    ttrpc::Request::parse_from_bytes(&frame[10..])
        .map(|request| request.method)
        .unwrap_or_default()
}
