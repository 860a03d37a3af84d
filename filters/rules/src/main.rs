//! `tidevoy-rules` reads rules and requests from standard input, and prints what is wrong with the rules, and what would
//! happen to each request. The control plane runs it, so that there is only one engine.
//!
//! Input: `{"rules": [...], "requests": [{"statement": "SELECT 1", "user": "app"}]}`. Without valid rules, no request is
//! judged.

use std::io::{Read, stdin, stdout};
use std::net::IpAddr;
use std::process::ExitCode;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sql_text::{Normalizer, hexadecimal, without_comments};
use statement_rules::{CommandKind, Outcome, Request, RuleConfig, RuleError, RuleSet, StatementInfo};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Input {
    rules: Vec<Value>,
    #[serde(default)]
    requests: Vec<RequestInput>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RequestInput {
    statement: String,
    #[serde(default)]
    command: CommandKind,
    #[serde(default)]
    user: String,
    #[serde(default)]
    database: String,
    #[serde(default)]
    client: Option<IpAddr>,
    #[serde(default)]
    group: String,
}

#[derive(Serialize)]
struct Output {
    errors: Vec<RuleError>,
    results: Vec<RequestOutput>,
}

#[derive(Serialize)]
struct RequestOutput {
    statements: Vec<StatementOutput>,
    /// The rules that apply, in order.
    hits: Vec<HitOutput>,
    /// The error that the client gets.
    error: Option<ErrorOutput>,
    /// The text that the node gets. None: the client's text.
    text: Option<String>,
    /// The rules whose limits must allow the request.
    limits: Vec<String>,
    must_log: bool,
}

#[derive(Serialize)]
struct StatementOutput {
    /// The text that patterns match.
    text: String,
    normalized: String,
    digest: String,
}

#[derive(Serialize)]
struct HitOutput {
    rule: String,
    dry_run: bool,
}

#[derive(Serialize)]
struct ErrorOutput {
    code: u16,
    state: String,
    message: String,
}

fn main() -> ExitCode {
    let mut text = Vec::new();
    let result = stdin()
        .read_to_end(&mut text)
        .map_err(|error| error.to_string())
        .and_then(|_| serde_json::from_slice(&text).map_err(|error| format!("the input is no valid JSON: {error}")))
        .and_then(|input| serde_json::to_writer(stdout().lock(), &run(input)).map_err(|error| error.to_string()));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tidevoy-rules: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(input: Input) -> Output {
    let mut errors = Vec::new();
    let mut configs = Vec::new();
    for (index, value) in input.rules.into_iter().enumerate() {
        let rule = value.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
        match serde_json::from_value::<RuleConfig>(value) {
            Ok(config) => configs.push(config),
            Err(error) => {
                errors.push(RuleError {
                    index: Some(index),
                    rule,
                    key: String::new(),
                    reason: error.to_string(),
                    position: None,
                });
            }
        }
    }
    if !errors.is_empty() {
        return Output { errors, results: Vec::new() };
    }
    match RuleSet::new(configs) {
        Ok(rules) => Output { errors, results: input.requests.iter().map(|request| judge(&rules, request)).collect() },
        Err(errors) => Output { errors, results: Vec::new() },
    }
}

fn judge(rules: &RuleSet, request: &RequestInput) -> RequestOutput {
    let mut normalizer = Normalizer::default();
    let mut statements = Vec::new();
    let mut classes = Vec::new();
    for text in sql_text::statements(request.statement.as_bytes()) {
        let normalized = normalizer.normalize(&text);
        let digest = sql_text::digest(normalized);
        let class = rules.classify(normalized, &digest);
        statements.push(StatementOutput {
            text: lossy(&without_comments(&text)),
            normalized: lossy(normalized),
            digest: hexadecimal(&digest),
        });
        classes.push((text, digest, class));
    }
    let infos = classes.iter().map(|(text, digest, class)| StatementInfo { text, digest, class }).collect::<Vec<_>>();
    let verdict = rules.judge(&Request {
        command: request.command,
        statements: &infos,
        user: request.user.as_bytes(),
        database: request.database.as_bytes(),
        client: request.client,
        group: &request.group,
    });
    let hits = verdict.hits.iter();
    let hits = hits.map(|hit| HitOutput { rule: rules.name(hit.rule).into(), dry_run: hit.is_dry_run }).collect();
    let (error, text, limits) = match verdict.outcome {
        Outcome::Block(answer) => {
            let error = ErrorOutput { code: answer.code, state: lossy(&answer.state), message: answer.message };
            (Some(error), None, Vec::new())
        }
        Outcome::Pass { text, limits } => (None, text.map(|text| lossy(&text)), limits),
    };
    let limits = limits.iter().map(|key| rules.name(key.rule).into()).collect();
    RequestOutput { statements, hits, error, text, limits, must_log: verdict.must_log }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
