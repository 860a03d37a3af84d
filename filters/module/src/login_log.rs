//! The login log: one line of JSON for each login and each change of user.

mod record;

pub(crate) use record::{LoginRecord, TlsRecord};

use crate::config::LoginLogConfig;
use crate::line_log::LineLog;

pub(crate) static LOG: LineLog<()> = LineLog::new("logins", "tidevoy-logins");

/// Whether logins are logged. Called for each login, so it must be cheap.
pub(crate) fn is_on() -> bool {
    LOG.is_on()
}

/// Appends a line. Called by workers.
pub(crate) fn push(record: &LoginRecord<'_>) {
    let line = record.to_line();
    LOG.push(|()| Some(line));
}

/// Applies the published configuration; None: the log is off. Called on Envoy's main thread.
pub(crate) fn configure(wanted: Option<LoginLogConfig>) {
    LOG.configure(wanted.map(|file| (file.into(), ())));
}
