//! Bytes of a peer that the kernel has, and nobody has read.

use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;

use socket2::SockRef;

/// Whether there are some. They stay where they are.
pub(crate) fn has_unread(connection: BorrowedFd<'_>) -> bool {
    let peeked = SockRef::from(&connection).peek(&mut [MaybeUninit::uninit()]);
    matches!(peeked, Ok(1..))
}
