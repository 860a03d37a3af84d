//! The state of a TCP connection in the kernel.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// Time since an acknowledgement or data of the peer arrived. The peer's kernel acknowledges even if the peer's process
/// is stopped or does not read. None: not a TCP connection.
///
/// Source: `tcp_get_info` in Linux' `net/ipv4/tcp.c`; both fields are in milliseconds.
#[must_use]
pub fn since_heard(connection: BorrowedFd<'_>) -> Option<Duration> {
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut length = libc::socklen_t::try_from(size_of::<libc::tcp_info>()).ok()?;
    // SAFETY: the kernel writes at most `length` bytes.
    let result = unsafe {
        libc::getsockopt(
            connection.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return None;
    }
    // SAFETY: it has only integers, and was zeroed.
    let info = unsafe { info.assume_init() };
    Some(Duration::from_millis(info.tcpi_last_ack_recv.min(info.tcpi_last_data_recv).into()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::thread::sleep;

    use super::*;

    #[test]
    fn since_heard_counts_unread_bytes() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let near = TcpStream::connect(listener.local_addr().expect("an address")).expect("connected");
        let (mut far, _) = listener.accept().expect("accepted");
        sleep(Duration::from_millis(60));
        assert!(since_heard(near.as_fd()).is_some_and(|quiet| quiet >= Duration::from_millis(50)));
        far.write_all(b"1").expect("sent");
        assert!(since_heard(near.as_fd()).is_some_and(|quiet| quiet < Duration::from_millis(50)));
    }

    #[test]
    fn since_heard_is_none_for_other_sockets() {
        let (one, _other) = UnixStream::pair().expect("a pair");
        assert_eq!(since_heard(one.as_fd()), None);
    }
}
