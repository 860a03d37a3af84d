//! The self-test of [`Events::swap`], with connections of its own. Migration uses [`Events::swap`], so sessions migrate
//! only if the test passes on this machine.

use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use super::{Event, Events, OuterEpoll, SwapResult, data_of, epoll_ctl};
use crate::socket::Socket;

const ALL: u32 = (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLET) as u32;

pub(super) fn run() -> Result<(), &'static str> {
    let (outer, inner) = (epoll()?, epoll()?);
    let (mut near, mut far) = pair()?;
    let (mut new_near, new_far) = pair()?;
    let fd = far.as_raw_fd();
    if !epoll_ctl(outer.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, ALL, data_of(fd)) {
        return Err("a socket cannot be watched");
    }
    let events = Events::with_descriptors(inner, OuterEpoll { epoll: outer.as_raw_fd(), mask: ALL });
    let socket = Socket::of_descriptor(fd);
    if !events.offload(&socket, 1) || !events.watch(new_far.as_fd(), 2) {
        return Err("an epoll descriptor cannot be watched by another");
    }
    events.dispatch(|_| {});
    if events.swap(&socket, 3, OwnedFd::from(new_far)) != SwapResult::Watched {
        return Err("a descriptor cannot be replaced");
    }
    if !matches!(near.read(&mut [0; 1]), Ok(0)) {
        return Err("a connection stays open that was replaced");
    }
    if new_near.write(b"1").is_err() || near.write(b"1").is_ok() {
        return Err("bytes do not go to the connection that has taken the place");
    }
    let mut received = Vec::new();
    events.dispatch(|event| received.push(event));
    if received != [Event { key: 3, is_end: false }] || !matches!(far.read(&mut [0; 2]), Ok(1)) {
        return Err("events of a connection that was replaced are not those of the new one");
    }
    Ok(())
}

fn epoll() -> Result<OwnedFd, &'static str> {
    // SAFETY: no pointer is given; the descriptor has no other owner.
    match unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) } {
        -1 => Err("there are no more descriptors"),
        // SAFETY: just created.
        made => Ok(unsafe { OwnedFd::from_raw_fd(made) }),
    }
}

fn pair() -> Result<(UnixStream, UnixStream), &'static str> {
    let pair = UnixStream::pair().map_err(|_| "there are no more descriptors")?;
    let nonblocking = pair.0.set_nonblocking(true).and_then(|()| pair.1.set_nonblocking(true));
    nonblocking.map_err(|_| "a socket cannot be made non-blocking")?;
    Ok(pair)
}

#[cfg(test)]
mod tests {
    #[test]
    fn self_test_passes_on_this_machine() {
        assert_eq!(super::run(), Ok(()));
    }
}
