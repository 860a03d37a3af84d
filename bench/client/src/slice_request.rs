//! The request for one slice of load, a line of JSON.

use std::ops::RangeInclusive;
use std::time::Duration;

use serde_json::{Map, Value};

use crate::failure::Failure;

/// The allowed lengths of a slice.
const SECONDS: RangeInclusive<f64> = 1e-6..=3600.0;
/// The allowed rates, per second.
const RATES: RangeInclusive<f64> = 1e-4..=1e7;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct SliceRequest {
    /// The index of the target.
    pub(crate) target: usize,
    /// How long statements and connections become due.
    pub(crate) duration: Duration,
    pub(crate) pace: Pace,
    /// New connections per second. None: no new connections.
    pub(crate) new_connections: Option<f64>,
}

/// How often the open connections send statements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Pace {
    /// Each connection sends the next statement as soon as the last one is answered.
    FullSpeed,
    /// Statements per second, for all connections together.
    AtRate(f64),
    Never,
}

impl SliceRequest {
    /// Reads a request for `targets` targets with `connections` open connections each.
    pub(crate) fn read(line: &[u8], targets: usize, connections: usize) -> Result<Self, Failure> {
        Self::parse(line, targets, connections).map_err(|reason| {
            let shown = &line[..line.len().min(200)];
            Failure::Setting(format!("the request \"{}\" is invalid: {reason}", shown.trim_ascii().escape_ascii()))
        })
    }

    fn parse(line: &[u8], targets: usize, connections: usize) -> Result<Self, String> {
        let request: Map<String, Value> = serde_json::from_slice(line).map_err(|error| error.to_string())?;
        if let Some(key) =
            request.keys().find(|key| !["target", "seconds", "rate", "new_connections"].contains(&&***key))
        {
            return Err(format!("{key:?} is unknown"));
        }
        let target = request.get("target").and_then(Value::as_u64).unwrap_or(u64::MAX);
        if target >= targets as u64 {
            return Err(format!("target must be a number from 0 to {}", targets - 1));
        }
        let seconds = number(&request, "seconds", SECONDS)?.ok_or("it has no seconds")?;
        let pace = match number_or_zero(&request, "rate")? {
            None => Pace::FullSpeed,
            Some(0.0) => Pace::Never,
            Some(_) if connections == 0 => return Err("rate must be 0 without --connections".into()),
            Some(rate) => Pace::AtRate(rate),
        };
        Ok(Self {
            target: target as usize,
            duration: Duration::from_secs_f64(seconds),
            pace,
            new_connections: number_or_zero(&request, "new_connections")?.filter(|&rate| rate > 0.0),
        })
    }
}

/// None: the key is absent or null.
fn number(request: &Map<String, Value>, key: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, String> {
    match request.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_f64() {
            Some(number) if range.contains(&number) => Ok(Some(number)),
            _ => Err(format!("{key} must be a number from {} to {}", range.start(), range.end())),
        },
    }
}

fn number_or_zero(request: &Map<String, Value>, key: &str) -> Result<Option<f64>, String> {
    if request.get(key).and_then(Value::as_f64) == Some(0.0) {
        return Ok(Some(0.0));
    }
    number(request, key, RATES).map_err(|reason| format!("{reason}, or 0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<SliceRequest, Failure> {
        SliceRequest::read(line.as_bytes(), 2, 16)
    }

    #[test]
    fn orders_are_read_with_and_without_rates() {
        let request = SliceRequest {
            target: 1,
            duration: Duration::from_millis(30),
            pace: Pace::AtRate(6000.0),
            new_connections: Some(300.0),
        };
        let line = r#"{"target": 1, "seconds": 0.03, "rate": 6000.0, "new_connections": 300}"#;
        assert_eq!(read(line).expect("an request"), request);
        let line = r#"{"target": 1, "seconds": 0.03, "rate": null, "new_connections": null}"#;
        let plain = SliceRequest { pace: Pace::FullSpeed, new_connections: None, ..request };
        assert_eq!(read(line).expect("an request"), plain);
        assert_eq!(read(r#"{"target": 1, "seconds": 0.03}"#).expect("an request"), plain);
        let line = r#"{"target": 1, "seconds": 0.03, "rate": 0, "new_connections": 0}"#;
        assert_eq!(read(line).expect("an request"), SliceRequest { pace: Pace::Never, ..plain });
    }

    #[test]
    fn invalid_orders_are_rejected_with_a_reason() {
        for (line, message) in [
            ("", "EOF"),
            ("[1]", "invalid type"),
            (r#"{"target": 0, "seconds": 1"#, "EOF"),
            (r#"{"target": 2, "seconds": 1}"#, "target must be a number from 0 to 1"),
            (r#"{"target": -1, "seconds": 1}"#, "target must be"),
            (r#"{"seconds": 1}"#, "target must be"),
            (r#"{"target": 0}"#, "no seconds"),
            (r#"{"target": 0, "seconds": 0}"#, "seconds must be"),
            (r#"{"target": 0, "seconds": 1, "rate": -1}"#, "rate must be a number from 0.0001 to 10000000, or 0"),
            (r#"{"target": 0, "seconds": 1, "new_connections": 1e300}"#, "new_connections must be"),
            (r#"{"target": 0, "seconds": 1, "new_connections": "7"}"#, "new_connections must be"),
            (r#"{"target": 0, "seconds": 1, "rates": 1}"#, "\"rates\" is unknown"),
        ] {
            let failure = read(line).expect_err(line).to_string();
            assert!(failure.contains(message) && failure.contains("is invalid"), "{failure}");
        }
        let failure =
            SliceRequest::read(br#"{"target": 0, "seconds": 1, "rate": 5}"#, 1, 0).expect_err("no connections");
        assert!(failure.to_string().contains("without --connections"), "{failure}");
    }
}
