//! The records that wait to be written.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Bytes of the records that may wait, about a second of a busy Envoy on a disk that stands still.
const MAX_QUEUE_BYTES: usize = 32 << 20;

/// The writer is woken when so many bytes wait; before, it comes by itself after some time.
const WAKE_BYTES: usize = 4 << 20;

/// Records, in order, encoded for both files.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Batch {
    /// For the traffic file.
    pub(super) traffic: Vec<u8>,
    /// For the results file.
    pub(super) results: Vec<u8>,
    pub(super) records: u64,
}

impl Batch {
    pub(super) fn is_empty(&self) -> bool {
        self.traffic.is_empty() && self.results.is_empty()
    }

    fn len(&self) -> usize {
        self.traffic.len() + self.results.len()
    }

    pub(super) fn clear(&mut self) {
        self.traffic.clear();
        self.results.clear();
        self.records = 0;
    }
}

/// A queue from the workers to the writer. Each holds the lock only while it encodes a record or exchanges the batch.
#[derive(Default)]
pub(super) struct BatchQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    batch: Batch,
    /// Records that were lost since the last one that was not.
    dropped: u64,
    is_closed: bool,
}

/// Whether a record will be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pushed {
    Accepted,
    /// There was no room.
    Dropped,
    /// The capture has ended.
    Closed,
}

impl BatchQueue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends a record of about `bytes` bytes. `mark_dropped` encodes how many records are missing before it.
    pub(super) fn push(
        &self,
        bytes: usize,
        mark_dropped: impl FnOnce(u64, &mut Vec<u8>),
        encode: impl FnOnce(&mut Vec<u8>, &mut Vec<u8>),
    ) -> Pushed {
        let mut state = self.lock();
        if state.is_closed {
            return Pushed::Closed;
        }
        let before = state.batch.len();
        if before + bytes > MAX_QUEUE_BYTES {
            state.dropped += 1;
            return Pushed::Dropped;
        }
        let QueueState { batch, dropped, .. } = &mut *state;
        if *dropped > 0 {
            mark_dropped(std::mem::take(dropped), &mut batch.results);
        }
        encode(&mut batch.traffic, &mut batch.results);
        batch.records += 1;
        let must_wake = before < WAKE_BYTES && batch.len() >= WAKE_BYTES;
        drop(state);
        if must_wake {
            self.changed.notify_one();
        }
        Pushed::Accepted
    }

    /// A record was lost before it could be pushed.
    pub(super) fn add_dropped(&self) {
        self.lock().dropped += 1;
    }

    /// Accepts no more records.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_one();
    }

    /// Exchanges `batch`, which must be empty, for the records that wait: at the latest after `timeout`, or when there
    /// are many. Returns whether the queue is closed, so that no more will come. `mark_dropped`: see [`Self::push`].
    pub(super) fn take(
        &self,
        batch: &mut Batch,
        timeout: Duration,
        mark_dropped: impl FnOnce(u64, &mut Vec<u8>),
    ) -> bool {
        let is_waiting = |state: &mut QueueState| state.batch.len() < WAKE_BYTES && !state.is_closed;
        let waited = self.changed.wait_timeout_while(self.lock(), timeout, is_waiting);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        std::mem::swap(&mut state.batch, batch);
        if state.is_closed && state.dropped > 0 {
            mark_dropped(std::mem::take(&mut state.dropped), &mut batch.results);
        }
        state.is_closed
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

    fn mark(count: u64, results: &mut Vec<u8>) {
        results.extend(format!("{count} dropped\n").bytes());
    }

    fn push(queue: &BatchQueue, bytes: usize) -> Pushed {
        queue.push(bytes, mark, |traffic, results| {
            traffic.resize(traffic.len() + bytes, b'x');
            results.extend(b"result\n");
        })
    }

    fn take(queue: &BatchQueue) -> (Batch, bool) {
        let mut batch = Batch::default();
        let is_closed = queue.take(&mut batch, Duration::ZERO, mark);
        (batch, is_closed)
    }

    #[test]
    fn records_are_taken_in_order_and_both_files_together() {
        let queue = BatchQueue::default();
        assert_eq!((push(&queue, 3), push(&queue, 4)), (Pushed::Accepted, Pushed::Accepted));
        let (batch, is_closed) = take(&queue);
        assert_eq!((batch.traffic.len(), &*batch.results, batch.records), (7, &b"result\nresult\n"[..], 2));
        assert!(!is_closed && take(&queue).0.is_empty());
    }

    #[test]
    fn lost_records_are_marked_where_they_are_missing() {
        let queue = BatchQueue::default();
        push(&queue, MAX_QUEUE_BYTES / 2);
        assert_eq!((push(&queue, MAX_QUEUE_BYTES), push(&queue, MAX_QUEUE_BYTES)), (Pushed::Dropped, Pushed::Dropped));
        push(&queue, 1);
        queue.add_dropped();
        queue.close();
        assert_eq!(push(&queue, 1), Pushed::Closed);
        let (batch, is_closed) = take(&queue);
        assert_eq!((&*batch.results, is_closed), (&b"result\n2 dropped\nresult\n1 dropped\n"[..], true));
        assert!(queue.wait_closed(Duration::MAX) && take(&queue).0.is_empty());
    }

    #[test]
    fn many_bytes_and_the_end_wake_the_writer() {
        let queue = BatchQueue::default();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                [(); 2].map(|()| {
                    let mut batch = Batch::default();
                    let is_closed = queue.take(&mut batch, Duration::MAX, mark);
                    (batch.traffic.len(), is_closed)
                })
            });
            push(&queue, WAKE_BYTES);
            while !queue.lock().batch.is_empty() {
                std::thread::yield_now();
            }
            queue.close();
            assert_eq!(writer.join().expect("the writer"), [(WAKE_BYTES, false), (0, true)]);
        });
    }
}
