//! What came of a slice. Recording costs nanoseconds: the memory is there before, and text is made afterwards.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::failure::{Failure, Tally};

/// Answers that there is room for before memory has to be found: more than a second has.
const ANSWERS: usize = 1 << 20;
const CONNECTS: usize = 1 << 16;

#[derive(Debug)]
pub(crate) struct Record {
    latencies: Vec<Duration>,
    new_connections: Vec<Duration>,
    tally: Tally,
    first_sent: Option<Instant>,
    last_answered: Option<Instant>,
}

impl Record {
    pub(crate) fn new() -> Self {
        Self {
            latencies: touched(ANSWERS),
            new_connections: touched(CONNECTS),
            tally: Tally::default(),
            first_sent: None,
            last_answered: None,
        }
    }

    /// Forgets everything but its memory.
    pub(crate) fn clear(&mut self) {
        self.latencies.clear();
        self.new_connections.clear();
        self.tally = Tally::default();
        (self.first_sent, self.last_answered) = (None, None);
    }

    pub(crate) fn sent(&mut self, now: Instant) {
        self.first_sent.get_or_insert(now);
    }

    /// A statement of an open connection was answered.
    pub(crate) fn answered(&mut self, due: Instant, now: Instant) {
        self.latencies.push(now - due);
        self.last_answered = Some(now);
    }

    /// A new connection has come, asked, and gone.
    pub(crate) fn visited(&mut self, due: Instant, now: Instant) {
        self.new_connections.push(now - due);
        self.last_answered = Some(now);
    }

    pub(crate) fn failed(&mut self, failure: &Failure) {
        self.tally.add(failure);
    }

    /// As it is printed.
    pub(crate) fn tell(&self) -> Value {
        let time = match (self.first_sent, self.last_answered) {
            (Some(first), Some(last)) => last - first,
            _ => Duration::ZERO,
        };
        let mut found = json!({
            "seconds": time.as_secs_f64(),
            "latencies_us": microseconds(&self.latencies),
            "new_connections_us": microseconds(&self.new_connections),
        });
        self.tally.tell(&mut found);
        found
    }
}

/// Memory that the kernel has already given.
fn touched(count: usize) -> Vec<Duration> {
    let mut memory = vec![Duration::MAX; count];
    memory.clear();
    memory
}

/// With one decimal.
fn microseconds(durations: &[Duration]) -> Vec<f64> {
    durations.iter().map(|duration| ((duration.as_nanos() + 50) / 100) as f64 / 10.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_as_they_were_recorded() {
        let mut record = Record::new();
        let start = Instant::now();
        let after = |nanoseconds| start + Duration::from_nanos(nanoseconds);
        record.sent(start);
        record.sent(after(500));
        record.answered(start, after(12_345));
        record.answered(after(500), after(1_000_500));
        record.visited(start, after(2_000_000));
        record.failed(&Failure::Closed);
        let found = record.tell();
        assert_eq!(found["latencies_us"].to_string(), "[12.3,1000.0]");
        assert_eq!(found["new_connections_us"].to_string(), "[2000.0]");
        assert_eq!(found["seconds"], 0.002);
        assert_eq!((&found["errors"], &found["errors_by_kind"]), (&json!(1), &json!({"closed": 1})));
    }

    #[test]
    fn each_slice_begins_anew_in_the_same_memory() {
        let mut record = Record::new();
        record.sent(Instant::now());
        record.failed(&Failure::Closed);
        record.clear();
        assert!(record.latencies.capacity() >= ANSWERS);
        let empty = json!({
            "seconds": 0.0, "latencies_us": [], "new_connections_us": [], "errors": 0, "errors_by_kind": {}, "details": [],
        });
        assert_eq!(record.tell(), empty);
    }
}
