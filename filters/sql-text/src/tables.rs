//! Other names for the tables of a statement.
//!
//! [`references`] finds where a statement names tables. A qualifier, such as `t` in `t.id`, gets the new name, too,
//! unless it is an alias. This needs no grammar: which words a table follows is enough.

mod references;
#[cfg(test)]
mod tests;

use std::ops::Range;

use crate::comments::without_comments;
use crate::scanner::{Scanner, TokenKind, is_space};
use crate::text::{lowercase, push_quoted};
use references::find_references;

/// New names of tables.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TableNames(Vec<(TableName, TableName)>);

/// The name of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
struct TableName {
    /// None: any database for an old name; the same database for a new one.
    database: Option<Vec<u8>>,
    table: Vec<u8>,
}

impl TableName {
    /// Parses `table` or `database.table`, each perhaps in backticks.
    fn parse(text: &str) -> Option<Self> {
        let tokens = tokens(text.as_bytes());
        let name = |token: &Token| token.is_name().then(|| token.text.clone());
        let (database, table) = match tokens.as_slice() {
            [table] => (None, name(table)?),
            [database, dot, table] if dot.text == b"." => (Some(name(database)?), name(table)?),
            _ => return None,
        };
        Some(Self { database, table }).filter(|name| !name.table.is_empty() && name.database.as_deref() != Some(b""))
    }

    fn fits(&self, database: Option<&[u8]>, table: &[u8]) -> bool {
        self.table == table && self.database.as_deref().is_none_or(|expected| database == Some(expected))
    }
}

impl TableNames {
    /// Reads old and new names, each `table` or `database.table`. An old name without a database stands for tables in
    /// all databases, except those that another old name names with their database. The error is the text that is no
    /// name.
    pub fn new<'a>(names: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self, &'a str> {
        let parse = |(old, new): (&'a str, &'a str)| {
            let mut lower = TableName::parse(old).ok_or(old)?;
            lower.database = lower.database.map(|name| lowercase(&name));
            lower.table = lowercase(&lower.table);
            Ok::<_, &'a str>((lower, TableName::parse(new).ok_or(new)?))
        };
        let mut names = names.into_iter().map(parse).collect::<Result<Vec<_>, _>>()?;
        names.sort_by_key(|(old, _)| old.database.is_none());
        Ok(Self(names))
    }

    fn find(&self, database: Option<&[u8]>, table: &[u8]) -> Option<&TableName> {
        self.0.iter().find(|(old, _)| old.fits(database, table)).map(|(_, new)| new)
    }
}

#[derive(Debug)]
struct Token {
    kind: TokenKind,
    range: Range<usize>,
    /// The text as it is written; that of a name in backticks is without them.
    text: Vec<u8>,
    /// The text in lower case.
    lower: Vec<u8>,
}

impl Token {
    fn is_name(&self) -> bool {
        matches!(self.kind, TokenKind::Identifier | TokenKind::QuotedIdentifier)
    }

    /// Whether this is a word, such as a keyword, without backticks.
    fn is_word(&self, words: &[&[u8]]) -> bool {
        self.kind == TokenKind::Identifier && words.contains(&&*self.lower)
    }

    fn is_symbol(&self, symbol: u8) -> bool {
        self.kind == TokenKind::Other && self.text == [symbol]
    }
}

fn tokens(sql: &[u8]) -> Vec<Token> {
    let mut scanner = Scanner::new(sql);
    let mut tokens = Vec::new();
    let mut text = Vec::new();
    while let Some((kind, start)) = scanner.next(&mut text) {
        let lower = lowercase(&text);
        tokens.push(Token { kind, range: start..scanner.at, text: std::mem::take(&mut text), lower });
    }
    tokens
}

/// The statement with the new names of its tables, perhaps without comments and without semicolons at its end. None: it
/// contains no such table.
#[must_use]
pub fn rename_tables(sql: &[u8], names: &TableNames) -> Option<Vec<u8>> {
    let tokens = tokens(sql);
    let changes = changes(&tokens, names);
    // A comment whose content runs may begin or end within a name: `shop /*! .orders */`.
    if changes.iter().any(|(range, _)| has_comment(sql, &tokens[range.clone()])) {
        let clean = without_comments(sql);
        let tokens = self::tokens(&clean);
        return Some(with_changes(&clean, &tokens, self::changes(&tokens, names)));
    }
    (!changes.is_empty()).then(|| with_changes(sql, &tokens, changes))
}

/// The statement with other texts in place of these tokens.
fn with_changes(sql: &[u8], tokens: &[Token], changes: Vec<(Range<usize>, Vec<u8>)>) -> Vec<u8> {
    let mut changed = Vec::new();
    let mut end = 0;
    for (range, name) in changes {
        changed.extend_from_slice(&sql[end..tokens[range.start].range.start]);
        // A backtick beside another one would be a part of the name.
        if changed.ends_with(b"`") {
            changed.push(b' ');
        }
        changed.extend(name);
        end = tokens[range.end - 1].range.end;
        if sql[end..].starts_with(b"`") {
            changed.push(b' ');
        }
    }
    changed.extend_from_slice(&sql[end..]);
    changed
}

/// Whether there is a comment between these tokens.
fn has_comment(sql: &[u8], tokens: &[Token]) -> bool {
    tokens.windows(2).any(|pair| !sql[pair[0].range.end..pair[1].range.start].iter().all(|byte| is_space(*byte)))
}

/// A table of the statement that gets another name. The old names are in lower case.
struct RenamedTable<'a> {
    database: Option<&'a [u8]>,
    table: &'a [u8],
    new: &'a TableName,
}

/// The sequences of tokens that get another text, in order.
fn changes(tokens: &[Token], names: &TableNames) -> Vec<(Range<usize>, Vec<u8>)> {
    let references = find_references(tokens);
    let mut tables: Vec<RenamedTable<'_>> = Vec::new();
    let mut changes = Vec::new();
    for range in &references.tables {
        let (database, table) = name_parts(&tokens[range.clone()]);
        if database.is_none() && references.common_tables.contains(table) {
            continue;
        }
        if let Some(new) = names.find(database, table) {
            tables.push(RenamedTable { database, table, new });
            changes.push((range.clone(), quoted(new, &tokens[range.clone()])));
        }
    }
    for range in &references.qualifiers {
        let (database, table) = name_parts(&tokens[range.clone()]);
        let is_alias = database.is_none() && references.aliases.contains(table);
        let is_renamed = |renamed: &&RenamedTable<'_>| {
            renamed.table == table && (database.is_none() || renamed.database.is_none() || renamed.database == database)
        };
        if let Some(RenamedTable { new, .. }) = tables.iter().find(is_renamed).filter(|_| !is_alias) {
            // A qualifier without a database stays one.
            let new = TableName { database: new.database.clone().filter(|_| database.is_some()), ..(*new).clone() };
            changes.push((range.clone(), quoted(&new, &tokens[range.clone()])));
        }
    }
    changes.sort_by_key(|(range, _)| range.start);
    changes
}

/// Database and table of `table` or `database.table`, in lower case.
fn name_parts(tokens: &[Token]) -> (Option<&[u8]>, &[u8]) {
    match tokens {
        [database, _, table] => (Some(&database.lower), &table.lower),
        _ => (None, &tokens[0].lower),
    }
}

/// The new name in backticks. The database of the old name stays if the new name has none.
fn quoted(new: &TableName, old: &[Token]) -> Vec<u8> {
    let old_database = if let [database, _, _] = old { Some(&database.text) } else { None };
    let mut text = Vec::new();
    for name in new.database.as_ref().or(old_database).into_iter().chain([&new.table]) {
        if !text.is_empty() {
            text.push(b'.');
        }
        push_quoted(name, b'`', b"`", &mut text);
    }
    text
}
