use super::*;

/// Judges each statement with one rule, which has these conditions and blocks with the message `x`.
fn blocked(conditions: &str, client: &Client, statements: &[&str]) -> Vec<bool> {
    let separator = if conditions.is_empty() { "" } else { "," };
    let rules = rules(&format!(r#"[{{"name": "r", "block": {{"message": "x"}}{separator} {conditions}}}]"#));
    statements.iter().map(|sql| outcome(&client.judge(&rules, sql.as_bytes())) == "block x").collect()
}

#[test]
fn all_conditions_must_hold() {
    let sql = ["select 1"];
    assert_eq!(blocked("", &CLIENT, &sql), [true]);
    assert_eq!(blocked(r#""user": ["x", "app"]"#, &CLIENT, &sql), [true]);
    assert_eq!(blocked(r#""user": ["App"]"#, &CLIENT, &sql), [false]);
    assert_eq!(blocked(r#""database": ["sHOP"]"#, &CLIENT, &sql), [true]);
    assert_eq!(blocked(r#""database": ["s"]"#, &CLIENT, &sql), [false]);
    assert_eq!(blocked(r#""client": ["10.0.0.0/8"]"#, &CLIENT, &sql), [true]);
    assert_eq!(blocked(r#""client": ["10.1.2.4", "fd00::/8"]"#, &CLIENT, &sql), [false]);
    assert_eq!(blocked(r#""client": ["10.0.0.0/8"]"#, &Client { address: "::ffff:10.0.0.1", ..CLIENT }, &sql), [true]);
    assert_eq!(blocked(r#""client": ["0.0.0.0/0"]"#, &Client { address: "unknown", ..CLIENT }, &sql), [false]);
    assert_eq!(blocked(r#""group": ["main"]"#, &CLIENT, &sql), [true]);
    assert_eq!(blocked(r#""group": ["x"]"#, &CLIENT, &sql), [false]);
    assert_eq!(blocked(r#""user": ["app"], "database": ["other"]"#, &CLIENT, &sql), [false]);
    assert_eq!(blocked(r#""enabled": false"#, &CLIENT, &sql), [false]);
    assert_eq!(blocked(r#""dry_run": true"#, &CLIENT, &sql), [false]);
    let sql = ["select * from t where id = 1", "select * from t", "delete from t"];
    let digest = format!(r#""digest": ["{}", "{}"]"#, digest_of(sql[0]), "0".repeat(64));
    assert_eq!(blocked(&digest, &CLIENT, &sql), [true, false, false]);
    assert_eq!(blocked(&format!(r#"{digest}, "pattern": "id = 2""#), &CLIENT, &sql), [false, false, false]);
    assert_eq!(blocked(&format!(r#"{digest}, "normalized": "`id` = \\?""#), &CLIENT, &sql), [true, false, false]);
    assert_eq!(blocked(&format!(r#"{digest}, "normalized": "delete""#), &CLIENT, &sql), [false, false, false]);
    assert_eq!(blocked(r#""normalized": "from `t`$""#, &CLIENT, &sql), [false, true, true]);
    assert_eq!(blocked(r#""normalized": "select", "pattern": "where""#, &CLIENT, &sql), [true, false, false]);
    assert_eq!(blocked(r#""pattern": "^SELECT .* from t$""#, &CLIENT, &sql), [false, true, false]);
}

#[test]
fn commands() {
    let with = |command| Client { command, ..CLIENT };
    for (condition, expected) in [
        ("", [true, true, true]),
        (r#""commands": ["query"]"#, [true, false, false]),
        (r#""commands": ["prepare", "execute"]"#, [false, true, true]),
    ] {
        let commands = [CommandKind::Query, CommandKind::Prepare, CommandKind::Execute];
        assert_eq!(commands.map(|command| blocked(condition, &with(command), &["select 1"])[0]), expected);
    }
    // A limit counts executions, and a text is rewritten before it is prepared.
    let rules = rules(
        r#"[{"name": "a", "limit": {"concurrent": 1}, "continue": true},
                          {"name": "b", "pattern": "1", "rewrite": {"replace": "2"}}]"#,
    );
    let hits_of = |command| hits(&with(command).judge(&rules, b"select 1"));
    assert_eq!(hits_of(CommandKind::Query), [0, 1]);
    assert_eq!(hits_of(CommandKind::Prepare), [1]);
    assert_eq!(hits_of(CommandKind::Execute), [0]);
}

#[test]
fn first_rule_decides_unless_it_continues() {
    let verdict = |json: &str| {
        let verdict = CLIENT.judge(&rules(json), b"select 1");
        (hits(&verdict), outcome(&verdict), verdict.must_log)
    };
    let block = r#"{"name": "b", "block": {"message": "no"}}"#;
    let log = |more: &str| format!(r#"[{{"name": "a", "log": true{more}}}, {block}]"#);
    assert_eq!(verdict(&log("")), (vec![0, 1], "block no".into(), true));
    assert_eq!(verdict(&log(r#", "continue": false"#)), (vec![0], "pass".into(), true));
    assert_eq!(verdict(&log(r#", "continue": false, "dry_run": true"#)), (vec![0, 1], "block no".into(), false));
    let rewrite = |more: &str| {
        format!(
            r#"[{{"name": "a", "pattern": "1", "rewrite": {{"text": "select 2"}}{more}}},
                    {{"name": "c", "pattern": "2", "block": {{"message": "two"}}}}, {block}]"#
        )
    };
    assert_eq!(verdict(&rewrite("")), (vec![0], "select 2".into(), false));
    assert_eq!(verdict(&rewrite(r#", "continue": true"#)), (vec![0, 1], "block two".into(), false));
    assert_eq!(verdict(&rewrite(r#", "dry_run": true"#)), (vec![0, 2], "block no".into(), false));
    let verdict = CLIENT.judge(&rules(&rewrite(r#", "dry_run": true"#)), b"select 1");
    assert_eq!(verdict.hits[0], Hit { rule: 0, is_dry_run: true });
}

#[test]
fn rewriting() {
    let cases = [
        (
            r#""pattern": "limit (\\d+)", "rewrite": {"replace": "limit 10 /* $1 */"}"#,
            "select  1 limit 99",
            "select 1 limit 10 /* 99 */",
        ),
        (
            r#""pattern": "(?<a>x) = (\\w+)", "rewrite": {"replace": "${a}x = $2$$"}"#,
            "select x=1, X = b",
            "select xx = 1$, Xx = b$",
        ),
        (r#""pattern": "straight_join ?", "rewrite": {"replace": ""}"#, "select straight_join 1;", "select 1;"),
        (r#""normalized": "now", "rewrite": {"text": "select 2"}"#, "select now()", "select 2"),
        (r#""rewrite": {"tables": {"a": "b.c"}}"#, "select a.a from /* a */ a;", "select `c`.a from /* a */ `b`.`c`;"),
        (r#""rewrite": {"tables": {"a": "b"}}"#, "select a from c", "pass"),
        (
            r#""rewrite": {"tables": {"a": "b"}}"#,
            "use a; select 1 from a ; select 2",
            "use a; select 1 from `b` ; select 2",
        ),
        (
            r#""rewrite": {"tables": {"a": "b"}}"#,
            "select 1 /*!; delete from*/ a; select 2",
            "select 1 /*!; /*! delete from*/ `b`; select 2",
        ),
        (
            r#""pattern": "1", "rewrite": {"text": "select 3"}"#,
            "select 1; select 2; select 1",
            "select 3; select 2; select 3",
        ),
        (
            r#""pattern": "1", "rewrite": {"replace": "'2'"}"#,
            "prepare s from  'select 1';",
            "prepare s from  'select ''2''';",
        ),
    ];
    for (rule, sql, expected) in cases {
        let rules = rules(&format!(r#"[{{"name": "r", {rule}}}]"#));
        assert_eq!(outcome(&CLIENT.judge(&rules, sql.as_bytes())), expected, "{sql}");
    }
}

#[test]
fn use_statement_counts_for_later_statements() {
    let rules = rules(r#"[{"name": "r", "database": ["other"], "block": {"message": "x"}}]"#);
    let texts = ["use Other; select 1", "select 1; use other", "use `other`; use shop; select 1", "select 1"];
    assert_eq!(texts.map(|sql| outcome(&CLIENT.judge(&rules, sql.as_bytes()))), ["block x", "pass", "block x", "pass"]);
    // The second statement is judged, not the first one.
    assert_eq!(CLIENT.judge(&rules, b"use other; use other").hits.len(), 1);
}

#[test]
fn only_the_first_statements_within_prepare_are_judged() {
    let prepare = |number: usize| format!("prepare s from '{}drop table t'", "select 1; ".repeat(number));
    let block = rules(r#"[{"name": "r", "pattern": "^drop table", "block": {"message": "x"}}]"#);
    let rewrite = rules(r#"[{"name": "r", "pattern": "select 1", "rewrite": {"replace": "select 2"}}]"#);
    let outcome_of = |rules: &RuleSet, number| outcome(&CLIENT.judge(rules, prepare(number).as_bytes()));
    assert_eq!([outcome_of(&block, 99), outcome_of(&block, 100)], ["block x", "pass"]);
    let text = outcome_of(&rewrite, 99);
    assert!(text.contains("select 2; drop table t"), "{text}");
    assert_eq!(outcome_of(&rewrite, 100), "pass");
}

#[test]
fn text_within_prepare_is_judged() {
    let rules = rules(
        r#"[{"name": "r", "user": ["app"], "pattern": "drop table", "commands": ["query"], "block": {"message": "x"}},
            {"name": "l", "limit": {"concurrent": 1}}]"#,
    );
    let outcome_of = |client: &Client, sql: &str| outcome(&client.judge(&rules, sql.as_bytes()));
    assert_eq!(outcome_of(&CLIENT, "prepare s from 'select 1'"), "pass");
    assert_eq!(outcome_of(&CLIENT, "prepare s from 'drop /* ''*/ table t'"), "block x");
    assert_eq!(outcome_of(&CLIENT, "select 1; prepare s from \"drop\\ntable t\""), "block x");
    let text = outcome_of(&CLIENT, "prepare s from @v");
    assert!(text.starts_with("block Tidevoy: while the rule 'r' blocks"), "{text}");
    let other = Client { user: "other", ..CLIENT };
    assert_eq!(outcome_of(&other, "prepare s from @v"), "pass");
    // The limit counts PREPARE itself, not the statement that does not run yet.
    assert_eq!(hits(&other.judge(&rules, b"prepare s from 'select 1'")), [1]);
}

#[test]
fn limits_of_all_statements_apply() {
    let rules = rules(r#"[{"name": "a", "user": ["app"], "limit": {"per_second": 5, "by": ["user", "client"]}}]"#);
    let verdict = CLIENT.judge(&rules, b"select 1; select 2");
    let Outcome::Pass { text: None, limits } = verdict.outcome else { panic!("{verdict:?}") };
    assert_eq!(limits.len(), 2);
    assert_eq!(limits[0], limits[1]);
    let again = RuleSet::new(configs(
        r#"[{"name": "new", "log": true}, {"name": "a", "user": ["app"], "limit": {"per_second": 5, "by": ["user", "client"]}}]"#,
    ));
    let Outcome::Pass { limits: later, .. } = CLIENT.judge(&again.expect("rules"), b"select 1").outcome else {
        panic!()
    };
    assert_eq!((later[0].rule, later[0].bucket), (1, limits[0].bucket), "what was used of a limit must stay");
}

#[test]
fn class_of_other_rules_is_not_used() {
    let old = rules(r#"[{"name": "r", "normalized": "x", "block": {}}]"#);
    let new = rules(r#"[{"name": "r", "normalized": "select", "block": {"message": "x"}}]"#);
    let (digest, class) = old.classify_text(b"select 1");
    assert!(old.is_current(&class) && !new.is_current(&class));
    let statements = [StatementInfo { text: b"select 1", digest: &digest, class: &class }];
    let request = Request { statements: &statements, ..Request::default() };
    assert_eq!(outcome(&new.judge(&request)), "block x");
}

#[test]
fn errors_name_rule_and_key() {
    let cases = [
        (r#"{"name": "Bad name", "log": true}"#, "name", "small letters"),
        (r#"{"name": "r"}"#, "", "exactly one action"),
        (r#"{"name": "r", "log": true, "block": {}}"#, "", "exactly one action"),
        (r#"{"name": "r", "log": true, "pattern": "("}"#, "pattern", "unclosed group"),
        (r#"{"name": "r", "log": true, "normalized": "[z-a]"}"#, "normalized", "range"),
        (r#"{"name": "r", "log": true, "digest": ["12"]}"#, "digest", "64 hexadecimal digits"),
        (r#"{"name": "r", "log": true, "client": ["10"]}"#, "client", "10.0.0.0/8"),
        (r#"{"name": "r", "block": {"code": 2006}}"#, "block.code", "1000 to 1999"),
        (r#"{"name": "r", "block": {"message": ""}}"#, "block.message", "1 to 512"),
        (r#"{"name": "r", "limit": {}}"#, "limit", "per_second"),
        (r#"{"name": "r", "limit": {"per_second": 0}}"#, "limit.per_second", "0.001"),
        (r#"{"name": "r", "limit": {"concurrent": 0}}"#, "limit.concurrent", "use block"),
        (r#"{"name": "r", "limit": {"concurrent": 1, "wait": 61}}"#, "limit.wait", "60"),
        (r#"{"name": "r", "limit": {"concurrent": 1, "client_prefix": 24}}"#, "limit.client_prefix", "limit.by"),
        (r#"{"name": "r", "rewrite": {}}"#, "rewrite", "exactly one"),
        (r#"{"name": "r", "rewrite": {"replace": "x"}}"#, "rewrite.replace", "pattern"),
        (r#"{"name": "r", "rewrite": {"text": "x"}}"#, "rewrite.text", "which statements"),
        (r#"{"name": "r", "pattern": "x", "rewrite": {"text": "a; b"}}"#, "rewrite.text", "several"),
        (r#"{"name": "r", "pattern": "x", "rewrite": {"text": "/* a */"}}"#, "rewrite.text", "no statement"),
        (r#"{"name": "r", "pattern": "(x)", "rewrite": {"replace": "$2"}}"#, "rewrite.replace", "group 2"),
        (r#"{"name": "r", "pattern": "(x)", "rewrite": {"replace": "$1x"}}"#, "rewrite.replace", "${1}x"),
        (r#"{"name": "r", "rewrite": {"tables": {"a": "b c"}}}"#, "rewrite.tables", "\"b c\""),
        (r#"{"name": "r", "commands": ["execute"], "rewrite": {"tables": {"a": "b"}}}"#, "commands", "prepare"),
    ];
    for (rule, key, reason) in cases {
        let errors =
            RuleSet::new(configs(&format!("[{{\"name\": \"first\", \"log\": true}}, {rule}]"))).expect_err(rule);
        assert_eq!((errors.len(), errors[0].index, errors[0].key.as_str()), (1, Some(1), key), "{errors:?}");
        assert!(errors[0].reason.contains(reason), "{errors:?}");
    }
    let errors = RuleSet::new(configs(r#"[{"name": "a", "log": true}, {"name": "a"}, {"name": "b"}]"#));
    let errors = errors.expect_err("errors");
    assert_eq!(errors.iter().filter_map(|error| error.index).collect::<Vec<_>>(), [1, 1, 2]);
    assert!(rules("[]").is_empty() && rules(r#"[{"name": "a", "log": true, "enabled": false}]"#).is_empty());
}
