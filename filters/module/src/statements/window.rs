//! The statistics of all workers since they were taken last.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::rows::{RowLimits, Statement, StatementRow, StatementStats, merge};
use crate::node::{self, SharedNode};

/// Rows of one worker. At this number, executions of further statements are added to one row for each node.
const MAX_WORKER_ROWS: usize = 10_000;

/// A row of a worker. It holds the objects whose addresses form its key, so that no address is used again.
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
            user: row.user.as_ref().to_owned(),
            node: row.node.name.clone(),
            stats: row.stats,
        })
    }
}

/// Takes the statistics since the last call. See [`merge`] for the limits.
pub(super) fn take_rows(limits: RowLimits) -> Vec<StatementRow> {
    let windows = WINDOWS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let rows = windows.iter().filter_map(Weak::upgrade).flat_map(|window| lock(&window).take());
    merge(rows, limits)
}

/// Forgets all statistics.
pub(super) fn clear() {
    take_rows(RowLimits { rows: 0, bytes: 0 });
}
