//! A connection to a node that Envoy does not know, such as that to the target of a migration.

use std::cell::{Cell, RefCell};
use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use envoy_abi::socket_options;
use migration::restore::RestoreStatement;
use mysql_proto::secret::SecretBytes;
use socket2::Socket;
use tls::{ReceiveResult, Stream};

use crate::nonblocking;
use crate::unread::has_unread_bytes;
use crate::worker::WorkerContext;

/// About how many bytes of states are sent before the worker handles other events, since encrypting and copying takes
/// time.
const BYTES_PER_TURN: usize = 128 * 1024;

/// The node has closed the connection, cannot be reached, or has violated TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TargetLost;

/// Why a target cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TargetFault {
    Lost,
    /// The node has sent something unexpected.
    Invalid,
}

impl From<TargetLost> for TargetFault {
    fn from(_: TargetLost) -> Self {
        Self::Lost
    }
}

pub(crate) struct TargetConn {
    pub(crate) worker: Rc<WorkerContext>,
    connection: Socket,
    tls: RefCell<Option<Box<Stream>>>,
    /// Bytes that wait until the socket is connected, or has room.
    outbox: RefCell<SecretBytes>,
    /// States that are sent after the outbox.
    states: RefCell<Option<UnsentStates>>,
    /// There are more states, and room to send them.
    has_more: Cell<bool>,
    /// [`Self::receive`] has reported that TLS is established.
    is_tls_reported: Cell<bool>,
}

/// States that are being sent. Only encrypted bytes that did not fit into the connection are copied.
struct UnsentStates {
    statement: Rc<RestoreStatement>,
    /// The index of the first piece that was not sent completely.
    piece: usize,
    /// How many bytes of this piece were sent.
    sent: usize,
}

impl TargetConn {
    /// Begins to connect. Events report the result. `like`: the descriptor whose options are copied.
    pub(crate) fn connect(worker: Rc<WorkerContext>, address: SocketAddr, like: BorrowedFd<'_>) -> io::Result<Self> {
        let connection = nonblocking::socket(address)?;
        socket_options::copy(like, connection.as_fd())?;
        nonblocking::connect(&connection, address)?;
        Ok(Self {
            worker,
            connection,
            tls: RefCell::default(),
            outbox: RefCell::default(),
            states: RefCell::default(),
            has_more: Cell::new(false),
            is_tls_reported: Cell::new(false),
        })
    }

    /// Whether the TCP connection is established.
    pub(crate) fn is_connected(&self) -> bool {
        self.connection.peer_addr().is_ok()
    }

    /// Sends the bytes for which there is room now, and the rest later.
    pub(crate) fn send(&self, bytes: &[u8]) -> Result<(), TargetLost> {
        match &mut *self.tls.borrow_mut() {
            Some(stream) => stream.send(bytes),
            None => self.outbox.borrow_mut().extend_from_slice(bytes),
        }
        self.flush()
    }

    /// Like [`Self::send`], for states.
    pub(crate) fn send_states(&self, statement: Rc<RestoreStatement>) -> Result<(), TargetLost> {
        self.states.replace(Some(UnsentStates { statement, piece: 0, sent: 0 }));
        self.flush()
    }

    /// True: there are more states to send, and room. The caller has to continue after other events.
    pub(crate) fn take_has_more(&self) -> bool {
        self.has_more.replace(false)
    }

    /// Whether everything was sent.
    pub(crate) fn has_sent_all(&self) -> bool {
        self.states.borrow().is_none() && self.outbox.borrow().is_empty()
    }

    /// Sends the SSLRequest, and begins TLS after it. Fails if bytes have followed the greeting: TLS would not protect
    /// them.
    pub(crate) fn start_tls(&self, request: &[u8], stream: Stream) -> Result<(), TargetFault> {
        if has_unread_bytes(self.descriptor()) {
            return Err(TargetFault::Invalid);
        }
        self.send(request)?;
        self.tls.replace(Some(Box::new(stream)));
        Ok(self.flush()?)
    }

    /// Reads and decrypts all received bytes, and appends them to `plain`. Ok(true), once: TLS is established.
    pub(crate) fn receive(&self, plain: &mut Vec<u8>) -> Result<bool, TargetLost> {
        // The node may have sent an error before the connection broke, so a failed write is reported after the reads.
        let flushed = self.flush();
        loop {
            let open = self.worker.buffers.with_buffer(|buffer| match (&self.connection).read(buffer) {
                Ok(0) => Err(TargetLost),
                Ok(length) => self.decrypt(&buffer[..length], plain).map(|()| true),
                Err(error) if error.kind() == ErrorKind::Interrupted => Ok(true),
                // `NotConnected`: the attempt to connect goes on.
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected) => Ok(false),
                Err(_) => Err(TargetLost),
            })?;
            if !open {
                break;
            }
        }
        flushed?;
        let is_established = self.tls.borrow().as_ref().is_some_and(|stream| !stream.is_handshaking());
        Ok(is_established && !self.is_tls_reported.replace(true))
    }

    fn decrypt(&self, bytes: &[u8], plain: &mut Vec<u8>) -> Result<(), TargetLost> {
        let received = match &mut *self.tls.borrow_mut() {
            None => {
                plain.extend_from_slice(bytes);
                return Ok(());
            }
            Some(stream) => stream.receive(bytes, &mut |piece| plain.extend_from_slice(piece)),
        };
        // Also after an error, to send the alert.
        self.flush()?;
        match received {
            Ok(ReceiveResult::Open) => Ok(()),
            Ok(ReceiveResult::Closed) => Err(TargetLost),
            Err(error) => {
                envoy_abi::log!(Warn, "TLS with a node failed while a session was moving: {error}");
                Err(TargetLost)
            }
        }
    }

    fn flush(&self) -> Result<(), TargetLost> {
        let mut outbox = self.outbox.borrow_mut();
        let sent = self.write(&outbox)?;
        outbox.consume(sent);
        if !outbox.is_empty() || !self.flush_tls()? {
            return Ok(());
        }
        let mut states = self.states.borrow_mut();
        if let Some(unsent) = &mut *states
            && self.send_pieces(unsent)?
        {
            *states = None;
        }
        Ok(())
    }

    /// Sends encrypted bytes. True: none are left.
    fn flush_tls(&self) -> Result<bool, TargetLost> {
        if let Some(stream) = &mut *self.tls.borrow_mut() {
            while !stream.outgoing().is_empty() {
                match self.write(stream.outgoing())? {
                    0 => return Ok(false),
                    sent => stream.sent(sent),
                }
            }
        }
        Ok(true)
    }

    /// Sends a few pieces, if there is room. True: no piece is left.
    fn send_pieces(&self, unsent: &mut UnsentStates) -> Result<bool, TargetLost> {
        let statement = Rc::clone(&unsent.statement);
        let (mut has_room, mut bytes) = (true, 0);
        for piece in statement.pieces().iter().skip(unsent.piece) {
            if bytes >= BYTES_PER_TURN {
                break;
            }
            bytes += piece.len();
            let has_tls = self.tls.borrow_mut().as_mut().map(|stream| stream.send(piece)).is_some();
            has_room = if has_tls {
                unsent.sent = piece.len();
                self.flush_tls()?
            } else {
                unsent.sent += self.write(&piece[unsent.sent..])?;
                unsent.sent == piece.len()
            };
            if unsent.sent == piece.len() {
                (unsent.piece, unsent.sent) = (unsent.piece + 1, 0);
            }
            if !has_room {
                break; // an event reports when there is room
            }
        }
        let is_done = unsent.piece == statement.pieces().len();
        self.has_more.set(has_room && !is_done);
        Ok(is_done)
    }

    /// Writes the bytes for which there is room, and returns their number.
    fn write(&self, bytes: &[u8]) -> Result<usize, TargetLost> {
        let mut done = 0;
        while done < bytes.len() {
            match (&self.connection).write(&bytes[done..]) {
                Ok(sent) => done += sent,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected) => break,
                Err(_) => return Err(TargetLost),
            }
        }
        Ok(done)
    }

    /// Wraps an existing connection, with its TLS.
    pub(crate) fn from_parts(worker: Rc<WorkerContext>, connection: OwnedFd, tls: Option<Box<Stream>>) -> Self {
        let is_tls_reported = Cell::new(tls.is_some());
        Self {
            worker,
            connection: connection.into(),
            tls: RefCell::new(tls),
            outbox: RefCell::default(),
            is_tls_reported,
            states: RefCell::default(),
            has_more: Cell::new(false),
        }
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }

    /// The connection and the TLS on it, for the session.
    pub(crate) fn into_parts(self) -> (OwnedFd, Option<Box<Stream>>) {
        (self.connection.into(), self.tls.into_inner())
    }
}
