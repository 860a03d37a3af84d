//! The statistics of all workers since they were taken last.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use sql_digest::Digest;

use crate::node::{self, SharedNode};

/// The longest text of a statement, in bytes.
const MAX_TEXT_BYTES: usize = 2048;

/// Rows of one worker. Statements without a row count in the row of their node that has no statement.
const MAX_WORKER_ROWS: usize = 10_000;

/// A normalized statement.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Statement {
    pub(crate) digest: Digest,
    /// The beginning of the normalized text.
    pub(crate) text: String,
    /// Bytes of the whole normalized text.
    pub(crate) length: usize,
}

impl Statement {
    pub(crate) fn new(normalized: &[u8]) -> Self {
        let length = (0..=normalized.len().min(MAX_TEXT_BYTES))
            .rev()
            .find(|length| std::str::from_utf8(&normalized[..*length]).is_ok())
            .unwrap_or_default();
        let text = String::from_utf8_lossy(&normalized[..length]).into_owned();
        Self { digest: sql_digest::digest(normalized), text, length: normalized.len() }
    }

    /// The digest as TiDB shows it.
    pub(crate) fn digest_text(&self) -> String {
        self.digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The database that the statement makes the session's database, in lower case. None: it is no USE.
    pub(super) fn used_database(&self) -> Option<&str> {
        let name = self.text.strip_prefix("use ")?;
        Some(name.strip_prefix('`').and_then(|name| name.strip_suffix('`')).unwrap_or(name))
    }
}

/// How often a statement ran, and what it cost. The time is what the client sees: from the arrival of the request to the
/// last byte of the response.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct StatementStats {
    pub(crate) count: u64,
    pub(crate) errors: u64,
    pub(crate) rows: u64,
    pub(crate) request_bytes: u64,
    pub(crate) response_bytes: u64,
    pub(crate) microseconds: u64,
    pub(crate) max_microseconds: u64,
    /// The executions in each latency bucket, whose bounds are [`node::BUCKETS`].
    pub(crate) latency: [u64; node::BUCKET_NAMES.len()],
}

impl StatementStats {
    pub(super) fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.errors += other.errors;
        self.rows += other.rows;
        self.request_bytes += other.request_bytes;
        self.response_bytes += other.response_bytes;
        self.microseconds += other.microseconds;
        self.max_microseconds = self.max_microseconds.max(other.max_microseconds);
        self.latency.iter_mut().zip(other.latency).for_each(|(sum, count)| *sum += count);
    }
}

/// The statistics of a statement of a user at a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StatementRow {
    /// None: all statements of the node that have no row of their own, or whose text the module does not know.
    pub(crate) statement: Option<Arc<Statement>>,
    /// Empty if there is no statement.
    pub(crate) user: Arc<str>,
    pub(crate) node: Arc<str>,
    pub(crate) stats: StatementStats,
}

/// A row of a worker. The pointers in its key stay valid as long as it exists.
struct WorkerRow {
    statement: Option<Arc<Statement>>,
    user: Arc<str>,
    node: Arc<SharedNode>,
    stats: StatementStats,
}

/// The addresses of a statement, a user and a node, which are quicker to compare than their contents.
type WorkerKey = (usize, usize, usize);

/// The statistics of one worker.
#[derive(Default)]
pub(super) struct WorkerWindow(HashMap<WorkerKey, WorkerRow>);

/// One execution of a statement.
pub(super) struct Execution {
    pub(super) is_error: bool,
    pub(super) rows: u64,
    pub(super) request_bytes: u64,
    pub(super) response_bytes: u64,
    pub(super) microseconds: u64,
}

impl WorkerWindow {
    pub(super) fn record(
        &mut self,
        statement: Option<&Arc<Statement>>,
        user: &Arc<str>,
        node: &Arc<SharedNode>,
        execution: &Execution,
    ) {
        let key = |statement: Option<&Arc<Statement>>| match statement {
            Some(statement) => (Arc::as_ptr(statement).addr(), Arc::as_ptr(user).addr(), Arc::as_ptr(node).addr()),
            None => (0, 0, Arc::as_ptr(node).addr()),
        };
        let has_room = self.0.len() < MAX_WORKER_ROWS;
        let statement = statement.filter(|_| has_room || self.0.contains_key(&key(statement)));
        let row = self.0.entry(key(statement)).or_insert_with(|| WorkerRow {
            statement: statement.map(Arc::clone),
            user: if statement.is_some() { Arc::clone(user) } else { Arc::from("") },
            node: Arc::clone(node),
            stats: StatementStats::default(),
        });
        let stats = &mut row.stats;
        stats.count += 1;
        stats.errors += u64::from(execution.is_error);
        stats.rows += execution.rows;
        stats.request_bytes += execution.request_bytes;
        stats.response_bytes += execution.response_bytes;
        stats.microseconds += execution.microseconds;
        stats.max_microseconds = stats.max_microseconds.max(execution.microseconds);
        stats.latency[node::BUCKETS.partition_point(|&end| end < execution.microseconds)] += 1;
    }
}

/// The windows of all workers.
static WINDOWS: Mutex<Vec<Weak<Mutex<WorkerWindow>>>> = Mutex::new(Vec::new());

pub(super) fn add_worker() -> Arc<Mutex<WorkerWindow>> {
    let window = Arc::default();
    let mut windows = WINDOWS.lock().unwrap_or_else(PoisonError::into_inner);
    windows.retain(|window| window.strong_count() > 0);
    windows.push(Arc::downgrade(&window));
    window
}

pub(super) fn lock(window: &Mutex<WorkerWindow>) -> MutexGuard<'_, WorkerWindow> {
    window.lock().unwrap_or_else(PoisonError::into_inner)
}

impl WorkerWindow {
    /// Removes all rows.
    pub(super) fn take(&mut self) -> impl Iterator<Item = StatementRow> + use<> {
        std::mem::take(&mut self.0).into_values().map(|row| StatementRow {
            statement: row.statement,
            user: row.user,
            node: row.node.name.as_str().into(),
            stats: row.stats,
        })
    }
}

/// Takes the statistics since the last call. At most `max_rows` rows have a statement: those with the most time.
pub(crate) fn take_rows(max_rows: usize) -> Vec<StatementRow> {
    let windows = WINDOWS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let rows = windows.iter().filter_map(Weak::upgrade).flat_map(|window| lock(&window).take());
    sum_rows(rows, max_rows)
}

/// Sums rows with the same statement, user and node. At most `max_rows` rows with a statement stay: those with the most
/// time. The others are summed in a row without a statement for each node.
pub(crate) fn sum_rows(rows: impl IntoIterator<Item = StatementRow>, max_rows: usize) -> Vec<StatementRow> {
    let mut sums: HashMap<(Option<Digest>, Arc<str>, Arc<str>), StatementRow> = HashMap::new();
    let mut add = |row: StatementRow| {
        let digest = row.statement.as_ref().map(|statement| statement.digest);
        match sums.entry((digest, Arc::clone(&row.user), Arc::clone(&row.node))) {
            std::collections::hash_map::Entry::Occupied(mut sum) => sum.get_mut().stats.add(&row.stats),
            std::collections::hash_map::Entry::Vacant(slot) => drop(slot.insert(row)),
        }
    };
    rows.into_iter().for_each(&mut add);
    let (mut kept, mut others): (Vec<_>, Vec<_>) = sums.into_values().partition(|row| row.statement.is_some());
    kept.sort_unstable_by_key(|row| Reverse(row.stats.microseconds));
    for row in kept.drain(kept.len().min(max_rows)..) {
        match others.iter_mut().find(|other| other.node == row.node) {
            Some(other) => other.stats.add(&row.stats),
            None => others.push(StatementRow { statement: None, user: Arc::from(""), ..row }),
        }
    }
    kept.append(&mut others);
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(statement: Option<u8>, user: &str, node: &str, microseconds: u64) -> StatementRow {
        let statement =
            statement.map(|number| Arc::new(Statement { digest: [number; 32], text: number.to_string(), length: 1 }));
        let stats = StatementStats { count: 1, microseconds, max_microseconds: microseconds, ..Default::default() };
        StatementRow { statement, user: user.into(), node: node.into(), stats }
    }

    fn summary(rows: &[StatementRow]) -> Vec<(Option<u8>, &str, &str, u64, u64, u64)> {
        let number = |row: &StatementRow| row.statement.as_ref().map(|statement| statement.digest[0]);
        rows.iter()
            .map(|row| {
                let stats = &row.stats;
                (number(row), &*row.user, &*row.node, stats.count, stats.microseconds, stats.max_microseconds)
            })
            .collect()
    }

    #[test]
    fn equal_rows_are_summed_and_the_rows_with_the_most_time_stay() {
        let rows = || {
            [
                row(Some(1), "u", "n", 5),
                row(Some(2), "u", "n", 30),
                row(Some(1), "u", "n", 20),
                row(Some(1), "v", "n", 10),
                row(None, "", "n", 1),
            ]
        };
        let all = sum_rows(rows(), 3);
        let expected = [
            (Some(2), "u", "n", 1, 30, 30),
            (Some(1), "u", "n", 2, 25, 20),
            (Some(1), "v", "n", 1, 10, 10),
            (None, "", "n", 1, 1, 1),
        ];
        assert_eq!(summary(&all), expected);
        assert_eq!(summary(&sum_rows(rows(), 1)), [(Some(2), "u", "n", 1, 30, 30), (None, "", "n", 4, 36, 20)]);
        let others = sum_rows([row(Some(1), "u", "a", 1), row(Some(1), "u", "b", 2)], 0);
        assert_eq!(others.iter().map(|row| row.stats.count).collect::<Vec<_>>(), [1, 1]);
    }

    #[test]
    fn use_statement_names_a_database() {
        let used = |text: &str| {
            let mut normalizer = sql_digest::Normalizer::default();
            Statement::new(normalizer.normalize(text.as_bytes())).used_database().map(str::to_owned)
        };
        for (text, expected) in [
            ("USE Shop", Some("shop")),
            ("use /* c */ `my shop`;", Some("my shop")),
            ("use user", Some("user")),
            ("select 1", None),
            ("used", None),
        ] {
            assert_eq!(used(text).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn long_text_is_cut_between_characters() {
        let normalized = "ä".repeat(MAX_TEXT_BYTES);
        let statement = Statement::new(normalized.as_bytes());
        assert_eq!(statement.text.len(), MAX_TEXT_BYTES);
        assert_eq!(statement.digest, sql_digest::digest(normalized.as_bytes()));
        assert_eq!(Statement::new(format!("a{normalized}").as_bytes()).text.len(), MAX_TEXT_BYTES - 1);
    }
}
