//! KILL statements.

use std::ops::Range;

use crate::scanner::{TokenKind, is_space};
use crate::tokens::Tokens;

/// A KILL statement (TiDB: `KILL [TIDB] [CONNECTION | QUERY] id`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kill {
    /// It ends only the statement that runs.
    pub is_query: bool,
    pub id: u64,
    /// Where the id is in the text.
    pub id_range: Range<usize>,
}

/// Whether a text may begin with this keyword, in lower case. It is also true for every text that begins with a comment:
/// it is a cheap test before an exact one, and does not replace that. `start`: the first bytes of the text.
#[must_use]
pub fn may_begin_with(start: &[u8], keyword: &[u8]) -> bool {
    let first = start.iter().position(|byte| !is_space(*byte));
    match first.map(|first| &start[first..]) {
        None => true,
        Some(rest) if b"/-#".contains(&rest[0]) => true, // a comment
        Some(rest) => rest.iter().zip(keyword).all(|(byte, letter)| byte.to_ascii_lowercase() == *letter),
    }
}

/// None: the statement is no KILL statement with a number.
#[must_use]
pub fn kill(statement: &[u8]) -> Option<Kill> {
    let mut tokens = Tokens::new(statement);
    tokens.skip_keyword(b"kill").then_some(())?;
    tokens.skip_keyword(b"tidb");
    let is_query = tokens.skip_keyword(b"query");
    if !is_query {
        tokens.skip_keyword(b"connection");
    }
    let (kind, id_range) = tokens.next()?;
    let id = std::str::from_utf8(&tokens.literal).ok()?.parse().ok()?;
    (kind == TokenKind::Integer && tokens.is_at_end()).then_some(Kill { is_query, id, id_range })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kill_statement_names_its_session() {
        for (statement, expected) in [
            ("kill 12", Some((false, 12, 5..7))),
            ("KILL QUERY 12;", Some((true, 12, 11..13))),
            ("/* mysql */ kill connection 18446744073709551615", Some((false, u64::MAX, 28..48))),
            ("kill tidb query 1", Some((true, 1, 16..17))),
            ("kill tidb 1 -- comment", Some((false, 1, 10..11))),
            ("kill 1; ;", Some((false, 1, 5..6))),
            ("kill -1", None),
            ("kill 0x1", None),
            ("kill 1; select 1", None),
            ("kill 18446744073709551616", None),
            ("kill connection_id()", None),
            ("kill query", None),
            ("killed 1", None),
            ("kill 1 \x01", None),
        ] {
            let expected = expected.map(|(is_query, id, id_range)| Kill { is_query, id, id_range });
            assert_eq!(kill(statement.as_bytes()), expected, "{statement}");
        }
    }

    #[test]
    fn beginning_shows_whether_a_text_may_begin_with_a_keyword() {
        for (start, expected) in [
            ("", true),
            ("  ", true),
            ("k", true),
            ("\n KILL 1", true),
            ("/*", true),
            ("-- x", true),
            ("select", false),
            ("kid", false),
        ] {
            assert_eq!(may_begin_with(start.as_bytes(), b"kill"), expected, "{start:?}");
        }
    }
}
