//! The entries that wait to be written.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::entries::Entries;

/// Bytes of the entries that may wait: about 14,000 lines of the login log.
const MAX_QUEUE_BYTES: usize = 4 * 1024 * 1024;

/// A queue from the workers to the writer. Each holds the lock only while it copies an entry or takes the buffer.
#[derive(Default)]
pub(super) struct EntryQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    entries: Entries,
    is_closed: bool,
}

impl EntryQueue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends an entry. False: the queue is full or closed.
    pub(super) fn push(&self, entry: &[u8]) -> bool {
        let mut state = self.lock();
        if state.is_closed || state.entries.len() + entry.len() > MAX_QUEUE_BYTES {
            return false;
        }
        let was_empty = state.entries.is_empty();
        state.entries.push(entry);
        drop(state);
        if was_empty {
            self.changed.notify_one(); // otherwise the writer is busy, or has been notified
        }
        true
    }

    /// Accepts no more entries.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_one();
    }

    /// Waits for entries, and takes them all. Empty: the queue is closed, and no entries are left.
    pub(super) fn take(&self) -> Entries {
        let idle = |state: &mut QueueState| state.entries.is_empty() && !state.is_closed;
        let mut state = self.changed.wait_while(self.lock(), idle).unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut state.entries)
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
        let queue = EntryQueue::default();
        assert!(queue.push(b"one\n") && queue.push(b"two\n"));
        assert_eq!(queue.take(), b"one\ntwo\n"[..].into());
        queue.close();
        assert_eq!(queue.take(), Entries::default());
    }

    #[test]
    fn full_queue_rejects_lines_until_they_are_taken() {
        let (queue, line) = (EntryQueue::default(), vec![b'x'; MAX_QUEUE_BYTES / 4]);
        assert_eq!((0..6).filter(|_| queue.push(&line)).count(), 4);
        assert!(!queue.push(b"\n"));
        assert_eq!(queue.take().len(), MAX_QUEUE_BYTES);
        assert!(queue.push(&line));
    }

    #[test]
    fn closed_queue_rejects_lines_and_keeps_those_it_has() {
        let queue = EntryQueue::default();
        assert!(queue.push(b"one\n"));
        assert!(!queue.wait_closed(Duration::ZERO));
        queue.close();
        assert!(queue.wait_closed(Duration::MAX));
        assert!(!queue.push(b"two\n"));
        assert_eq!(queue.take(), b"one\n"[..].into());
    }

    #[test]
    fn waiting_writer_gets_a_line_and_the_end_of_the_queue() {
        let queue = EntryQueue::default();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| [queue.take(), queue.take()]);
            queue.push(b"one\n");
            while !queue.lock().entries.is_empty() {
                std::thread::yield_now();
            }
            queue.close();
            assert_eq!(writer.join().expect("the writer"), [b"one\n"[..].into(), Entries::default()]);
        });
    }
}
