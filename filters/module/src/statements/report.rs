//! Sends the statistics to the control plane: a unary gRPC call to the cluster of the xDS stream, by Envoy itself.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use envoy_abi::extension::{Counter, Metrics};
use envoy_abi::http_callout::{HttpClient, HttpResponse};

use super::messages::framed;
use super::outbox::{Answer, Outbox, SendResult};
use super::rows::RowLimits;
use super::window;
use crate::grpc::{INVALID_ARGUMENT, Method};
use crate::telemetry;

const REPORT: Method =
    Method { path: "/tidevoy.statements.v1.StatementReports/Report", timeout: Duration::from_secs(5) };
/// The tag of the calls.
pub(crate) const TAG: u64 = 0;
/// Of several failures in a row, only this one is logged. The first ones are usual: a control plane accepts no reports
/// until it has got the first metrics of this Envoy.
const LOGGED_FAILURE: u32 = 3;
/// The control plane accepts messages of at most 4 MiB. This leaves room for the rows without a statement, one a node.
const MAX_BYTES: usize = 2 << 20;

/// Reports periodically. All methods run on Envoy's main thread.
pub(crate) struct StatementReporter {
    reports: Counter,
    outbox: RefCell<Outbox>,
    /// When the statistics were last taken. None: they are off.
    taken_at: Cell<Option<Duration>>,
    is_waiting: Cell<bool>,
    /// How many reports in a row have failed.
    failures: Cell<u32>,
    /// Results that are not counted yet, because Envoy's hook for responses gets no metrics.
    results: RefCell<Vec<SendResult>>,
}

impl StatementReporter {
    pub(crate) fn new(metrics: &mut Metrics) -> Result<Self, String> {
        Ok(Self {
            reports: metrics.counter("statement_reports", &["result"])?,
            outbox: RefCell::default(),
            taken_at: Cell::new(None),
            is_waiting: Cell::new(false),
            failures: Cell::new(0),
            results: RefCell::default(),
        })
    }

    /// Reports if it is time to.
    pub(crate) fn tick(&self, now: Duration, metrics: &Metrics, http: &HttpClient) {
        for result in self.results.take() {
            metrics.add(self.reports, &[name(result)], 1);
        }
        let Some(config) = super::config() else {
            if self.taken_at.take().is_some() {
                window::clear();
                self.outbox.borrow_mut().clear();
            }
            return;
        };
        let Some(taken_at) = self.taken_at.get() else {
            self.taken_at.set(Some(now));
            return;
        };
        let period = now.saturating_sub(taken_at);
        if period < config.interval {
            return;
        }
        self.taken_at.set(Some(now));
        let limits = RowLimits { rows: config.max_rows, bytes: MAX_BYTES };
        self.outbox.borrow_mut().add(window::take_rows(limits), period, limits);
        if self.is_waiting.get() {
            return;
        }
        let Some(body) = self.outbox.borrow_mut().next(telemetry::instance()).map(framed) else { return };
        self.is_waiting.set(true);
        if let Err(error) = REPORT.call(http, TAG, &body)
            && self.is_waiting.get()
        {
            self.on_failure(SendResult::Failed, &error.to_string());
        }
    }

    /// Applies Envoy's response to the report.
    pub(crate) fn on_response(&self, response: Option<&HttpResponse>) {
        let result = self.outbox.borrow_mut().on_answer(answer(response));
        self.is_waiting.set(false);
        match result {
            SendResult::Acknowledged => {
                self.failures.set(0);
                self.results.borrow_mut().push(result);
            }
            SendResult::Failed | SendResult::Dropped => self.on_failure(result, &reason(response)),
            SendResult::Forgotten => {}
        }
    }

    fn on_failure(&self, result: SendResult, reason: &str) {
        self.is_waiting.set(false);
        self.results.borrow_mut().push(result);
        self.failures.set(self.failures.get().saturating_add(1));
        if self.failures.get() == LOGGED_FAILURE {
            envoy_abi::log!(
                Warn,
                "the control plane did not accept the statistics of statements, which are sent again ({reason})"
            );
        }
    }
}

fn answer(response: Option<&HttpResponse>) -> Answer<'_> {
    match response {
        Some(response) if response.header(":status") != Some("200") => Answer::Missing,
        // Without a message, gRPC sends the status as a header.
        Some(response) if response.header("grpc-status") == Some(INVALID_ARGUMENT) => Answer::Invalid,
        Some(response) => Answer::Body(&response.body),
        None => Answer::Missing,
    }
}

/// Why a report was not acknowledged.
fn reason(response: Option<&HttpResponse>) -> String {
    let Some(response) = response else { return "the connection was reset".to_owned() };
    let value = |name: &&str| response.header(name).map(|value| format!("{name}: {value}"));
    ["grpc-message", "grpc-status", ":status"].iter().find_map(value).unwrap_or_default()
}

fn name(result: SendResult) -> &'static str {
    match result {
        SendResult::Acknowledged => "acknowledged",
        SendResult::Failed => "failed",
        SendResult::Dropped => "dropped",
        SendResult::Forgotten => "forgotten",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(headers: &[(&str, &str)]) -> HttpResponse {
        let headers = headers.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
        HttpResponse::new(headers, b"body".to_vec())
    }

    #[test]
    fn only_a_response_of_the_control_plane_is_an_answer() {
        assert_eq!(answer(None), Answer::Missing);
        assert_eq!(answer(Some(&response(&[(":status", "503")]))), Answer::Missing);
        assert_eq!(answer(Some(&response(&[(":status", "200")]))), Answer::Body(b"body"));
        assert_eq!(answer(Some(&response(&[(":status", "200"), ("grpc-status", "14")]))), Answer::Body(b"body"));
        assert_eq!(answer(Some(&response(&[(":status", "200"), ("grpc-status", "3")]))), Answer::Invalid);
    }

    #[test]
    fn the_most_exact_reason_is_logged() {
        let all = [(":status", "200"), ("grpc-status", "14"), ("grpc-message", "why")];
        assert_eq!(reason(Some(&response(&all))), "grpc-message: why");
        assert_eq!(reason(Some(&response(&all[..2]))), "grpc-status: 14");
        assert_eq!(reason(Some(&response(&all[..1]))), ":status: 200");
        assert_eq!(reason(None), "the connection was reset");
    }
}
