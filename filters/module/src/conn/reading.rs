//! Reads bytes from the peer, and forwards them to the other connection of the session.

use std::cell::{Cell, RefCell};
use std::io::ErrorKind;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use envoy_abi::socket::{Io, IoOutcome, Received};
use socket2::SockRef;

use super::{Conn, MAX_UNREPORTED_BYTES, ReadError, ReadStep};
use crate::offload;

/// Reads in a row from one connection before other connections are served.
const MAX_READS_PER_TURN: usize = 16;

/// What Envoy has to do about the receiving side of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum ReceivingState {
    #[default]
    Open,
    /// The peer has closed its side.
    PeerFinished,
    /// The connection must be closed.
    Closing,
}

#[derive(Default)]
pub(super) struct ReceivingSide {
    pub(super) state: Cell<ReceivingState>,
    /// Received bytes that have to go through Envoy's buffers when Envoy calls the read hook.
    pub(super) pending: RefCell<Vec<u8>>,
    /// Bytes that were received and forwarded directly, and are not reported to Envoy yet.
    unreported: Cell<usize>,
    /// How often Envoy has read from the connection since the session was established.
    pub(super) read_count: Cell<u8>,
    /// The last event reported that the peer has closed, or that the connection is broken.
    pub(super) has_end_event: Cell<bool>,
}

impl Conn {
    /// Reads once from the socket.
    pub(crate) fn receive(&self, buffer: &mut [u8]) -> Received {
        if self.key.get().is_some() {
            self.socket.receive_with_end(buffer, self.receiving.has_end_event.get())
        } else {
            self.socket.receive(buffer)
        }
    }

    /// Returns the number of received bytes that are not reported to Envoy yet, and resets this number.
    pub(crate) fn take_unreported_rx(&self) -> usize {
        self.receiving.unreported.take()
    }

    /// Envoy's read hook: reads while there is something to read and Envoy wants to read. `step` reads once into the
    /// given buffer, and adds the bytes that it passes to Envoy's buffers to the given count.
    pub(crate) fn read(&self, step: impl Fn(&mut [u8], &mut usize) -> ReadStep) -> IoOutcome {
        let mut passed = 0;
        let pending = self.receiving.pending.take();
        if !pending.is_empty() {
            self.pass_on(&pending, &mut passed);
        }
        let outcome = match self.receiving.state.get() {
            ReceivingState::Open => self.read_batch(step),
            ReceivingState::PeerFinished => IoOutcome { close: false, bytes: 0, end_of_stream: true },
            ReceivingState::Closing => IoOutcome::close(0),
        };
        let ends = outcome.close || outcome.end_of_stream;
        if ends && self.sending.unreported.get() > 0 {
            self.socket.set_writable(); // the last chance to report these bytes
        }
        let bytes = passed + outcome.bytes;
        if ends || bytes > 0 || self.receiving.unreported.get() >= MAX_UNREPORTED_BYTES {
            return IoOutcome { bytes: bytes + self.receiving.unreported.take(), ..outcome };
        }
        outcome
    }

    /// Like [`Self::read`], for an event of an offloaded connection.
    pub(crate) fn read_offloaded(&self, step: impl Fn(&mut [u8], &mut usize) -> ReadStep) {
        let outcome = self.read_batch(step);
        if outcome.close {
            self.receiving.state.set(ReceivingState::Closing);
        } else if outcome.end_of_stream {
            self.receiving.state.set(ReceivingState::PeerFinished); // TLS reports the end only once
        }
        if outcome.close || outcome.end_of_stream || !self.receiving.pending.borrow().is_empty() {
            self.onload();
        } else if self.receiving.unreported.get() >= MAX_UNREPORTED_BYTES {
            self.socket.set_readable();
        }
    }

    /// Returns an offloaded connection to Envoy, which reads from it at once.
    pub(crate) fn onload(&self) {
        if self.key.get().is_some() {
            offload::onload(self, false);
            self.socket.set_readable();
        }
    }

    /// Makes Envoy call the read hook, also if there is nothing new to read.
    pub(crate) fn read_again(&self) {
        self.onload();
        self.socket.set_readable(); // also if it is not offloaded
    }

    /// Makes Envoy close the connection.
    pub(crate) fn abort(&self) {
        self.receiving.state.set(ReceivingState::Closing);
        self.read_again();
    }

    /// Whether there are bytes to read, or the connection has ended.
    pub(crate) fn has_unread(&self) -> bool {
        let peeked = self.socket.with_descriptor(|fd| SockRef::from(&fd).peek(&mut [MaybeUninit::uninit()]));
        !peeked.is_some_and(|peeked| peeked.is_err_and(|error| error.kind() == ErrorKind::WouldBlock))
    }

    /// Duplicates the descriptor of the connection.
    pub(crate) fn duplicate(&self) -> Option<OwnedFd> {
        self.socket.with_descriptor(|fd| fd.try_clone_to_owned())?.ok()
    }

    /// The peer's address, while the connection is open.
    pub(crate) fn peer_address(&self) -> Option<SocketAddr> {
        self.socket.with_descriptor(|fd| SockRef::from(&fd).peer_addr())?.ok()?.as_socket()
    }

    fn read_batch(&self, step: impl Fn(&mut [u8], &mut usize) -> ReadStep) -> IoOutcome {
        let mut passed = 0;
        for _ in 0..MAX_READS_PER_TURN {
            match self.worker.buffers.with_buffer(|buffer| step(buffer, &mut passed)) {
                ReadStep::Continue if self.socket.should_stop_reading() => break,
                ReadStep::Continue => {}
                ReadStep::Yield => break,
                ReadStep::Close => return IoOutcome::close(passed),
                ReadStep::Wait | ReadStep::EndOfStream if self.sending.is_broken.get() => {
                    return IoOutcome::close(passed);
                }
                ReadStep::Wait => return IoOutcome::open(passed),
                ReadStep::EndOfStream => return IoOutcome { close: false, bytes: passed, end_of_stream: true },
            }
        }
        // There may be more to read, so Envoy has to call the read hook again.
        self.onload();
        self.socket.set_readable();
        IoOutcome::open(passed)
    }

    /// Passes bytes to the other connection through Envoy's buffers. When these are full, Envoy pauses both
    /// connections.
    pub(crate) fn pass_on(&self, bytes: &[u8], passed: &mut usize) {
        if self.key.get().is_some() {
            // Envoy accepts bytes only within its read hook.
            self.receiving.pending.borrow_mut().extend_from_slice(bytes);
            return;
        }
        self.socket.pass_on(bytes);
        *passed += bytes.len();
        if let Some(other) = self.other_conn.borrow().upgrade() {
            other.sending.envoy_buffered.set(other.sending.envoy_buffered.get() + bytes.len());
            other.onload();
        }
    }

    /// Like [`Self::forward`], outside of a read, for bytes that were read before.
    pub(crate) fn forward_received(&self, bytes: &[u8]) {
        if self.key.get().is_some() {
            self.forward(bytes, &mut 0);
        } else {
            self.receiving.pending.borrow_mut().extend_from_slice(bytes);
        }
        if !self.receiving.pending.borrow().is_empty() {
            self.onload();
            self.socket.set_readable();
        }
    }

    /// Forwards bytes to the other connection, directly if possible. The rest goes through Envoy's buffers. To keep the
    /// order, all later bytes take the same way until these buffers are empty.
    pub(crate) fn forward(&self, bytes: &[u8], passed: &mut usize) {
        if bytes.is_empty() {
            return;
        }
        let sent = if self.receiving.pending.borrow().is_empty() {
            self.other_conn.borrow().upgrade().map_or(0, |other| other.send_direct(bytes))
        } else {
            0
        };
        self.receiving.unreported.set(self.receiving.unreported.get() + sent);
        if sent < bytes.len() {
            self.pass_on(&bytes[sent..], passed);
        }
    }

    /// Decrypts received bytes, calls `plain` with each piece, and sends the replies of the TLS handshake.
    /// Ok(true): the peer has closed its side.
    pub(crate) fn decrypt(&self, ciphertext: &[u8], mut plain: impl FnMut(&[u8])) -> Result<bool, ReadError> {
        let handshaking = self.is_handshaking();
        let received = match &mut *self.tls.borrow_mut() {
            Some(stream) => stream.receive(ciphertext, &mut plain),
            None => return Ok(false),
        };
        // Also after an error, to send the alert.
        let flushed = self.flush();
        let received = received.map_err(ReadError::Tls)?;
        if flushed == Io::Broken {
            return Err(ReadError::Broken);
        }
        if handshaking && !self.is_handshaking() {
            self.socket.set_writable(); // bytes of the other connection have waited for the handshake
        }
        Ok(received == tls::ReceiveResult::Closed)
    }
}
