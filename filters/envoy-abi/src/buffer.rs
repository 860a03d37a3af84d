//! Bytes between Envoy and us.

use crate::sys::Buffer;

impl Buffer {
    pub(crate) const EMPTY: Self = Self { data: core::ptr::null(), length: 0 };

    /// Ours, for a call that does not keep them.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self { data: bytes.as_ptr(), length: bytes.len() }
    }

    /// # Safety
    /// The bytes must live as long as `'a`. Envoy's do until the hook returns that got them, or until the
    /// object changes that lent them.
    pub(crate) unsafe fn bytes<'a>(self) -> &'a [u8] {
        if self.data.is_null() || self.length == 0 {
            return &[];
        }
        // SAFETY: not null, and the caller vouches for the bytes.
        unsafe { core::slice::from_raw_parts(self.data, self.length) }
    }

    /// A copy as text; what is no UTF-8 is replaced.
    ///
    /// # Safety
    /// As for `bytes`, for the time of the call.
    pub(crate) unsafe fn text(self) -> String {
        // SAFETY: passed on to the caller.
        String::from_utf8_lossy(unsafe { self.bytes() }).into_owned()
    }
}

/// An address that Envoy gives in two parts, as `ip:port`, with brackets around IPv6.
///
/// # Safety
/// `get` must fill what it is given, as Envoy's address getters do, or return false.
pub(crate) unsafe fn address(get: impl FnOnce(*mut Buffer, *mut u32) -> bool) -> Option<std::net::SocketAddr> {
    let (mut ip, mut port) = (Buffer::EMPTY, 0);
    if !get(&mut ip, &mut port) {
        return None;
    }
    // SAFETY: filled by Envoy, and used up here.
    let ip = unsafe { ip.text() };
    let ip = ip.split('%').next()?; // of a link-local address, without the name of the link
    Some(std::net::SocketAddr::new(ip.parse().ok()?, u16::try_from(port).ok()?))
}
