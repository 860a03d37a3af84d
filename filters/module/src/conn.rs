//! One TCP connection of a session, with or without TLS: reads and sends its bytes, below Envoy's buffers.

mod reading;
mod writing;

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use envoy_abi::socket::Socket;
use socket2::{SockRef, TcpKeepalive};
use tls::{Stream, TlsDetails, TlsError};

use crate::offload::EventKey;
use crate::unread::has_ended;
use crate::worker::WorkerContext;
use reading::{ReceivingSide, ReceivingState};
use writing::{SendingSide, SendingState};

/// Directly forwarded bytes are reported to Envoy when there are this many, and not for each packet.
const MAX_UNREPORTED_BYTES: usize = 1024 * 1024;

/// The result of one read.
pub(crate) enum ReadStep {
    /// Bytes were read; there may be more.
    Continue,
    /// There may be more, but other connections are served first.
    Yield,
    /// There are no more bytes now. An event reports when there are.
    Wait,
    EndOfStream,
    Close,
}

/// Why a read through TLS failed.
pub(crate) enum ReadError {
    /// The peer has violated TLS. An alert was sent to it.
    Tls(TlsError),
    /// Unsent bytes could not be sent, because the connection is broken. What the peer sent before is decrypted.
    Broken,
}

pub(crate) struct Conn {
    pub(crate) worker: Rc<WorkerContext>,
    pub(crate) socket: Socket,
    /// The other connection of the session.
    other_conn: RefCell<Weak<Conn>>,
    tls: RefCell<Option<Box<Stream>>>,
    /// The key of the connection's events. None: the connection is not offloaded: Envoy, and not the module, gets its
    /// events (see `offload.rs`).
    key: Cell<Option<EventKey>>,
    receiving: ReceivingSide,
    sending: SendingSide,
}

impl Conn {
    pub(crate) fn new(worker: Rc<WorkerContext>, socket: Socket) -> Rc<Self> {
        Rc::new(Self {
            worker,
            socket,
            other_conn: RefCell::default(),
            tls: RefCell::default(),
            key: Cell::new(None),
            receiving: ReceivingSide::default(),
            sending: SendingSide::default(),
        })
    }

    /// Allows the module to send bytes directly. Before this, all bytes have to go through Envoy's write hook.
    pub(crate) fn allow_direct(&self) {
        self.sending.is_direct.set(true);
    }

    /// Enables TCP keepalive, with these times if the socket is one of TCP.
    pub(crate) fn set_keepalive(&self, keepalive: &TcpKeepalive) {
        let _ = self.socket.with_descriptor(|socket| SockRef::from(&socket).set_tcp_keepalive(keepalive));
    }

    /// Makes each of the two connections of a session know the other one.
    pub(crate) fn pair(self: &Rc<Self>, other: &Rc<Self>) {
        self.other_conn.replace(Rc::downgrade(other));
        other.other_conn.replace(Rc::downgrade(self));
    }

    pub(crate) fn start_tls(&self, stream: Stream) {
        self.tls.replace(Some(Box::new(stream)));
    }

    /// Resets the state when the descriptor refers to another connection, which may have TLS. Returns the TLS state of
    /// the old connection.
    pub(crate) fn replace_connection(&self, tls: Option<Box<Stream>>) -> Option<Box<Stream>> {
        self.sending.outbox.replace(Vec::new());
        self.sending.is_broken.set(false);
        self.receiving.has_end_event.set(false);
        self.tls.replace(tls)
    }

    pub(crate) fn has_tls(&self) -> bool {
        self.tls.borrow().is_some()
    }

    /// None: the connection has no TLS, or its handshake is not complete.
    pub(crate) fn tls_details(&self) -> Option<TlsDetails> {
        self.tls.borrow().as_ref().and_then(|stream| stream.details())
    }

    /// Whether a write has failed, because the connection is broken.
    pub(crate) fn is_broken(&self) -> bool {
        self.sending.is_broken.get()
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.receiving.state.get() == ReceivingState::Closing
    }

    pub(crate) fn is_handshaking(&self) -> bool {
        self.tls.borrow().as_ref().is_some_and(|stream| stream.is_handshaking())
    }

    pub(crate) fn key(&self) -> Option<EventKey> {
        self.key.get()
    }

    pub(crate) fn set_key(&self, key: Option<EventKey>) {
        self.key.set(key);
    }

    /// Counts a read from the established connection by Envoy, and returns the count.
    pub(crate) fn count_read(&self) -> u8 {
        self.receiving.read_count.set(self.receiving.read_count.get().saturating_add(1));
        self.receiving.read_count.get()
    }

    pub(crate) fn is_offloaded(&self) -> bool {
        self.key.get().is_some()
    }

    pub(crate) fn set_end_event(&self, ends: bool) {
        self.receiving.has_end_event.set(ends);
    }

    /// Whether the connection is offloaded, and its last event reported that the peer has closed or that the connection
    /// is broken.
    pub(crate) fn has_end_event(&self) -> bool {
        self.is_offloaded() && self.receiving.has_end_event.get()
    }

    /// Whether the peer has closed or reset the connection, or its sending direction. Bytes may still be unread.
    pub(crate) fn has_ended(&self) -> bool {
        self.has_end_event() || !self.is_offloaded() && self.socket.with_descriptor(has_ended) != Some(false)
    }

    /// Whether there are bytes for the peer that were not sent yet.
    pub(crate) fn has_unsent(&self) -> bool {
        self.sending.envoy_buffered.get() > 0
            || self.sending.sealed.get() > 0
            || !self.sending.outbox.borrow().is_empty()
            || self.other_conn.borrow().upgrade().is_some_and(|other| !other.receiving.pending.borrow().is_empty())
            || self.tls.borrow().as_ref().is_some_and(|tls| !tls.outgoing().is_empty())
    }

    /// Whether Envoy has nothing left to do for the connection, so that it may be offloaded.
    pub(crate) fn is_quiescent(&self) -> bool {
        self.sending.envoy_buffered.get() == 0
            && self.other_conn.borrow().upgrade().is_some_and(|other| other.sending.envoy_buffered.get() == 0)
            && self.sending.sealed.get() == 0
            && self.sending.state.get() == SendingState::Open
            && !self.sending.is_broken.get()
            && self.receiving.state.get() == ReceivingState::Open
            && self.receiving.pending.borrow().is_empty()
            && self.sending.outbox.borrow().is_empty()
            && self.tls.borrow().as_ref().is_none_or(|tls| !tls.is_handshaking() && tls.outgoing().is_empty())
    }
}
