//! How long things took.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde_json::Value;

use crate::failure::Failure;

/// Durations from 1 µs to 5 minutes (longer ones count as that), to three digits.
#[derive(Debug)]
pub(crate) struct Latency(Histogram<u64>);

const MOST: Duration = Duration::from_secs(300);

impl Latency {
    pub(crate) fn new() -> Result<Self, Failure> {
        let most = MOST.as_nanos() as u64;
        Histogram::new_with_bounds(1000, most, 3).map(Self).map_err(|error| Failure::Setting(error.to_string()))
    }

    pub(crate) fn record(&mut self, duration: Duration) {
        self.0.saturating_record(duration.as_nanos() as u64);
    }

    /// Puts `p50_ms`, `p95_ms`, `p99_ms` and `max_ms` into what is printed; nothing when nothing was recorded.
    pub(crate) fn tell(&self, found: &mut Value) {
        if self.0.is_empty() {
            return;
        }
        let milliseconds = |nanoseconds: u64| nanoseconds as f64 / 1e6;
        for (name, quantile) in [("p50_ms", 0.50), ("p95_ms", 0.95), ("p99_ms", 0.99)] {
            found[name] = milliseconds(self.0.value_at_quantile(quantile)).into();
        }
        found["max_ms"] = milliseconds(self.0.max()).into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn percentiles_are_in_milliseconds() {
        let mut latency = Latency::new().expect("bounds");
        for microseconds in 1..=1000 {
            latency.record(Duration::from_micros(microseconds));
        }
        latency.record(Duration::from_secs(3600));
        let mut found = json!({});
        latency.tell(&mut found);
        for (name, expected) in [("p50_ms", 0.5), ("p95_ms", 0.95), ("p99_ms", 0.99)] {
            let value = found[name].as_f64().expect(name);
            assert!((value - expected).abs() < expected * 0.003, "{name} {value}");
        }
        assert!((found["max_ms"].as_f64().expect("max") - 300_000.0).abs() < 300.0);
    }

    #[test]
    fn of_nothing_nothing_is_told() {
        let mut found = json!({});
        Latency::new().expect("bounds").tell(&mut found);
        assert_eq!(found, json!({}));
    }
}
