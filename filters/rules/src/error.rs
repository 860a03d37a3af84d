//! Why a rule cannot be used.

use serde::Serialize;

/// An error in a rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("{}", self.text())]
pub struct RuleError {
    /// The index of the rule in the list. None: the error is in all rules together.
    pub index: Option<usize>,
    /// The name of the rule; empty if there is none.
    pub rule: String,
    /// The key, such as `limit.per_second`; empty: the rule as a whole.
    pub key: String,
    pub reason: String,
    /// The character of the pattern at which the error is, counted from 1.
    pub position: Option<usize>,
}

impl RuleError {
    fn text(&self) -> String {
        let rule = if self.index.is_some() { format!("rule {}", self.rule) } else { String::new() };
        let parts = [rule.as_str(), &self.key, &self.reason];
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(": ")
    }
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
        RuleError { index: Some(index), rule: rule.into(), ..self.of_all_rules() }
    }

    pub(crate) fn of_all_rules(self) -> RuleError {
        RuleError {
            index: None,
            rule: String::new(),
            key: self.key.into(),
            reason: self.reason,
            position: self.position,
        }
    }
}
