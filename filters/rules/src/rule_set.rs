//! All rules, prepared so that judging a statement costs about the same with 2 rules and with 2,000.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sql_text::{Digest, Normalizer, may_begin_with, prepared_text, used_database};

use crate::config::RuleConfig;
use crate::error::{KeyError, RuleError};
use crate::limit::Limit;
use crate::pattern::Patterns;
use crate::rule::{Action, Rule};

/// Distinguishes the rule sets of a process.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// Rules in their order. They never change.
#[derive(Debug)]
pub struct RuleSet {
    id: u64,
    pub(crate) rules: Vec<Rule>,
    pub(crate) patterns: Option<Patterns>,
    normalized: Option<Patterns>,
    by_digest: HashMap<Digest, Vec<usize>>,
    pub(crate) open: OpenRules,
    /// The rules that block statements.
    pub(crate) blocking: Vec<usize>,
    pub(crate) has_databases: bool,
    needs_digest: bool,
}

/// The rules without a condition about the statement's text.
#[derive(Debug, Default)]
pub(crate) struct OpenRules {
    pub(crate) by_user: HashMap<Vec<u8>, Vec<usize>>,
    /// The databases are in lower case.
    pub(crate) by_database: HashMap<Vec<u8>, Vec<usize>>,
    pub(crate) others: Vec<usize>,
}

/// What digest and normalized text of a statement decide, for one rule set.
#[derive(Debug, Clone)]
pub struct Class {
    set: u64,
    /// The rules whose conditions about digest and normalized text hold, in order. None: there are none.
    pub(crate) rules: Option<Arc<[usize]>>,
    pub(crate) kind: StatementKind,
}

/// What the engine must do for a statement besides matching rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StatementKind {
    /// `PREPARE name FROM ...`
    Prepare,
    /// `USE database`
    Use,
    Other,
}

impl Class {
    pub(crate) fn contains(&self, rule: usize) -> bool {
        self.rules.as_ref().is_some_and(|rules| rules.binary_search(&rule).is_ok())
    }
}

impl RuleSet {
    /// Checks all rules. On an error, none can be used.
    pub fn new(configs: Vec<RuleConfig>) -> Result<Self, Vec<RuleError>> {
        let mut rules = Vec::with_capacity(configs.len());
        let mut errors = Vec::new();
        let mut names = HashSet::new();
        for (index, config) in configs.iter().enumerate() {
            match Rule::new(config) {
                Ok(rule) => rules.push(rule),
                Err(error) => errors.push(error.of_rule(index, &config.name)),
            }
            if !names.insert(&config.name) {
                let error = KeyError::new("name", "another rule has this name; give each rule its own");
                errors.push(error.of_rule(index, &config.name));
            }
        }
        if !errors.is_empty() {
            return Err(errors);
        }
        Self::from_rules(rules).map_err(|error| vec![error.of_all_rules()])
    }

    fn from_rules(rules: Vec<Rule>) -> Result<Self, KeyError> {
        let enabled = || rules.iter().enumerate().filter(|(_, rule)| rule.is_enabled);
        let patterns = enabled().filter_map(|(index, rule)| Some((index, rule.pattern.as_ref()?))).collect::<Vec<_>>();
        let normalized = enabled().filter_map(|(index, rule)| Some((index, rule.normalized.as_ref()?)));
        let normalized = normalized.collect::<Vec<_>>();
        let mut by_digest: HashMap<Digest, Vec<usize>> = HashMap::new();
        let mut open = OpenRules::default();
        for (index, rule) in enabled() {
            for digest in rule.digests.iter().collect::<HashSet<_>>() {
                by_digest.entry(*digest).or_default().push(index);
            }
            if rule.depends_on_normalized() || rule.pattern.is_some() {
                continue;
            }
            if !rule.users.is_empty() {
                rule.users.iter().for_each(|user| open.by_user.entry(user.clone()).or_default().push(index));
            } else if !rule.databases.is_empty() {
                rule.databases.iter().for_each(|name| open.by_database.entry(name.clone()).or_default().push(index));
            } else {
                open.others.push(index);
            }
        }
        let blocking = enabled().filter(|(_, rule)| matches!(rule.action, Action::Block(_)) && !rule.is_dry_run);
        Ok(Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            patterns: Patterns::new("pattern", &patterns)?,
            normalized: Patterns::new("normalized", &normalized)?,
            by_digest,
            open,
            blocking: blocking.map(|(index, _)| index).collect(),
            has_databases: enabled().any(|(_, rule)| !rule.databases.is_empty()),
            needs_digest: enabled().any(|(_, rule)| rule.depends_on_normalized() || rule.is_limited_by_digest()),
            rules,
        })
    }

    /// Whether no rule is in force.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rules.iter().all(|rule| !rule.is_enabled)
    }

    /// The number of rules, with those that are not in force.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    #[must_use]
    pub fn name(&self, rule: usize) -> &str {
        &self.rules[rule].name
    }

    /// Whether the class is one of this rule set.
    #[must_use]
    pub fn is_current(&self, class: &Class) -> bool {
        class.set == self.id
    }

    pub(crate) fn limit(&self, rule: usize) -> Option<&Limit> {
        match &self.rules.get(rule)?.action {
            Action::Limit(limit) => Some(limit),
            _ => None,
        }
    }

    /// Whether a rule depends on the database of the session.
    #[must_use]
    pub fn has_databases(&self) -> bool {
        self.has_databases
    }

    /// Whether a rule does more than count and log.
    #[must_use]
    pub fn must_enforce(&self) -> bool {
        self.rules.iter().any(|rule| rule.is_enabled && !rule.is_dry_run && !matches!(rule.action, Action::Log))
    }

    /// Whether a rule depends on the digest or the normalized text of statements. If not, [`Self::classify_text_only`]
    /// is enough, and the digest may be any.
    #[must_use]
    pub fn needs_digest(&self) -> bool {
        self.needs_digest
    }

    /// The class of a statement for rules that depend neither on digests nor on normalized texts.
    #[must_use]
    pub fn classify_text_only(&self, sql: &[u8]) -> Class {
        let kind = if may_begin_with(sql, b"prepare") && prepared_text(sql).is_some() {
            StatementKind::Prepare
        } else if may_begin_with(sql, b"use") && used_database(sql).is_some() {
            StatementKind::Use
        } else {
            StatementKind::Other
        };
        Class { set: self.id, rules: None, kind }
    }

    /// What digest and normalized text decide alone. A caller may keep it for each distinct statement, as long as
    /// [`Self::is_current`] holds.
    #[must_use]
    pub fn classify(&self, normalized: &[u8], digest: &Digest) -> Class {
        let of_digest = self.by_digest.get(digest).map(Vec::as_slice).unwrap_or_default();
        let mut of_text = Vec::new();
        if let Some(patterns) = &self.normalized {
            patterns.find(normalized, &mut of_text);
        }
        let needs_text = |rule: &&usize| self.rules[**rule].normalized.is_none() || of_text.contains(*rule);
        let mut rules: Vec<usize> = of_digest.iter().filter(needs_text).copied().collect();
        rules.extend(of_text.iter().filter(|rule| self.rules[**rule].digests.is_empty()));
        rules.sort_unstable();
        let kind = match normalized {
            [b'p', b'r', b'e', b'p', b'a', b'r', b'e', b' ', ..] => StatementKind::Prepare,
            [b'u', b's', b'e', b' ', ..] => StatementKind::Use,
            _ => StatementKind::Other,
        };
        Class { set: self.id, rules: (!rules.is_empty()).then(|| rules.into()), kind }
    }

    /// Digest and class of a statement.
    #[must_use]
    pub fn classify_text(&self, sql: &[u8]) -> (Digest, Class) {
        let mut normalizer = Normalizer::default();
        let normalized = normalizer.normalize(sql);
        let digest = sql_text::digest(normalized);
        (digest, self.classify(normalized, &digest))
    }
}
