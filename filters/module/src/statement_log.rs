//! The statement log: an entry for each statement that is slow or has failed, as JSON or as in TiDB's slow log.
//!
//! [`rules`] decide which statements are logged, and [`text`] which text an entry shows.

mod record;
mod rules;
mod text;
mod tidb_format;

pub(crate) use record::StatementRecord;
pub(crate) use text::SentText;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::config::{StatementLogConfig, StatementLogFormat};
use crate::line_log::LineLog;
use rules::LogRules;

pub(crate) static LOG: LineLog<LogRules> = LineLog::new("statements", "tidevoy-stmts");

/// The parts of the rules that workers check without a lock, after each statement.
struct Precheck {
    threshold_microseconds: AtomicU64,
    logs_errors: AtomicBool,
    keeps_texts: AtomicBool,
}

static PRECHECK: Precheck = Precheck {
    threshold_microseconds: AtomicU64::new(u64::MAX),
    logs_errors: AtomicBool::new(false),
    keeps_texts: AtomicBool::new(false),
};

/// Whether statements are logged. Called for each read from a client, so it must be cheap.
pub(crate) fn is_on() -> bool {
    LOG.is_on()
}

/// Whether the log may show texts as clients have sent them.
pub(crate) fn keeps_texts() -> bool {
    PRECHECK.keeps_texts.load(Ordering::Relaxed)
}

/// Whether a statement may be logged. Called for each statement, so it must be cheap.
pub(crate) fn may_log(microseconds: u64, is_error: bool) -> bool {
    microseconds >= PRECHECK.threshold_microseconds.load(Ordering::Relaxed)
        || is_error && PRECHECK.logs_errors.load(Ordering::Relaxed)
}

/// Logs a statement if the settings want it. `must_log`: in any case. Called by workers.
pub(crate) fn push(record: &StatementRecord<'_>, must_log: bool) {
    LOG.push(|rules| {
        let is_wanted = must_log || rules.accept(record.duration, record.error_code.is_some(), fastrand::f64());
        is_wanted.then(|| match rules.format {
            StatementLogFormat::Json => record.to_json(rules.redacts),
            StatementLogFormat::Tidb => record.to_tidb_entry(rules.redacts),
        })
    });
}

/// Applies the published configuration; None: the log is off. Called on Envoy's main thread.
pub(crate) fn configure(wanted: Option<StatementLogConfig>) {
    let rules = wanted.as_ref().map(LogRules::new);
    LOG.configure(wanted.as_ref().map(StatementLogConfig::target).zip(rules));
    let rules = rules.filter(|_| LOG.is_on());
    let threshold = rules.map_or(u64::MAX, |rules| rules.threshold_microseconds());
    PRECHECK.threshold_microseconds.store(threshold, Ordering::Relaxed);
    PRECHECK.logs_errors.store(rules.is_some_and(|rules| rules.logs_errors), Ordering::Relaxed);
    PRECHECK.keeps_texts.store(rules.is_some_and(|rules| !rules.redacts), Ordering::Relaxed);
}
