//! The reports that the control plane has not acknowledged yet.
//!
//! A report that may have arrived is sent again, unchanged and with the same number, so that it counts exactly once.
//! Meanwhile, later statistics wait. Both are bounded, however long no control plane answers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::messages::{ReportRequest, ReportResponse, RowMessage, StatementMessage, unframed};
use super::rows::{RowLimits, Statement, StatementRow, merge};

/// Control planes answer, but do not accept the report: then it is dropped, since it would be rejected for ever. Some
/// rejections are temporary: a control plane that has just started does not know this Envoy yet.
const MAX_REJECTIONS: u32 = 20;

/// How the control plane has answered a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer<'a> {
    /// It has not answered.
    Missing,
    /// The body of a response.
    Body(&'a [u8]),
    /// The report is invalid.
    Invalid,
}

/// What became of a report that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendResult {
    Acknowledged,
    /// It is sent again.
    Failed,
    /// It is lost.
    Dropped,
    /// The statistics were switched off meanwhile.
    Forgotten,
}

#[derive(Default)]
pub(super) struct Outbox {
    /// The number of the last report.
    sequence: u64,
    waiting: Vec<StatementRow>,
    /// The time that the waiting rows cover.
    waiting_time: Duration,
    unacknowledged: Option<ReportRequest>,
    rejections: u32,
}

impl Outbox {
    /// Adds the statistics of another period.
    pub(super) fn add(&mut self, rows: Vec<StatementRow>, period: Duration, limits: RowLimits) {
        self.waiting_time += period;
        self.waiting = merge(self.waiting.drain(..).chain(rows), limits);
    }

    /// The report to send now. None: there is nothing to report.
    pub(super) fn next(&mut self, instance: &str) -> Option<&ReportRequest> {
        if self.unacknowledged.is_none() {
            let period = std::mem::take(&mut self.waiting_time);
            if self.waiting.is_empty() {
                return None;
            }
            self.sequence += 1;
            self.rejections = 0;
            self.unacknowledged = Some(ReportRequest {
                instance: instance.to_owned(),
                sequence: self.sequence,
                milliseconds: u32::try_from(period.as_millis()).unwrap_or(u32::MAX),
                ..encode(std::mem::take(&mut self.waiting))
            });
        }
        self.unacknowledged.as_ref()
    }

    /// Forgets all reports. Numbers go on, because the control plane ignores those that it knows.
    pub(super) fn clear(&mut self) {
        *self = Self { sequence: self.sequence, ..Self::default() };
    }

    /// Applies the answer to the last report.
    pub(super) fn on_answer(&mut self, answer: Answer<'_>) -> SendResult {
        let Some(report) = &self.unacknowledged else { return SendResult::Forgotten };
        let result = match answer {
            Answer::Missing => SendResult::Failed,
            Answer::Invalid => SendResult::Dropped,
            Answer::Body(body) if is_acknowledgement(body, report.sequence) => SendResult::Acknowledged,
            Answer::Body(_) => {
                self.rejections += 1;
                if self.rejections < MAX_REJECTIONS { SendResult::Failed } else { SendResult::Dropped }
            }
        };
        if result != SendResult::Failed {
            self.unacknowledged = None;
        }
        result
    }
}

fn is_acknowledgement(body: &[u8], sequence: u64) -> bool {
    unframed::<ReportResponse>(body).is_some_and(|response| response.sequence == sequence)
}

/// A report with these rows, which lists each statement once.
fn encode(rows: Vec<StatementRow>) -> ReportRequest {
    let mut report = ReportRequest::default();
    let mut numbers = HashMap::new();
    for row in rows {
        let statement = row.statement.map_or(0, |statement| {
            *numbers.entry(statement.digest).or_insert_with(|| {
                report.statements.push(encode_statement(&statement));
                report.statements.len()
            })
        });
        let stats = row.stats;
        report.rows.push(RowMessage {
            statement: u32::try_from(statement).unwrap_or_default(),
            user: row.user,
            node: row.node,
            count: stats.count,
            errors: stats.errors,
            rows: stats.rows,
            request_bytes: stats.request_bytes,
            response_bytes: stats.response_bytes,
            microseconds: stats.microseconds,
            max_microseconds: stats.max_microseconds,
            latency: stats.latency.to_vec(),
        });
    }
    report
}

fn encode_statement(statement: &Arc<Statement>) -> StatementMessage {
    StatementMessage { digest: statement.digest.to_vec(), text: statement.text.clone() }
}

#[cfg(test)]
mod tests {
    use super::super::messages::framed;
    use super::super::rows::StatementStats;
    use super::*;

    const LIMITS: RowLimits = RowLimits { rows: 2, bytes: 1 << 20 };
    const PERIOD: Duration = Duration::from_secs(5);

    fn rows(digests: &[u8]) -> Vec<StatementRow> {
        let row = |&digest: &u8| StatementRow {
            statement: Some(Arc::new(Statement { digest: [digest; 32], text: format!("select {digest}"), length: 0 })),
            user: "u".to_owned(),
            node: "n".to_owned(),
            stats: StatementStats { count: 1, microseconds: u64::from(digest), ..StatementStats::default() },
        };
        digests.iter().map(row).collect()
    }

    fn acknowledgement(sequence: u64) -> Vec<u8> {
        framed(&ReportResponse { sequence })
    }

    #[test]
    fn a_report_lists_each_statement_once() {
        let mut outbox = Outbox::default();
        let mut all = rows(&[1, 2]);
        all.push(StatementRow { user: "other".to_owned(), ..all[0].clone() });
        all.push(StatementRow { statement: None, ..all[0].clone() });
        outbox.add(all, PERIOD, RowLimits { rows: 9, ..LIMITS });
        let report = outbox.next("i").expect("a report");
        assert_eq!((report.instance.as_str(), report.sequence, report.milliseconds), ("i", 1, 5000));
        assert_eq!(report.statements.len(), 2);
        assert_eq!(report.rows.len(), 4);
        for row in &report.rows[..3] {
            assert_eq!(u64::from(report.statements[row.statement as usize - 1].digest[0]), row.microseconds);
        }
        assert_eq!(report.rows[3].statement, 0);
    }

    #[test]
    fn a_failed_report_is_sent_again_unchanged_while_later_rows_wait() {
        let mut outbox = Outbox::default();
        outbox.add(rows(&[1]), PERIOD, LIMITS);
        let first = outbox.next("i").cloned();
        assert_eq!(outbox.on_answer(Answer::Missing), SendResult::Failed);
        outbox.add(rows(&[2, 3]), PERIOD, LIMITS);
        outbox.add(rows(&[4, 3]), PERIOD, LIMITS);
        assert_eq!(outbox.next("i").cloned(), first);
        assert_eq!(outbox.on_answer(Answer::Body(&acknowledgement(1))), SendResult::Acknowledged);
        let second = outbox.next("i").expect("a report");
        assert_eq!((second.sequence, second.milliseconds), (2, 10_000));
        let counts: Vec<_> = second.rows.iter().map(|row| (row.microseconds, row.count)).collect();
        assert_eq!(counts, [(6, 2), (4, 1), (2, 1)], "the last one has lost its statement");
        assert_eq!(second.statements.len(), 2);
    }

    #[test]
    fn another_acknowledgement_does_not_count() {
        let mut outbox = Outbox::default();
        outbox.add(rows(&[1]), PERIOD, LIMITS);
        assert!(outbox.next("i").is_some());
        assert_eq!(outbox.on_answer(Answer::Body(&acknowledgement(2))), SendResult::Failed);
        assert_eq!(outbox.on_answer(Answer::Body(b"")), SendResult::Failed);
        assert_eq!(outbox.next("i").map(|report| report.sequence), Some(1));
    }

    #[test]
    fn a_report_that_is_always_rejected_is_dropped() {
        let mut outbox = Outbox::default();
        outbox.add(rows(&[1]), PERIOD, LIMITS);
        assert!(outbox.next("i").is_some());
        let results: Vec<_> = (0..MAX_REJECTIONS).map(|_| outbox.on_answer(Answer::Body(b""))).collect();
        assert_eq!(results.last(), Some(&SendResult::Dropped));
        assert!(outbox.next("i").is_none());
    }

    #[test]
    fn an_invalid_report_is_dropped_at_once() {
        let mut outbox = Outbox::default();
        outbox.add(rows(&[1]), PERIOD, LIMITS);
        assert!(outbox.next("i").is_some());
        assert_eq!(outbox.on_answer(Answer::Invalid), SendResult::Dropped);
        assert!(outbox.next("i").is_none());
    }

    #[test]
    fn numbers_go_on_after_statistics_were_off() {
        let mut outbox = Outbox::default();
        outbox.add(rows(&[1]), PERIOD, LIMITS);
        assert!(outbox.next("i").is_some());
        outbox.clear();
        assert_eq!(outbox.on_answer(Answer::Body(&acknowledgement(1))), SendResult::Forgotten);
        outbox.add(rows(&[2]), PERIOD, LIMITS);
        assert_eq!(outbox.next("i").map(|report| (report.sequence, report.milliseconds)), Some((2, 5000)));
    }

    #[test]
    fn without_rows_there_is_no_report() {
        let mut outbox = Outbox::default();
        outbox.add(Vec::new(), PERIOD, LIMITS);
        assert!(outbox.next("i").is_none());
        outbox.add(rows(&[1]), PERIOD, LIMITS);
        assert_eq!(outbox.next("i").map(|report| report.milliseconds), Some(5000));
    }
}
