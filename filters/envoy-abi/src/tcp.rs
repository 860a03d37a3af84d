//! The kernel's view of a TCP connection.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// How long ago an acknowledgement or data of the peer arrived. The peer's kernel acknowledges even if its process is
/// stopped, or does not read. None: it is no TCP connection.
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
    // SAFETY: it is made of integers only, and was zeroed.
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
    fn bytes_that_arrive_count_although_nobody_reads_them() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let near = TcpStream::connect(listener.local_addr().expect("an address")).expect("connected");
        let (mut far, _) = listener.accept().expect("accepted");
        sleep(Duration::from_millis(60));
        assert!(since_heard(near.as_fd()).is_some_and(|quiet| quiet >= Duration::from_millis(50)));
        far.write_all(b"1").expect("sent");
        assert!(since_heard(near.as_fd()).is_some_and(|quiet| quiet < Duration::from_millis(50)));
    }

    #[test]
    fn other_sockets_have_no_such_time() {
        let (one, _other) = UnixStream::pair().expect("a pair");
        assert_eq!(since_heard(one.as_fd()), None);
    }
}
