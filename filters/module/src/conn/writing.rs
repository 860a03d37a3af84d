//! Sends bytes to the peer: those of the other connection of the session, and the module's own.

use std::cell::{Cell, RefCell};

use envoy_abi::socket::{Io, IoOutcome};
use socket2::SockRef;
use tls::Stream;

use super::{Conn, MAX_UNREPORTED_BYTES};
use crate::switches;

/// How much plaintext is encrypted at a time. The rest waits in Envoy's write buffer.
const SEAL_BYTES: usize = 64 * 1024;

/// How far the connection's sending side has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum SendingState {
    #[default]
    Open,
    /// TLS has ended, and nothing more is sent.
    Finished,
    FinSent,
}

#[derive(Default)]
pub(super) struct SendingSide {
    pub(super) state: Cell<SendingState>,
    /// Bytes may be sent directly.
    pub(super) is_direct: Cell<bool>,
    /// Unsent bytes of the module itself that are not encrypted. They go before those of TLS.
    pub(super) outbox: RefCell<Vec<u8>>,
    /// Bytes at the front of Envoy's write buffer, or on their way there, that are already encrypted. They stay in the
    /// buffer until they are sent, since Envoy may close a connection whose write buffer is empty.
    pub(super) sealed: Cell<usize>,
    /// Bytes for the peer that Envoy buffers.
    pub(super) envoy_buffered: Cell<usize>,
    /// Bytes that were sent directly, and are not reported to Envoy yet.
    pub(super) unreported: Cell<usize>,
    /// A write has failed, because the connection is broken.
    pub(super) is_broken: Cell<bool>,
    pub(super) is_corked: Cell<bool>,
}

impl Conn {
    /// Writes to the descriptor. If the socket buffer is full, the connection returns to Envoy, which waits for room.
    fn send(&self, bytes: &[u8]) -> Io {
        let sent = self.socket.send(bytes);
        if sent == Io::WouldBlock {
            self.onload();
        }
        sent
    }

    /// Sends bytes directly, unless earlier bytes are still unsent. Returns how many bytes were accepted. The caller
    /// must pass the rest to Envoy's write buffer, even if these bytes are already encrypted.
    pub(super) fn send_direct(&self, bytes: &[u8]) -> usize {
        if !self.may_send_directly()
            || self.sending.envoy_buffered.get() > 0
            || self.sending.state.get() != SendingState::Open
            || !self.sending.outbox.borrow().is_empty()
        {
            return 0;
        }
        let sent = match &mut *self.tls.borrow_mut() {
            None => self.send(bytes),
            Some(stream) if stream.is_handshaking() || !stream.outgoing().is_empty() => Io::WouldBlock,
            Some(stream) => {
                stream.send(bytes);
                match self.send_outgoing(stream) {
                    Io::Done(_) => Io::Done(bytes.len()),
                    Io::WouldBlock => {
                        self.sending.sealed.set(bytes.len());
                        Io::WouldBlock
                    }
                    Io::Broken => Io::Broken,
                }
            }
        };
        let taken = match sent {
            Io::Done(sent) => sent,
            Io::WouldBlock => 0,
            Io::Broken => {
                // Envoy's hooks have to close this connection. Its last event may already be handled, so trigger them.
                self.close_after_reading();
                self.socket.set_writable();
                bytes.len()
            }
        };
        let unreported = self.sending.unreported.get() + taken;
        self.sending.unreported.set(unreported);
        if unreported >= MAX_UNREPORTED_BYTES {
            self.socket.set_writable();
        }
        taken
    }

    /// A write has failed: makes the read hook close the connection after it has read what the peer sent before.
    pub(crate) fn close_after_reading(&self) {
        self.sending.is_broken.set(true);
        self.onload();
        self.socket.set_readable();
    }

    /// After the end of the connection was read, the failed write does not decide any more what follows.
    pub(crate) fn forget_failed_write(&self) {
        self.sending.is_broken.set(false);
    }

    /// While offloading is switched off, bytes are sent directly only to offloaded connections. Only a migrating
    /// session has such connections then.
    fn may_send_directly(&self) -> bool {
        self.sending.is_direct.get() && (switches::is_offload_on() || self.key.get().is_some())
    }

    /// Sends the module's own bytes. Those that do not fit now are queued, and sent before any other bytes.
    pub(crate) fn write_or_queue(&self, bytes: &[u8]) -> Io {
        match &mut *self.tls.borrow_mut() {
            Some(stream) => stream.send(bytes),
            None => self.sending.outbox.borrow_mut().extend_from_slice(bytes),
        }
        self.flush()
    }

    /// Sends the last bytes on a connection that is about to be closed. Bytes that do not fit now are dropped.
    pub(crate) fn write_final(&self, error: &[u8]) {
        match &mut *self.tls.borrow_mut() {
            Some(stream) => {
                stream.send(error);
                stream.finish();
                let _ = self.socket.send(stream.outgoing());
            }
            None => drop(self.socket.send(error)),
        }
    }

    /// Sends the queued bytes. `Done`: all are sent; `WouldBlock`: some are still queued.
    pub(crate) fn flush(&self) -> Io {
        let mut outbox = self.sending.outbox.borrow_mut();
        while !outbox.is_empty() {
            match self.send(&outbox) {
                Io::Done(sent) => drop(outbox.drain(..sent)),
                other => return other,
            }
        }
        drop(outbox);
        let mut tls = self.tls.borrow_mut();
        let Some(stream) = tls.as_mut() else {
            return Io::Done(0);
        };
        self.send_outgoing(stream)
    }

    /// Drops the queued bytes, since the peer is gone.
    pub(crate) fn discard_unsent(&self) {
        self.sending.outbox.borrow_mut().clear();
        if let Some(stream) = &mut *self.tls.borrow_mut() {
            stream.sent(stream.outgoing().len());
        }
    }

    fn send_outgoing(&self, stream: &mut Stream) -> Io {
        while !stream.outgoing().is_empty() {
            match self.send(stream.outgoing()) {
                Io::Done(sent) => stream.sent(sent),
                other => return other,
            }
        }
        Io::Done(0)
    }

    /// Envoy's write hook: sends Envoy's write buffer, and with `end` a FIN after it. During the TLS handshake nothing
    /// is sent from the buffer. Also reports directly sent bytes to Envoy, for its counters.
    pub(crate) fn write(&self, end: bool) -> IoOutcome {
        let written = self.write_buffer(end);
        self.sending.envoy_buffered.set(self.sending.envoy_buffered.get().saturating_sub(written.bytes));
        IoOutcome { bytes: written.bytes + self.sending.unreported.take(), ..written }
    }

    fn write_buffer(&self, end: bool) -> IoOutcome {
        let mut written = 0;
        match self.flush() {
            Io::Done(_) => written += self.remove_sealed(),
            Io::WouldBlock => return IoOutcome::open(0),
            Io::Broken => return IoOutcome::close(0),
        }
        if self.is_handshaking() {
            return IoOutcome::open(written);
        }
        while self.socket.write_buffer_length() > 0 {
            let sent = if self.has_tls() { self.seal_and_send() } else { self.socket.flush() };
            match sent {
                Io::Done(bytes) => written += bytes,
                Io::WouldBlock => return IoOutcome::open(written),
                Io::Broken => return IoOutcome::close(written),
            }
        }
        if end {
            self.finish_tls();
            match self.flush() {
                Io::Done(_) => self.send_fin(),
                Io::WouldBlock => {} // Envoy calls the hook again
                Io::Broken => return IoOutcome::close(written),
            }
        }
        IoOutcome::open(written)
    }

    /// Removes the encrypted bytes from Envoy's write buffer after they were sent.
    fn remove_sealed(&self) -> usize {
        let length = self.sending.sealed.get().min(self.socket.write_buffer_length());
        self.sending.sealed.set(self.sending.sealed.get() - length);
        if length > 0 { self.socket.take_from_write_buffer(|_| length) } else { 0 }
    }

    fn seal_and_send(&self) -> Io {
        let mut sealed = 0;
        self.socket.take_from_write_buffer(|slices| {
            if let Some(stream) = self.tls.borrow_mut().as_mut() {
                for slice in slices {
                    let piece = &slice[..slice.len().min(SEAL_BYTES - sealed)];
                    stream.send(piece);
                    sealed += piece.len();
                    if sealed == SEAL_BYTES {
                        break;
                    }
                }
            }
            0
        });
        self.sending.sealed.set(sealed);
        match self.flush() {
            Io::Done(_) => Io::Done(self.remove_sealed()),
            other => other,
        }
    }

    /// Holds back what is sent next, so that [`Self::finish`] can send the FIN in the same segment. Must be lifted soon.
    pub(crate) fn set_cork(&self, is_corked: bool) {
        if self.sending.is_corked.replace(is_corked) != is_corked {
            // While a TCP connection is corked, the kernel holds back a segment that is not full (tcp(7)). Other sockets
            // lack the option, and do not need it.
            let _ = self.socket.with_descriptor(|socket| SockRef::from(&socket).set_tcp_cork(is_corked));
        }
    }

    pub(crate) fn is_corked(&self) -> bool {
        self.sending.is_corked.get()
    }

    /// Ends the sending side of TLS and TCP, once. Bytes that do not fit now are dropped.
    pub(crate) fn finish(&self) {
        self.finish_tls();
        let _ = self.flush();
        self.send_fin();
    }

    fn finish_tls(&self) {
        if self.sending.state.get() != SendingState::Open {
            return;
        }
        self.sending.state.set(SendingState::Finished);
        if let Some(stream) = self.tls.borrow_mut().as_mut() {
            stream.finish();
        }
    }

    fn send_fin(&self) {
        if self.sending.state.replace(SendingState::FinSent) != SendingState::FinSent {
            self.socket.shutdown_write();
        }
    }

    /// Sends `error` and a FIN before the connection is closed, and discards unread bytes. If a socket is closed with
    /// unread bytes, the kernel sends a reset, which may overtake the error and the bytes that Envoy has written.
    pub(crate) fn close_gracefully(&self, error: &[u8]) {
        if !error.is_empty() && self.sending.state.get() == SendingState::Open {
            let _ = self.write_or_queue(error);
        }
        self.finish();
        self.worker.buffers.with_buffer(|buffer| {
            for _ in 0..16 {
                if !matches!(self.socket.receive(buffer).io, Io::Done(1..)) {
                    break;
                }
            }
        });
    }
}
