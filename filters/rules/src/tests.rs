//! Rules and statements, from the configuration to the verdict.

mod evasion;
mod reference;
mod verdicts;

use sql_text::Normalizer;

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
        let mut normalizer = Normalizer::default();
        let classes = sql_text::statements(text).map(|statement| {
            let normalized = normalizer.normalize(&statement);
            let digest = sql_text::digest(normalized);
            (statement, digest, rules.classify(normalized, &digest))
        });
        let classes = classes.collect::<Vec<_>>();
        let info = |(text, digest, class)| StatementInfo { text, digest, class };
        let statements = classes.iter().map(|(text, digest, class)| info((text, digest, class))).collect::<Vec<_>>();
        rules.judge(&Request {
            command: self.command,
            statements: &statements,
            user: self.user.as_bytes(),
            database: self.database.as_bytes(),
            client: self.address.parse().ok(),
            group: self.group,
        })
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

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn digest_of(sql: &str) -> String {
    hex(&sql_text::digest(Normalizer::default().normalize(sql.as_bytes())))
}
