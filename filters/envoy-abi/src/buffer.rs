//! Bytes that are passed between Envoy and the module.

use crate::sys::Buffer;

impl Buffer {
    pub(crate) const EMPTY: Self = Self { data: core::ptr::null(), length: 0 };

    /// The module's bytes, for a call that does not keep them.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self { data: bytes.as_ptr(), length: bytes.len() }
    }

    /// # Safety
    /// The bytes must live as long as `'a`. Envoy's bytes live until the hook that received them returns, or until the
    /// object that lent them changes.
    pub(crate) unsafe fn bytes<'a>(self) -> &'a [u8] {
        if self.data.is_null() || self.length == 0 {
            return &[];
        }
        // SAFETY: not null, and the caller vouches for the bytes.
        unsafe { core::slice::from_raw_parts(self.data, self.length) }
    }

    /// A copy as text; invalid UTF-8 is replaced.
    ///
    /// # Safety
    /// As for `bytes`, for the time of the call.
    pub(crate) unsafe fn text(self) -> String {
        // SAFETY: passed on to the caller.
        String::from_utf8_lossy(unsafe { self.bytes() }).into_owned()
    }
}

/// The address that an Envoy getter returns as IP and port.
///
/// # Safety
/// `get` must fill its arguments, as Envoy's address getters do, or return false.
pub(crate) unsafe fn address(get: impl FnOnce(*mut Buffer, *mut u32) -> bool) -> Option<std::net::SocketAddr> {
    let (mut ip, mut port) = (Buffer::EMPTY, 0);
    if !get(&mut ip, &mut port) {
        return None;
    }
    // SAFETY: filled by Envoy, and copied here.
    let ip = unsafe { ip.text() };
    let ip = ip.split('%').next()?; // a link-local address without its zone
    Some(std::net::SocketAddr::new(ip.parse().ok()?, u16::try_from(port).ok()?))
}
