//! One TCP connection's bytes in both directions, plain or TLS, below Envoy's buffers.

mod reading;
mod writing;

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use envoy_abi::socket::Socket;
use tls::{Stream, TlsError};

use crate::offload::EventKey;
use crate::worker::WorkerContext;

/// After so many directly forwarded bytes they are reported to Envoy: not for each packet.
const MAX_UNREPORTED_BYTES: usize = 1024 * 1024;

/// The result of one read.
pub(crate) enum ReadStep {
    /// Bytes were read; there may be more.
    Continue,
    /// There may be more, but other connections have their turn first.
    Yield,
    /// There is no more. An event follows when there is.
    Wait,
    EndOfStream,
    Close,
}

/// The state of a connection, as found by the module. Envoy has to react to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConnState {
    Open,
    /// The peer has closed its side.
    PeerFinished,
    /// It must be closed.
    Closing,
}

/// Why bytes could not be decrypted.
pub(crate) enum ReadError {
    /// The peer violates TLS, and was sent an alert.
    Tls(TlsError),
    /// The connection is broken.
    Broken,
}

pub(crate) struct Conn {
    pub(crate) worker: Rc<WorkerContext>,
    pub(crate) socket: Socket,
    /// The connection on the other side of the session.
    peer_conn: RefCell<Weak<Conn>>,
    /// Bytes may be sent directly.
    is_direct: Cell<bool>,
    tls: RefCell<Option<Box<Stream>>>,
    /// Bytes of the module itself, before TLS.
    outbox: RefCell<Vec<u8>>,
    /// Bytes at the front of Envoy's write buffer, or on their way there, that are encrypted already. They leave it when
    /// they are sent: an empty write buffer tells Envoy that it may close.
    sealed: Cell<usize>,
    is_finished: Cell<bool>,
    /// The FIN was sent.
    is_fin_sent: Cell<bool>,
    /// Bytes for the peer that Envoy buffers.
    envoy_buffered: Cell<usize>,
    /// Bytes that were read here and forwarded directly, and are not reported to Envoy yet.
    unreported_rx: Cell<usize>,
    /// Bytes that were sent directly, and are not reported to Envoy yet.
    unreported_tx: Cell<usize>,
    /// A write has found that the connection is broken.
    is_broken: Cell<bool>,
    /// How often Envoy has read it since its session was established.
    read_count: Cell<u8>,
    /// The key of its events. None: it is not offloaded.
    key: Cell<Option<EventKey>>,
    /// The last event reported that the peer has closed, or that the connection is broken.
    has_end_event: Cell<bool>,
    /// Bytes that were read while offloaded, and have to go through Envoy's buffers.
    pending_in: RefCell<Vec<u8>>,
    /// What was found while offloaded, and Envoy has to react to.
    state: Cell<ConnState>,
}

impl Conn {
    pub(crate) fn new(worker: Rc<WorkerContext>, socket: Socket) -> Rc<Self> {
        Rc::new(Self {
            worker,
            socket,
            peer_conn: RefCell::default(),
            is_direct: Cell::new(false),
            tls: RefCell::default(),
            outbox: RefCell::default(),
            sealed: Cell::new(0),
            is_finished: Cell::new(false),
            is_fin_sent: Cell::new(false),
            envoy_buffered: Cell::new(0),
            unreported_rx: Cell::new(0),
            unreported_tx: Cell::new(0),
            is_broken: Cell::new(false),
            read_count: Cell::new(0),
            key: Cell::new(None),
            has_end_event: Cell::new(false),
            pending_in: RefCell::default(),
            state: Cell::new(ConnState::Open),
        })
    }

    /// From now on bytes may be sent directly. Before, Envoy's write hook has to see them.
    pub(crate) fn allow_direct(&self) {
        self.is_direct.set(true);
    }

    /// Connects the two sides of a session.
    pub(crate) fn pair(self: &Rc<Self>, other: &Rc<Self>) {
        self.peer_conn.replace(Rc::downgrade(other));
        other.peer_conn.replace(Rc::downgrade(self));
    }

    pub(crate) fn start_tls(&self, stream: Stream) {
        self.tls.replace(Some(Box::new(stream)));
    }

    /// The descriptor refers to another connection now, which may have TLS. Returns the TLS of the old one.
    pub(crate) fn replace_connection(&self, tls: Option<Box<Stream>>) -> Option<Box<Stream>> {
        self.outbox.replace(Vec::new());
        self.is_broken.set(false);
        self.has_end_event.set(false);
        self.tls.replace(tls)
    }

    pub(crate) fn has_tls(&self) -> bool {
        self.tls.borrow().is_some()
    }

    /// Whether a write has found that the connection is broken.
    pub(crate) fn is_broken(&self) -> bool {
        self.is_broken.get()
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.state.get() == ConnState::Closing
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

    /// Counts a read by Envoy of the established connection. Returns the count.
    pub(crate) fn count_read(&self) -> u8 {
        self.read_count.set(self.read_count.get().saturating_add(1));
        self.read_count.get()
    }

    pub(crate) fn is_offloaded(&self) -> bool {
        self.key.get().is_some()
    }

    pub(crate) fn set_end_event(&self, ends: bool) {
        self.has_end_event.set(ends);
    }

    /// Whether it is offloaded, and its last event reported that the peer has closed, or that the connection is broken.
    pub(crate) fn has_end_event(&self) -> bool {
        self.is_offloaded() && self.has_end_event.get()
    }

    /// Whether there are bytes for the peer that were not sent yet.
    pub(crate) fn has_unsent(&self) -> bool {
        self.envoy_buffered.get() > 0
            || self.sealed.get() > 0
            || !self.outbox.borrow().is_empty()
            || self.peer_conn.borrow().upgrade().is_some_and(|other| !other.pending_in.borrow().is_empty())
            || self.tls.borrow().as_ref().is_some_and(|tls| !tls.outgoing().is_empty())
    }

    /// Whether nothing is left for Envoy to do, so that the connection may be offloaded.
    pub(crate) fn is_quiescent(&self) -> bool {
        self.envoy_buffered.get() == 0
            && self.peer_conn.borrow().upgrade().is_some_and(|other| other.envoy_buffered.get() == 0)
            && self.sealed.get() == 0
            && !self.is_finished.get()
            && !self.is_broken.get()
            && self.state.get() == ConnState::Open
            && self.pending_in.borrow().is_empty()
            && self.outbox.borrow().is_empty()
            && self.tls.borrow().as_ref().is_none_or(|tls| !tls.is_handshaking() && tls.outgoing().is_empty())
    }
}
