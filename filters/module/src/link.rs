//! One TCP connection's bytes in both directions, plain or TLS, below Envoy's buffers.

mod reading;
mod writing;

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use abi::socket::Socket;
use tls::{Stream, TlsError};

use crate::events::Key;

/// So many bytes that went past Envoy it is told of at once, and not for each packet.
const TOLD: usize = 1024 * 1024;

/// What comes of one read.
pub(crate) enum Step {
    /// Bytes were taken; there may be more.
    On,
    /// There may be more, but others have their turn first.
    Later,
    /// Envoy calls when there is more.
    Again,
    EndOfStream,
    Close,
}

/// How it stands with a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Open,
    /// The peer will send no more.
    Ended,
    /// It must be closed.
    Doomed,
}

/// What a TLS link could not read.
pub(crate) enum Unread {
    /// The peer does not speak TLS as it must; it was told.
    Tls(TlsError),
    /// The connection broke.
    Broken,
}

pub(crate) struct Link {
    pub(crate) socket: Socket,
    /// The session's other side.
    other: RefCell<Weak<Link>>,
    /// Bytes may be sent straight.
    open: Cell<bool>,
    tls: RefCell<Option<Box<Stream>>>,
    /// Bytes of our own, before TLS.
    outbox: RefCell<Vec<u8>>,
    /// Bytes at the front of Envoy's write buffer, or on their way there, that are sealed already. They leave it when
    /// they are sent: an empty write buffer tells Envoy that it may close.
    sealed: Cell<usize>,
    finished: Cell<bool>,
    /// The FIN was sent.
    shut: Cell<bool>,
    /// Bytes on their way here by Envoy's buffers.
    queued: Cell<usize>,
    /// Bytes that were read here and sent past Envoy, and that it was not told of yet.
    heard: Cell<usize>,
    /// Bytes that were sent from here past Envoy, and that it was not told of yet.
    untold: Cell<usize>,
    /// A write has found that the connection is broken.
    broken: Cell<bool>,
    /// How often Envoy has read it since its session was established, as far as that can be counted here.
    reads: Cell<u8>,
    /// Its events come to the module.
    key: Cell<Option<Key>>,
    /// The last of them told that the connection ends.
    ends: Cell<bool>,
    /// Bytes that were read past Envoy, and have to go by its buffers.
    kept: RefCell<Vec<u8>>,
    /// What was found past Envoy, and Envoy has to hear.
    fate: Cell<Fate>,
}

impl Link {
    pub(crate) fn new(socket: Socket) -> Rc<Self> {
        Rc::new(Self {
            socket,
            other: RefCell::default(),
            open: Cell::new(false),
            tls: RefCell::default(),
            outbox: RefCell::default(),
            sealed: Cell::new(0),
            finished: Cell::new(false),
            shut: Cell::new(false),
            queued: Cell::new(0),
            heard: Cell::new(0),
            untold: Cell::new(0),
            broken: Cell::new(false),
            reads: Cell::new(0),
            key: Cell::new(None),
            ends: Cell::new(false),
            kept: RefCell::default(),
            fate: Cell::new(Fate::Open),
        })
    }

    /// From now on bytes may be sent straight; before, Envoy's write hook has to see them.
    pub(crate) fn open(&self) {
        self.open.set(true);
    }

    /// What comes from the one goes to the other from now on.
    pub(crate) fn pair(self: &Rc<Self>, other: &Rc<Self>) {
        self.other.replace(Rc::downgrade(other));
        other.other.replace(Rc::downgrade(self));
    }

    pub(crate) fn start_tls(&self, stream: Stream) {
        self.tls.replace(Some(Box::new(stream)));
    }

    /// The descriptor names another connection now, which may have TLS. Returns the TLS of the old one.
    pub(crate) fn renew(&self, tls: Option<Box<Stream>>) -> Option<Box<Stream>> {
        self.outbox.replace(Vec::new());
        self.broken.set(false);
        self.ends.set(false);
        self.tls.replace(tls)
    }

    pub(crate) fn has_tls(&self) -> bool {
        self.tls.borrow().is_some()
    }

    /// A write has found that there is nobody any more.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.get()
    }

    pub(crate) fn is_doomed(&self) -> bool {
        self.fate.get() == Fate::Doomed
    }

    pub(crate) fn is_handshaking(&self) -> bool {
        self.tls.borrow().as_ref().is_some_and(|stream| stream.is_handshaking())
    }

    pub(crate) fn key(&self) -> Option<Key> {
        self.key.get()
    }

    pub(crate) fn set_key(&self, key: Option<Key>) {
        self.key.set(key);
    }

    /// Envoy has read it once more, established. Returns how often that was.
    pub(crate) fn count_read(&self) -> u8 {
        self.reads.set(self.reads.get().saturating_add(1));
        self.reads.get()
    }

    pub(crate) fn is_past_envoy(&self) -> bool {
        self.key.get().is_some()
    }

    pub(crate) fn set_ends(&self, ends: bool) {
        self.ends.set(ends);
    }

    /// Whether there are bytes for the peer that were not sent yet.
    pub(crate) fn has_unsent(&self) -> bool {
        self.queued.get() > 0
            || self.sealed.get() > 0
            || !self.outbox.borrow().is_empty()
            || self.other.borrow().upgrade().is_some_and(|other| !other.kept.borrow().is_empty())
            || self.tls.borrow().as_ref().is_some_and(|tls| !tls.outgoing().is_empty())
    }

    /// Whether nothing is left that Envoy would have to do, so that its events may come to the module.
    pub(crate) fn is_calm(&self) -> bool {
        self.queued.get() == 0
            && self.other.borrow().upgrade().is_some_and(|other| other.queued.get() == 0)
            && self.sealed.get() == 0
            && !self.finished.get()
            && !self.broken.get()
            && self.fate.get() == Fate::Open
            && self.kept.borrow().is_empty()
            && self.outbox.borrow().is_empty()
            && self.tls.borrow().as_ref().is_none_or(|tls| !tls.is_handshaking() && tls.outgoing().is_empty())
    }
}
