//! Statistics of statements: collected by workers, and reported to the control plane by [`report`].

mod messages;
mod outbox;
pub(crate) mod report;
pub(crate) mod window;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::config::{StatementsConfig, seconds};
use window::{RowLimits, StatementRow, merge};

/// How statistics are reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReportConfig {
    pub(crate) max_rows: usize,
    pub(crate) interval: Duration,
}

/// None: no statistics are collected.
static CONFIG: Mutex<Option<ReportConfig>> = Mutex::new(None);

static ROWS: Mutex<Vec<StatementRow>> = Mutex::new(Vec::new());

/// Applies a published configuration. None: no statistics are collected, and those collected are dropped.
pub(crate) fn configure(config: Option<StatementsConfig>) {
    let config =
        config.map(|config| ReportConfig { max_rows: config.max_rows as usize, interval: seconds(config.interval) });
    *lock(&CONFIG) = config;
    if config.is_none() {
        lock(&ROWS).clear();
    }
}

pub(crate) fn config() -> Option<ReportConfig> {
    *lock(&CONFIG)
}

/// Adds statistics.
#[cfg_attr(not(test), expect(dead_code, reason = "nothing observes statements yet"))]
pub(crate) fn add(row: StatementRow) {
    lock(&ROWS).push(row);
}

/// Takes the statistics since the last call; at most `max_rows` rows with a statement, those with the highest total
/// latency; the rest is summed per node in rows without a statement.
pub(crate) fn take_rows(max_rows: usize) -> Vec<StatementRow> {
    merge(lock(&ROWS).drain(..), RowLimits { rows: max_rows, bytes: usize::MAX })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::window::StatementStats;
    use super::*;

    #[test]
    fn rows_are_taken_once_and_dropped_when_statistics_are_off() {
        let row = StatementRow {
            statement: None,
            user: String::new(),
            node: "n".to_owned(),
            stats: StatementStats::default(),
        };
        configure(Some(StatementsConfig { max_rows: 10.0, interval: 5.0 }));
        assert_eq!(config().map(|config| (config.max_rows, config.interval.as_secs())), Some((10, 5)));
        add(row.clone());
        assert_eq!(take_rows(10), std::slice::from_ref(&row));
        assert_eq!(take_rows(10), []);
        add(row);
        configure(None);
        assert_eq!(take_rows(10), []);
    }
}
