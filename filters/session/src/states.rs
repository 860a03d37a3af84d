//! The states of a session as a node has exported them: an object of JSON, nearly all of which is the nodes' business.
//!
//! Source: TiDB's `pkg/sessionctx/sessionstates/session_states.go` (keys), `pkg/session/session.go` and
//! `pkg/executor/select.go` (how they are restored). Values are kept as they are written: 64-bit integers occur.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use serde_json::value::RawValue;

use crate::messages::query;

/// What SET SESSION_STATES sets even where the states do not have it, to nothing (`DecodeSessionStates` in TiDB's
/// `pkg/sessionctx/variable/session.go`): what the client may ask of the last statement, the number of the statement that
/// was prepared last, and the like. Without that number the node would give it once more, to another statement.
const LAST: [&str; 15] = [
    "prepared-stmt-id",
    "status",
    "current-db",
    "txn-info",
    "query-info",
    "ddl-info",
    "found-rows",
    "in-plan-cache",
    "in-binding",
    "affected-rows",
    "last-insert-id",
    "warnings",
    "rs-group",
    "hypo-indexes",
    "hypo-tiflash-replicas",
];

/// Makes backslashes escape, whatever the node's own setting is, and text be read as JSON is written. The session's own
/// settings come back with its states.
#[must_use]
pub fn prepare() -> Vec<u8> {
    query(b"SET @@session.sql_mode='', @@session.character_set_client='utf8mb4'")
}

/// The statement that restores `json`, or a part of it. The node must have heard [`prepare`] before.
#[must_use]
pub fn restore(json: &[u8]) -> Vec<u8> {
    restored(json, true)
}

/// `backslashes`: they escape there. To double a quote means the same in all modes.
fn restored(json: &[u8], backslashes: bool) -> Vec<u8> {
    let mut text = b"SET SESSION_STATES '".to_vec();
    text.reserve(json.len() + json.len() / 8);
    for &byte in json {
        if byte == b'\'' || byte == b'\\' && backslashes {
            text.push(byte);
        }
        text.push(byte);
    }
    text.push(b'\'');
    query(&text)
}

/// JSON that no character set changes.
fn ascii(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for letter in json.chars() {
        if letter.is_ascii() {
            text.push(letter);
        } else {
            for unit in letter.encode_utf16(&mut [0; 2]) {
                let _ = write!(text, "\\u{unit:04x}");
            }
        }
    }
    text
}

/// States that cannot be carried over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unusable {
    /// More than anybody would take.
    TooMany,
    /// They are no JSON object, or a key that matters has another type.
    NoJson,
    /// There is text that is not ASCII in them, and the node has converted it for its client to a character set that may
    /// not have all of it.
    CharacterSet,
}

/// The statement that undoes, at the node that has exported these states, what the export has changed: the client may still
/// ask for what its last statement has left (ROW_COUNT, FOUND_ROWS, warnings). None when they cannot be read.
///
/// Where the node has converted them to a character set other than UTF-8, texts of warnings may lose letters.
#[must_use]
pub fn undo(json: &[u8]) -> Option<Vec<u8>> {
    let text = String::from_utf8_lossy(json);
    let parts = Parts { all: serde_json::from_str(&text).ok()? };
    let is_certain = matches!(text, Cow::Borrowed(_)) && parts.is_in_utf8().ok()?;
    if !is_certain && !parts.database().ok()?.is_ascii() {
        return None; // it would be another one
    }
    let kept: BTreeMap<&str, &RawValue> = LAST.iter().filter_map(|&key| Some((key, *parts.all.get(key)?))).collect();
    let json = serde_json::to_string(&kept).ok()?;
    let backslashes =
        !parts.variables().ok()?.get("sql_mode").is_some_and(|mode| mode.contains("NO_BACKSLASH_ESCAPES"));
    Some(restored(ascii(&json).as_bytes(), backslashes))
}

/// The states, taken apart as far as needed.
pub struct Parts<'a> {
    all: BTreeMap<Cow<'a, str>, &'a RawValue>,
}

impl<'a> Parts<'a> {
    /// Of the JSON that a node has exported.
    pub fn of(json: &'a [u8]) -> Result<Self, Unusable> {
        let all: BTreeMap<Cow<'a, str>, &'a RawValue> = serde_json::from_slice(json)
            .map_err(|_| if json.is_ascii() { Unusable::NoJson } else { Unusable::CharacterSet })?;
        let parts = Self { all };
        if !json.is_ascii() && !parts.is_in_utf8()? {
            return Err(Unusable::CharacterSet);
        }
        parts.database()?;
        Ok(parts)
    }

    /// How long the node lets the session be idle; None: that is not known.
    #[must_use]
    pub fn wait_timeout(&self) -> Option<Duration> {
        let seconds = self.variables().ok()?.get("wait_timeout")?.parse().ok()?;
        Some(Duration::from_secs(seconds))
    }

    /// The session's database; empty when it has none.
    pub fn database(&self) -> Result<String, Unusable> {
        self.read("current-db").map(Option::unwrap_or_default)
    }

    /// Whether what is not ASCII in them is UTF-8 without a loss.
    fn is_in_utf8(&self) -> Result<bool, Unusable> {
        let variables = self.variables()?;
        let Some(name) = variables.get("character_set_results") else { return Ok(true) };
        // Empty: the node converts nothing.
        Ok(matches!(name.to_ascii_lowercase().as_str(), "" | "utf8mb4" | "binary"))
    }

    fn variables(&self) -> Result<BTreeMap<Cow<'a, str>, Cow<'a, str>>, Unusable> {
        self.read("sys-vars").map(Option::unwrap_or_default)
    }

    fn read<T: serde::Deserialize<'a>>(&self, key: &str) -> Result<Option<T>, Unusable> {
        self.all.get(key).map(|value| serde_json::from_str(value.get())).transpose().map_err(|_| Unusable::NoJson)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn database(json: &str) -> Result<String, Unusable> {
        Parts::of(json.as_bytes())?.database()
    }

    #[test]
    fn quotes_and_backslashes_are_doubled() {
        let statement = restore(br#"{"a":"it's \"b\""}"#);
        assert_eq!(&statement[4..], br#"{"a":"it's \"b\""}"#.escape_in_quotes());
        assert_eq!(usize::from(statement[0]), statement.len() - 4);
    }

    trait Quoted {
        fn escape_in_quotes(&self) -> Vec<u8>;
    }

    impl Quoted for [u8] {
        fn escape_in_quotes(&self) -> Vec<u8> {
            let text = String::from_utf8(self.to_vec()).expect("text").replace('\\', r"\\").replace('\'', "''");
            format!("\x03SET SESSION_STATES '{text}'").into_bytes()
        }
    }

    #[test]
    fn the_database_may_be_missing() {
        assert_eq!(database(r#"{"current-db":"a\u0062"}"#), Ok("ab".to_owned()));
        assert_eq!(database("{}"), Ok(String::new()));
    }

    #[test]
    fn how_long_it_may_be_idle_is_among_its_variables() {
        let of = |json: &str| Parts::of(json.as_bytes()).expect("states").wait_timeout();
        assert_eq!(of(r#"{"sys-vars":{"wait_timeout":"28800"}}"#), Some(Duration::from_secs(28_800)));
        assert_eq!(of(r#"{"sys-vars":{"wait_timeout":"soon"}}"#), None);
        assert_eq!(of("{}"), None);
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for json in ["", "[]", "{", r#"{"current-db":1}"#] {
            assert_eq!(database(json), Err(Unusable::NoJson), "{json}");
        }
    }

    #[test]
    fn text_that_was_converted_is_not_trusted() {
        let states =
            |set: &str, text: &str| format!(r#"{{"sys-vars":{{"character_set_results":"{set}"}},"x":"{text}"}}"#);
        assert_eq!(database(&states("utf8mb4", "ü")), Ok(String::new()));
        assert_eq!(database(&states("", "ü")), Ok(String::new()));
        assert_eq!(database(&states("gbk", "u")), Ok(String::new()));
        assert_eq!(database(&states("gbk", "ü")), Err(Unusable::CharacterSet));
        // As it comes from the node: no UTF-8 at all.
        assert_eq!(Parts::of(b"{\"x\":\"\xb9\"}").err(), Some(Unusable::CharacterSet));
    }

    fn undone(json: &str) -> String {
        let statement = undo(json.as_bytes()).expect("a statement");
        String::from_utf8(statement[5..].to_vec()).expect("text")
    }

    #[test]
    fn what_the_last_statement_left_is_put_back_to_the_digit() {
        let json = r#"{"last-insert-id":18446744073709551615,"found-rows":3,"user-var-values":{"a":1}}"#;
        assert_eq!(undone(json), r#"SET SESSION_STATES '{"found-rows":3,"last-insert-id":18446744073709551615}'"#);
    }

    #[test]
    fn what_the_node_would_reset_is_put_back_too() {
        let json = r#"{"prepared-stmt-id":7,"hypo-indexes":{"d":{}},"prepared-stmts":{"7":{"text":"select 1"}}}"#;
        assert_eq!(undone(json), r#"SET SESSION_STATES '{"hypo-indexes":{"d":{}},"prepared-stmt-id":7}'"#);
    }

    #[test]
    fn also_where_the_node_has_converted_it() {
        let mut json = br#"{"current-db":"a","found-rows":3,"user-var-values":{"a":""#.to_vec();
        json.extend(b"\xfc\"}}");
        let statement = undo(&json).expect("a statement");
        assert_eq!(&statement[5..], br#"SET SESSION_STATES '{"current-db":"a","found-rows":3}'"#);
        assert_eq!(undo(b"{\"current-db\":\"\xfc\"}"), None, "it would be another database");
        assert_eq!(undo(b"[]"), None);
    }

    #[test]
    fn it_is_put_back_in_the_sessions_own_mode_and_character_set() {
        let json = |mode: &str| format!(r#"{{"sys-vars":{{"sql_mode":"{mode}"}},"warnings":["it's \"ü𝄞\""]}}"#);
        assert_eq!(undone(&json("ANSI")), r#"SET SESSION_STATES '{"warnings":["it''s \\"\\u00fc\\ud834\\udd1e\\""]}'"#);
        assert_eq!(
            undone(&json("ANSI,NO_BACKSLASH_ESCAPES")),
            r#"SET SESSION_STATES '{"warnings":["it''s \"\u00fc\ud834\udd1e\""]}'"#
        );
    }
}
