//! Which statements are not captured, since they may hold passwords or keys.

use std::collections::HashMap;

use data_encoding::{BASE64, HEXLOWER_PERMISSIVE};
use serde::Deserialize;
use serde_json::Value;

use crate::secrets;

/// Words that stand before a password, or a key of storage, in statements of TiDB.
const SYNTAX_WORDS: [&str; 3] = ["identified", "access-key", "access_key"];

/// Whether statements with the same normalized text may hold secrets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Secrecy {
    /// All of them.
    Secret,
    /// Those whose text has a suspicious word: they contain another statement, or set a variable.
    ByText,
    /// Those with a word that stands before secrets in TiDB's syntax, such as a mistyped `CREATE USER`. All other
    /// literals are data of the application.
    Open,
}

impl Secrecy {
    pub(crate) fn of(normalized: &str) -> Self {
        const OTHER_TEXTS: [&str; 7] = ["prepare", "set", "explain", "desc", "describe", "trace", "create"];
        let first = normalized.split(' ').next().unwrap_or_default();
        if first != "prepare" && secrets::is_secret_kind(normalized) {
            Self::Secret
        } else if OTHER_TEXTS.contains(&first) {
            Self::ByText
        } else {
            Self::Open
        }
    }

    /// Whether a statement with this text must be left out.
    pub(crate) fn hides(self, text: &[u8]) -> bool {
        match self {
            Self::Secret => true,
            Self::ByText => secrets::has_secret_word(text),
            Self::Open => secrets::has_word(text, &SYNTAX_WORDS),
        }
    }
}

/// Whether exported states hold a secret: in the text of a prepared statement, or in the name or value of a user
/// variable. `json`: the states (pingcap/tidb `pkg/sessionctx/sessionstates/session_states.go`). Invalid JSON may hold
/// one. `is_hidden`: whether a text must be left out.
pub(super) fn states_have_secret(json: &[u8], mut is_hidden: impl FnMut(&[u8]) -> bool) -> bool {
    let Ok(states) = serde_json::from_slice::<States>(json) else { return true };
    let has_secret = |text: &str| {
        let decoded = [HEXLOWER_PERMISSIVE.decode(text.as_bytes()), BASE64.decode(text.as_bytes())];
        secrets::has_secret_word(text.as_bytes())
            || decoded.iter().flatten().any(|bytes| secrets::has_secret_word(bytes))
    };
    states.prepared_statements.values().any(|prepared| is_hidden(prepared.text.as_bytes()))
        || states.user_variables.iter().any(|(name, value)| has_secret(name) || any_text(value, &has_secret))
}

#[derive(Deserialize)]
struct States {
    #[serde(rename = "prepared-stmts", default)]
    prepared_statements: HashMap<String, PreparedState>,
    #[serde(rename = "user-var-values", default)]
    user_variables: HashMap<String, Value>,
}

#[derive(Deserialize)]
struct PreparedState {
    #[serde(default)]
    text: String,
}

fn any_text(value: &Value, is_found: &impl Fn(&str) -> bool) -> bool {
    match value {
        Value::String(text) => is_found(text),
        Value::Array(values) => values.iter().any(|value| any_text(value, is_found)),
        Value::Object(values) => values.values().any(|value| any_text(value, is_found)),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use sql_text::Normalizer;

    use super::*;

    fn is_hidden(text: &str) -> bool {
        let mut normalizer = Normalizer::default();
        let normalized = normalizer.normalize(text.as_bytes());
        Secrecy::of(std::str::from_utf8(normalized).expect("UTF-8")).hides(text.as_bytes())
    }

    #[test]
    fn statements_with_passwords_and_keys_are_hidden() {
        for text in [
            "CREATE USER u IDENTIFIED BY 'x'",
            "/* c */ alter /* d */ user u identified by 'x'",
            "set password for u = 'x'",
            "grant select on *.* to u identified by 'x'",
            "BACKUP DATABASE d TO 's3://b/p?access-key=K'",
            "load data infile 's3://b/p?secret-access-key=K' into table t",
            "prepare s from 'create user u identified by ''x'''",
            "set @a = 'alter user u IDENTIFIED BY ''x'''",
            "set global tidb_cloud_storage_uri = 's3://b/p?access-key=K'",
            "explain import into t from 's3://b/p?access-key=K'",
            "traffic replay from 's3://b/p' user='u' password='x'",
            "creat user u identified by 'x'",
            "insert into t values ('s3://b/p?Access-Key=K')",
        ] {
            assert!(is_hidden(text), "{text}");
        }
    }

    #[test]
    fn statements_of_applications_are_captured() {
        for text in [
            "select password from users where token = 'x'",
            "update users set passwd = 'x'",
            "prepare s from 'select ?'",
            "set names utf8mb4",
            "create table t (a int)",
        ] {
            assert!(!is_hidden(text), "{text}");
        }
    }

    #[test]
    fn secrets_in_states_are_found() {
        let is_secret = |text: &[u8]| text.starts_with(b"alter user");
        for (states, expected) in [
            (
                r#"{"sys-vars": {"block_encryption_mode": "aes"}, "user-var-values": {"a": {"k": 5, "b": "a2VwdA=="}}}"#,
                false,
            ),
            (r#"{"prepared-stmts": {"1": {"text": "select ?", "types": null}}}"#, false),
            (r#"{"prepared-stmts": {"1": {"text": "alter user u"}}}"#, true),
            // "identified by 'x'"
            (r#"{"user-var-values": {"a": {"k": 5, "b": "aWRlbnRpZmllZCBieSAneCc="}}}"#, true),
            (r#"{"user-var-values": {"a": "6964656e746966696564206279202778 27"}}"#, false),
            (r#"{"user-var-values": {"a": "6964656e74696669656420627920277827"}}"#, true),
            (r#"{"user-var-values": {"a": ["Password"]}}"#, true),
            (r#"{"user-var-values": {"password": {"k": 5, "b": "aHVudGVyMg=="}}}"#, true),
            (r#"{"user-var-values": 7}"#, true),
        ] {
            assert_eq!(states_have_secret(states.as_bytes(), is_secret), expected, "{states}");
        }
    }
}
