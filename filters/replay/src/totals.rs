//! What a replay has done, in numbers.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::skip::SkipReason;

/// Numbers of a replay, with those before it was resumed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Totals {
    /// Records of the input that were replayed or skipped.
    pub(crate) records: u64,
    pub(crate) replayed: u64,
    /// Those that were replayed to warm up; their results were not recorded.
    pub(crate) warm_up: u64,
    /// Those to which the server answered with an error, or not at all.
    pub(crate) errors: u64,
    /// By the server's code; 2013: the connection was lost.
    pub(crate) errors_by_code: BTreeMap<u16, u64>,
    pub(crate) skipped: BTreeMap<SkipReason, u64>,
    pub(crate) rows: u64,
    pub(crate) bytes: u64,
    pub(crate) latency_us: u64,
    pub(crate) sessions: u64,
    pub(crate) connections: u64,
    pub(crate) lost_connections: u64,
    /// Sessions whose connection was closed because another one needed it.
    pub(crate) displaced_sessions: u64,
    /// Requests for a file, which were answered with an empty one.
    pub(crate) local_files: u64,
    /// Records that are missing in the capture, by its own account.
    pub(crate) dropped_in_capture: u64,
    /// How late the statements began that were latest.
    pub(crate) max_lag_us: u64,
    /// The times of the first and the last record, in nanoseconds since 1970.
    pub(crate) first_ns: Option<i64>,
    pub(crate) last_ns: Option<i64>,
    /// How long the replay took.
    pub(crate) seconds: f64,
}

impl Totals {
    pub(crate) fn add_time(&mut self, time_ns: i64) {
        self.first_ns = Some(self.first_ns.map_or(time_ns, |first| first.min(time_ns)));
        self.last_ns = Some(self.last_ns.map_or(time_ns, |last| last.max(time_ns)));
    }

    pub(crate) fn skip(&mut self, reason: SkipReason) {
        *self.skipped.entry(reason).or_default() += 1;
    }

    pub(crate) fn captured_seconds(&self) -> f64 {
        match (self.first_ns, self.last_ns) {
            (Some(first), Some(last)) => (last - first) as f64 / 1e9,
            _ => 0.0,
        }
    }

    /// For people.
    pub(crate) fn text(&self) -> String {
        let mut lines = vec![
            format!("{} records of {:.1} s, replayed in {:.1} s", self.records, self.captured_seconds(), self.seconds),
            format!(
                "{} replayed in {} sessions, {} with an error, {} rows",
                self.replayed, self.sessions, self.errors, self.rows
            ),
        ];
        if self.warm_up > 0 {
            lines.push(format!("{} of them to warm up", self.warm_up));
        }
        lines.extend(self.errors_by_code.iter().map(|(code, count)| format!("{count} with error {code}")));
        lines.extend(self.skipped.iter().map(|(reason, count)| format!("{count} skipped {reason}")));
        for (count, what) in [
            (self.lost_connections, "connections were lost"),
            (self.displaced_sessions, "sessions were closed for others (--max-connections)"),
            (self.local_files, "requests for a file were answered with an empty one"),
            (self.dropped_in_capture, "records are missing in the capture"),
        ] {
            if count > 0 {
                lines.push(format!("{count} {what}"));
            }
        }
        if self.max_lag_us >= 100_000 {
            lines.push(format!("statements began up to {:.1} s late", self.max_lag_us as f64 / 1e6));
        }
        lines.join("\n")
    }
}
