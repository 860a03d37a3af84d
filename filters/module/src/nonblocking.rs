//! Non-blocking TCP connections.

use std::io::{Error, ErrorKind};
use std::net::SocketAddr;

use socket2::{Domain, Protocol, Socket, Type};

/// `EINPROGRESS`, for which `std` has no stable name.
const IN_PROGRESS: i32 = 115;

/// Creates a socket for a connection to `address`.
pub(crate) fn socket(address: SocketAddr) -> Result<Socket, Error> {
    Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))
}

/// Begins to connect. Err: the attempt has failed at once.
pub(crate) fn connect(socket: &Socket, address: SocketAddr) -> Result<(), Error> {
    match socket.connect(&address.into()) {
        Err(error) if error.raw_os_error() != Some(IN_PROGRESS) && error.kind() != ErrorKind::WouldBlock => Err(error),
        _ => Ok(()),
    }
}
