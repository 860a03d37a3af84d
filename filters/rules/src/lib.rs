//! Rules for statements: which to block, limit, rewrite or log.
//!
//! A [`RuleSet`] judges each request of a client. The first rule whose conditions hold decides, unless it says that the
//! following ones apply, too. All patterns are matched in one pass, so many rules cost about as much as few.
//!
//! ```
//! use statement_rules::{Outcome, Request, RuleConfig, RuleSet};
//!
//! let config = r#"{"name": "no-sleep", "pattern": "sleep\\(", "block": {}}"#;
//! let rules = RuleSet::new(vec![serde_json::from_str::<RuleConfig>(config).unwrap()]).unwrap();
//! let verdict = rules.judge_text(b"SELECT SLEEP /* a */ (10)", &Request { user: b"app", ..Request::default() });
//! assert!(matches!(verdict.outcome, Outcome::Block(answer) if answer.code == 1148));
//! ```

mod answer;
mod config;
mod error;
mod judge;
mod limit;
mod limiter;
mod pattern;
mod rule;
mod rule_set;
#[cfg(test)]
mod tests;

pub use answer::Answer;
pub use config::{BlockConfig, CommandKind, LimitConfig, LimitScope, RewriteConfig, RuleConfig};
pub use error::RuleError;
pub use judge::{Hit, Outcome, Request, StatementInfo, Verdict};
pub use limit::LimitKey;
pub use limiter::{Exceeded, Limiter, Permit};
pub use rule_set::{Class, RuleSet};
