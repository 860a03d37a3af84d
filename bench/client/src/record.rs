//! The results of a slice. Recording an answer takes only nanoseconds: memory for the answers of about a second is
//! allocated before, and numbers become text afterwards.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::failure::{Failure, FailureCounts};

/// The number of answers for which memory is allocated in advance: more than arrive in a second.
const ANSWERS: usize = 1 << 20;
const NEW_CONNECTIONS: usize = 1 << 16;

#[derive(Debug)]
pub(crate) struct Record {
    latencies: Vec<Duration>,
    new_connections: Vec<Duration>,
    failures: FailureCounts,
    first_sent: Option<Instant>,
    last_answered: Option<Instant>,
}

impl Record {
    pub(crate) fn new() -> Self {
        Self {
            latencies: touched(ANSWERS),
            new_connections: touched(NEW_CONNECTIONS),
            failures: FailureCounts::default(),
            first_sent: None,
            last_answered: None,
        }
    }

    /// Removes all results, but keeps the memory.
    pub(crate) fn clear(&mut self) {
        self.latencies.clear();
        self.new_connections.clear();
        self.failures = FailureCounts::default();
        (self.first_sent, self.last_answered) = (None, None);
    }

    pub(crate) fn sent(&mut self, now: Instant) {
        self.first_sent.get_or_insert(now);
    }

    /// Records the answer to a statement of an open connection.
    pub(crate) fn answered(&mut self, due: Instant, now: Instant) {
        self.latencies.push(now - due);
        self.last_answered = Some(now);
    }

    /// Records a new connection that has logged in and has run its statement.
    pub(crate) fn connected(&mut self, due: Instant, now: Instant) {
        self.new_connections.push(now - due);
        self.last_answered = Some(now);
    }

    pub(crate) fn failed(&mut self, failure: &Failure) {
        self.failures.add(failure);
    }

    /// The results as they are printed.
    pub(crate) fn to_json(&self) -> Value {
        let time = match (self.first_sent, self.last_answered) {
            (Some(first), Some(last)) => last - first,
            _ => Duration::ZERO,
        };
        let mut result = json!({
            "seconds": time.as_secs_f64(),
            "latencies_us": microseconds(&self.latencies),
            "new_connections_us": microseconds(&self.new_connections),
        });
        self.failures.add_to(&mut result);
        result
    }
}

/// An empty vector whose memory the kernel has already mapped.
fn touched(count: usize) -> Vec<Duration> {
    let mut memory = vec![Duration::MAX; count];
    memory.clear();
    memory
}

/// Converts durations to microseconds with one decimal place.
fn microseconds(durations: &[Duration]) -> Vec<f64> {
    durations.iter().map(|duration| ((duration.as_nanos() + 50) / 100) as f64 / 10.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_times_are_reported() {
        let mut record = Record::new();
        let start = Instant::now();
        let after = |nanoseconds| start + Duration::from_nanos(nanoseconds);
        record.sent(start);
        record.sent(after(500));
        record.answered(start, after(12_345));
        record.answered(after(500), after(1_000_500));
        record.connected(start, after(2_000_000));
        record.failed(&Failure::Closed);
        let result = record.to_json();
        assert_eq!(result["latencies_us"].to_string(), "[12.3,1000.0]");
        assert_eq!(result["new_connections_us"].to_string(), "[2000.0]");
        assert_eq!(result["seconds"], 0.002);
        assert_eq!((&result["errors"], &result["errors_by_kind"]), (&json!(1), &json!({"closed": 1})));
    }

    #[test]
    fn clear_removes_all_results_and_keeps_the_memory() {
        let mut record = Record::new();
        record.sent(Instant::now());
        record.failed(&Failure::Closed);
        record.clear();
        assert!(record.latencies.capacity() >= ANSWERS);
        let empty = json!({
            "seconds": 0.0, "latencies_us": [], "new_connections_us": [], "errors": 0, "errors_by_kind": {}, "details": [],
        });
        assert_eq!(record.to_json(), empty);
    }
}
