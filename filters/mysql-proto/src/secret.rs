//! Secret bytes: passwords, tokens and session states.

use std::fmt;
use std::hint::black_box;
use std::ops::{Deref, DerefMut};

/// Bytes that are overwritten when they are dropped, and never printed.
///
/// Growing moves them to new memory and overwrites the old, where `Vec` would leave a copy. So the memory behind the
/// bytes, up to the capacity, holds none of them.
#[derive(Clone, Default)]
pub struct SecretBytes(Vec<u8>);

impl SecretBytes {
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        Self(Vec::with_capacity(capacity))
    }

    #[must_use]
    pub fn capacity(&self) -> usize {
        self.0.capacity()
    }

    pub fn extend_from_slice(&mut self, bytes: &[u8]) {
        self.reserve(bytes.len());
        self.0.extend_from_slice(bytes);
    }

    pub fn push(&mut self, byte: u8) {
        self.reserve(1);
        self.0.push(byte);
    }

    pub fn truncate(&mut self, length: usize) {
        if let Some(dropped) = self.0.get_mut(length..) {
            wipe(dropped);
        }
        self.0.truncate(length);
    }

    /// Removes `bytes` bytes from the front.
    pub fn consume(&mut self, bytes: usize) {
        self.0.copy_within(bytes.., 0);
        self.truncate(self.0.len() - bytes);
    }

    pub fn clear(&mut self) {
        self.truncate(0);
    }

    fn reserve(&mut self, more: usize) {
        let needed = self.0.len() + more;
        if needed > self.0.capacity() {
            let mut grown = Vec::with_capacity(needed.max(2 * self.0.capacity()));
            grown.extend_from_slice(&self.0);
            wipe(&mut self.0);
            self.0 = grown;
        }
    }
}

impl Drop for SecretBytes {
    fn drop(&mut self) {
        wipe(&mut self.0);
    }
}

/// Prints only the number of bytes.
impl fmt::Debug for SecretBytes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "SecretBytes({} bytes)", self.0.len())
    }
}

impl Deref for SecretBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for SecretBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl AsRef<[u8]> for SecretBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// Takes ownership of the bytes without a copy.
impl From<Vec<u8>> for SecretBytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }
}

impl From<&[u8]> for SecretBytes {
    fn from(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }
}

impl<T: AsRef<[u8]> + ?Sized> PartialEq<T> for SecretBytes {
    fn eq(&self, other: &T) -> bool {
        self.0 == other.as_ref()
    }
}

impl Eq for SecretBytes {}

/// Overwrites bytes, also if nothing reads them afterwards.
///
/// The crate `zeroize` writes each byte on its own. For large session states, that takes longer than receiving them.
pub fn wipe(bytes: &mut [u8]) {
    bytes.fill(0);
    black_box(bytes); // as if it read them; otherwise the compiler could remove the writes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_bytes_grow_and_shrink_like_a_vec() {
        let (mut secret, mut plain) = (SecretBytes::default(), Vec::new());
        for length in [0, 1, 7, 100, 5000] {
            let bytes = vec![length as u8; length];
            secret.extend_from_slice(&bytes);
            plain.extend_from_slice(&bytes);
            secret.push(9);
            plain.push(9);
            secret.consume(length / 3);
            plain.drain(..length / 3);
            assert_eq!(secret, plain);
            secret.truncate(plain.len() - 1);
            plain.truncate(plain.len() - 1);
            assert_eq!(secret, plain);
        }
        secret.truncate(1 << 20);
        assert_eq!(secret, plain);
        assert!(secret.capacity() <= 2 * 5200);
        secret.clear();
        assert!(secret.is_empty());
    }

    #[test]
    fn debug_output_hides_secret_bytes() {
        let secret = SecretBytes::from(&b"hunter2"[..]);
        assert_eq!(format!("{secret:?}"), "SecretBytes(7 bytes)");
        // Neither as text nor as numbers.
        assert!(!format!("{secret:#?}").contains("104"));
    }

    #[test]
    fn truncate_and_wipe_remove_bytes() {
        let mut secret = SecretBytes::from(&b"hunter2"[..]);
        secret.truncate(2);
        assert_eq!(secret, b"hu");
        let mut buffer = *b"hunter2";
        wipe(&mut buffer[..6]);
        assert_eq!(&buffer, b"\0\0\0\0\0\x002");
    }
}
