//! Detects received bytes that were not read yet.

use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;

use socket2::SockRef;

/// Whether `connection` has received bytes that were not read yet. They stay unread.
pub(crate) fn has_unread_bytes(connection: BorrowedFd<'_>) -> bool {
    let peeked = SockRef::from(&connection).peek(&mut [MaybeUninit::uninit()]);
    matches!(peeked, Ok(1..))
}
