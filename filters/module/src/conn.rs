//! One TCP connection of a session, with or without TLS: reads and sends its bytes, below Envoy's buffers.

mod reading;
mod writing;

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use envoy_abi::socket::Socket;
use tls::{Stream, TlsError};

use crate::offload::EventKey;
use crate::worker::WorkerContext;

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

/// The state of a connection as the module has found it. Envoy has to react to this state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConnState {
    Open,
    /// The peer has closed its side.
    PeerFinished,
    /// The connection must be closed.
    Closing,
}

/// Why bytes could not be decrypted.
pub(crate) enum ReadError {
    /// The peer has violated TLS. An alert was sent to it.
    Tls(TlsError),
    /// The connection is broken.
    Broken,
}

pub(crate) struct Conn {
    pub(crate) worker: Rc<WorkerContext>,
    pub(crate) socket: Socket,
    /// The other connection of the session.
    peer_conn: RefCell<Weak<Conn>>,
    /// Bytes may be sent directly.
    is_direct: Cell<bool>,
    tls: RefCell<Option<Box<Stream>>>,
    /// Unsent bytes of the module itself that are not encrypted. They go before those of `tls`.
    outbox: RefCell<Vec<u8>>,
    /// Bytes at the front of Envoy's write buffer, or on their way there, that are already encrypted. They stay in the
    /// buffer until they are sent, since Envoy may close a connection whose write buffer is empty.
    sealed: Cell<usize>,
    /// The sending side of the connection has ended.
    is_finished: Cell<bool>,
    /// The FIN was sent.
    is_fin_sent: Cell<bool>,
    /// Bytes for the peer that Envoy buffers.
    envoy_buffered: Cell<usize>,
    /// Bytes that were received and forwarded directly, and are not reported to Envoy yet.
    unreported_rx: Cell<usize>,
    /// Bytes that were sent directly, and are not reported to Envoy yet.
    unreported_tx: Cell<usize>,
    /// A write has failed, since the connection is broken.
    is_broken: Cell<bool>,
    /// How often Envoy has read from the connection since the session was established.
    read_count: Cell<u8>,
    /// The key of the connection's events. None: the connection is not offloaded.
    key: Cell<Option<EventKey>>,
    /// The last event reported that the peer has closed, or that the connection is broken.
    has_end_event: Cell<bool>,
    /// Received bytes that have to go through Envoy's buffers when Envoy calls the read hook.
    pending_in: RefCell<Vec<u8>>,
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

    /// Allows the module to send bytes directly. Before this, all bytes have to go through Envoy's write hook.
    pub(crate) fn allow_direct(&self) {
        self.is_direct.set(true);
    }

    /// Makes each of the two connections of a session know the other one.
    pub(crate) fn pair(self: &Rc<Self>, other: &Rc<Self>) {
        self.peer_conn.replace(Rc::downgrade(other));
        other.peer_conn.replace(Rc::downgrade(self));
    }

    pub(crate) fn start_tls(&self, stream: Stream) {
        self.tls.replace(Some(Box::new(stream)));
    }

    /// Resets the state when the descriptor refers to another connection, which may have TLS. Returns the TLS state of
    /// the old connection.
    pub(crate) fn replace_connection(&self, tls: Option<Box<Stream>>) -> Option<Box<Stream>> {
        self.outbox.replace(Vec::new());
        self.is_broken.set(false);
        self.has_end_event.set(false);
        self.tls.replace(tls)
    }

    pub(crate) fn has_tls(&self) -> bool {
        self.tls.borrow().is_some()
    }

    /// Whether a write has failed, since the connection is broken.
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

    /// Counts a read from the established connection by Envoy, and returns the count.
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

    /// Whether the connection is offloaded, and its last event reported that the peer has closed or that the connection
    /// is broken.
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

    /// Whether Envoy has nothing left to do for the connection, so that it may be offloaded.
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
