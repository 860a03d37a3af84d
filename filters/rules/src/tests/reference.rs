//! The engine agrees with one that tries one rule after the other.

use proptest::prelude::*;
use sql_text::{Digest, without_comments};

use super::*;
use crate::pattern;
use crate::rule::{Action, EXECUTE, PREPARE, QUERY, Rule, SessionInfo};

/// Judges one statement: the rules that apply, and the new text or whether it is blocked.
fn judge_slowly(rules: &[Rule], sql: &[u8], client: &Client) -> (Vec<usize>, Option<Vec<u8>>, bool) {
    let command = match client.command {
        CommandKind::Query => QUERY,
        CommandKind::Prepare => PREPARE,
        CommandKind::Execute => EXECUTE,
    };
    let database = sql_text::lowercase(client.database.as_bytes());
    let session = SessionInfo {
        user: client.user.as_bytes(),
        database: &database,
        client: client.address.parse().ok(),
        group: client.group,
    };
    let mut changed = None::<Vec<u8>>;
    let mut hits = Vec::new();
    for (index, rule) in rules.iter().enumerate() {
        let current = changed.clone().unwrap_or_else(|| sql.to_vec());
        let mut normalizer = Normalizer::default();
        let normalized = normalizer.normalize(&current);
        let digest: Digest = sql_text::digest(normalized);
        let matches = |pattern: &Option<regex_syntax::hir::Hir>, text: &[u8]| {
            pattern.as_ref().is_none_or(|hir| pattern::compile("", hir).expect("a pattern").is_match(text))
        };
        let fits = rule.is_enabled
            && rule.fits_command(command)
            && (rule.digests.is_empty() || rule.digests.contains(&digest))
            && matches(&rule.normalized, normalized)
            && matches(&rule.pattern, &without_comments(&current))
            && rule.fits_session(&session);
        if !fits {
            continue;
        }
        let new = match &rule.action {
            Action::Rewrite(rewrite) => match rewrite.apply(&current, &without_comments(&current)) {
                None => continue,
                new => new,
            },
            _ => None,
        };
        hits.push(index);
        if rule.is_dry_run {
            continue;
        }
        if matches!(rule.action, Action::Block(_)) {
            return (hits, None, true);
        }
        changed = new.or(changed);
        if !rule.continues {
            break;
        }
    }
    (hits, changed, false)
}

const STATEMENTS: [&str; 6] = [
    "select * from t where a = 1",
    "select b from t",
    "delete /* c */ from `u` where b='x'",
    "insert into u values (1, 2)",
    "update t set a = 2 where b = 3",
    "select t.a, u.b from t join u on t.a = u.a",
];

fn any_rule() -> impl Strategy<Value = String> {
    let patterns = ["t", "from t", "a = \\\\d", "^select", "x|2", "u[ `]", "insert .* values"];
    let text = |key: &'static str| {
        prop::option::weighted(0.4, prop::sample::select(patterns.to_vec()))
            .prop_map(move |pattern| pattern.map_or(String::new(), |text| format!(r#", "{key}": "{text}""#)))
    };
    let digest = prop::option::weighted(0.2, 0..STATEMENTS.len()).prop_map(|statement| {
        statement.map_or(String::new(), |index| format!(r#", "digest": ["{}"]"#, digest_of(STATEMENTS[index])))
    });
    let some = |choices: &'static [&'static str]| prop::sample::select(choices);
    let session = some(&[
        "",
        "",
        "",
        r#", "user": ["app"]"#,
        r#", "user": ["b", "b"]"#,
        r#", "database": ["shop"]"#,
        r#", "client": ["10.0.0.0/8"]"#,
        r#", "group": ["x"]"#,
        r#", "commands": ["query"]"#,
    ]);
    let action = some(&[
        r#""block": {}"#,
        r#""limit": {"concurrent": 1}"#,
        r#""log": true"#,
        r#""rewrite": {"tables": {"t": "u"}}"#,
        r#""rewrite": {"tables": {"u": "t", "x": "y"}}"#,
    ]);
    let switches = some(&[
        "",
        "",
        r#", "continue": true"#,
        r#", "continue": true"#,
        r#", "dry_run": true"#,
        r#", "enabled": false"#,
    ]);
    (text("pattern"), text("normalized"), digest, session, action, switches).prop_map(
        |(pattern, normalized, digest, session, action, switches)| {
            format!("{action}{pattern}{normalized}{digest}{session}{switches}")
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn one_pass_agrees_with_one_rule_after_the_other(
        bodies in prop::collection::vec(any_rule(), 0..8),
        statement in 0..STATEMENTS.len(),
        command in prop::sample::select(vec![CommandKind::Query, CommandKind::Prepare, CommandKind::Execute]),
        user in prop::sample::select(vec!["app", "b"]),
    ) {
        let list = bodies.iter().enumerate().map(|(index, body)| format!(r#"{{"name": "r{index}", {body}}}"#));
        let json = format!("[{}]", list.collect::<Vec<_>>().join(","));
        let client = Client { command, user, ..CLIENT };
        let sql = STATEMENTS[statement].as_bytes();
        let slow_rules = configs(&json).iter().map(|config| Rule::new(config).expect("a rule")).collect::<Vec<_>>();
        let (expected_hits, expected_text, is_blocked) = judge_slowly(&slow_rules, sql, &client);
        let verdict = client.judge(&rules(&json), sql);
        prop_assert_eq!(hits(&verdict), expected_hits, "{}", json);
        match verdict.outcome {
            Outcome::Block(_) => prop_assert!(is_blocked),
            Outcome::Pass { text, .. } => {
                prop_assert!(!is_blocked);
                prop_assert_eq!(text, expected_text);
            }
        }
    }
}
