//! Rules and statements, from the configuration to the verdict.

mod evasion;
mod reference;
mod verdicts;

use sql_text::{Normalizer, hexadecimal};

use crate::{CommandKind, Hit, Outcome, Request, RuleConfig, RuleSet, StatementInfo, Verdict};

fn configs(json: &str) -> Vec<RuleConfig> {
    serde_json::from_str(json).expect("rules")
}

fn rules(json: &str) -> RuleSet {
    RuleSet::new(configs(json)).expect("rules")
}

/// A client whose user is `app`, with the database `Shop`, at 10.1.2.3.
struct Client {
    command: CommandKind,
    user: &'static str,
    database: &'static str,
    address: &'static str,
    group: &'static str,
}

const CLIENT: Client =
    Client { command: CommandKind::Query, user: "app", database: "Shop", address: "10.1.2.3", group: "main" };

impl Client {
    fn judge(&self, rules: &RuleSet, text: &[u8]) -> Verdict {
        let request = Request {
            command: self.command,
            user: self.user.as_bytes(),
            database: self.database.as_bytes(),
            client: self.address.parse().ok(),
            group: self.group,
            ..Request::default()
        };
        rules.judge_text(text, &request)
    }
}

/// The outcome in short: `pass`, `block MESSAGE`, or the new text.
fn outcome(verdict: &Verdict) -> String {
    match &verdict.outcome {
        Outcome::Block(answer) => format!("block {}", answer.message),
        Outcome::Pass { text: Some(text), .. } => String::from_utf8_lossy(text).into_owned(),
        Outcome::Pass { text: None, .. } => "pass".into(),
    }
}

fn hits(verdict: &Verdict) -> Vec<usize> {
    verdict.hits.iter().map(|hit| hit.rule).collect()
}

fn digest_of(sql: &str) -> String {
    hexadecimal(&sql_text::digest(Normalizer::default().normalize(sql.as_bytes())))
}
