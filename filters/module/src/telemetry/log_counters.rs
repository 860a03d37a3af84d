//! The counters of a log.

use std::cell::Cell;

use envoy_abi::extension::{Counter, Metrics};

use crate::line_log::LogCounts;

pub(super) struct LogCounters {
    lines: Counter,
    write_errors: Counter,
    /// The last reported counts.
    reported: Cell<[u64; 3]>,
}

impl LogCounters {
    /// `log`: the beginning of the names.
    pub(super) fn new(metrics: &mut Metrics, log: &str) -> Result<Self, String> {
        Ok(Self {
            lines: metrics.counter(&format!("{log}_lines"), &["result"])?,
            write_errors: metrics.counter(&format!("{log}_write_errors"), &[])?,
            reported: Cell::default(),
        })
    }

    /// Reports zeros, too, as soon as the log is on: a series that begins with another value shows no increase.
    pub(super) fn report(&self, metrics: &Metrics, is_on: bool, counts: &LogCounts) {
        let now = counts.get();
        if !is_on && now == [0; 3] {
            return;
        }
        let before = self.reported.replace(now);
        metrics.add(self.lines, &["written"], now[0] - before[0]);
        metrics.add(self.lines, &["dropped"], now[1] - before[1]);
        metrics.add(self.write_errors, &[], now[2] - before[2]);
    }
}
