//! Checks a connection for unread bytes, or for its end, without reading anything.

use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::SockRef;

/// Whether `connection` has received bytes that were not read yet. They stay unread.
pub(crate) fn has_unread_bytes(connection: BorrowedFd<'_>) -> bool {
    let peeked = SockRef::from(&connection).peek(&mut [MaybeUninit::uninit()]);
    matches!(peeked, Ok(1..))
}

/// Whether the peer has closed or reset `connection`, or its sending direction. Bytes may still be unread.
pub(crate) fn has_ended(connection: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::new(&connection, PollFlags::RDHUP)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|events| events > 0)
}
