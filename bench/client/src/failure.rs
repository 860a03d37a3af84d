//! What can go wrong, and how often it did.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Map, Value};
use thiserror::Error;

/// What ended a connection, or the whole run.
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
    /// A short name to count by.
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

/// Failures by kind, and what the first of them said.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    kinds: BTreeMap<Cow<'static, str>, u64>,
    details: Vec<String>,
}

/// More say nothing new.
const MOST_DETAILS: usize = 20;

impl Tally {
    pub(crate) fn add(&mut self, failure: &Failure) {
        self.add_detailed(failure.kind(), || failure.to_string());
    }

    pub(crate) fn add_detailed(&mut self, kind: Cow<'static, str>, detail: impl FnOnce() -> String) {
        *self.kinds.entry(kind).or_default() += 1;
        if self.details.len() < MOST_DETAILS {
            self.details.push(detail());
        }
    }

    pub(crate) fn total(&self) -> u64 {
        self.kinds.values().sum()
    }

    /// Puts `errors`, `errors_by_kind` and `details` into what is printed.
    pub(crate) fn tell(&self, found: &mut Value) {
        let kinds: Map<String, Value> =
            self.kinds.iter().map(|(kind, &count)| (kind.to_string(), count.into())).collect();
        found["errors"] = self.total().into();
        found["errors_by_kind"] = kinds.into();
        found["details"] = self.details.clone().into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn failures_are_counted_by_kind() {
        let mut tally = Tally::default();
        for _ in 0..30 {
            tally.add(&Failure::Refused { code: 1040, text: "Too many connections".into() });
        }
        tally.add(&Failure::Io(io::ErrorKind::ConnectionReset.into()));
        let mut found = json!({});
        tally.tell(&mut found);
        assert_eq!(found["errors"], 31);
        assert_eq!(found["errors_by_kind"], json!({"error 1040": 30, "reset": 1}));
        assert_eq!(found["details"].as_array().map(Vec::len), Some(MOST_DETAILS));
    }

    #[test]
    fn what_ended_a_crowd_gives_it_its_kind() {
        let (address, failure) = (([127, 0, 0, 1], 4000).into(), Box::new(Failure::Closed));
        let failure = Failure::Crowd { address, done: 3, wanted: 5, failure };
        assert_eq!(failure.kind(), "closed");
        assert!(failure.to_string().starts_with("3 of 5 connections to 127.0.0.1:4000 were logged in"));
    }
}
