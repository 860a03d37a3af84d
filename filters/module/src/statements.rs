//! Statistics of statements: how often each ran, for which user and at which node, and what it cost.
//!
//! [`session`] follows the statements of one session. [`collector`] sums them in one worker. The main thread takes the
//! sums of all workers, as [`window`] describes.

mod collector;
mod session;
mod window;

pub(crate) use collector::StatementCollector;
pub(crate) use session::SessionStatements;
pub(crate) use window::{Statement, StatementRow, StatementStats, take_rows};

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether statements are observed.
static IS_ON: AtomicBool = AtomicBool::new(false);

/// Whether statements are observed. Called for each read from a client, so it must be cheap.
pub(crate) fn is_on() -> bool {
    IS_ON.load(Ordering::Relaxed)
}

/// Begins or ends to observe statements. Sessions follow with their next request.
pub(crate) fn switch(is_on: bool) {
    IS_ON.store(is_on, Ordering::Relaxed);
}
