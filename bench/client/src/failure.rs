//! The failures of connections and of a run, and how often they occurred.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Map, Value};
use thiserror::Error;

/// Why a connection, or the whole run, has failed.
#[derive(Debug, Error)]
pub(crate) enum Failure {
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    #[error("the server closed the connection, although it was still needed")]
    Closed,
    #[error("the server answered with error {code}: {text}")]
    Refused { code: u16, text: String },
    #[error("the server sent what is no answer of MySQL's protocol: {0}")]
    Protocol(String),
    #[error("TLS failed: {0}")]
    Tls(#[from] rustls::Error),
    #[error("nothing came within {} s", .0.as_secs_f64())]
    Slow(Duration),
    #[error("no connection is left that could ask")]
    Unsent,
    #[error("an answer is not what was asked for: {0}")]
    Content(String),
    #[error("{0}")]
    Setting(String),
    #[error("{done} of {wanted} connections to {address} were logged in, then one failed: {failure}")]
    Crowd { address: SocketAddr, done: usize, wanted: usize, failure: Box<Failure> },
}

impl From<rustix::io::Errno> for Failure {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Io(errno.into())
    }
}

impl Failure {
    /// The short name under which the failure is counted.
    pub(crate) fn kind(&self) -> Cow<'static, str> {
        match self {
            Self::Io(error) => match error.kind() {
                io::ErrorKind::ConnectionRefused => "refused".into(),
                io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => "reset".into(),
                kind => kind.to_string().into(),
            },
            Self::Closed => "closed".into(),
            Self::Refused { code, .. } => format!("error {code}").into(),
            Self::Protocol(_) => "protocol".into(),
            Self::Tls(_) => "tls".into(),
            Self::Slow(_) => "slow".into(),
            Self::Unsent => "unsent".into(),
            Self::Content(_) => "content".into(),
            Self::Setting(_) => "setting".into(),
            Self::Crowd { failure, .. } => failure.kind(),
        }
    }
}

/// Counts of failures by kind, and the texts of the first failures.
#[derive(Debug, Default)]
pub(crate) struct FailureCounts {
    kinds: BTreeMap<Cow<'static, str>, u64>,
    details: Vec<String>,
}

/// How many texts are kept.
const MAX_DETAILS: usize = 20;

impl FailureCounts {
    pub(crate) fn add(&mut self, failure: &Failure) {
        self.add_detailed(failure.kind(), || failure.to_string());
    }

    pub(crate) fn add_detailed(&mut self, kind: Cow<'static, str>, detail: impl FnOnce() -> String) {
        *self.kinds.entry(kind).or_default() += 1;
        if self.details.len() < MAX_DETAILS {
            self.details.push(detail());
        }
    }

    pub(crate) fn total(&self) -> u64 {
        self.kinds.values().sum()
    }

    /// Adds `errors`, `errors_by_kind` and `details` to the printed `result`.
    pub(crate) fn add_to(&self, result: &mut Value) {
        let kinds: Map<String, Value> =
            self.kinds.iter().map(|(kind, &count)| (kind.to_string(), count.into())).collect();
        result["errors"] = self.total().into();
        result["errors_by_kind"] = kinds.into();
        result["details"] = self.details.clone().into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn failures_are_counted_by_kind() {
        let mut counts = FailureCounts::default();
        for _ in 0..30 {
            counts.add(&Failure::Refused { code: 1040, text: "Too many connections".into() });
        }
        counts.add(&Failure::Io(io::ErrorKind::ConnectionReset.into()));
        let mut result = json!({});
        counts.add_to(&mut result);
        assert_eq!(result["errors"], 31);
        assert_eq!(result["errors_by_kind"], json!({"error 1040": 30, "reset": 1}));
        assert_eq!(result["details"].as_array().map(Vec::len), Some(MAX_DETAILS));
    }

    #[test]
    fn failed_mass_login_is_counted_by_the_kind_of_its_cause() {
        let (address, failure) = (([127, 0, 0, 1], 4000).into(), Box::new(Failure::Closed));
        let failure = Failure::Crowd { address, done: 3, wanted: 5, failure };
        assert_eq!(failure.kind(), "closed");
        assert!(failure.to_string().starts_with("3 of 5 connections to 127.0.0.1:4000 were logged in"));
    }
}
