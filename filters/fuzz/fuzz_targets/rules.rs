//! Rules and statements. Input: session and order of the rules (1 byte), then the text of a request.

#![no_main]

use std::sync::OnceLock;

use fuzz::tokens::{Token, tokens, tokens_at};
use libfuzzer_sys::fuzz_target;
use regex_automata::meta::Regex;
use sql_text::{
    Normalizer, PreparedText, TableNames, hexadecimal, prepared_text, quoted_string, rename_tables, statements,
    used_database, without_comments,
};
use statement_rules::{
    BlockConfig, CommandKind, LimitConfig, LimitScope, Outcome, Request, RewriteConfig, RuleConfig, RuleSet, Verdict,
};

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
    fn config(&self, name: usize) -> RuleConfig {
        let list = |value: Option<&str>| value.map(str::to_string).into_iter().collect();
        let mut config = RuleConfig {
            name: format!("r{name}"),
            enabled: true,
            dry_run: self.is_dry_run,
            continues: Some(self.continues),
            digest: self.digest.map(digest_of).into_iter().collect(),
            pattern: self.pattern.map(str::to_string),
            normalized: self.normalized.map(str::to_string),
            commands: self.command.into_iter().collect(),
            user: list(self.user),
            database: list(self.database),
            ..RuleConfig::default()
        };
        let rewrite = RewriteConfig::default;
        match self.action {
            ModelAction::Block => config.block = Some(BlockConfig::default()),
            ModelAction::Limit => {
                let by = vec![LimitScope::Digest];
                config.limit = Some(LimitConfig { concurrent: Some(1), by, ..LimitConfig::default() });
            }
            ModelAction::Log => config.log = true,
            ModelAction::Replace(with) => {
                config.rewrite = Some(RewriteConfig { replace: Some(with.to_string()), ..rewrite() });
            }
            ModelAction::Text(text) => {
                config.rewrite = Some(RewriteConfig { text: Some(text.to_string()), ..rewrite() });
            }
            ModelAction::Tables => {
                let tables = [("t".to_string(), "u".to_string())].into();
                config.rewrite = Some(RewriteConfig { tables, ..rewrite() });
            }
        }
        config
    }
}

fn digest_of(sql: &str) -> String {
    hexadecimal(&sql_text::digest(Normalizer::default().normalize(sql.as_bytes())))
}

/// A rule of the model with what it is compared with.
struct CompiledRule {
    rule: ModelRule,
    /// The normalized text with the rule's digest.
    digested: Option<Vec<u8>>,
    pattern: Option<Regex>,
    normalized: Option<Regex>,
}

/// The rules in one order, for the model and for the engine.
struct Rules {
    model: Vec<CompiledRule>,
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
        let configs = rules.iter().enumerate().map(|(name, rule)| rule.config(name)).collect();
        let model = rules.into_iter().map(|rule| CompiledRule {
            digested: rule.digest.map(|sql| Normalizer::default().normalize(sql.as_bytes()).to_vec()),
            pattern: compile(rule.pattern),
            normalized: compile(rule.normalized),
            rule,
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
        let request = Request {
            command: self.command,
            user: self.user.as_bytes(),
            database: self.database.as_bytes(),
            group: "main",
            ..Request::default()
        };
        rules.judge_text(text, &request)
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

/// A new text ends with a semicolon if the old one does.
fn keep_end(old: &[u8], new: &mut Vec<u8>) {
    let ends = |text: &[u8]| text.trim_ascii_end().ends_with(b";");
    if ends(old) && !ends(new) {
        new.push(b';');
    }
}

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
                    keep_end(&statement, &mut new);
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
                let all = statements(&content).collect::<Vec<_>>();
                for statement in all.iter().take(100) {
                    let new = self.apply(statement, CommandKind::Prepare, false, true)?;
                    is_changed |= new.is_some() && all.len() <= 100;
                    texts.push(new.map_or_else(
                        || statement.to_vec(),
                        |mut new| {
                            keep_end(statement, &mut new);
                            new
                        },
                    ));
                }
                let string = || quoted_string(&texts.join(&b' '));
                let new = is_changed.then(|| [&current[..range.start], &string(), &current[range.end..]].concat());
                Ok(new.or(changed))
            }
            Some(PreparedText::Variable) => {
                for (index, CompiledRule { rule, .. }) in self.rules.model.iter().enumerate() {
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
        for (index, CompiledRule { rule, digested, pattern, normalized }) in rules.model.iter().enumerate() {
            let current = changed.as_deref().unwrap_or(sql);
            let mut normalizer = Normalizer::default();
            let text = normalizer.normalize(current);
            let clean = without_comments(current);
            let fits_command = match rule.action {
                ModelAction::Limit => command != CommandKind::Prepare,
                ModelAction::Replace(_) | ModelAction::Text(_) | ModelAction::Tables => command != CommandKind::Execute,
                _ => rule.command.is_none_or(|only| only == command || is_within),
            };
            let fits = fits_command
                && digested.as_ref().is_none_or(|digested| digested == text)
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
    let rule = &rules.model[*last].rule;
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
