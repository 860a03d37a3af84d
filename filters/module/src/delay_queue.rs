//! A queue of entries that are due at once or at a later time.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// The entries that are due, in order, and the delayed ones.
#[derive(Debug)]
pub(crate) struct DelayQueue<T> {
    ready: VecDeque<T>,
    /// By the time when they are due, then in the order in which they were added.
    delayed: BTreeMap<(Duration, u64), T>,
    next_number: u64,
}

impl<T> Default for DelayQueue<T> {
    fn default() -> Self {
        Self { ready: VecDeque::new(), delayed: BTreeMap::new(), next_number: 0 }
    }
}

impl<T> DelayQueue<T> {
    /// Adds an entry that is not due before `until`.
    pub(crate) fn push(&mut self, entry: T, until: Duration, now: Duration) {
        if until <= now {
            self.ready.push_back(entry);
        } else {
            self.next_number += 1;
            self.delayed.insert((until, self.next_number), entry);
        }
    }

    /// Adds an entry that is due, before all others that are due.
    pub(crate) fn push_front(&mut self, entry: T) {
        self.ready.push_front(entry);
    }

    /// Takes the next entry that is due.
    pub(crate) fn pop_ready(&mut self, now: Duration) -> Option<T> {
        while let Some(first) = self.delayed.first_entry().filter(|first| first.key().0 <= now) {
            self.ready.push_back(first.remove());
        }
        self.ready.pop_front()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.delayed.is_empty()
    }

    /// When the first delayed entry is due.
    pub(crate) fn next_due(&self) -> Option<Duration> {
        self.delayed.first_key_value().map(|((until, _), _)| *until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn delayed_entries_are_returned_when_they_are_due() {
        let mut queue = DelayQueue::default();
        for (entry, until) in [('a', 0), ('b', 5), ('c', 0), ('d', 3), ('e', 3)] {
            queue.push(entry, at(until), at(0));
        }
        assert_eq!(queue.next_due(), Some(at(3)));
        let mut taken = |now: u64| std::iter::from_fn(|| queue.pop_ready(at(now))).collect::<String>();
        assert_eq!([taken(2), taken(3), taken(4), taken(5)], ["ac", "de", "", "b"]);
        assert!(queue.is_empty());
    }

    #[test]
    fn entry_pushed_to_the_front_is_returned_first() {
        let mut queue = DelayQueue::default();
        queue.push('a', at(0), at(0));
        queue.push_front('b');
        assert_eq!(
            (queue.pop_ready(at(0)), queue.pop_ready(at(0)), queue.pop_ready(at(0))),
            (Some('b'), Some('a'), None)
        );
    }
}
