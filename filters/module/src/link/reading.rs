//! What comes from the peer, and how it goes on.

use std::io::ErrorKind;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use abi::socket::{Io, Outcome, Received};
use socket2::SockRef;

use super::{Fate, Link, Step, TOLD, Unread};
use crate::{events, worker};

/// Reads in a row from one connection, before others have their turn.
const READS: usize = 16;

impl Link {
    /// One read.
    pub(crate) fn receive(&self, buffer: &mut [u8]) -> Received {
        if self.key.get().is_some() {
            self.socket.receive_knowing(buffer, self.ends.get())
        } else {
            self.socket.receive(buffer)
        }
    }

    /// Bytes of which Envoy has not heard yet, and does now.
    pub(crate) fn take_heard(&self) -> usize {
        self.heard.take()
    }

    /// Reads as long as there is something to read, and Envoy wants it: `step` does one read into the buffer that it
    /// gets, and adds up how many bytes it passed on by Envoy's buffers. For Envoy's hook.
    pub(crate) fn read(&self, step: impl Fn(&mut [u8], &mut usize) -> Step) -> Outcome {
        let mut passed = 0;
        let kept = self.kept.take();
        if !kept.is_empty() {
            self.pass_on(&kept, &mut passed);
        }
        let outcome = match self.fate.get() {
            Fate::Open => self.read_in_turn(step),
            Fate::Ended => Outcome { close: false, bytes: 0, end_of_stream: true },
            Fate::Doomed => Outcome::close(0),
        };
        let ends = outcome.close || outcome.end_of_stream;
        if ends && self.untold.get() > 0 {
            self.socket.set_writable(); // the last occasion to tell
        }
        let bytes = passed + outcome.bytes;
        if ends || bytes > 0 || self.heard.get() >= TOLD {
            return Outcome { bytes: bytes + self.heard.take(), ..outcome };
        }
        outcome
    }

    /// The same for an event that came past Envoy.
    pub(crate) fn read_here(&self, step: impl Fn(&mut [u8], &mut usize) -> Step) {
        let outcome = self.read_in_turn(step);
        if outcome.close {
            self.fate.set(Fate::Doomed);
        } else if outcome.end_of_stream {
            self.fate.set(Fate::Ended); // TLS tells of it once
        }
        if outcome.close || outcome.end_of_stream || !self.kept.borrow().is_empty() {
            self.give_back();
        } else if self.heard.get() >= TOLD {
            self.socket.set_readable();
        }
    }

    /// From now on Envoy hears of its events, and looks at it at once.
    pub(crate) fn give_back(&self) {
        if self.key.get().is_some() {
            events::give_back(self, false);
            self.socket.set_readable();
        }
    }

    /// The connection must be closed.
    pub(crate) fn doom(&self) {
        self.fate.set(Fate::Doomed);
        self.give_back();
        self.socket.set_readable(); // also where it is Envoy's already
    }

    /// Whether there is something to read, be it the end of the connection.
    pub(crate) fn has_unread(&self) -> bool {
        let peeked = self.socket.with_descriptor(|fd| SockRef::from(&fd).peek(&mut [MaybeUninit::uninit()]));
        !peeked.is_some_and(|peeked| peeked.is_err_and(|error| error.kind() == ErrorKind::WouldBlock))
    }

    /// Another descriptor of the connection.
    pub(crate) fn duplicate(&self) -> Option<OwnedFd> {
        self.socket.with_descriptor(|fd| fd.try_clone_to_owned())?.ok()
    }

    /// The peer's address, while the connection is open.
    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        self.socket.with_descriptor(|fd| SockRef::from(&fd).peer_addr())?.ok()?.as_socket()
    }

    fn read_in_turn(&self, step: impl Fn(&mut [u8], &mut usize) -> Step) -> Outcome {
        let mut passed = 0;
        for _ in 0..READS {
            match worker::with_buffer(|buffer| step(buffer, &mut passed)) {
                Step::On if self.socket.should_stop_reading() => break,
                Step::On => {}
                Step::Later => break,
                Step::Close => return Outcome::close(passed),
                Step::Again | Step::EndOfStream if self.broken.get() => return Outcome::close(passed),
                Step::Again => return Outcome::open(passed),
                Step::EndOfStream => return Outcome { close: false, bytes: passed, end_of_stream: true },
            }
        }
        // Who is given back is called again, too.
        self.give_back();
        self.socket.set_readable();
        Outcome::open(passed)
    }

    /// Gives bytes to the other side by Envoy's buffers, which tell both to pause when they hold too much.
    pub(crate) fn pass_on(&self, bytes: &[u8], passed: &mut usize) {
        if self.key.get().is_some() {
            // Envoy takes them within its own hook only.
            self.kept.borrow_mut().extend_from_slice(bytes);
            return;
        }
        self.socket.pass_on(bytes);
        *passed += bytes.len();
        if let Some(other) = self.other.borrow().upgrade() {
            other.queued.set(other.queued.get() + bytes.len());
            other.give_back();
        }
    }

    /// The same outside of a read, for bytes that were read before.
    pub(crate) fn resume(&self, bytes: &[u8]) {
        if self.key.get().is_some() {
            self.forward(bytes, &mut 0);
        } else {
            self.kept.borrow_mut().extend_from_slice(bytes);
        }
        if !self.kept.borrow().is_empty() {
            self.give_back();
            self.socket.set_readable();
        }
    }

    /// Gives bytes to the other side, straight if possible. What there is no room for goes by Envoy's buffers, and so
    /// does what comes behind it, until they are empty: that keeps the order.
    pub(crate) fn forward(&self, bytes: &[u8], passed: &mut usize) {
        let sent = if self.kept.borrow().is_empty() {
            self.other.borrow().upgrade().map_or(0, |other| other.send_straight(bytes))
        } else {
            0
        };
        self.heard.set(self.heard.get() + sent);
        if sent < bytes.len() {
            self.pass_on(&bytes[sent..], passed);
        }
    }

    /// Decrypts what came from the socket to the end of `plain`, and answers what the TLS handshake asks for.
    /// Ok(true): the peer has closed its side.
    pub(crate) fn decrypt(&self, ciphertext: &[u8], plain: &mut Vec<u8>) -> Result<bool, Unread> {
        let handshaking = self.is_handshaking();
        let received = match &mut *self.tls.borrow_mut() {
            Some(stream) => stream.receive(ciphertext, &mut |piece| plain.extend_from_slice(piece)),
            None => return Ok(false),
        };
        // Also the alert that says what was wrong.
        let flushed = self.flush();
        let received = received.map_err(Unread::Tls)?;
        if flushed == Io::Broken {
            return Err(Unread::Broken);
        }
        if handshaking && !self.is_handshaking() {
            self.socket.set_writable(); // what the other side has said meanwhile has waited for this
        }
        Ok(received == tls::Received::Closed)
    }
}
