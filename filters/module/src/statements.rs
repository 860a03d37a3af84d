//! Statistics of statements: how often each ran, for which user and at which node, and what it cost.
//!
//! [`session`] follows the statements of one session. [`collector`] sums them in one worker. The main thread takes the
//! sums of all workers ([`window`]), and sends them to the control plane ([`report`]).
//! [`crate::statement_log`] logs single statements.

mod collector;
mod messages;
mod outbox;
pub(crate) mod report;
mod rows;
mod session;
mod shared;
mod window;

pub(crate) use collector::StatementCollector;
pub(crate) use rows::Statement;
pub(crate) use session::{ClientConnection, MAX_STATEMENTS, SessionStatements};
pub(crate) use shared::Shared;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::config::{StatementsConfig, seconds};
use crate::{capture, statement_log};

/// How statistics are reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReportConfig {
    pub(crate) max_rows: usize,
    pub(crate) interval: Duration,
}

/// None: no statistics are collected.
static CONFIG: Mutex<Option<ReportConfig>> = Mutex::new(None);

/// Whether statistics are collected, so that workers need no lock to know.
static IS_ON: AtomicBool = AtomicBool::new(false);

/// Applies a published configuration. None: no statistics are collected. Sessions follow with their next request.
pub(crate) fn configure(config: Option<StatementsConfig>) {
    let config =
        config.map(|config| ReportConfig { max_rows: config.max_rows as usize, interval: seconds(config.interval) });
    IS_ON.store(config.is_some(), Ordering::Relaxed);
    *CONFIG.lock().unwrap_or_else(PoisonError::into_inner) = config;
}

/// Whether executions are observed: for statistics, for the log, or for a capture. Called for each read from a client, so it must be
/// cheap.
pub(crate) fn is_on() -> bool {
    identifies_statements() || capture::is_on()
}

/// Whether the statements of executions are identified. A capture does so later.
fn identifies_statements() -> bool {
    has_statistics() || statement_log::is_on()
}

/// Whether statistics are collected.
fn has_statistics() -> bool {
    IS_ON.load(Ordering::Relaxed)
}

fn config() -> Option<ReportConfig> {
    *CONFIG.lock().unwrap_or_else(PoisonError::into_inner)
}
