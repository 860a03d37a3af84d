//! The system variables that a migration needs from the exported states of a session.
//!
//! TiDB restores a session in this order: it parses the prepared statements, sets the variables in random order, then
//! restores the rest (`DecodeSessionStates` in `pkg/session/session.go`). So before and after its restore, the module
//! sets some variables itself.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;

use crate::messages::query;

/// A mode in which `SET SESSION_STATES` could not be escaped as long as the states are still arriving.
const NO_BACKSLASH_ESCAPES: &str = "NO_BACKSLASH_ESCAPES";

/// The system variables that are needed, out of several hundred. None: the states do not contain the variable.
#[derive(Deserialize, Default)]
#[serde(default)]
pub(crate) struct SessionVariables<'a> {
    #[serde(borrow)]
    sql_mode: Cow<'a, str>,
    #[serde(borrow)]
    character_set_results: Option<Cow<'a, str>>,
    #[serde(borrow)]
    wait_timeout: Cow<'a, str>,
    #[serde(borrow)]
    collation_connection: Option<Cow<'a, str>>,
    #[serde(borrow)]
    collation_database: Option<Cow<'a, str>>,
    #[serde(borrow)]
    collation_server: Option<Cow<'a, str>>,
    #[serde(borrow)]
    transaction_isolation: Option<Cow<'a, str>>,
    /// The isolation level of the next transaction only.
    #[serde(borrow)]
    tx_isolation_one_shot: Option<Cow<'a, str>>,
    #[serde(borrow)]
    tx_read_ts: Option<Cow<'a, str>>,
    #[serde(borrow)]
    tidb_snapshot: Option<Cow<'a, str>>,
}

impl SessionVariables<'_> {
    /// Whether the node converts text for the client. Where the client's character set lacks a character, the node then
    /// sends a question mark. TiDB converts text for all character sets but those that are listed here
    /// (`FindEncodingTakeUTF8AsNoop` in `pkg/parser/charset/encoding.go`, `encoding_latin1.go`).
    pub(crate) fn is_text_converted(&self) -> bool {
        let is_kept = |name: &str| matches!(name, "" | "utf8mb4" | "utf8mb3" | "utf8" | "latin1" | "binary");
        self.character_set_results.as_ref().is_some_and(|name| !is_kept(&name.to_ascii_lowercase()))
    }

    /// Whether a backslash escapes the next character of a string.
    pub(crate) fn has_backslash_escapes(&self) -> bool {
        self.modes().all(|mode| mode != NO_BACKSLASH_ESCAPES)
    }

    /// How long the node lets the session be idle. None: for ever, or unknown.
    pub(crate) fn wait_timeout(&self) -> Option<Duration> {
        self.wait_timeout.parse().ok().filter(|seconds| *seconds > 0).map(Duration::from_secs)
    }

    /// Whether TiDB would restore a variable with another effect.
    ///
    /// * `tx_read_ts`: the timestamp of `SET TRANSACTION READ ONLY AS OF TIMESTAMP`. It is exported even after the
    ///   transaction, and would apply to the next one (`CleanupTxnReadTSIfUsed` in `pkg/sessionctx/variable/session.go`
    ///   does not clear the exported value).
    /// * `tidb_snapshot`: it would be restored without the schema of that time (`pkg/executor/set.go`).
    /// * Prepared statements are parsed with backslash escapes ([`Self::preparation_query`]).
    pub(crate) fn has_unrestorable(&self, has_prepared_statements: bool) -> bool {
        [&self.tx_read_ts, &self.tidb_snapshot].into_iter().flatten().any(|value| !value.is_empty())
            || has_prepared_statements && !self.has_backslash_escapes()
    }

    /// The statement that prepares the target for the restore, whatever the target's defaults are. It sets the session's
    /// SQL mode and collation, which determine the meaning of prepared statements. Text is UTF-8, and backslashes escape.
    pub(crate) fn preparation_query(&self) -> Vec<u8> {
        let modes: Vec<_> = self.modes().filter(|mode| *mode != NO_BACKSLASH_ESCAPES && is_word(mode)).collect();
        let mut text =
            format!("SET @@session.sql_mode='{}', @@session.character_set_client='utf8mb4'", modes.join(","));
        if let Some(collation) = self.collation_connection.as_ref().filter(|name| is_word(name)) {
            text += &format!(", @@session.collation_connection='{collation}'");
        }
        query(text.as_bytes())
    }

    /// The variables to set once more after the restore. In TiDB, setting a character set also sets its default
    /// collation, and an isolation level may be rejected as long as `tidb_skip_isolation_level_check` is not set. The
    /// restore also uses up the isolation level of the next transaction.
    pub(crate) fn after_restore(&self) -> BTreeMap<&'static str, &str> {
        non_empty([
            ("collation_connection", &self.collation_connection),
            ("collation_database", &self.collation_database),
            ("collation_server", &self.collation_server),
            ("transaction_isolation", &self.transaction_isolation),
            ("tx_isolation_one_shot", &self.tx_isolation_one_shot),
        ])
    }

    /// The variables to set at the old node to undo the export, which has used up the isolation level of the next
    /// transaction.
    pub(crate) fn after_export(&self) -> BTreeMap<&'static str, &str> {
        non_empty([("tx_isolation_one_shot", &self.tx_isolation_one_shot)])
    }

    fn modes(&self) -> impl Iterator<Item = &str> {
        self.sql_mode.split(',').filter(|mode| !mode.is_empty())
    }
}

/// Whether the name needs no escapes.
fn is_word(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

fn non_empty<'a, const N: usize>(
    variables: [(&'static str, &'a Option<Cow<'_, str>>); N],
) -> BTreeMap<&'static str, &'a str> {
    let values = variables.into_iter().filter_map(|(name, value)| Some((name, value.as_deref()?)));
    values.filter(|(_, value)| !value.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(json: &str) -> SessionVariables<'_> {
        serde_json::from_str(json).expect("variables")
    }

    fn preparation(json: &str) -> String {
        String::from_utf8(variables(json).preparation_query()[5..].to_vec()).expect("text")
    }

    #[test]
    fn target_gets_the_modes_and_the_collation_of_the_session() {
        assert_eq!(preparation("{}"), "SET @@session.sql_mode='', @@session.character_set_client='utf8mb4'");
        assert_eq!(
            preparation(
                r#"{"sql_mode":"ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT","collation_connection":"gbk_bin"}"#
            ),
            "SET @@session.sql_mode='ANSI_QUOTES,PIPES_AS_CONCAT', @@session.character_set_client='utf8mb4', \
             @@session.collation_connection='gbk_bin'"
        );
        assert_eq!(
            preparation(r#"{"sql_mode":"A','","collation_connection":"b'"}"#),
            "SET @@session.sql_mode='', @@session.character_set_client='utf8mb4'",
            "names that would need escapes"
        );
    }

    #[test]
    fn used_timestamps_and_snapshots_are_unrestorable() {
        for (json, expected) in [
            ("{}", false),
            (r#"{"tx_read_ts":"","tidb_snapshot":""}"#, false),
            (r#"{"tx_read_ts":"2026-11-27 01:45:02"}"#, true),
            (r#"{"tidb_snapshot":"443852055297916932"}"#, true),
        ] {
            assert_eq!(variables(json).has_unrestorable(false), expected, "{json}");
        }
        let mode = variables(r#"{"sql_mode":"ANSI,NO_BACKSLASH_ESCAPES"}"#);
        assert_eq!((mode.has_unrestorable(false), mode.has_unrestorable(true)), (false, true));
    }

    #[test]
    fn wait_timeout_of_zero_is_none() {
        assert_eq!(variables(r#"{"wait_timeout":"0"}"#).wait_timeout(), None);
        assert_eq!(variables(r#"{"wait_timeout":"60"}"#).wait_timeout(), Some(Duration::from_secs(60)));
    }

    #[test]
    fn only_variables_with_values_are_set_again() {
        let variables = variables(
            r#"{"collation_connection":"utf8mb4_general_ci","collation_server":"","tx_isolation_one_shot":"SERIALIZABLE"}"#,
        );
        let expected = [("collation_connection", "utf8mb4_general_ci"), ("tx_isolation_one_shot", "SERIALIZABLE")];
        assert_eq!(variables.after_restore(), BTreeMap::from(expected));
        assert_eq!(variables.after_export(), BTreeMap::from([expected[1]]));
    }
}
