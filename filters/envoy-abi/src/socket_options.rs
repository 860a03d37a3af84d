//! Copies socket options to a connection that replaces another one.

use core::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Options with an integer that Envoy sets for a cluster (keepalive, `socket_options`), or that the module sets. They
/// are set in this order, because the type of service sets the priority.
const INTEGERS: [(c_int, c_int); 11] = [
    (libc::IPPROTO_IP, libc::IP_TOS),
    (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
    (libc::SOL_SOCKET, libc::SO_PRIORITY),
    (libc::SOL_SOCKET, libc::SO_MARK),
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
    (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT),
    (libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT),
];

/// Buffer sizes, and their bits in `SO_BUF_LOCK`, which tell whether the size was set. Otherwise the kernel adapts the
/// size, and setting it would stop that.
const BUFFER_SIZES: [(c_int, c_int); 2] = [(libc::SO_SNDBUF, 1), (libc::SO_RCVBUF, 2)];
/// Since Linux 5.14 (`include/uapi/asm-generic/socket.h`, `include/uapi/linux/socket.h`).
const SO_BUF_LOCK: c_int = 72;

/// `TCP_CA_NAME_MAX`: maximum bytes in the name of a congestion control algorithm.
const ALGORITHM_BYTES: usize = 16;

/// Sets the options of `to` to their values on `from`. Skips options that one of the sockets does not have. Some sizes
/// only have an effect before `to` is connected.
///
/// # Errors
/// The kernel rejects an option.
pub fn copy(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
    for (level, name) in INTEGERS {
        if let (Some(value), Some(now)) = (integer(from, level, name), integer(to, level, name))
            && value != now
        {
            set(to, level, name, &value.to_ne_bytes())?;
        }
    }
    let is_set = integer(from, libc::SOL_SOCKET, SO_BUF_LOCK).unwrap_or(0);
    for (name, bit) in BUFFER_SIZES {
        if is_set & bit != 0
            && let Some(size) = integer(from, libc::SOL_SOCKET, name)
            && integer(to, libc::SOL_SOCKET, name) != Some(size)
        {
            // The kernel doubles the size that is set (socket(7)).
            set(to, libc::SOL_SOCKET, name, &(size / 2).to_ne_bytes())?;
        }
    }
    if let (Some(algorithm), Some(now)) = (congestion_control(from), congestion_control(to))
        && algorithm != now
    {
        set(to, libc::IPPROTO_TCP, libc::TCP_CONGESTION, &algorithm)?;
    }
    Ok(())
}

pub(crate) fn integer(socket: BorrowedFd<'_>, level: c_int, name: c_int) -> Option<c_int> {
    let mut value = [0; size_of::<c_int>()];
    (get(socket, level, name, &mut value)? == value.len()).then_some(c_int::from_ne_bytes(value))
}

fn congestion_control(socket: BorrowedFd<'_>) -> Option<[u8; ALGORITHM_BYTES]> {
    let mut name = [0; ALGORITHM_BYTES];
    get(socket, libc::IPPROTO_TCP, libc::TCP_CONGESTION, &mut name)?;
    Some(name)
}

/// Returns the length of the value; None if the socket does not have the option.
fn get(socket: BorrowedFd<'_>, level: c_int, name: c_int, value: &mut [u8]) -> Option<usize> {
    let mut length = value.len() as libc::socklen_t;
    let pointer: *mut c_void = value.as_mut_ptr().cast();
    // SAFETY: the kernel writes at most `length` bytes.
    let result = unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, pointer, &raw mut length) };
    (result == 0).then_some(length as usize)
}

pub(crate) fn set(socket: BorrowedFd<'_>, level: c_int, name: c_int, value: &[u8]) -> io::Result<()> {
    let length = value.len() as libc::socklen_t;
    // SAFETY: the kernel reads `length` bytes.
    match unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, value.as_ptr().cast(), length) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::fd::{AsFd, FromRawFd, OwnedFd};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn socket(domain: c_int) -> OwnedFd {
        // SAFETY: no pointer is given; the descriptor has no other owner.
        unsafe { OwnedFd::from_raw_fd(libc::socket(domain, libc::SOCK_STREAM, 0)) }
    }

    #[test]
    fn options_that_were_set_are_copied() {
        let (from, to) = (socket(libc::AF_INET), socket(libc::AF_INET));
        let values: [(c_int, c_int, c_int); 9] = [
            (libc::IPPROTO_IP, libc::IP_TOS, 0x48),
            (libc::SOL_SOCKET, libc::SO_PRIORITY, 3),
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 61),
            (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 4),
            (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 6),
            (libc::IPPROTO_TCP, libc::TCP_NODELAY, 1),
            (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 12_345),
            (libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, 4096),
        ];
        for (level, name, value) in values {
            set(from.as_fd(), level, name, &value.to_ne_bytes()).expect("set");
        }
        set(from.as_fd(), libc::SOL_SOCKET, libc::SO_SNDBUF, &50_000_i32.to_ne_bytes()).expect("set");
        set(from.as_fd(), libc::IPPROTO_TCP, libc::TCP_CONGESTION, b"reno").expect("every kernel has it");
        let receive_buffer = integer(to.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF);
        copy(from.as_fd(), to.as_fd()).expect("copied");
        for (level, name, value) in values {
            assert_eq!(integer(to.as_fd(), level, name), Some(value), "{level} {name}");
        }
        assert_eq!(integer(to.as_fd(), libc::SOL_SOCKET, libc::SO_SNDBUF), Some(100_000));
        assert!(congestion_control(to.as_fd()).is_some_and(|name| name.starts_with(b"reno\0")));
        assert_eq!(integer(to.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF), receive_buffer);
        assert_eq!(integer(to.as_fd(), libc::SOL_SOCKET, SO_BUF_LOCK), Some(1));
    }

    #[test]
    fn options_that_one_of_the_sockets_lacks_are_skipped() {
        let (six, four) = (socket(libc::AF_INET6), socket(libc::AF_INET));
        set(six.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_TCLASS, &0x48_i32.to_ne_bytes()).expect("set");
        set(six.as_fd(), libc::IPPROTO_TCP, libc::TCP_NODELAY, &1_i32.to_ne_bytes()).expect("set");
        copy(six.as_fd(), four.as_fd()).expect("copied");
        assert_eq!(integer(four.as_fd(), libc::IPPROTO_TCP, libc::TCP_NODELAY), Some(1));
        let (unix, _other) = UnixStream::pair().expect("a pair");
        copy(four.as_fd(), unix.as_fd()).expect("nothing to copy");
        copy(unix.as_fd(), four.as_fd()).expect("nothing to copy");
    }

    #[test]
    fn option_that_cannot_be_set_is_an_error() {
        let (from, to) = (socket(libc::AF_INET), TcpListener::bind("127.0.0.1:0").expect("a port"));
        set(from.as_fd(), libc::IPPROTO_TCP, libc::TCP_CONGESTION, b"reno").expect("every kernel has it");
        copy(from.as_fd(), to.as_fd()).expect("copied");
        assert!(set(to.as_fd(), libc::IPPROTO_TCP, libc::TCP_CONGESTION, b"no such one").is_err());
    }
}
