//! Statistics of statements: how often each ran, for which user and at which node, and what it cost.
//!
//! [`session`] follows the statements of one session. [`collector`] sums them in one worker. The main thread takes the
//! sums of all workers, as [`window`] describes. [`crate::statement_log`] logs single statements.

mod collector;
mod session;
mod window;

pub(crate) use collector::StatementCollector;
pub(crate) use session::{SessionDetails, SessionStatements};
pub(crate) use window::{Statement, StatementRow, StatementStats, take_rows};

use std::sync::atomic::{AtomicBool, Ordering};

use crate::statement_log;

/// Whether statements are summed.
static IS_SUMMING: AtomicBool = AtomicBool::new(false);

/// Whether statements are observed, to be summed or logged. Called for each read from a client, so it must be cheap.
pub(crate) fn is_on() -> bool {
    is_summing() || statement_log::is_on()
}

/// Whether statements are summed.
fn is_summing() -> bool {
    IS_SUMMING.load(Ordering::Relaxed)
}

/// Begins or ends to sum statements. Sessions follow with their next request.
pub(crate) fn switch(is_on: bool) {
    IS_SUMMING.store(is_on, Ordering::Relaxed);
}
