//! Entries of a log, one behind the other.

/// Whole entries.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Entries {
    pub(super) bytes: Vec<u8>,
    /// Where each entry ends.
    pub(super) ends: Vec<usize>,
}

impl Entries {
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(super) fn push(&mut self, entry: &[u8]) {
        self.bytes.extend_from_slice(entry);
        self.ends.push(self.bytes.len());
    }
}

/// Each line is an entry.
#[cfg(test)]
impl From<&[u8]> for Entries {
    fn from(lines: &[u8]) -> Self {
        let mut entries = Self::default();
        lines.split_inclusive(|&byte| byte == b'\n').for_each(|line| entries.push(line));
        entries
    }
}
