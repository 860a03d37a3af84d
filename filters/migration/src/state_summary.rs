//! What a migration needs to know of a session's exported states, which are a JSON object.
//!
//! Source: TiDB's `pkg/sessionctx/sessionstates/session_states.go` (keys), `pkg/session/session.go`,
//! `pkg/sessionctx/variable/session.go` and `pkg/executor/select.go` (how they are restored). Values are copied
//! verbatim, because they may be 64-bit integers.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use mysql_proto::secret::SecretBytes;
use serde_json::value::RawValue;
use zeroize::Zeroizing;

use crate::json_scanner::ScannedJson;
use crate::messages::query;
use crate::session_variables::SessionVariables;

const VARIABLES: &str = "sys-vars";
const DATABASE: &str = "current-db";
/// The ID of the prepared statement that was prepared last.
const LAST_PREPARED: &str = "prepared-stmt-id";

/// The keys that [`StateSummary`] is built from: system variables, and everything that [`StateSummary::undo`] restores.
/// The latter are the values that TiDB clears if their key is missing (`DecodeSessionStates` in
/// `pkg/sessionctx/variable/session.go`). For example, without `prepared-stmt-id`, the next prepared statement would
/// get the ID of the first one. If the keys of variables, bindings, prepared statements or sequence values are missing,
/// TiDB keeps the values.
pub(crate) const SUMMARY_KEYS: [&str; 16] = [
    VARIABLES,
    "status",
    DATABASE,
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
    LAST_PREPARED,
    "hypo-indexes",
    "hypo-tiflash-replicas",
];

/// The statement that restores a small part of the states. `backslash_escapes`: whether backslashes escape in the
/// session's SQL mode. A doubled quote means the same in all modes.
fn restore_query(json: &[u8], backslash_escapes: bool) -> SecretBytes {
    let mut text = SecretBytes::with_capacity(json.len() + json.len() / 8 + 32);
    text.extend_from_slice(b"SET SESSION_STATES '");
    for &byte in json {
        if byte == b'\'' || byte == b'\\' && backslash_escapes {
            text.push(byte);
        }
        text.push(byte);
    }
    text.push(b'\'');
    query(&text).into()
}

/// Replaces non-ASCII characters by escapes, so that no character set changes the JSON.
fn escape_non_ascii(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for character in json.chars() {
        if character.is_ascii() {
            text.push(character);
        } else {
            for unit in character.encode_utf16(&mut [0; 2]) {
                let _ = write!(text, "\\u{unit:04x}");
            }
        }
    }
    text
}

/// Why states cannot be restored at another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UnusableStates {
    /// The states or the token exceed the limit of one session.
    TooLarge,
    /// The states exceed what is left of the budget of all sessions.
    OverBudget,
    /// The states are not a JSON object, or the value of a needed key has another type.
    InvalidJson,
    /// The exported text may have lost characters or bytes: the node converted it to the character set of results, or
    /// it was not UTF-8 before.
    LossyText,
    /// TiDB would restore a variable or a prepared statement with another effect ([`crate::session_variables`]).
    Unrestorable,
}

/// What a migration needs to know of the states. It is small.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct StateSummary {
    /// The session's database; empty if it has none.
    pub database: String,
    /// How long the node lets the session be idle, if known.
    pub wait_timeout: Option<Duration>,
    /// The statement that undoes the export at the old node. The client may still ask for results of its last statement
    /// (ROW_COUNT, FOUND_ROWS, warnings), which the export has replaced. None if they are unknown.
    ///
    /// If the node converted the states to another character set, texts of warnings may lose characters.
    pub undo: Option<SecretBytes>,
}

/// Hides the client's data.
impl std::fmt::Debug for StateSummary {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { database, wait_timeout, undo } = self;
        write!(formatter, "StateSummary(database of {} bytes, {wait_timeout:?}, undo: {undo:?})", database.len())
    }
}

/// The statements that the target runs before and after the restore of all states.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RestoreFrame {
    pub(crate) preparation: Vec<u8>,
    /// Sets some variables again, which the restore of all states may have changed.
    pub(crate) completion: SecretBytes,
}

impl StateSummary {
    /// Builds a summary from the values of [`SUMMARY_KEYS`]. Err: the states cannot be restored at another node.
    pub(crate) fn from_scan(scanned: &ScannedJson) -> (Self, Result<RestoreFrame, UnusableStates>) {
        let texts: BTreeMap<&str, Cow<'_, str>> =
            scanned.values.iter().map(|(key, value)| (*key, String::from_utf8_lossy(value))).collect();
        let variables = texts.get(VARIABLES).map_or(Ok(SessionVariables::default()), |text| serde_json::from_str(text));
        let database = texts.get(DATABASE).map_or(Ok(String::new()), |text| serde_json::from_str(text));
        let text = scanned.text;
        let (Ok(variables), Ok(database), true) = (variables, database, scanned.is_object) else {
            let why = if text.is_ascii { UnusableStates::InvalidJson } else { UnusableStates::LossyText };
            return (Self::default(), Err(why));
        };
        let is_converted = variables.is_text_converted();
        let is_lossless = !text.has_replacement_character
            && if is_converted { text.is_ascii && !text.has_question_mark } else { text.is_utf8 };
        let is_database_lossless = is_lossless || database.is_ascii() && !(is_converted && database.contains('?'));
        let partial_restore = |variables_to_set| {
            let json = partial_states(&texts, variables_to_set).filter(|_| !scanned.is_truncated)?;
            Some(restore_query(json.as_bytes(), variables.has_backslash_escapes()))
        };
        let undo = partial_restore(variables.after_export()).filter(|_| is_database_lossless);
        let completion = partial_restore(variables.after_restore());
        let has_prepared_statements = texts.contains_key(LAST_PREPARED);
        let frame = match completion {
            _ if !is_lossless => Err(UnusableStates::LossyText),
            _ if variables.has_unrestorable(has_prepared_statements) => Err(UnusableStates::Unrestorable),
            None if scanned.is_truncated => Err(UnusableStates::OverBudget),
            None => Err(UnusableStates::InvalidJson),
            Some(completion) => Ok(RestoreFrame { preparation: variables.preparation_query(), completion }),
        };
        (Self { database, wait_timeout: variables.wait_timeout(), undo }, frame)
    }
}

/// The states that [`StateSummary::undo`] restores, with these variables, in ASCII. None: they are invalid.
fn partial_states(
    texts: &BTreeMap<&str, Cow<'_, str>>,
    variables: BTreeMap<&'static str, &str>,
) -> Option<Zeroizing<String>> {
    let variables = serde_json::value::to_raw_value(&variables).ok().filter(|_| !variables.is_empty());
    let kept = texts.iter().filter(|(key, _)| **key != VARIABLES);
    let kept: Result<BTreeMap<&str, &RawValue>, _> =
        kept.map(|(key, text)| Ok((*key, serde_json::from_str(text)?))).collect::<serde_json::Result<_>>();
    let mut states = kept.ok()?;
    states.extend(variables.as_deref().map(|variables| (VARIABLES, variables)));
    let json = Zeroizing::new(serde_json::to_string(&states).ok()?);
    Some(Zeroizing::new(escape_non_ascii(&json)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json_scanner::JsonScanner;

    fn summary(json: &[u8]) -> (StateSummary, Result<RestoreFrame, UnusableStates>) {
        let mut scan = JsonScanner::new(&SUMMARY_KEYS);
        scan.push(json, |_| true);
        StateSummary::from_scan(&scan.finish())
    }

    fn database(json: &str) -> Result<String, UnusableStates> {
        let (summary, usable) = summary(json.as_bytes());
        usable.map(|_| summary.database)
    }

    #[test]
    fn database_is_read_and_may_be_missing() {
        assert_eq!(database(r#"{"current-db":"a\u0062"}"#), Ok("ab".to_owned()));
        assert_eq!(database("{}"), Ok(String::new()));
    }

    #[test]
    fn wait_timeout_is_read_from_the_system_variables() {
        let of = |json: &str| summary(json.as_bytes()).0.wait_timeout;
        let all = r#"{"sys-vars":{"a":"b","wait_timeout":"28800","sql_mode":"","x":"y"}}"#;
        assert_eq!(of(all), Some(Duration::from_secs(28_800)));
        assert_eq!(of(r#"{"sys-vars":{"wait_timeout":"soon"}}"#), None);
        assert_eq!(of("{}"), None);
    }

    #[test]
    fn invalid_json_is_unusable() {
        for json in ["", "[]", "{", r#"{"current-db":1}"#, r#"{"sys-vars":[]"#] {
            assert_eq!(summary(json.as_bytes()), (StateSummary::default(), Err(UnusableStates::InvalidJson)), "{json}");
        }
    }

    #[test]
    fn invalid_values_of_needed_keys_are_unusable() {
        assert_eq!(summary(br#"{"found-rows":x}"#).1.map(drop), Err(UnusableStates::InvalidJson));
    }

    #[test]
    fn text_that_may_have_lost_characters_is_unusable() {
        let usable = |set: &str, text: &str| {
            let json = format!(r#"{{"sys-vars":{{"character_set_results":"{set}"}},"x":"{text}"}}"#);
            summary(json.as_bytes()).1.map(drop)
        };
        let lossy = Err(UnusableStates::LossyText);
        for unconverted in ["utf8mb4", "UTF8MB4", "utf8", "utf8mb3", "latin1", "binary", ""] {
            assert_eq!(usable(unconverted, "ü?"), Ok(()), "{unconverted}");
        }
        assert_eq!(database(r#"{"x":"ü?"}"#), Ok(String::new()));
        for converted in ["gbk", "gb18030", "ascii", "another"] {
            assert_eq!(usable(converted, "u"), Ok(()), "{converted}");
            assert_eq!(usable(converted, "ü"), lossy, "{converted}");
            assert_eq!(usable(converted, "?"), lossy, "{converted}: it may replace a character");
        }
        assert_eq!(usable("utf8mb4", "\u{fffd}"), lossy, "it replaces bytes that were not UTF-8");
        // Bytes that are not UTF-8, as the node sends them.
        assert_eq!(summary(b"{\"x\":\"\xb9\"}").1.map(drop), lossy);
    }

    fn undo(json: &[u8]) -> Option<SecretBytes> {
        summary(json).0.undo
    }

    fn undone(json: &str) -> String {
        let statement = undo(json.as_bytes()).expect("a statement");
        String::from_utf8(statement[5..].to_vec()).expect("text")
    }

    #[test]
    fn undo_keeps_64_bit_integers_exactly() {
        let json = r#"{"last-insert-id":18446744073709551615,"found-rows":3,"user-var-values":{"a":1}}"#;
        assert_eq!(undone(json), r#"SET SESSION_STATES '{"found-rows":3,"last-insert-id":18446744073709551615}'"#);
    }

    /// TiDB clears these values if their keys are missing.
    #[test]
    fn undo_restores_values_that_a_missing_key_would_clear() {
        let json = r#"{"prepared-stmt-id":7,"prepared-stmts":{"7":{}},"hypo-indexes":{"a":{}}}"#;
        let kept = r#"{"hypo-indexes":{"a":{}},"prepared-stmt-id":7}"#;
        assert_eq!(undone(json), format!("SET SESSION_STATES '{kept}'"));
    }

    #[test]
    fn undo_is_known_for_converted_text_if_the_database_is_ascii() {
        let mut json = br#"{"current-db":"a","found-rows":3,"user-var-values":{"a":""#.to_vec();
        json.extend(b"\xfc\"}}");
        let statement = undo(&json).expect("a statement");
        assert_eq!(&statement[5..], br#"SET SESSION_STATES '{"current-db":"a","found-rows":3}'"#);
        assert_eq!(undo(b"{\"current-db\":\"\xfc\"}"), None, "the database's name is unknown");
        let gbk = br#"{"sys-vars":{"character_set_results":"gbk"},"current-db":"?"}"#;
        assert_eq!(undo(gbk), None, "the question mark may replace a character");
        assert_eq!(undone(r#"{"current-db":"?"}"#), r#"SET SESSION_STATES '{"current-db":"?"}'"#);
        assert_eq!(undo(b"[]"), None);
    }

    #[test]
    fn undo_restores_the_isolation_level_that_the_export_uses_up() {
        let json = r#"{"sys-vars":{"tx_isolation_one_shot":"SERIALIZABLE","collation_connection":"b"},"found-rows":3}"#;
        let kept = r#"{"found-rows":3,"sys-vars":{"tx_isolation_one_shot":"SERIALIZABLE"}}"#;
        assert_eq!(undone(json), format!("SET SESSION_STATES '{kept}'"));
    }

    #[test]
    fn completion_restores_the_summary_and_sets_variables_again() {
        let completion = |json: &str| {
            let frame = summary(json.as_bytes()).1.expect("usable");
            String::from_utf8(frame.completion[5..].to_vec()).expect("text")
        };
        assert_eq!(
            completion(r#"{"sys-vars":{"collation_connection":"utf8mb4_general_ci","x":"y"},"found-rows":3,"y":{}}"#),
            r#"SET SESSION_STATES '{"found-rows":3,"sys-vars":{"collation_connection":"utf8mb4_general_ci"}}'"#
        );
        assert_eq!(completion(r#"{"found-rows":3}"#), r#"SET SESSION_STATES '{"found-rows":3}'"#);
    }

    #[test]
    fn states_that_tidb_would_restore_differently_are_unusable() {
        let timestamp = br#"{"sys-vars":{"tx_read_ts":"2026-11-27"}}"#;
        assert_eq!(summary(timestamp).1.map(drop), Err(UnusableStates::Unrestorable));
        let modes = br#"{"sys-vars":{"sql_mode":"NO_BACKSLASH_ESCAPES"},"prepared-stmt-id":1}"#;
        assert_eq!(summary(modes).1.map(drop), Err(UnusableStates::Unrestorable));
    }

    #[test]
    fn undo_is_unknown_for_truncated_values() {
        let mut scan = JsonScanner::new(&SUMMARY_KEYS);
        scan.push(br#"{"found-rows":3,"warnings":["long"]}"#, |bytes| bytes < 5);
        let (summary, usable) = StateSummary::from_scan(&scan.finish());
        assert_eq!((summary.undo, usable.map(drop)), (None, Err(UnusableStates::OverBudget)));
    }

    #[test]
    fn undo_is_escaped_for_the_sql_mode_and_any_character_set() {
        let json = |mode: &str| format!(r#"{{"sys-vars":{{"sql_mode":"{mode}"}},"warnings":["it's \"ü𝄞\""]}}"#);
        assert_eq!(undone(&json("ANSI")), r#"SET SESSION_STATES '{"warnings":["it''s \\"\\u00fc\\ud834\\udd1e\\""]}'"#);
        assert_eq!(
            undone(&json("ANSI,NO_BACKSLASH_ESCAPES")),
            r#"SET SESSION_STATES '{"warnings":["it''s \"\u00fc\ud834\udd1e\""]}'"#
        );
    }
}
