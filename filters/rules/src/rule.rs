//! A rule that was checked.

use std::cell::RefCell;
use std::net::IpAddr;

use ipnet::IpNet;
use regex_automata::meta::Regex;
use regex_automata::util::interpolate;
use regex_syntax::hir::Hir;
use sql_text::{Digest, TableNames};

use crate::answer::Answer;
use crate::config::{BlockConfig, CommandKind, LimitConfig, LimitScope, RewriteConfig, RuleConfig};
use crate::error::KeyError;
use crate::limit::Limit;
use crate::pattern;

const MAX_NAME_CHARACTERS: usize = 64;
const MAX_MESSAGE_CHARACTERS: usize = 512;

/// Bits of commands. A statement within `PREPARE ... FROM 'text'` has `QUERY` and `PREPARE`.
pub(crate) const QUERY: u8 = 1;
pub(crate) const PREPARE: u8 = 2;
pub(crate) const EXECUTE: u8 = 4;

/// The session of a statement.
pub(crate) struct SessionInfo<'a> {
    pub(crate) user: &'a [u8],
    /// In lower case.
    pub(crate) database: &'a [u8],
    pub(crate) client: Option<IpAddr>,
    pub(crate) group: &'a str,
}

#[derive(Debug)]
pub(crate) struct Rule {
    pub(crate) name: String,
    pub(crate) is_enabled: bool,
    pub(crate) is_dry_run: bool,
    pub(crate) continues: bool,
    pub(crate) digests: Vec<Digest>,
    pub(crate) pattern: Option<Hir>,
    pub(crate) normalized: Option<Hir>,
    commands: u8,
    pub(crate) users: Vec<Vec<u8>>,
    /// In lower case, as TiDB compares them.
    pub(crate) databases: Vec<Vec<u8>>,
    clients: Vec<IpNet>,
    groups: Vec<String>,
    pub(crate) action: Action,
}

#[derive(Debug)]
pub(crate) enum Action {
    Block(Answer),
    Limit(Limit),
    Rewrite(Rewrite),
    Log,
}

#[derive(Debug)]
pub(crate) enum Rewrite {
    Replace { pattern: Box<Regex>, with: Vec<u8> },
    Text(Vec<u8>),
    Tables(TableNames),
}

impl Rule {
    pub(crate) fn new(config: &RuleConfig) -> Result<Self, KeyError> {
        check_name(&config.name)?;
        let parse = |key, pattern: &Option<String>| pattern.as_ref().map(|text| pattern::parse(key, text)).transpose();
        let pattern = parse("pattern", &config.pattern)?;
        let action = Action::new(config, pattern.as_ref())?;
        let clients = config.client.iter().map(|text| parse_network(text)).collect::<Result<_, _>>()?;
        Ok(Self {
            name: config.name.clone(),
            is_enabled: config.enabled,
            is_dry_run: config.dry_run,
            continues: config.continues.unwrap_or(matches!(action, Action::Log)),
            digests: config.digest.iter().map(|text| parse_digest(text)).collect::<Result<_, _>>()?,
            normalized: parse("normalized", &config.normalized)?,
            pattern,
            commands: commands(config, &action)?,
            users: config.user.iter().map(|user| user.as_bytes().to_vec()).collect(),
            databases: config.database.iter().map(|name| sql_text::lowercase(name.as_bytes())).collect(),
            clients,
            groups: config.group.clone(),
            action,
        })
    }

    /// Whether each digest has a limit of its own.
    pub(crate) fn is_limited_by_digest(&self) -> bool {
        matches!(&self.action, Action::Limit(limit) if limit.by_digest)
    }

    /// Whether digest and normalized text decide something.
    pub(crate) fn depends_on_normalized(&self) -> bool {
        !self.digests.is_empty() || self.normalized.is_some()
    }

    /// Whether the rule applies to one of these commands.
    pub(crate) fn fits_command(&self, commands: u8) -> bool {
        self.commands & commands != 0
    }

    /// Whether the conditions about the session hold. `database`: in lower case.
    pub(crate) fn fits_session(&self, session: &SessionInfo<'_>) -> bool {
        is_empty_or(&self.users, |user| user == session.user)
            && is_empty_or(&self.databases, |name| name == session.database)
            && is_empty_or(&self.groups, |group| group == session.group)
            && is_empty_or(&self.clients, |network| session.client.is_some_and(|client| contains(network, client)))
    }
}

/// Whether a condition with these values holds.
fn is_empty_or<T>(values: &[T], holds: impl FnMut(&T) -> bool) -> bool {
    values.is_empty() || values.iter().any(holds)
}

fn contains(network: &IpNet, address: IpAddr) -> bool {
    network.contains(&address) || network.contains(&address.to_canonical())
}

impl Action {
    fn new(config: &RuleConfig, pattern: Option<&Hir>) -> Result<Self, KeyError> {
        let RuleConfig { name, block, limit, rewrite, log, .. } = config;
        match (block, limit, rewrite, log) {
            (Some(block), None, None, false) => block_action(name, block),
            (None, Some(limit), None, false) => limit_action(name, limit),
            (None, None, Some(rewrite), false) => Rewrite::new(config, rewrite, pattern).map(Self::Rewrite),
            (None, None, None, true) => Ok(Self::Log),
            _ => Err(KeyError::new("", "give the rule exactly one action: block, limit, rewrite, or log")),
        }
    }
}

fn block_action(name: &str, config: &BlockConfig) -> Result<Action, KeyError> {
    if let Some(message) = &config.message
        && (message.is_empty()
            || message.chars().count() > MAX_MESSAGE_CHARACTERS
            || message.chars().any(char::is_control))
    {
        let reason = format!("a message has 1 to {MAX_MESSAGE_CHARACTERS} characters, and no control characters");
        return Err(KeyError::new("block.message", reason));
    }
    // Codes of 2000 to 2999 are those of client libraries, which then give up the connection.
    if let Some(code) = config.code
        && !matches!(code, 1000..2000 | 3000..)
    {
        return Err(KeyError::new("block.code", "a code of a server is 1000 to 1999, or 3000 to 65535"));
    }
    Ok(Action::Block(Answer::blocked(name, config.message.as_deref(), config.code)))
}

fn limit_action(name: &str, config: &LimitConfig) -> Result<Action, KeyError> {
    if config.per_second.is_none() && config.concurrent.is_none() {
        return Err(KeyError::new("limit", "give per_second, concurrent, or both"));
    }
    if config.per_second.is_some_and(|rate| !(0.001..=1_000_000.0).contains(&rate)) {
        return Err(KeyError::new("limit.per_second", "a rate is 0.001 to 1000000"));
    }
    if config.concurrent == Some(0) {
        return Err(KeyError::new("limit.concurrent", "the number is at least 1; to allow no statement, use block"));
    }
    if config.client_prefix.is_some_and(|bits| !(1..=128).contains(&bits)) {
        return Err(KeyError::new("limit.client_prefix", "a prefix has 1 to 128 bits"));
    }
    if config.client_prefix.is_some() && !config.by.contains(&LimitScope::Client) {
        return Err(KeyError::new("limit.client_prefix", "a prefix needs client in limit.by"));
    }
    if !(0.0..=60.0).contains(&config.wait) {
        return Err(KeyError::new("limit.wait", "a statement may wait 0 to 60 seconds"));
    }
    Ok(Action::Limit(Limit::new(name, config)))
}

impl Rewrite {
    fn new(rule: &RuleConfig, config: &RewriteConfig, pattern: Option<&Hir>) -> Result<Self, KeyError> {
        match config {
            RewriteConfig { replace: Some(with), text: None, tables } if tables.is_empty() => {
                let key = "rewrite.replace";
                let hir = pattern.ok_or_else(|| KeyError::new(key, "the text that it stands for needs a pattern"))?;
                let pattern = pattern::compile("pattern", hir)?;
                check_groups(with, &pattern)?;
                check_is_single(key, with)?;
                Ok(Self::Replace { pattern: Box::new(pattern), with: with.as_bytes().to_vec() })
            }
            RewriteConfig { replace: None, text: Some(text), tables } if tables.is_empty() => {
                let key = "rewrite.text";
                if rule.digest.is_empty() && rule.pattern.is_none() && rule.normalized.is_none() {
                    return Err(KeyError::new(
                        key,
                        "say which statements it stands for: digest, pattern, or normalized",
                    ));
                }
                check_is_single(key, text)?;
                if sql_text::without_comments(text.as_bytes()).is_empty() {
                    return Err(KeyError::new(key, "the text contains no statement"));
                }
                Ok(Self::Text(text.as_bytes().to_vec()))
            }
            RewriteConfig { replace: None, text: None, tables } if !tables.is_empty() => {
                let names = tables.iter().map(|(old, new)| (old.as_str(), new.as_str()));
                let names = TableNames::new(names).map_err(|name| {
                    let reason = format!("{name:?} is no name of a table; write table, or database.table");
                    KeyError::new("rewrite.tables", reason)
                })?;
                Ok(Self::Tables(names))
            }
            _ => Err(KeyError::new("rewrite", "give exactly one of replace, text, and tables")),
        }
    }

    /// The new text of a statement. `text`: without comments. None: the statement stays as it is.
    pub(crate) fn apply(&self, sql: &[u8], text: &[u8]) -> Option<Vec<u8>> {
        match self {
            Self::Replace { pattern, with } => {
                let mut changed = Vec::with_capacity(text.len() + with.len());
                let mut end = 0;
                for groups in pattern.captures_iter(text) {
                    let found = groups.get_match()?;
                    changed.extend_from_slice(&text[end..found.start()]);
                    groups.interpolate_bytes_into(text, with, &mut changed);
                    end = found.end();
                }
                changed.extend_from_slice(&text[end..]);
                Some(changed)
            }
            Self::Text(text) => Some(text.clone()),
            Self::Tables(names) => sql_text::rename_tables(sql, names),
        }
    }
}

/// A client waits for the result of one statement, so no second one may be added.
fn check_is_single(key: &'static str, text: &str) -> Result<(), KeyError> {
    let is_single = sql_text::statements(text.as_bytes()).count() <= 1;
    if is_single { Ok(()) } else { Err(KeyError::new(key, "the text contains several statements; give one")) }
}

fn check_groups(with: &str, pattern: &Regex) -> Result<(), KeyError> {
    let unknown = RefCell::new(None);
    let groups = pattern.group_info();
    let one = regex_automata::PatternID::ZERO;
    interpolate::bytes(
        with.as_bytes(),
        |index, _| {
            if index >= groups.group_len(one) {
                unknown.replace(Some(format!("group {index}")));
            }
        },
        |name| {
            let index = groups.to_index(one, name);
            if index.is_none() {
                unknown.replace(Some(format!("group {name:?}")));
            }
            index
        },
        &mut Vec::new(),
    );
    match unknown.into_inner() {
        None => Ok(()),
        Some(group) => {
            let reason =
                format!("the pattern has no {group}; write ${{1}}x for group 1 before an x, and $$ for a dollar sign");
            Err(KeyError::new("rewrite.replace", reason))
        }
    }
}

pub(crate) fn command_bit(command: CommandKind) -> u8 {
    match command {
        CommandKind::Query => QUERY,
        CommandKind::Prepare => PREPARE,
        CommandKind::Execute => EXECUTE,
    }
}

fn commands(config: &RuleConfig, action: &Action) -> Result<u8, KeyError> {
    let given = config.commands.iter().fold(0, |all, command| all | command_bit(*command));
    match action {
        Action::Rewrite(_) if given & EXECUTE != 0 => {
            Err(KeyError::new("commands", "an executed statement has no text to rewrite; use prepare"))
        }
        _ if given != 0 => Ok(given),
        // A statement is rewritten when it is prepared, and limited when it runs.
        Action::Rewrite(_) => Ok(QUERY | PREPARE),
        Action::Limit(_) => Ok(QUERY | EXECUTE),
        Action::Block(_) | Action::Log => Ok(QUERY | PREPARE | EXECUTE),
    }
}

fn check_name(name: &str) -> Result<(), KeyError> {
    let is_fine = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'_' | b'-');
    if (1..=MAX_NAME_CHARACTERS).contains(&name.len()) && name.bytes().all(is_fine) {
        return Ok(());
    }
    let reason = format!("a name has 1 to {MAX_NAME_CHARACTERS} characters: small letters, digits, `_` and `-`");
    Err(KeyError::new("name", reason))
}

fn parse_digest(text: &str) -> Result<Digest, KeyError> {
    let mut digest = Digest::default();
    let is_fine = text.len() == 2 * digest.len() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    for (byte, pair) in digest.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = std::str::from_utf8(pair).ok().and_then(|pair| u8::from_str_radix(pair, 16).ok()).unwrap_or_default();
    }
    if is_fine { Ok(digest) } else { Err(KeyError::new("digest", format!("{text:?} has not 64 hexadecimal digits"))) }
}

fn parse_network(text: &str) -> Result<IpNet, KeyError> {
    let network = text.parse::<IpNet>().or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
    network.map_err(|_| KeyError::new("client", format!("{text:?} is no network, such as 10.0.0.0/8")))
}
