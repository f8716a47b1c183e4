//! Our terminal, lent to a workload: raw while it has it, the window's size, the keys that give it back.
//!
//! Promises that the terminal is as it was when [`Raw`] is dropped, however that comes. Must never change what is no
//! terminal.

use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, OwnedFd};

use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::error::{Context, Result};
use crate::sys::pty;

/// ctrl-p ctrl-q, one after the other: what container engines use.
const DETACH: [u8; 2] = [0x10, 0x11];

/// A terminal that hands on every key as it is.
pub struct Raw {
    terminal: OwnedFd,
    before: Termios,
}

impl Raw {
    /// Makes our standard input raw; `None` when it is no terminal.
    pub fn enter() -> Result<Option<Self>> {
        const WHAT: &str = "take over the terminal";
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return Ok(None);
        }
        let terminal = stdin.as_fd().try_clone_to_owned().context(|| WHAT)?;
        let before = tcgetattr(&terminal).context(|| WHAT)?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        tcsetattr(&terminal, SetArg::TCSANOW, &raw).context(|| WHAT)?;
        Ok(Some(Self { terminal, before }))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // One that has hung up is nobody's any more.
        let _ = tcsetattr(&self.terminal, SetArg::TCSANOW, &self.before);
    }
}

/// Size of the window that our output is shown in: width and height, characters. `None`: there is none.
pub fn size() -> Option<(u16, u16)> {
    let known = |found: io::Result<(u16, u16)>| found.ok().filter(|(w, h)| *w > 0 && *h > 0);
    known(pty::window(io::stdout())).or_else(|| known(pty::window(io::stdin())))
}

/// Tells when the window's size changes.
pub struct Window(Option<Signal>);

impl Window {
    /// `wanted`: else it never tells.
    pub fn watch(wanted: bool) -> Result<Self> {
        let signals = wanted.then(|| signal(SignalKind::window_change()));
        let signals = signals
            .transpose()
            .context(|| "watch the terminal's size")?;
        Ok(Self(signals))
    }

    /// It may have changed.
    pub async fn changed(&mut self) {
        match &mut self.0 {
            Some(signals) => drop(signals.recv().await),
            None => std::future::pending().await,
        }
    }
}

/// Looks for the keys that give the terminal back in what is typed.
#[derive(Debug, Default)]
pub struct Keys {
    /// How many of them have just been typed, and were held back.
    seen: usize,
}

impl Keys {
    /// What goes on to the workload, and whether the keys were typed: nothing after them is passed on.
    pub fn pass(&mut self, typed: &[u8]) -> (Vec<u8>, bool) {
        let mut on = Vec::with_capacity(typed.len() + 1);
        for &key in typed {
            if DETACH.get(self.seen) == Some(&key) {
                self.seen += 1;
                if self.seen == DETACH.len() {
                    return (on, true);
                }
                continue;
            }
            on.extend_from_slice(DETACH.get(..self.seen).unwrap_or_default());
            // ctrl-p twice: the second may be the first of the two.
            self.seen = usize::from(key == DETACH[0]);
            if self.seen == 0 {
                on.push(key);
            }
        }
        (on, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(parts: &[&[u8]]) -> (Vec<u8>, bool) {
        let (mut keys, mut all) = (Keys::default(), Vec::new());
        for part in parts {
            let (on, detached) = keys.pass(part);
            all.extend(on);
            if detached {
                return (all, true);
            }
        }
        (all, false)
    }

    #[test]
    fn only_the_two_keys_in_a_row_give_the_terminal_back() {
        for (parts, on, detached) in [
            (&[&b"ls\r"[..]][..], &b"ls\r"[..], false),
            (&[b"a\x10\x11b"], b"a", true),
            (&[b"a\x10", b"\x11"], b"a", true),
            (&[b"\x10", b"x\x11"], b"\x10x\x11", false),
            (&[b"\x10\x10\x11"], b"\x10", true),
            (&[b"\x11\x10a"], b"\x11\x10a", false),
        ] {
            assert_eq!(typed(parts), (on.to_vec(), detached), "{parts:?}");
        }
    }

    #[test]
    fn what_is_no_terminal_has_no_size_and_is_left_alone() {
        let (end, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(pty::window(&end).is_err());
    }
}
