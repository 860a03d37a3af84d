//! Envoy's runtime: values that an operator sets through the admin port (`POST /runtime_modify`) or a layer of the
//! bootstrap.

use crate::sys::{self, Buffer};

/// The Boolean value of a key, or `default` if the key has none. May be called on any thread.
#[must_use]
pub fn boolean(key: &str, default: bool) -> bool {
    // SAFETY: Envoy reads the key before it returns.
    unsafe { sys::runtime_boolean(Buffer::of(key.as_bytes()), default) }
}
