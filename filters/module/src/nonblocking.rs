//! TCP connections whose calls do not block.

use std::io::{Error, ErrorKind};
use std::net::SocketAddr;

use socket2::{Domain, Protocol, Socket, Type};

/// EINPROGRESS, for which std has no stable name.
const IN_PROGRESS: i32 = 115;

/// A socket for connections to such addresses.
pub(crate) fn socket(address: SocketAddr) -> Result<Socket, Error> {
    Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))
}

/// Begins to connect. Err: that has failed already.
pub(crate) fn connect(socket: &Socket, address: SocketAddr) -> Result<(), Error> {
    match socket.connect(&address.into()) {
        Err(error) if error.raw_os_error() != Some(IN_PROGRESS) && error.kind() != ErrorKind::WouldBlock => Err(error),
        _ => Ok(()),
    }
}
