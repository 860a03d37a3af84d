//! What the rules say about a request.

use std::borrow::Cow;
use std::net::IpAddr;

use sql_text::{Digest, PreparedText, prepared_text, quoted_string, statements, used_database, without_comments};

use crate::answer::Answer;
use crate::config::CommandKind;
use crate::limit::LimitKey;
use crate::rule::{Action, EXECUTE, PREPARE, QUERY, SessionInfo, command_bit};
use crate::rule_set::{Class, RuleSet, StatementKind};

/// In `PREPARE name FROM 'text'`, rules apply to this many statements of the text at most.
const MAX_PREPARED_STATEMENTS: usize = 100;

/// A request of a client: the statements of a text, or one that is prepared or executed.
#[derive(Debug, Clone, Copy, Default)]
pub struct Request<'a> {
    pub command: CommandKind,
    pub statements: &'a [StatementInfo<'a>],
    pub user: &'a [u8],
    /// Empty: none, or an unknown one.
    pub database: &'a [u8],
    pub client: Option<IpAddr>,
    /// The group of nodes.
    pub group: &'a str,
}

/// A statement, as [`sql_text::statements`] finds it in a text.
#[derive(Debug, Clone, Copy)]
pub struct StatementInfo<'a> {
    pub text: &'a [u8],
    pub digest: &'a Digest,
    /// What [`RuleSet::classify`] returned. If that was another rule set, the statement is classified again.
    pub class: &'a Class,
}

/// What the rules say about a request.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// The rules that apply, for each statement in order.
    pub hits: Vec<Hit>,
    pub outcome: Outcome,
    /// Whether the statement log must contain the statements.
    pub must_log: bool,
}

/// A rule that applies to a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hit {
    /// The index of the rule.
    pub rule: usize,
    /// The rule has no effect.
    pub is_dry_run: bool,
}

/// What happens to a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It goes to the node.
    Pass {
        /// The text of the request instead of the one that the client sent. None: that one.
        text: Option<Vec<u8>>,
        /// The limits that must allow the request first.
        limits: Vec<LimitKey>,
    },
    /// The client gets an error.
    Block(Answer),
}

impl Default for Outcome {
    fn default() -> Self {
        Self::Pass { text: None, limits: Vec::new() }
    }
}

impl RuleSet {
    /// Applies the rules to all statements of a text. `request` names session and command; its statements are ignored.
    #[must_use]
    pub fn judge_text(&self, text: &[u8], request: &Request<'_>) -> Verdict {
        let texts = statements(text).collect::<Vec<_>>();
        let classified = texts.iter().map(|text| self.classify_text(text)).collect::<Vec<_>>();
        let info = |(text, (digest, class))| StatementInfo { text, digest, class };
        let statements = texts.iter().map(|text| &**text).zip(classified.iter().map(|(digest, class)| (digest, class)));
        self.judge(&Request { statements: &statements.map(info).collect::<Vec<_>>(), ..*request })
    }

    /// Judges all statements of a request. One that is blocked blocks the whole request.
    #[must_use]
    pub fn judge(&self, request: &Request<'_>) -> Verdict {
        let mut judge = Judge {
            rules: self,
            request,
            database: if self.has_databases { lowercase(request.database) } else { Cow::Borrowed(b"") },
            hits: Vec::new(),
            limits: Vec::new(),
            must_log: false,
        };
        let outcome = match judge.judge_all() {
            Ok(text) => Outcome::Pass { text, limits: judge.limits },
            Err(answer) => Outcome::Block(answer),
        };
        Verdict { hits: judge.hits, outcome, must_log: judge.must_log }
    }

    /// Appends the rules that may apply to a statement, in order.
    fn find_candidates(&self, text: &[u8], class: &Class, user: &[u8], database: &[u8], found: &mut Vec<usize>) {
        if let Some(patterns) = &self.patterns {
            patterns.find(text, found);
            found.retain(|rule| !self.rules[*rule].depends_on_normalized() || class.contains(*rule));
        }
        if let Some(rules) = &class.rules {
            found.extend(rules.iter().filter(|rule| self.rules[**rule].pattern.is_none()));
        }
        let open = &self.open;
        if !open.by_user.is_empty() {
            found.extend(open.by_user.get(user).into_iter().flatten());
        }
        if !open.by_database.is_empty() {
            found.extend(open.by_database.get(database).into_iter().flatten());
        }
        found.extend(&open.others);
        found.sort_unstable();
        found.dedup(); // a rule may name a user twice
    }
}

fn lowercase(name: &[u8]) -> Cow<'_, [u8]> {
    let is_lower = name.iter().all(|byte| byte.is_ascii() && !byte.is_ascii_uppercase());
    if is_lower { Cow::Borrowed(name) } else { Cow::Owned(sql_text::lowercase(name)) }
}

struct Judge<'a> {
    rules: &'a RuleSet,
    request: &'a Request<'a>,
    /// The database of the next statement, in lower case.
    database: Cow<'a, [u8]>,
    hits: Vec<Hit>,
    limits: Vec<LimitKey>,
    must_log: bool,
}

impl Judge<'_> {
    fn session(&self) -> SessionInfo<'_> {
        let Request { user, client, group, .. } = *self.request;
        SessionInfo { user, database: &self.database, client, group }
    }

    /// Returns the new text of the request; None: it stays as it is. The error is the answer for the client.
    fn judge_all(&mut self) -> Result<Option<Vec<u8>>, Answer> {
        let commands = command_bit(self.request.command);
        let mut changed: Vec<(usize, Vec<u8>)> = Vec::new();
        for (index, statement) in self.request.statements.iter().enumerate() {
            let text = if self.rules.is_current(statement.class) {
                self.judge_one(statement.text, *statement.digest, statement.class, commands)?
            } else {
                let (digest, class) = self.rules.classify_text(statement.text);
                self.judge_one(statement.text, digest, &class, commands)?
            };
            changed.extend(text.map(|text| (index, text)));
        }
        if changed.is_empty() {
            return Ok(None);
        }
        let mut changed = changed.into_iter().peekable();
        let mut texts = Vec::with_capacity(self.request.statements.len());
        for (index, statement) in self.request.statements.iter().enumerate() {
            texts.push(match changed.next_if(|(changed, _)| *changed == index) {
                Some((_, text)) => Cow::Owned(with_end_of(statement.text, text)),
                None => Cow::Borrowed(statement.text),
            });
        }
        Ok(Some(texts.join(&b' ')))
    }

    /// Judges a statement, and what it prepares. Returns its new text.
    fn judge_one(
        &mut self,
        sql: &[u8],
        digest: Digest,
        class: &Class,
        commands: u8,
    ) -> Result<Option<Vec<u8>>, Answer> {
        let mut changed = self.apply_rules(sql, digest, class, commands)?;
        let sql = changed.as_deref().unwrap_or(sql);
        match class.kind {
            StatementKind::Other => {}
            StatementKind::Use => {
                if self.rules.has_databases && commands == QUERY {
                    let database = used_database(sql).map(|name| sql_text::lowercase(&name));
                    self.database = database.map_or_else(|| std::mem::take(&mut self.database), Cow::Owned);
                }
            }
            StatementKind::Prepare => {
                if commands != EXECUTE
                    && let Some(text) = self.judge_prepared(sql)?
                {
                    changed = Some(text);
                }
            }
        }
        Ok(changed)
    }

    /// Judges the text that a `PREPARE` statement prepares.
    fn judge_prepared(&mut self, sql: &[u8]) -> Result<Option<Vec<u8>>, Answer> {
        match prepared_text(sql) {
            None => Ok(None),
            Some(PreparedText::Variable) => {
                let rules = self.rules;
                let blocks = |rule: &&usize| {
                    let rule = &rules.rules[**rule];
                    rule.fits_command(QUERY | PREPARE) && rule.fits_session(&self.session())
                };
                let Some(rule) = rules.blocking.iter().find(blocks) else { return Ok(None) };
                self.hits.push(Hit { rule: *rule, is_dry_run: false });
                Err(Answer::unknown_text(rules.name(*rule)))
            }
            Some(PreparedText::Literal { content, range }) => {
                let mut is_changed = false;
                let mut texts = Vec::new();
                // A node refuses a text with several statements.
                let mut parts = statements(&content);
                for statement in parts.by_ref().take(MAX_PREPARED_STATEMENTS) {
                    let (digest, class) = self.rules.classify_text(&statement);
                    let text = self.apply_rules(&statement, digest, &class, QUERY | PREPARE)?;
                    is_changed |= text.is_some();
                    texts.push(match text {
                        Some(text) => Cow::Owned(with_end_of(&statement, text)),
                        None => statement,
                    });
                }
                let is_whole = parts.next().is_none();
                let string = || quoted_string(&texts.join(&b' '));
                Ok((is_changed && is_whole).then(|| [&sql[..range.start], &string(), &sql[range.end..]].concat()))
            }
        }
    }

    /// Applies one rule after the other. Returns the new text of the statement.
    fn apply_rules(
        &mut self,
        sql: &[u8],
        digest: Digest,
        class: &Class,
        commands: u8,
    ) -> Result<Option<Vec<u8>>, Answer> {
        let rules = self.rules;
        let is_prepare_statement = class.kind == StatementKind::Prepare && commands == QUERY;
        let mut changed: Option<Vec<u8>> = None;
        let (mut digest, mut class) = (digest, Cow::Borrowed(class));
        let mut next = 0;
        'texts: loop {
            let current = changed.as_deref().unwrap_or(sql);
            let text = if rules.patterns.is_some() { without_comments(current) } else { Cow::Borrowed(current) };
            let mut candidates = Vec::new();
            rules.find_candidates(&text, &class, self.request.user, &self.database, &mut candidates);
            for index in candidates.into_iter().skip_while(|index| *index < next) {
                let rule = &rules.rules[index];
                if !fits_command(rule, commands) || !rule.fits_session(&self.session()) {
                    continue;
                }
                // Of `PREPARE ... FROM 'text'`, only the text within is rewritten.
                if matches!(rule.action, Action::Rewrite(_)) && is_prepare_statement {
                    continue;
                }
                let new_text = match &rule.action {
                    Action::Rewrite(rewrite) => match rewrite.apply(current, &text) {
                        Some(text) => Some(text),
                        None => continue, // it names none of the tables
                    },
                    _ => None,
                };
                self.hits.push(Hit { rule: index, is_dry_run: rule.is_dry_run });
                if rule.is_dry_run {
                    continue;
                }
                match &rule.action {
                    Action::Block(answer) => return Err(answer.clone()),
                    Action::Limit(limit) => {
                        let bucket = limit.bucket(self.request.user, &digest, self.request.client);
                        self.limits.push(LimitKey { rule: index, bucket });
                    }
                    Action::Log => self.must_log = true,
                    Action::Rewrite(_) => {}
                }
                if let Some(text) = new_text {
                    if !rule.continues {
                        return Ok(Some(text));
                    }
                    let (new_digest, new_class) = rules.classify_text(&text);
                    (digest, class, next) = (new_digest, Cow::Owned(new_class), index + 1);
                    changed = Some(text);
                    continue 'texts;
                }
                if !rule.continues {
                    break;
                }
            }
            return Ok(changed);
        }
    }
}

/// Whether a rule applies to these commands. A text within `PREPARE` is a query, and is prepared; but it does not run.
fn fits_command(rule: &crate::rule::Rule, commands: u8) -> bool {
    let is_within_prepare = commands == QUERY | PREPARE;
    rule.fits_command(if is_within_prepare && matches!(rule.action, Action::Limit(_)) { PREPARE } else { commands })
}

/// The new text, with a semicolon if the old one has it, since another statement may follow.
fn with_end_of(old: &[u8], mut new: Vec<u8>) -> Vec<u8> {
    if old.trim_ascii_end().ends_with(b";") && !new.trim_ascii_end().ends_with(b";") {
        new.push(b';');
    }
    new
}
