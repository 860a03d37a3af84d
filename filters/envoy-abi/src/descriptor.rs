//! Reads and writes a socket's descriptor without Envoy's own calls: these functions report more, and cost less.
//!
//! Sources: tcp(7) and Linux' `net/ipv4/tcp.c` (`TCP_INQ`, `tcp_inq_hint`).

use core::ffi::c_int;
use core::mem::{MaybeUninit, size_of};
use std::io::{Error, ErrorKind};

use crate::socket::{Io, Received};

/// Makes each read report how much it left. False: this kernel or socket does not support it.
pub(crate) fn announce_rest(fd: c_int) -> bool {
    let on: c_int = 1;
    let length = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: the kernel reads `length` bytes of `on`.
    unsafe { libc::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INQ, (&raw const on).cast(), length) == 0 }
}

/// Room for one control message with an int.
#[repr(C, align(8))]
struct Control([u8; 32]);

/// Reads once. After [`announce_rest`], the kernel reports how much is left; a FIN counts, too.
pub(crate) fn receive(fd: c_int, into: &mut [u8]) -> Received {
    let mut control = MaybeUninit::<Control>::uninit();
    let mut piece = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    // SAFETY: all fields may be zero.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = &raw mut piece;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of::<Control>();
    loop {
        // SAFETY: the kernel writes into `into` and `control`, no more than their lengths say.
        let done = unsafe { libc::recvmsg(fd, &raw mut message, libc::MSG_DONTWAIT) };
        if let Ok(done) = usize::try_from(done) {
            // SAFETY: the kernel has filled `message`.
            let left = unsafe { left_behind(&message) };
            return Received { io: Io::Done(done), more: done == into.len() || left != Some(0) };
        }
        match failed() {
            None => {}
            Some(io) => return Received { io, more: false },
        }
    }
}

/// Reads once, without asking how much is left; `ends`: an event has reported the end of the connection.
pub(crate) fn receive_knowing(fd: c_int, into: &mut [u8], ends: bool) -> Received {
    loop {
        // SAFETY: the kernel writes into `into`, no more than its length says.
        let done = unsafe { libc::recv(fd, into.as_mut_ptr().cast(), into.len(), libc::MSG_DONTWAIT) };
        if let Ok(done) = usize::try_from(done) {
            return Received { io: Io::Done(done), more: ends || done == into.len() };
        }
        if let Some(io) = failed() {
            return Received { io, more: false };
        }
    }
}

/// # Safety
/// `message` was filled by recvmsg.
unsafe fn left_behind(message: &libc::msghdr) -> Option<c_int> {
    // SAFETY: the kernel placed the control messages there.
    let header = unsafe { libc::CMSG_FIRSTHDR(message).as_ref() }?;
    if header.cmsg_level != libc::SOL_TCP || header.cmsg_type != libc::TCP_CM_INQ {
        return None;
    }
    // SAFETY: a message of this type has an int.
    Some(unsafe { libc::CMSG_DATA(header).cast::<c_int>().read_unaligned() })
}

/// Writes once, perhaps only a part of `bytes`.
pub(crate) fn send(fd: c_int, bytes: &[u8]) -> Io {
    loop {
        // SAFETY: the kernel only reads.
        let done =
            unsafe { libc::send(fd, bytes.as_ptr().cast(), bytes.len(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
        if let Ok(done) = usize::try_from(done) {
            return Io::Done(done);
        }
        if let Some(io) = failed() {
            return io;
        }
    }
}

/// The meaning of the last call's error; None: it was interrupted.
fn failed() -> Option<Io> {
    match Error::last_os_error().kind() {
        ErrorKind::Interrupted => None,
        ErrorKind::WouldBlock => Some(Io::WouldBlock),
        _ => Some(Io::Broken),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Both ends of a TCP connection; reads of the second one report how much they left.
    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let near = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
        let (far, _) = listener.accept().expect("the other end");
        assert!(announce_rest(far.as_raw_fd()));
        (near, far)
    }

    /// Returns once `bytes` bytes, or the end, can be read.
    fn arrived(far: &TcpStream, bytes: usize) {
        let mut seen = vec![0; bytes];
        while far.peek(&mut seen).expect("a connection") < bytes.min(seen.len()) {}
    }

    #[test]
    fn read_of_all_bytes_reports_no_more() {
        let (mut near, far) = pair();
        near.write_all(b"12345").expect("sent");
        arrived(&far, 5);
        let mut buffer = [0; 8];
        assert_eq!(receive(far.as_raw_fd(), &mut buffer), Received { io: Io::Done(5), more: false });
        assert_eq!(&buffer[..5], b"12345");
        assert_eq!(receive(far.as_raw_fd(), &mut buffer), Received { io: Io::WouldBlock, more: false });
    }

    #[test]
    fn read_into_a_full_buffer_reports_more() {
        let (mut near, far) = pair();
        near.write_all(b"12345").expect("sent");
        arrived(&far, 5);
        let mut buffer = [0; 4];
        assert_eq!(receive(far.as_raw_fd(), &mut buffer), Received { io: Io::Done(4), more: true });
        assert_eq!(receive(far.as_raw_fd(), &mut buffer), Received { io: Io::Done(1), more: false });
    }

    #[test]
    fn read_before_a_fin_reports_more() {
        let (mut near, far) = pair();
        near.write_all(b"12345").expect("sent");
        near.shutdown(Shutdown::Write).expect("a FIN");
        let poll = |fd| {
            let mut entry = libc::pollfd { fd, events: libc::POLLRDHUP, revents: 0 };
            // SAFETY: one entry is given.
            unsafe { libc::poll(&raw mut entry, 1, 10_000) }
        };
        assert_eq!(poll(far.as_raw_fd()), 1);
        let mut buffer = [0; 8];
        assert_eq!(receive(far.as_raw_fd(), &mut buffer), Received { io: Io::Done(5), more: true });
        assert_eq!(receive(far.as_raw_fd(), &mut buffer).io, Io::Done(0));
    }

    #[test]
    fn read_of_a_socket_without_tcp_inq_reports_more() {
        let (mut near, far) = UnixStream::pair().expect("a pair");
        assert!(!announce_rest(far.as_raw_fd()));
        near.write_all(b"12345").expect("sent");
        let mut buffer = [0; 8];
        assert_eq!(receive(far.as_raw_fd(), &mut buffer), Received { io: Io::Done(5), more: true });
        assert_eq!(receive(far.as_raw_fd(), &mut buffer).io, Io::WouldBlock);
    }

    #[test]
    fn write_is_short_without_room_and_fails_without_a_peer() {
        let (near, mut far) = pair();
        let bytes = vec![7; 64 << 20];
        let Io::Done(sent) = send(near.as_raw_fd(), &bytes) else { panic!("nothing was sent") };
        assert!(sent < bytes.len());
        let mut left = sent;
        let mut buffer = vec![0; 1 << 20];
        far.set_nonblocking(false).expect("blocking");
        while left > 0 {
            left -= far.read(&mut buffer).expect("bytes");
        }
        drop(far);
        while send(near.as_raw_fd(), b"x") != Io::Broken {}
    }
}
