//! What some statements contain: the text of `PREPARE`, the database of `USE`, the states of `SET SESSION_STATES`, and
//! the parameters of prepared statements.

use std::ops::Range;

use crate::scanner::TokenKind;
use crate::text::{push_quoted, unescape};
use crate::tokens::Tokens;

/// What `PREPARE name FROM ...` prepares.
#[derive(Debug, PartialEq, Eq)]
pub enum PreparedText {
    /// A text.
    Literal {
        /// The content of the string.
        content: Vec<u8>,
        /// Where the string, with its quotes, is in the statement.
        range: Range<usize>,
    },
    /// The value of a variable, which the session knows.
    Variable,
}

/// The text that a `PREPARE` statement prepares. None: the statement is another one.
#[must_use]
pub fn prepared_text(sql: &[u8]) -> Option<PreparedText> {
    let mut tokens = Tokens::new(sql);
    (tokens.skip_keyword(b"prepare") && tokens.read_name() && tokens.skip_keyword(b"from")).then_some(())?;
    let (kind, range) = tokens.next()?;
    match kind {
        TokenKind::UserVariable => Some(PreparedText::Variable),
        TokenKind::String => string_content(sql, &range).map(|content| PreparedText::Literal { content, range }),
        _ => None,
    }
}

/// The database that a `USE` statement selects. None: the statement is another one.
#[must_use]
pub fn used_database(sql: &[u8]) -> Option<Vec<u8>> {
    let mut tokens = Tokens::new(sql);
    (tokens.skip_keyword(b"use") && tokens.read_name()).then_some(tokens.literal)
}

/// The states that `SET SESSION_STATES` restores. None: the statement is another one.
#[must_use]
pub fn session_states(sql: &[u8]) -> Option<Vec<u8>> {
    let mut tokens = Tokens::new(sql);
    (tokens.skip_keyword(b"set") && tokens.skip_keyword(b"session_states")).then_some(())?;
    let (kind, range) = tokens.next()?;
    (kind == TokenKind::String).then(|| string_content(sql, &range)).flatten()
}

/// Where the parameters of a prepared statement are, each a question mark.
#[must_use]
pub fn parameters(sql: &[u8]) -> Vec<usize> {
    let mut tokens = Tokens::new(sql);
    let parameters = std::iter::from_fn(|| tokens.next()).filter(|(kind, _)| *kind == TokenKind::Parameter);
    parameters.map(|(_, range)| range.start).collect()
}

/// The content of a string in quotes. None: it is a number in binary.
fn string_content(sql: &[u8], range: &Range<usize>) -> Option<Vec<u8>> {
    let quote = sql[range.start];
    matches!(quote, b'\'' | b'"').then_some(())?;
    let mut content = Vec::with_capacity(range.len());
    unescape(&sql[range.start + 1..range.end - 1], quote, &mut content);
    Some(content)
}

/// The string with this content, for TiDB's default SQL mode.
#[must_use]
pub fn quoted_string(content: &[u8]) -> Vec<u8> {
    let mut quoted = Vec::with_capacity(content.len() + 2);
    push_quoted(content, b'\'', b"'\\", &mut quoted);
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(sql: &str) -> Option<String> {
        match prepared_text(sql.as_bytes())? {
            PreparedText::Literal { content, range } => {
                assert!(matches!(sql.as_bytes()[range.start], b'\'' | b'"') && range.end <= sql.len());
                Some(String::from_utf8_lossy(&content).into_owned())
            }
            PreparedText::Variable => Some("@".into()),
        }
    }

    #[test]
    fn text_of_prepare_is_found() {
        let cases = [
            ("prepare s from 'select 1'", Some("select 1")),
            ("/* a */PREPARE `s s`/**/FROM\"select \\'a\\', ''b'' \"\"\";", Some("select 'a', ''b'' \"")),
            ("prepare s from @v", Some("@")),
            ("/*!prepare*/ s from @`a b`", Some("@")),
            ("prepare s from", None),
            ("prepare s from 'select", None),
            ("prepare s from b'01'", None),
            ("execute s", None),
            ("", None),
        ];
        for (sql, expected) in cases {
            assert_eq!(content(sql).as_deref(), expected, "{sql}");
        }
        for text in ["it's", "a\\", "", "\"\n"] {
            let sql = [b"prepare s from ", &*quoted_string(text.as_bytes())].concat();
            assert_eq!(content(&String::from_utf8_lossy(&sql)).as_deref(), Some(text));
        }
    }

    #[test]
    fn database_of_use_is_found() {
        assert_eq!(used_database(b" use Shop;"), Some(b"Shop".to_vec()));
        assert_eq!(used_database(b"USE/**/`a``b`"), Some(b"a`b".to_vec()));
        assert_eq!((used_database(b"user x"), used_database(b"use 'x'")), (None, None));
    }

    #[test]
    fn states_of_set_session_states_are_found() {
        let states = session_states(b"SET SESSION_STATES '{\"a\": \"it\\'s \\\\\"}'");
        assert_eq!(states.as_deref(), Some(&b"{\"a\": \"it's \\\"}"[..]));
        for other in
            [&b"set session_states = 1"[..], b"set session_states b'1'", b"show session_states", b"set @a = '{}'"]
        {
            assert_eq!(session_states(other), None);
        }
    }

    #[test]
    fn parameters_are_question_marks_outside_of_strings_names_and_comments() {
        assert_eq!(parameters(b"select ?, '?', `?` /* ? */ from t where a in (?) -- ?"), [7, 46]);
        assert_eq!(parameters(b"select 1"), [] as [usize; 0]);
    }
}
