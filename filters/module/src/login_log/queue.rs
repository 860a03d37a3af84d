//! The lines that wait to be written.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Bytes of the lines that may wait: about 14,000 lines.
const MAX_QUEUE_BYTES: usize = 4 * 1024 * 1024;

/// A queue from the workers to the writer. Each holds the lock only while it copies a line or takes the buffer.
#[derive(Default)]
pub(super) struct LineQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    /// Whole lines, each with its line break.
    lines: Vec<u8>,
    is_closed: bool,
}

impl LineQueue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends a line. False: the queue is full or closed.
    pub(super) fn push(&self, line: &[u8]) -> bool {
        let mut state = self.lock();
        if state.is_closed || state.lines.len() + line.len() > MAX_QUEUE_BYTES {
            return false;
        }
        let was_empty = state.lines.is_empty();
        state.lines.extend_from_slice(line);
        drop(state);
        if was_empty {
            self.changed.notify_one(); // otherwise the writer is busy, or has been notified
        }
        true
    }

    /// Accepts no more lines.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_one();
    }

    /// Waits for lines, and takes them all. Empty: the queue is closed, and no lines are left.
    pub(super) fn take(&self) -> Vec<u8> {
        let idle = |state: &mut QueueState| state.lines.is_empty() && !state.is_closed;
        let mut state = self.changed.wait_while(self.lock(), idle).unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut state.lines)
    }

    /// Waits until the queue is closed, but no longer than `timeout`. Returns whether it is closed.
    pub(super) fn wait_closed(&self, timeout: Duration) -> bool {
        let waited = self.changed.wait_timeout_while(self.lock(), timeout, |state| !state.is_closed);
        waited.unwrap_or_else(PoisonError::into_inner).0.is_closed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_taken_in_order_and_all_at_once() {
        let queue = LineQueue::default();
        assert!(queue.push(b"one\n") && queue.push(b"two\n"));
        assert_eq!(queue.take(), b"one\ntwo\n");
        queue.close();
        assert_eq!(queue.take(), b"");
    }

    #[test]
    fn full_queue_rejects_lines_until_they_are_taken() {
        let (queue, line) = (LineQueue::default(), vec![b'x'; MAX_QUEUE_BYTES / 4]);
        assert_eq!((0..6).filter(|_| queue.push(&line)).count(), 4);
        assert!(!queue.push(b"\n"));
        assert_eq!(queue.take().len(), MAX_QUEUE_BYTES);
        assert!(queue.push(&line));
    }

    #[test]
    fn closed_queue_rejects_lines_and_keeps_those_it_has() {
        let queue = LineQueue::default();
        assert!(queue.push(b"one\n"));
        assert!(!queue.wait_closed(Duration::ZERO));
        queue.close();
        assert!(queue.wait_closed(Duration::MAX));
        assert!(!queue.push(b"two\n"));
        assert_eq!(queue.take(), b"one\n");
    }

    #[test]
    fn waiting_writer_gets_a_line_and_the_end_of_the_queue() {
        let queue = LineQueue::default();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| [queue.take(), queue.take()]);
            queue.push(b"one\n");
            while !queue.lock().lines.is_empty() {
                std::thread::yield_now();
            }
            queue.close();
            assert_eq!(writer.join().expect("the writer"), [b"one\n".to_vec(), Vec::new()]);
        });
    }
}
