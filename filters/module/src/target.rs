//! A connection to the node that a session may move to, made past Envoy while another still serves the session.

use std::cell::{Cell, RefCell};
use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tls::{Received, Stream};

use crate::worker;

/// The node has closed, cannot be reached, or does not speak TLS as it must.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gone;

pub(crate) struct Target {
    connection: Socket,
    tls: RefCell<Option<Box<Stream>>>,
    /// Bytes that wait for the connection, or for room in it.
    outbox: RefCell<Vec<u8>>,
    /// TLS stands, and it was told.
    secured: Cell<bool>,
}

impl Target {
    /// Begins to connect; events tell how that goes on. `like`: the descriptor whose options it is to have.
    pub(crate) fn connect(address: SocketAddr, like: BorrowedFd<'_>) -> io::Result<Self> {
        let connection = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
        as_the_other(&connection, SockRef::from(&like))?;
        match connection.connect(&address.into()) {
            Err(error) if error.raw_os_error() != Some(IN_PROGRESS) && error.kind() != ErrorKind::WouldBlock => {
                return Err(error);
            }
            _ => {}
        }
        Ok(Self { connection, tls: RefCell::default(), outbox: RefCell::default(), secured: Cell::new(false) })
    }

    /// Sends what it can now, and the rest when there is room.
    pub(crate) fn send(&self, bytes: &[u8]) -> Result<(), Gone> {
        match &mut *self.tls.borrow_mut() {
            Some(stream) => stream.send(bytes),
            None => self.outbox.borrow_mut().extend_from_slice(bytes),
        }
        self.flush()
    }

    /// Begins TLS, behind what was sent.
    pub(crate) fn secure(&self, stream: Stream) -> Result<(), Gone> {
        self.tls.replace(Some(Box::new(stream)));
        self.flush()
    }

    /// Reads what has come, decrypted, to the end of `plain`. Ok(true), once: TLS stands.
    pub(crate) fn take(&self, plain: &mut Vec<u8>) -> Result<bool, Gone> {
        self.flush()?;
        loop {
            let open = worker::with_buffer(|buffer| match (&self.connection).read(buffer) {
                Ok(0) => Err(Gone),
                Ok(length) => self.open(&buffer[..length], plain).map(|()| true),
                Err(error) if error.kind() == ErrorKind::Interrupted => Ok(true),
                // Also while it is not connected yet.
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected) => Ok(false),
                Err(_) => Err(Gone),
            })?;
            if !open {
                break;
            }
        }
        let stands = self.tls.borrow().as_ref().is_some_and(|stream| !stream.is_handshaking());
        Ok(stands && !self.secured.replace(true))
    }

    fn open(&self, bytes: &[u8], plain: &mut Vec<u8>) -> Result<(), Gone> {
        let received = match &mut *self.tls.borrow_mut() {
            None => {
                plain.extend_from_slice(bytes);
                return Ok(());
            }
            Some(stream) => stream.receive(bytes, &mut |piece| plain.extend_from_slice(piece)),
        };
        // Also the alert that says what was wrong.
        self.flush()?;
        match received {
            Ok(Received::Open) => Ok(()),
            Ok(Received::Closed) => Err(Gone),
            Err(error) => {
                abi::log!(Warn, "TLS with a node failed, to which a session was to move: {error}");
                Err(Gone)
            }
        }
    }

    fn flush(&self) -> Result<(), Gone> {
        let mut outbox = self.outbox.borrow_mut();
        let sent = self.write(&outbox)?;
        outbox.drain(..sent);
        if !outbox.is_empty() {
            return Ok(());
        }
        if let Some(stream) = &mut *self.tls.borrow_mut() {
            while !stream.outgoing().is_empty() {
                match self.write(stream.outgoing())? {
                    0 => break,
                    sent => stream.sent(sent),
                }
            }
        }
        Ok(())
    }

    /// How many bytes were written; as many as there was room for.
    fn write(&self, bytes: &[u8]) -> Result<usize, Gone> {
        let mut done = 0;
        while done < bytes.len() {
            match (&self.connection).write(&bytes[done..]) {
                Ok(sent) => done += sent,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected) => break,
                Err(_) => return Err(Gone),
            }
        }
        Ok(done)
    }

    /// One that is there, with the TLS on it.
    pub(crate) fn of(connection: OwnedFd, tls: Option<Box<Stream>>) -> Self {
        let secured = Cell::new(tls.is_some());
        Self { connection: connection.into(), tls: RefCell::new(tls), outbox: RefCell::default(), secured }
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }

    /// The connection and the TLS on it, for the session.
    pub(crate) fn hand_over(self) -> (OwnedFd, Option<Box<Stream>>) {
        (self.connection.into(), self.tls.into_inner())
    }
}

/// EINPROGRESS, which std has no stable name for.
const IN_PROGRESS: i32 = 115;

/// Gives a connection the options that Envoy has given to another.
fn as_the_other(connection: &Socket, other: SockRef<'_>) -> io::Result<()> {
    connection.set_tcp_nodelay(other.tcp_nodelay()?)?;
    if other.keepalive()? {
        let keepalive = socket2::TcpKeepalive::new()
            .with_time(other.tcp_keepalive_time()?)
            .with_interval(other.tcp_keepalive_interval()?)
            .with_retries(other.tcp_keepalive_retries()?);
        connection.set_tcp_keepalive(&keepalive)?;
    }
    connection.set_tcp_user_timeout(other.tcp_user_timeout()?.filter(|timeout| !timeout.is_zero()))
}
