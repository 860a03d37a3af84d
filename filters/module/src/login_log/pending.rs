//! The lines that the writer has taken from the queue and not written yet.

/// Whole lines, of which a part may be written.
#[derive(Default)]
pub(super) struct PendingLines {
    bytes: Vec<u8>,
    written: usize,
}

impl PendingLines {
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        Self { bytes, written: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.written == self.bytes.len()
    }

    /// The unwritten rest: as many whole lines as `max_bytes` allow, but at least one.
    pub(super) fn next(&self, max_bytes: u64) -> &[u8] {
        let rest = &self.bytes[self.written..];
        let limit = usize::try_from(max_bytes).unwrap_or(usize::MAX).min(rest.len());
        let is_line_break = |byte: &u8| *byte == b'\n';
        let last = rest[..limit].iter().rposition(is_line_break).or_else(|| rest.iter().position(is_line_break));
        &rest[..last.map_or(rest.len(), |last| last + 1)]
    }

    /// Records that the next `bytes` bytes are written. Returns how many lines they complete.
    pub(super) fn advance(&mut self, bytes: usize) -> u64 {
        let done = &self.bytes[self.written..self.written + bytes];
        self.written += bytes;
        count_lines(done)
    }

    /// Whether only a part of a line is written.
    pub(super) fn is_inside_line(&self) -> bool {
        self.written > 0 && self.bytes[self.written - 1] != b'\n'
    }

    /// Writes the present line again from its start.
    pub(super) fn restart_line(&mut self) {
        let before = self.bytes[..self.written].iter().rposition(|&byte| byte == b'\n');
        self.written = before.map_or(0, |line_break| line_break + 1);
    }

    /// The number of lines that are not written completely.
    pub(super) fn line_count(&self) -> u64 {
        count_lines(&self.bytes[self.written..])
    }
}

fn count_lines(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|&&byte| byte == b'\n').count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_returns_whole_lines_within_the_limit_but_at_least_one() {
        let lines = PendingLines::new(b"one\ntwo\nthree\n".to_vec());
        for (max_bytes, expected) in
            [(0, &b"one\n"[..]), (4, b"one\n"), (7, b"one\n"), (8, b"one\ntwo\n"), (u64::MAX, b"one\ntwo\nthree\n")]
        {
            assert_eq!(lines.next(max_bytes), expected, "{max_bytes}");
        }
    }

    #[test]
    fn advance_counts_complete_lines() {
        let mut lines = PendingLines::new(b"one\ntwo\n".to_vec());
        assert_eq!((lines.advance(2), lines.is_inside_line(), lines.line_count()), (0, true, 2));
        assert_eq!((lines.advance(2), lines.is_inside_line(), lines.line_count()), (1, false, 1));
        assert_eq!((lines.advance(4), lines.is_empty(), lines.line_count()), (1, true, 0));
        assert!(PendingLines::default().is_empty());
    }

    #[test]
    fn line_can_be_written_again_from_its_start() {
        let mut lines = PendingLines::new(b"one\ntwo\n".to_vec());
        lines.advance(6);
        lines.restart_line();
        assert_eq!(lines.next(u64::MAX), b"two\n");
        lines.restart_line();
        assert_eq!(lines.next(u64::MAX), b"two\n", "nothing of the line is written");
    }
}
