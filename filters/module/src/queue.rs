//! Who is next, and who is not before a certain time.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Those that are due, in their order, and those that rest.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    due: VecDeque<T>,
    /// By when they are due; the number tells those of the same moment apart.
    resting: BTreeMap<(Duration, u64), T>,
    number: u64,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { due: VecDeque::new(), resting: BTreeMap::new(), number: 0 }
    }
}

impl<T> Queue<T> {
    /// One more, who is not due before `until`.
    pub(crate) fn add(&mut self, one: T, until: Duration, now: Duration) {
        if until <= now {
            self.due.push_back(one);
        } else {
            self.number += 1;
            self.resting.insert((until, self.number), one);
        }
    }

    /// One who goes before all others.
    pub(crate) fn add_first(&mut self, one: T) {
        self.due.push_front(one);
    }

    /// Who is next now.
    pub(crate) fn next(&mut self, now: Duration) -> Option<T> {
        while let Some(first) = self.resting.first_entry().filter(|first| first.key().0 <= now) {
            self.due.push_back(first.remove());
        }
        self.due.pop_front()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.due.is_empty() && self.resting.is_empty()
    }

    /// When the first of those that rest is due.
    pub(crate) fn due(&self) -> Option<Duration> {
        self.resting.first_key_value().map(|((until, _), _)| *until)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.due.iter().chain(self.resting.values())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn who_rests_comes_when_it_is_due() {
        let mut queue = Queue::default();
        for (one, until) in [('a', 0), ('b', 5), ('c', 0), ('d', 3), ('e', 3)] {
            queue.add(one, at(until), at(0));
        }
        assert_eq!(queue.due(), Some(at(3)));
        assert_eq!(queue.iter().collect::<String>(), "acdeb");
        let mut taken = |now: u64| std::iter::from_fn(|| queue.next(at(now))).collect::<String>();
        assert_eq!([taken(2), taken(3), taken(4), taken(5)], ["ac", "de", "", "b"]);
        assert!(queue.is_empty());
    }

    #[test]
    fn who_goes_first_goes_before_those_that_are_due() {
        let mut queue = Queue::default();
        queue.add('a', at(0), at(0));
        queue.add_first('b');
        assert_eq!((queue.next(at(0)), queue.next(at(0)), queue.next(at(0))), (Some('b'), Some('a'), None));
    }
}
