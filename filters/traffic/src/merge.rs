//! Merges several directories in the order in which commands began.
//!
//! Files have records in the order in which commands ended. So a record waits until each directory has been read up to
//! commands that began [`Window::time`] later; a command that took longer comes late. Within a connection the order is
//! always right, since the commands of a connection begin and end one after another.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::time::Duration;

use crate::TrafficError;
use crate::directory::{Reader, Statement};

/// What a statement takes in memory besides its texts.
const STATEMENT_BYTES: usize = 400;

/// How far is looked ahead.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    pub time: Duration,
    /// Memory of the statements that wait, of all directories together. When they take more, the window is shorter.
    pub max_bytes: usize,
}

impl Default for Window {
    fn default() -> Self {
        Self { time: Duration::from_secs(10), max_bytes: 256 << 20 }
    }
}

/// The statements of several sources by the time at which they began. Ends after the first error.
pub struct Merge<I = Reader> {
    sources: Vec<Source<I>>,
    waiting: BinaryHeap<Waiting>,
    waiting_bytes: usize,
    window_ns: i64,
    max_bytes: usize,
    read: u64,
    last_ns: i64,
    late: u64,
    has_failed: bool,
}

struct Source<I> {
    statements: I,
    has_ended: bool,
    /// The latest time at which a statement began that has been read.
    read_until_ns: i64,
}

/// A statement that waits, until those that began before it have been read.
struct Waiting {
    /// How many were read before it: statements with the same time stay in their order.
    sequence: u64,
    bytes: usize,
    statement: Statement,
}

impl<I: Iterator<Item = Result<Statement, TrafficError>>> Merge<I> {
    pub fn new(sources: impl IntoIterator<Item = I>, window: Window) -> Self {
        let sources = sources.into_iter();
        Self {
            sources: sources
                .map(|statements| Source { statements, has_ended: false, read_until_ns: i64::MIN })
                .collect(),
            waiting: BinaryHeap::new(),
            waiting_bytes: 0,
            window_ns: window.time.as_nanos().try_into().unwrap_or(i64::MAX),
            max_bytes: window.max_bytes,
            read: 0,
            last_ns: i64::MIN,
            late: 0,
            has_failed: false,
        }
    }

    /// Statements so far that came after one that began later.
    pub fn late(&self) -> u64 {
        self.late
    }

    pub fn sources(&self) -> impl Iterator<Item = &I> {
        self.sources.iter().map(|source| &source.statements)
    }

    fn next_statement(&mut self) -> Result<Option<Statement>, TrafficError> {
        loop {
            let needed_ns = match self.waiting.peek() {
                Some(_) if self.waiting_bytes > self.max_bytes => i64::MIN,
                Some(first) => first.time_ns().saturating_add(self.window_ns),
                None => i64::MAX,
            };
            let behind = self.sources.iter_mut().filter(|source| !source.has_ended);
            let furthest_behind = behind.min_by_key(|source| source.read_until_ns);
            match furthest_behind {
                Some(source) if source.read_until_ns < needed_ns => {
                    let Some(statement) = source.read()? else {
                        continue;
                    };
                    self.enqueue(statement);
                }
                _ => return Ok(self.take_first()),
            }
        }
    }

    fn enqueue(&mut self, statement: Statement) {
        let record = &statement.record;
        let texts = record.payload.len() + record.prepared_text.as_ref().map_or(0, Vec::len);
        let bytes = texts + STATEMENT_BYTES;
        self.waiting_bytes += bytes;
        self.waiting.push(Waiting { sequence: self.read, bytes, statement });
        self.read += 1;
    }

    fn take_first(&mut self) -> Option<Statement> {
        let first = self.waiting.pop()?;
        self.waiting_bytes -= first.bytes;
        let time_ns = first.time_ns();
        self.late += u64::from(time_ns < self.last_ns);
        self.last_ns = self.last_ns.max(time_ns);
        Some(first.statement)
    }
}

impl<I: Iterator<Item = Result<Statement, TrafficError>>> Iterator for Merge<I> {
    type Item = Result<Statement, TrafficError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_failed {
            return None;
        }
        let next = self.next_statement().transpose();
        self.has_failed = matches!(next, Some(Err(_)));
        next
    }
}

impl<I: Iterator<Item = Result<Statement, TrafficError>>> Source<I> {
    fn read(&mut self) -> Result<Option<Statement>, TrafficError> {
        let statement = self.statements.next().transpose()?;
        match &statement {
            Some(statement) => self.read_until_ns = self.read_until_ns.max(statement.record.time_ns),
            None => self.has_ended = true,
        }
        Ok(statement)
    }
}

impl Waiting {
    fn time_ns(&self) -> i64 {
        self.statement.record.time_ns
    }
}

/// A heap gives the greatest first: that is the one that began first.
impl Ord for Waiting {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.time_ns(), other.sequence).cmp(&(self.time_ns(), self.sequence))
    }
}

impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Waiting {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Waiting {}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::path::Path;

    use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};

    use super::*;
    use crate::directory::Position;
    use crate::record::Record;

    const SECOND: i64 = 1_000_000_000;

    fn statement(connection: u64, time_ns: i64) -> Statement {
        let record = Record::query(connection, time_ns, "");
        Statement { record, result: None, position: Position { file: Path::new("traffic").into(), offset: 0 } }
    }

    fn merge(sources: &[Vec<(u64, i64)>], window: Window) -> (Vec<(u64, i64)>, u64) {
        let sources = sources.iter().map(|source| source.iter().map(|key| Ok(statement(key.0, key.1))));
        let mut merge = Merge::new(sources, window);
        let merged = merge.by_ref().map(|statement| statement.expect("no error").record);
        let merged = merged.map(|record| (record.connection, record.time_ns)).collect();
        (merged, merge.late())
    }

    #[test]
    fn a_command_that_ended_after_others_comes_at_its_beginning() {
        let sources = [vec![(1, 1), (1, 4), (2, 2)], vec![(3, 3), (3, 5 * SECOND)]];
        let expected = vec![(1, 1), (2, 2), (3, 3), (1, 4), (3, 5 * SECOND)];
        assert_eq!(merge(&sources, Window::default()), (expected, 0));
    }

    #[test]
    fn a_command_that_took_longer_than_the_window_comes_late() {
        let sources = [vec![(1, 0), (1, 12 * SECOND), (1, 25 * SECOND), (2, 1)]];
        let expected = vec![(1, 0), (1, 12 * SECOND), (2, 1), (1, 25 * SECOND)];
        assert_eq!(merge(&sources, Window::default()), (expected, 1));
    }

    #[test]
    fn memory_limits_the_window() {
        let sources = [vec![(1, 2), (1, 3), (2, 1)]];
        let window = Window { max_bytes: STATEMENT_BYTES, ..Window::default() };
        assert_eq!(merge(&sources, window), (vec![(1, 2), (2, 1), (1, 3)], 1));
    }

    #[test]
    fn statements_with_the_same_time_stay_in_order() {
        let source: Vec<(u64, i64)> = (1..100).map(|connection| (connection, 5)).collect();
        assert_eq!(merge(std::slice::from_ref(&source), Window::default()), (source, 0));
    }

    #[test]
    fn nothing_follows_an_error() {
        let error = || TrafficError::NothingFound { path: "x".into() };
        let sources = [vec![Ok(statement(1, 1)), Err(error())].into_iter()];
        let mut merge = Merge::new(sources, Window::default());
        assert!(merge.next().is_some_and(|next| next.is_err()));
        assert!(merge.next().is_none());
    }

    proptest! {
        #[test]
        fn connections_keep_their_order(
            sources in prop::collection::vec(prop::collection::vec((0..4_u64, 0..60 * SECOND), 0..30), 0..4),
            seconds in 0..100_u64,
            max_bytes in any::<u16>(),
        ) {
            // Each source has its own connections, and the times of a connection increase.
            let sources: Vec<Vec<(u64, i64)>> = sources.into_iter().enumerate().map(|(index, mut source)| {
                let mut last: HashMap<u64, i64> = HashMap::new();
                for (connection, time_ns) in &mut source {
                    *connection += index as u64 * 4;
                    let last = last.entry(*connection).or_insert(0);
                    *last += *time_ns % (5 * SECOND) + 1;
                    *time_ns = *last;
                }
                source
            }).collect();
            let window = Window { time: Duration::from_secs(seconds), max_bytes: max_bytes.into() };
            let (merged, _) = merge(&sources, window);
            prop_assert_eq!(merged.len(), sources.iter().map(Vec::len).sum::<usize>());
            let mut last = HashMap::new();
            for (connection, time_ns) in merged {
                let before = last.insert(connection, time_ns);
                prop_assert!(before.is_none_or(|before| before < time_ns));
            }
        }

        #[test]
        fn a_window_over_everything_sorts(
            sources in prop::collection::vec(prop::collection::vec(0..SECOND, 0..30), 0..4),
        ) {
            let sources: Vec<Vec<(u64, i64)>> =
                sources.into_iter().map(|source| source.into_iter().map(|time_ns| (1, time_ns)).collect()).collect();
            let (merged, late) = merge(&sources, Window::default());
            prop_assert!(merged.is_sorted_by_key(|key| key.1));
            prop_assert_eq!(late, 0);
        }
    }
}
