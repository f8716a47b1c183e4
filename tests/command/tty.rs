//! A terminal of the test's own, with the command in it.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use nix::pty::{Winsize, openpty};
use nix::sys::signal::Signal;
use nix::sys::termios::{LocalFlags, tcgetattr};

use crate::kit::BOUND;
use crate::support::bin::PODVISOR;
use crate::support::eventually;

/// `podvisor ARGS` with a controlling terminal of 100 columns and 30 lines.
pub struct Tty {
    child: Child,
    keys: File,
    slave: OwnedFd,
    shown: Arc<Mutex<Vec<u8>>>,
    before: String,
}

impl Tty {
    pub fn start(args: &[&str]) -> Self {
        let size = Winsize {
            ws_row: 30,
            ws_col: 100,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let pty = openpty(Some(&size), None).unwrap();
        let end = || Stdio::from(pty.slave.try_clone().unwrap());
        let mut command = Command::new("setsid");
        command.args(["--ctty", PODVISOR]).args(args);
        command.stdin(end()).stdout(end()).stderr(end());
        let before = settings(&pty.slave);
        let child = command.spawn().unwrap();
        let shown = Arc::new(Mutex::new(Vec::new()));
        let mut from = File::from(pty.master.try_clone().unwrap());
        let to = Arc::clone(&shown);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = from.read(&mut buffer) {
                to.lock().unwrap().extend_from_slice(&buffer[..n]);
            }
        });
        Self {
            child,
            keys: File::from(pty.master),
            slave: pty.slave,
            shown,
            before,
        }
    }

    pub fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    pub fn shown(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().unwrap()).into_owned()
    }

    /// Waits until this has been shown.
    pub fn wait_for(&self, text: &str) {
        let what = format!("{text:?} on the terminal");
        eventually(BOUND, &what, || {
            let shown = self.shown();
            shown.contains(text).then_some(()).or_else(|| {
                assert!(!self.has_ended(), "ended without {text:?}: {shown:?}");
                None
            })
        });
    }

    /// Waits until every key is the workload's.
    pub fn wait_for_raw(&self) {
        eventually(BOUND, "a raw terminal", || {
            let flags = tcgetattr(&self.slave).unwrap().local_flags;
            (!flags.intersects(LocalFlags::ECHO | LocalFlags::ICANON)).then_some(())
        });
    }

    pub fn resize(&self, columns: u16, lines: u16) {
        let done = Command::new("stty")
            .args(["cols", &columns.to_string(), "rows", &lines.to_string()])
            .stdin(self.slave.try_clone().unwrap())
            .status();
        assert!(done.unwrap().success());
    }

    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).unwrap();
    }

    /// Exit code, when it has ended; the terminal has to be as it was.
    #[track_caller]
    pub fn end(&mut self) -> Option<i32> {
        let status = eventually(BOUND, "the end of the command", || {
            self.child.try_wait().unwrap()
        });
        let after = settings(&self.slave);
        assert_eq!(after, self.before, "{}", self.shown());
        status.code()
    }

    /// Waits until this is the last that is shown.
    pub fn wait_for_end(&self, text: &str) {
        eventually(BOUND, &format!("{text:?} at the end"), || {
            self.shown().ends_with(text).then_some(())
        });
    }

    fn has_ended(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()));
        stat.map_or(true, |s| s.contains(") Z "))
    }
}

impl Drop for Tty {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn settings(terminal: &OwnedFd) -> String {
    let t = tcgetattr(terminal).unwrap();
    format!(
        "{:?} {:?} {:?} {:?} {:?}",
        t.input_flags, t.output_flags, t.control_flags, t.local_flags, t.control_chars
    )
}
