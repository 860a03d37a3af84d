//! Rules and statements. Input: session and order of the rules (1 byte), then the text of a request.

#![no_main]

use std::sync::OnceLock;

use fuzz::tokens::{Token, tokens, tokens_at};
use libfuzzer_sys::fuzz_target;
use regex_automata::meta::Regex;
use sql_text::{
    Normalizer, PreparedText, TableNames, prepared_text, quoted_string, rename_tables, statements, used_database,
    without_comments,
};
use statement_rules::{CommandKind, Outcome, Request, RuleConfig, RuleSet, StatementInfo, Verdict};

/// Used by the included patterns.
mod error {
    #[expect(dead_code, reason = "the patterns are right")]
    #[derive(Debug)]
    pub struct KeyError {
        pub key: &'static str,
        pub reason: String,
        pub position: Option<usize>,
    }

    impl KeyError {
        pub fn new(key: &'static str, reason: impl Into<String>) -> Self {
            Self { key, reason: reason.into(), position: None }
        }
    }
}
// Patterns are included because they are private: the model matches them one by one.
#[expect(dead_code, reason = "the model does not match them in one pass")]
#[path = "../../rules/src/pattern.rs"]
mod pattern;

/// What the model knows of a rule.
#[derive(Default)]
struct ModelRule {
    digest: Option<&'static str>,
    pattern: Option<&'static str>,
    normalized: Option<&'static str>,
    user: Option<&'static str>,
    database: Option<&'static str>,
    command: Option<CommandKind>,
    is_dry_run: bool,
    continues: bool,
    action: ModelAction,
}

#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum ModelAction {
    #[default]
    Block,
    Limit,
    Log,
    Replace(&'static str),
    Text(&'static str),
    /// `t` becomes `u`.
    Tables,
}

fn model_rules() -> Vec<ModelRule> {
    let rule = ModelRule::default;
    vec![
        ModelRule { normalized: Some("^select"), action: ModelAction::Log, continues: true, ..rule() },
        ModelRule { digest: Some("select a from t where b = 1"), ..rule() },
        ModelRule { pattern: Some(r"delete from shop\.users where id = 1"), ..rule() },
        ModelRule { pattern: Some("select .* from users"), user: Some("app"), ..rule() },
        ModelRule { pattern: Some("to root@localhost"), ..rule() },
        ModelRule { pattern: Some(r"\bdrop\s+table\b"), command: Some(CommandKind::Query), ..rule() },
        ModelRule { normalized: Some("`id` = \\?"), pattern: Some("'x', 'y'"), is_dry_run: true, ..rule() },
        ModelRule { user: Some("app"), action: ModelAction::Limit, continues: true, ..rule() },
        ModelRule {
            pattern: Some(r"limit (\d+)"),
            action: ModelAction::Replace("limit 10 /* $1 */"),
            continues: true,
            ..rule()
        },
        ModelRule { action: ModelAction::Tables, continues: true, ..rule() },
        ModelRule { normalized: Some("now \\("), action: ModelAction::Text("select 2"), ..rule() },
        ModelRule { database: Some("other"), normalized: Some("^update"), ..rule() },
    ]
}

impl ModelRule {
    fn json(&self, name: usize) -> String {
        let mut keys = vec![format!(r#""name": "r{name}""#)];
        let mut add = |key: &str, value: Option<String>| {
            keys.extend(value.map(|value| format!(r#""{key}": {}"#, serde_json::to_string(&value).expect("a string"))));
        };
        let text = |text: Option<&str>| text.map(str::to_string);
        add("pattern", text(self.pattern));
        add("normalized", text(self.normalized));
        let digest = self.digest.map(|sql| sql_text::digest(Normalizer::default().normalize(sql.as_bytes())));
        let digest = digest.map(|digest| digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
        for (key, value) in [
            ("digest", digest),
            ("user", text(self.user)),
            ("database", text(self.database)),
            ("commands", self.command.map(|_| "query".to_string())),
        ] {
            keys.extend(value.map(|value| format!(r#""{key}": ["{value}"]"#)));
        }
        keys.push(format!(r#""dry_run": {}, "continue": {}"#, self.is_dry_run, self.continues));
        keys.push(match self.action {
            ModelAction::Block => r#""block": {}"#.into(),
            ModelAction::Limit => r#""limit": {"concurrent": 1, "by": ["digest"]}"#.into(),
            ModelAction::Log => r#""log": true"#.into(),
            ModelAction::Replace(with) => format!(r#""rewrite": {{"replace": "{with}"}}"#),
            ModelAction::Text(text) => format!(r#""rewrite": {{"text": "{text}"}}"#),
            ModelAction::Tables => r#""rewrite": {"tables": {"t": "u"}}"#.into(),
        });
        format!("{{{}}}", keys.join(", "))
    }
}

/// The rules in one order, for the model and for the engine.
struct Rules {
    model: Vec<(ModelRule, Option<Regex>, Option<Regex>)>,
    set: RuleSet,
}

/// The rules in the order that begins with this one.
fn rules(first: usize) -> &'static Rules {
    static ORDERS: OnceLock<Vec<Rules>> = OnceLock::new();
    let compile = |text: Option<&'static str>| {
        text.map(|text| pattern::compile("", &pattern::parse("", text).expect("a pattern")).expect("a pattern"))
    };
    let order = |first| {
        let mut rules = model_rules();
        rules.rotate_left(first);
        let list = rules.iter().enumerate().map(|(name, rule)| rule.json(name)).collect::<Vec<_>>();
        let configs = serde_json::from_str::<Vec<RuleConfig>>(&format!("[{}]", list.join(","))).expect("rules");
        let model = rules.into_iter().map(|rule| {
            let (pattern, normalized) = (compile(rule.pattern), compile(rule.normalized));
            (rule, pattern, normalized)
        });
        Rules { model: model.collect(), set: RuleSet::new(configs).expect("rules") }
    };
    let orders = ORDERS.get_or_init(|| (0..model_rules().len()).map(order).collect());
    &orders[first % orders.len()]
}

/// How a client sends a text.
#[derive(Clone, Copy)]
struct Session {
    command: CommandKind,
    user: &'static str,
    database: &'static str,
}

impl Session {
    fn judge(self, rules: &RuleSet, text: &[u8]) -> Verdict {
        let mut normalizer = Normalizer::default();
        let classes = statements(text).map(|statement| {
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
            client: None,
            group: "main",
        })
    }
}

/// What the model says about a request.
#[derive(Debug, Default, PartialEq)]
struct Seen {
    hits: Vec<usize>,
    limits: Vec<usize>,
    is_blocked: bool,
    must_log: bool,
    /// None: it stays as it is.
    text: Option<Vec<u8>>,
}

/// Judges with one rule after the other.
struct Model<'a> {
    rules: &'a Rules,
    session: Session,
    /// In lower case.
    database: Vec<u8>,
    seen: Seen,
}

/// The statement is blocked.
struct Blocked;

impl Model<'_> {
    fn judge(mut self, text: &[u8]) -> Seen {
        let mut texts = Vec::new();
        let mut is_changed = false;
        for statement in statements(text) {
            match self.judge_one(&statement) {
                Err(Blocked) => {
                    self.seen.is_blocked = true;
                    self.seen.limits.clear();
                    return self.seen;
                }
                Ok(None) => texts.push(statement.to_vec()),
                Ok(Some(mut new)) => {
                    is_changed = true;
                    let ends = |text: &[u8]| text.trim_ascii_end().ends_with(b";");
                    if ends(&statement) && !ends(&new) {
                        new.push(b';');
                    }
                    texts.push(new);
                }
            }
        }
        self.seen.text = is_changed.then(|| texts.join(&b' '));
        self.seen
    }

    fn judge_one(&mut self, sql: &[u8]) -> Result<Option<Vec<u8>>, Blocked> {
        let command = self.session.command;
        let mut normalizer = Normalizer::default();
        let normalized = normalizer.normalize(sql);
        let (is_prepare, is_use) = (normalized.starts_with(b"prepare "), normalized.starts_with(b"use "));
        let changed = self.apply(sql, command, is_prepare && command == CommandKind::Query, false)?;
        let current = changed.as_deref().unwrap_or(sql);
        if is_use
            && command == CommandKind::Query
            && let Some(database) = used_database(current)
        {
            self.database = sql_text::lowercase(&database);
        }
        match prepared_text(current).filter(|_| is_prepare && command != CommandKind::Execute) {
            Some(PreparedText::Literal { content, range }) => {
                let mut texts = Vec::new();
                let mut is_changed = false;
                for statement in statements(&content) {
                    let new = self.apply(&statement, CommandKind::Prepare, false, true)?;
                    is_changed |= new.is_some();
                    texts.push(new.unwrap_or_else(|| statement.to_vec()));
                }
                let string = || quoted_string(&texts.join(&b' '));
                let new = is_changed.then(|| [&current[..range.start], &string(), &current[range.end..]].concat());
                Ok(new.or(changed))
            }
            Some(PreparedText::Variable) => {
                for (index, (rule, ..)) in self.rules.model.iter().enumerate() {
                    let blocks = rule.action == ModelAction::Block && !rule.is_dry_run;
                    if blocks && self.fits_session(rule) {
                        self.seen.hits.push(index);
                        return Err(Blocked);
                    }
                }
                Ok(changed)
            }
            None => Ok(changed),
        }
    }

    fn fits_session(&self, rule: &ModelRule) -> bool {
        rule.user.is_none_or(|user| user == self.session.user)
            && rule.database.is_none_or(|database| database.as_bytes() == self.database)
    }

    /// `is_within`: the statement stands in the string of `PREPARE`.
    fn apply(
        &mut self,
        sql: &[u8],
        command: CommandKind,
        is_prepare: bool,
        is_within: bool,
    ) -> Result<Option<Vec<u8>>, Blocked> {
        let rules = self.rules;
        let mut changed: Option<Vec<u8>> = None;
        for (index, (rule, pattern, normalized)) in rules.model.iter().enumerate() {
            let current = changed.as_deref().unwrap_or(sql);
            let mut normalizer = Normalizer::default();
            let text = normalizer.normalize(current);
            let clean = without_comments(current);
            let fits_command = match rule.action {
                ModelAction::Limit => command != CommandKind::Prepare,
                ModelAction::Replace(_) | ModelAction::Text(_) | ModelAction::Tables => command != CommandKind::Execute,
                _ => rule.command.is_none_or(|only| only == command || is_within),
            };
            let digest = rule.digest.map(|sql| Normalizer::default().normalize(sql.as_bytes()).to_vec());
            let fits = fits_command
                && digest.is_none_or(|digest| digest == text)
                && normalized.as_ref().is_none_or(|regex| regex.is_match(text))
                && pattern.as_ref().is_none_or(|regex| regex.is_match(&*clean))
                && self.fits_session(rule);
            if !fits {
                continue;
            }
            let new = match rule.action {
                ModelAction::Block | ModelAction::Limit | ModelAction::Log => None,
                _ if is_prepare => continue,
                ModelAction::Replace(_) => {
                    let regex = pattern.as_ref().expect("a pattern");
                    let mut new = Vec::new();
                    let mut end = 0;
                    for groups in regex.captures_iter(&*clean) {
                        let found = groups.get_match().expect("a match");
                        new.extend(&clean[end..found.start()]);
                        new.extend(b"limit 10 /* ");
                        new.extend(&clean[groups.get_group(1).expect("a group").range()]);
                        new.extend(b" */");
                        end = found.end();
                    }
                    new.extend(&clean[end..]);
                    Some(new)
                }
                ModelAction::Text(text) => Some(text.as_bytes().to_vec()),
                ModelAction::Tables => {
                    let names = TableNames::new([("t", "u")]).expect("names");
                    let Some(new) = rename_tables(current, &names) else { continue };
                    Some(new)
                }
            };
            self.seen.hits.push(index);
            if rule.is_dry_run {
                continue;
            }
            match rule.action {
                ModelAction::Block => return Err(Blocked),
                ModelAction::Limit => self.seen.limits.push(index),
                ModelAction::Log => self.seen.must_log = true,
                _ => {}
            }
            changed = new.or(changed);
            if !rule.continues {
                break;
            }
        }
        Ok(changed)
    }
}

fn seen(verdict: &Verdict) -> Seen {
    let (text, limits, is_blocked) = match &verdict.outcome {
        Outcome::Block(_) => (None, Vec::new(), true),
        Outcome::Pass { text, limits } => (text.clone(), limits.iter().map(|limit| limit.rule).collect(), false),
    };
    let hits = verdict.hits.iter().map(|hit| hit.rule).collect();
    Seen { hits, limits, is_blocked, must_log: verdict.must_log, text }
}

/// What may stand between tokens.
const GAPS: [&[u8]; 8] =
    [b" ", b"  ", b"\n", b" /* drop ' table ; */", b" -- a;'\n", b"\t# \" b\n", b" /**/ ", b" /*!*/ /*T! */\r\n"];

/// The text with more between its tokens. None: the tokens would be others.
fn spaced(text: &[u8], mut choice: usize) -> Option<Vec<u8>> {
    let (all, _) = tokens_at(text);
    let mut spaced = Vec::new();
    let mut end = 0;
    for (range, _) in &all {
        spaced.extend(&text[end..range.start]);
        choice = choice.wrapping_mul(5).wrapping_add(3);
        if choice & 0x100 == 0 {
            spaced.extend(GAPS[choice % GAPS.len()]);
        }
        spaced.extend(&text[range.clone()]);
        end = range.end;
    }
    spaced.extend(&text[end..]);
    (tokens(&spaced) == tokens(text)).then_some(spaced)
}

/// The text with nothing between tokens where that is possible.
fn tight(text: &[u8]) -> Vec<u8> {
    let all = tokens(text);
    let mut tight = text.to_vec();
    for index in 1..all.len() {
        let (places, _) = tokens_at(&tight);
        let gap = places[index - 1].0.end..places[index].0.start;
        // Comments stay: hints and marks matter.
        if gap.is_empty() || !tight[gap.clone()].is_ascii() || !tight[gap.clone()].trim_ascii().is_empty() {
            continue;
        }
        let mut other = tight.clone();
        other.drain(gap);
        if tokens(&other) == all {
            tight = other;
        }
    }
    tight
}

/// Whether a rule with a digest or a normalized text may depend on what stands between the tokens: TiDB's digests take
/// some words for keywords only directly before a parenthesis, and not beside a dot.
fn depends_on_gaps(text: &[u8]) -> bool {
    tokens(text).iter().any(|token| token.text.starts_with(b"(") || token.text.contains(&b'.'))
}

fuzz_target!(|input: &[u8]| {
    let Some((&first, text)) = input.split_first() else { return };
    let rules = rules(usize::from(first & 0xf));
    let commands = [CommandKind::Query, CommandKind::Query, CommandKind::Prepare, CommandKind::Execute];
    let session = Session {
        command: commands[usize::from(first >> 4 & 3)],
        user: if first & 0x40 == 0 { "app" } else { "b" },
        database: if first & 0x80 == 0 { "Other" } else { "" },
    };
    let verdict = session.judge(&rules.set, text);
    let found = seen(&verdict);
    let model =
        Model { rules, session, database: sql_text::lowercase(session.database.as_bytes()), seen: Seen::default() };
    assert_eq!(found, model.judge(text));
    let Some(last) = found.hits.last().filter(|_| found.is_blocked) else { return };
    let (rule, ..) = &rules.model[*last];
    if (rule.digest.is_some() || rule.normalized.is_some()) && depends_on_gaps(text) {
        return;
    }
    // A pattern may match across the end of a string or a name that contains more than a word.
    if !tokens(text).iter().all(Token::is_plain) {
        return;
    }
    let mut others = [text.len(), usize::from(first)].map(|choice| spaced(text, choice)).to_vec();
    others.push((text.len() < 200).then(|| tight(text)));
    for other in others.into_iter().flatten() {
        let found = seen(&session.judge(&rules.set, &other));
        assert!(found.is_blocked, "{:?} passes", String::from_utf8_lossy(&other));
    }
});
