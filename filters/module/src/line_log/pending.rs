//! The entries that the writer has taken from the queue and not written yet.

use super::entries::Entries;

/// Whole entries, of which a part may be written.
#[derive(Default)]
pub(super) struct PendingEntries {
    entries: Entries,
    written: usize,
}

impl PendingEntries {
    pub(super) fn new(entries: Entries) -> Self {
        Self { entries, written: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.written == self.entries.len()
    }

    /// The unwritten rest: as many whole entries as `max_bytes` allow, but at least one.
    pub(super) fn next(&self, max_bytes: u64) -> &[u8] {
        let limit = usize::try_from(max_bytes).unwrap_or(usize::MAX).saturating_add(self.written);
        let ends = &self.entries.ends[self.complete_entries()..];
        let fitting = ends.partition_point(|&end| end <= limit).max(1).min(ends.len());
        let end = fitting.checked_sub(1).map_or(self.written, |last| ends[last]);
        &self.entries.bytes[self.written..end]
    }

    /// Records that the next `bytes` bytes are written. Returns how many entries they complete.
    pub(super) fn advance(&mut self, bytes: usize) -> u64 {
        let before = self.complete_entries();
        self.written += bytes;
        (self.complete_entries() - before) as u64
    }

    /// Whether only a part of an entry is written.
    pub(super) fn is_inside_entry(&self) -> bool {
        self.written > self.start_of_entry()
    }

    /// Writes the present entry again from its start.
    pub(super) fn restart_entry(&mut self) {
        self.written = self.start_of_entry();
    }

    /// The number of entries that are not written completely.
    pub(super) fn count(&self) -> u64 {
        (self.entries.ends.len() - self.complete_entries()) as u64
    }

    /// The number of entries that are written completely.
    fn complete_entries(&self) -> usize {
        self.entries.ends.partition_point(|&end| end <= self.written)
    }

    /// Where the first entry begins that is not written completely.
    fn start_of_entry(&self) -> usize {
        self.complete_entries().checked_sub(1).map_or(0, |last| self.entries.ends[last])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pending(lines: &[u8]) -> PendingEntries {
        PendingEntries::new(lines.into())
    }

    #[test]
    fn next_returns_whole_entries_within_the_limit_but_at_least_one() {
        let entries = pending(b"one\ntwo\nthree\n");
        for (max_bytes, expected) in
            [(0, &b"one\n"[..]), (4, b"one\n"), (7, b"one\n"), (8, b"one\ntwo\n"), (u64::MAX, b"one\ntwo\nthree\n")]
        {
            assert_eq!(entries.next(max_bytes), expected, "{max_bytes}");
        }
    }

    #[test]
    fn lines_of_an_entry_stay_together() {
        let mut entries = Entries::default();
        [&b"# 1\na;\n"[..], b"# 2\nb;\n"].iter().for_each(|entry| entries.push(entry));
        let mut entries = PendingEntries::new(entries);
        assert_eq!(entries.next(8), b"# 1\na;\n");
        assert_eq!((entries.advance(4), entries.is_inside_entry(), entries.count()), (0, true, 2));
        assert_eq!(entries.next(0), b"a;\n");
        entries.restart_entry();
        assert_eq!((entries.next(14).len(), entries.advance(14), entries.is_empty()), (14, 2, true));
    }

    #[test]
    fn advance_counts_complete_entries() {
        let mut entries = pending(b"one\ntwo\n");
        assert_eq!((entries.advance(2), entries.is_inside_entry(), entries.count()), (0, true, 2));
        assert_eq!((entries.advance(2), entries.is_inside_entry(), entries.count()), (1, false, 1));
        assert_eq!((entries.advance(4), entries.is_empty(), entries.count()), (1, true, 0));
        assert_eq!(entries.next(u64::MAX), b"");
        assert!(PendingEntries::default().is_empty());
    }

    #[test]
    fn entry_can_be_written_again_from_its_start() {
        let mut entries = pending(b"one\ntwo\n");
        entries.advance(6);
        entries.restart_entry();
        assert_eq!(entries.next(u64::MAX), b"two\n");
        entries.restart_entry();
        assert_eq!(entries.next(u64::MAX), b"two\n", "nothing of the entry is written");
    }
}
