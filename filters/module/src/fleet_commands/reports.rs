//! The results of commands that the control plane has not received.

use std::time::Duration;

use envoy_abi::http_callout::HttpResponse;

use super::messages::{ReportRequest, ResultMessage};
use crate::grpc::UNAVAILABLE;
use crate::telemetry;

/// How long a report is sent again. The control plane does not wait longer for results.
const MAX_AGE: Duration = Duration::from_secs(2);
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

pub(super) struct Report {
    pub(super) message: ReportRequest,
    /// When it is sent next.
    at: Duration,
    expires_at: Duration,
}

#[derive(Default)]
pub(super) struct ReportQueue(Vec<Report>);

impl ReportQueue {
    /// Adds a report for each result, so that none exceeds the limit of a message.
    pub(super) fn add(&mut self, results: Vec<ResultMessage>, now: Duration) {
        self.0.extend(results.into_iter().map(|result| Report {
            message: ReportRequest { instance: telemetry::instance().to_owned(), results: vec![result] },
            at: now,
            expires_at: now + MAX_AGE,
        }));
    }

    /// Removes the reports to send now.
    pub(super) fn take_due(&mut self, now: Duration) -> Vec<Report> {
        self.0.extract_if(.., |report| report.at <= now).collect()
    }

    /// Adds a report again, to be sent after [`RETRY_INTERVAL`]. It is dropped if it would then be older than [`MAX_AGE`].
    pub(super) fn retry(&mut self, report: Report, now: Duration) {
        let at = now + RETRY_INTERVAL;
        if at <= report.expires_at {
            self.0.push(Report { at, ..report });
        }
    }
}

/// Whether the control plane has refused a report, but may accept it later.
pub(super) fn may_succeed_later(response: &HttpResponse) -> bool {
    response.header("grpc-status") == Some(UNAVAILABLE) // without a message, gRPC sends the status as a header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_is_sent_again_while_the_control_plane_waits_for_it() {
        let mut queue = ReportQueue::default();
        queue.add(vec![ResultMessage::default(); 2], Duration::ZERO);
        let mut sent_at = Vec::new();
        for milliseconds in (0..5000).step_by(100) {
            let now = Duration::from_millis(milliseconds);
            let mut due = queue.take_due(now);
            sent_at.extend(due.iter().map(|_| milliseconds));
            due.truncate(1); // the second one is received at once
            due.into_iter().for_each(|report| queue.retry(report, now));
        }
        assert_eq!(sent_at, [0, 0, 500, 1000, 1500, 2000]);
        assert!(queue.0.is_empty());
    }

    #[test]
    fn only_an_unavailable_service_may_accept_the_report_later() {
        let response = |status: &str| HttpResponse::new(vec![("grpc-status".into(), status.into())], Vec::new());
        assert!(may_succeed_later(&response(UNAVAILABLE)));
        assert!(!may_succeed_later(&response("3")) && !may_succeed_later(&HttpResponse::new(Vec::new(), Vec::new())));
    }
}
