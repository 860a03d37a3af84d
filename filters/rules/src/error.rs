//! Why a rule cannot be used.

use serde::Serialize;

/// An error in a rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("rule {rule}: {key}: {reason}")]
pub struct RuleError {
    /// The index of the rule in the list.
    pub index: usize,
    /// The name of the rule; empty if it has none.
    pub rule: String,
    /// The key, such as `limit.per_second`; empty: the rule as a whole.
    pub key: String,
    pub reason: String,
    /// The character of the pattern at which the error is, counted from 1.
    pub position: Option<usize>,
}

/// An error within one rule, before it is known which one.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct KeyError {
    pub(crate) key: &'static str,
    pub(crate) reason: String,
    pub(crate) position: Option<usize>,
}

impl KeyError {
    pub(crate) fn new(key: &'static str, reason: impl Into<String>) -> Self {
        Self { key, reason: reason.into(), position: None }
    }

    pub(crate) fn of_rule(self, index: usize, rule: &str) -> RuleError {
        RuleError { index, rule: rule.into(), key: self.key.into(), reason: self.reason, position: self.position }
    }
}
