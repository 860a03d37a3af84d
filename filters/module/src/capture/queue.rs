//! The commands that wait for the writer.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::command::EndedCommand;

/// Bytes of the commands that may wait: about a second of a busy Envoy while the disk hangs.
const MAX_QUEUE_BYTES: usize = 32 << 20;

/// The number of waiting bytes at which the writer is woken. With fewer, it wakes up by itself after some time.
const WAKE_BYTES: usize = 4 << 20;

/// What the writer takes from the queue.
pub(super) enum Entry {
    Command(EndedCommand),
    /// The number of commands that are missing here.
    Dropped(u64),
}

/// A queue from the workers to the writer. Each holds the lock only while it moves a command or exchanges the entries.
#[derive(Default)]
pub(super) struct CommandQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    entries: Vec<Entry>,
    bytes: usize,
    /// Commands that were lost since the last one that was not.
    dropped: u64,
    is_closed: bool,
}

/// Whether a command will be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pushed {
    Accepted,
    /// There was no room.
    Dropped,
    /// The capture has ended.
    Closed,
}

impl QueueState {
    fn mark_dropped(&mut self) {
        if self.dropped > 0 {
            self.entries.push(Entry::Dropped(std::mem::take(&mut self.dropped)));
        }
    }
}

impl CommandQueue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn push(&self, command: EndedCommand) -> Pushed {
        let bytes = command.bytes();
        let mut state = self.lock();
        if state.is_closed {
            return Pushed::Closed;
        }
        if state.bytes + bytes > MAX_QUEUE_BYTES {
            state.dropped += 1;
            return Pushed::Dropped;
        }
        state.mark_dropped();
        state.entries.push(Entry::Command(command));
        let before = state.bytes;
        state.bytes += bytes;
        let must_wake = before < WAKE_BYTES && state.bytes >= WAKE_BYTES;
        drop(state);
        if must_wake {
            self.changed.notify_one();
        }
        Pushed::Accepted
    }

    /// A command was lost before it could be pushed.
    pub(super) fn add_dropped(&self) {
        self.lock().dropped += 1;
    }

    /// Accepts no more commands.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_one();
    }

    /// Exchanges `entries`, which must be empty, for the waiting ones: when there are [`WAKE_BYTES`], and after
    /// `timeout` at the latest. Returns whether the queue is closed, so that no more will come.
    pub(super) fn take(&self, entries: &mut Vec<Entry>, timeout: Duration) -> bool {
        let is_waiting = |state: &mut QueueState| state.bytes < WAKE_BYTES && !state.is_closed;
        let waited = self.changed.wait_timeout_while(self.lock(), timeout, is_waiting);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        if state.is_closed {
            state.mark_dropped();
        }
        std::mem::swap(&mut state.entries, entries);
        state.bytes = 0;
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
    use std::time::Instant;

    use mysql_proto::command::Command;
    use mysql_proto::tracker::CommandOutcome;

    use super::super::command::CapturedCommand;
    use super::*;

    fn push(queue: &CommandQueue, bytes: usize) -> Pushed {
        let captured = CapturedCommand::new(Command::Query, &vec![b'x'; bytes], 1, Instant::now());
        queue.push(captured.end(7, CommandOutcome::Ok, Default::default()))
    }

    /// The bytes of each command, or the negative number of those that are lost.
    fn take(queue: &CommandQueue, timeout: Duration) -> (Vec<i64>, bool) {
        let mut entries = Vec::new();
        let is_closed = queue.take(&mut entries, timeout);
        let sizes = entries.iter().map(|entry| match entry {
            Entry::Command(command) => command.content.len() as i64,
            Entry::Dropped(count) => -(*count as i64),
        });
        (sizes.collect(), is_closed)
    }

    #[test]
    fn commands_are_taken_in_order() {
        let queue = CommandQueue::default();
        assert_eq!((push(&queue, 3), push(&queue, 4)), (Pushed::Accepted, Pushed::Accepted));
        assert_eq!(take(&queue, Duration::ZERO), (vec![3, 4], false));
        assert_eq!(take(&queue, Duration::ZERO), (vec![], false));
    }

    #[test]
    fn lost_commands_are_marked_where_they_are_missing() {
        let queue = CommandQueue::default();
        push(&queue, 5);
        assert_eq!((push(&queue, MAX_QUEUE_BYTES), push(&queue, MAX_QUEUE_BYTES)), (Pushed::Dropped, Pushed::Dropped));
        push(&queue, 1);
        queue.add_dropped();
        queue.close();
        assert_eq!(push(&queue, 1), Pushed::Closed);
        assert_eq!(take(&queue, Duration::MAX), (vec![5, -2, 1, -1], true));
        assert!(queue.wait_closed(Duration::MAX));
    }

    #[test]
    fn there_is_room_again_after_commands_were_taken() {
        let queue = CommandQueue::default();
        let half = MAX_QUEUE_BYTES / 2;
        assert_eq!((push(&queue, half), push(&queue, half)), (Pushed::Accepted, Pushed::Dropped));
        take(&queue, Duration::ZERO);
        assert_eq!(push(&queue, half), Pushed::Accepted);
    }

    #[test]
    fn many_bytes_and_the_end_wake_the_writer() {
        let queue = CommandQueue::default();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| [(); 2].map(|()| take(&queue, Duration::MAX)));
            push(&queue, WAKE_BYTES);
            while !queue.lock().entries.is_empty() {
                std::thread::yield_now();
            }
            queue.close();
            let taken = writer.join().expect("the writer");
            assert_eq!(taken, [(vec![WAKE_BYTES as i64], false), (vec![], true)]);
        });
    }
}
