//! Where a statement names tables.

use std::collections::HashSet;
use std::ops::Range;

use super::Token;

/// What a statement names. Ranges are those of tokens: `table` or `database.table`.
#[derive(Debug, Default)]
pub(super) struct References {
    pub(super) tables: Vec<Range<usize>>,
    /// What stands before a column: `t` in `t.id`.
    pub(super) qualifiers: Vec<Range<usize>>,
    /// Aliases of tables, in lower case.
    pub(super) aliases: HashSet<Vec<u8>>,
    /// Names that `WITH` defines, in lower case.
    pub(super) common_tables: HashSet<Vec<u8>>,
}

/// Words between one that a table follows, and the table.
const MODIFIERS: &[&[u8]] = &[
    b"delayed",
    b"exists",
    b"from",
    b"high_priority",
    b"if",
    b"ignore",
    b"into",
    b"lateral",
    b"low_priority",
    b"not",
    b"quick",
    b"table",
];
/// Words that end a list of tables.
const END_OF_LIST: &[&[u8]] = &[
    b"except",
    b"for",
    b"group",
    b"having",
    b"intersect",
    b"limit",
    b"order",
    b"procedure",
    b"select",
    b"set",
    b"union",
    b"value",
    b"values",
    b"where",
    b"window",
];
/// Words behind a table that are no alias.
const NO_ALIAS: &[&[u8]] = &[
    b"cross",
    b"force",
    b"inner",
    b"join",
    b"left",
    b"natural",
    b"on",
    b"partition",
    b"right",
    b"straight_join",
    b"tablesample",
    b"use",
    b"using",
];
/// Functions whose arguments contain `FROM`.
const FUNCTIONS_WITH_FROM: &[&[u8]] = &[b"extract", b"mid", b"substr", b"substring", b"trim"];

/// What the next token may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expected {
    Other,
    Table,
    /// A table, or tables in parentheses.
    TableOrList,
    /// An alias, or something else.
    Alias,
}

/// The state within one pair of parentheses.
#[derive(Debug, Clone, Copy)]
struct Level {
    expected: Expected,
    /// Another table follows a comma.
    is_list: bool,
    /// The arguments of a function that contain `FROM`.
    is_function: bool,
    /// The level began where a table may stand.
    is_table: bool,
}

const BASE: Level = Level { expected: Expected::Other, is_list: false, is_function: false, is_table: false };

pub(super) fn find_references(tokens: &[Token]) -> References {
    let mut references = References { common_tables: common_tables(tokens), ..References::default() };
    let first = tokens.iter().position(|token| !token.is_symbol(b'(')).unwrap_or_default();
    let is_first = |words: &[&[u8]]| tokens.get(first).is_some_and(|token| token.is_word(words));
    // `FROM` and `IN` of other SHOW statements name databases.
    let mut before_from = tokens.iter().take_while(|token| !token.is_word(&[b"from", b"in"]));
    let lists_no_columns = is_first(&[b"show"])
        && !before_from.any(|token| token.is_word(&[b"columns", b"fields", b"index", b"indexes", b"keys"]));
    let on_names_table = is_first(&[b"grant", b"revoke"])
        || is_first(&[b"create", b"drop"]) && tokens.iter().take(first + 4).any(|token| token.is_word(&[b"index"]));
    let mut levels = vec![BASE];
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        let previous = at.checked_sub(1).map(|index| &tokens[index]);
        let follows = |words: &[&[u8]]| previous.is_some_and(|token| token.is_word(words));
        let depth = levels.len() - 1;
        let level = &mut levels[depth];
        let expected = std::mem::replace(&mut level.expected, Expected::Other);
        if token.is_symbol(b'(') {
            let is_table = expected == Expected::TableOrList;
            let inner = if is_table { Expected::TableOrList } else { Expected::Other };
            let is_function = follows(FUNCTIONS_WITH_FROM);
            levels.push(Level { expected: inner, is_list: is_table, is_function, is_table });
        } else if token.is_symbol(b')') {
            if depth > 0 && levels.pop().is_some_and(|inner| inner.is_table) {
                levels[depth - 1].expected = Expected::Alias;
            }
        } else if token.is_symbol(b',') {
            if level.is_list {
                level.expected = Expected::TableOrList;
            }
        } else if token.is_symbol(b';') {
            levels = vec![BASE];
        } else if token.is_name() {
            let name = name_at(tokens, at);
            let is_call = tokens.get(name.end).is_some_and(|next| next.is_symbol(b'('));
            let is_single = name.len() == 1;
            if is_single && token.is_word(&[b"from", b"join", b"straight_join"]) {
                let names_database = lists_no_columns || is_first(&[b"show"]) && !references.tables.is_empty();
                if !level.is_function && !names_database {
                    *level = Level { expected: Expected::TableOrList, is_list: true, ..*level };
                }
            } else if is_single && is_table_word(token, at == first, &follows, is_call, on_names_table) {
                let is_list = !token.is_word(&[b"into", b"references", b"on", b"insert", b"replace"]);
                *level = Level { expected: Expected::Table, is_list, ..*level };
            } else if is_single
                && token.is_word(MODIFIERS)
                && matches!(expected, Expected::Table | Expected::TableOrList)
            {
                level.expected = expected;
            } else if is_single && token.is_word(END_OF_LIST) {
                level.is_list = false;
            } else if matches!(expected, Expected::Table | Expected::TableOrList) {
                if expected == Expected::Table || !is_call {
                    references.tables.push(name.start..name.start + name.len().min(3));
                }
                level.expected = Expected::Alias;
            } else if expected == Expected::Alias && is_single {
                if token.is_word(&[b"as"]) {
                    level.expected = Expected::Alias;
                } else if level.is_list && !token.is_word(NO_ALIAS) {
                    references.aliases.insert(token.lower.clone());
                }
            } else if matches!(name.len(), 3 | 5) {
                references.qualifiers.push(name.start..name.end - 2); // without the column
            }
            at = name.end;
            continue;
        }
        at += 1;
    }
    references
}

/// Whether a table follows this word, which is neither `FROM` nor `JOIN`.
fn is_table_word(
    token: &Token,
    is_first: bool,
    follows: &dyn Fn(&[&[u8]]) -> bool,
    is_call: bool,
    on_names_table: bool,
) -> bool {
    let is = |words: &[&[u8]]| token.is_word(words);
    is(&[b"into", b"table", b"tables", b"references"])
        // Not `FOR UPDATE`, `ON UPDATE` and `ON DUPLICATE KEY UPDATE`.
        || is(&[b"update"]) && !follows(&[b"for", b"key", b"on"])
        || is(&[b"of"]) && follows(&[b"share", b"update"])
        || is(&[b"on"]) && on_names_table
        || is(&[b"insert", b"replace"]) && !is_call
        || is(&[b"delete"]) && !follows(&[b"on"])
        || is_first && is(&[b"desc", b"describe", b"truncate"])
}

/// The tokens of `name`, `name.name`, and so on. The last one may be `*`.
fn name_at(tokens: &[Token], start: usize) -> Range<usize> {
    let mut end = start + 1;
    while tokens.get(end).is_some_and(|dot| dot.is_symbol(b'.'))
        && tokens.get(end + 1).is_some_and(|name| name.is_name() || name.is_symbol(b'*'))
    {
        end += 2;
    }
    start..end
}

/// The names that `WITH name AS (...)` and `WITH name (columns) AS (...)` define.
fn common_tables(tokens: &[Token]) -> HashSet<Vec<u8>> {
    let mut names = HashSet::new();
    if !tokens.iter().any(|token| token.is_word(&[b"with"])) {
        return names;
    }
    for (index, pair) in tokens.windows(2).enumerate() {
        if !(pair[0].is_word(&[b"as"]) && pair[1].is_symbol(b'(')) {
            continue;
        }
        let mut before = index.checked_sub(1);
        if before.is_some_and(|before| tokens[before].is_symbol(b')')) {
            let open = tokens[..index].iter().rposition(|token| token.is_symbol(b'('));
            before = open.and_then(|open| open.checked_sub(1));
        }
        if let Some(name) = before.map(|before| &tokens[before]).filter(|name| name.is_name()) {
            names.insert(name.lower.clone());
        }
    }
    names
}
