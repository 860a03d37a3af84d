//! The file `meta`, which describes a directory (pingcap/tiproxy, `pkg/sqlreplay/store/meta.go`).

use std::time::Duration;

use serde::{Deserialize, Serialize};

const VERSION: &str = "v1";
const UNENCRYPTED: &str = "plaintext";

/// What is known about a directory as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meta {
    /// From the start of the capture to its end.
    pub duration: Duration,
    /// Records in the directory.
    pub commands: u64,
    /// Commands that were left out since they contain secrets.
    pub filtered: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MetaError {
    #[error("{0}")]
    Json(String),
    #[error("version '{0}' is not supported, only {VERSION}")]
    Version(String),
    #[error("files are encrypted by {0}; encryption is not supported")]
    Encrypted(String),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Fields {
    version: String,
    /// Nanoseconds.
    #[serde(default)]
    duration: i64,
    #[serde(default)]
    cmds: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    filtered_cmds: u64,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    encrypt_method: String,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Meta {
    pub fn to_json(&self) -> String {
        let fields = Fields {
            version: VERSION.into(),
            duration: i64::try_from(self.duration.as_nanos()).unwrap_or(i64::MAX),
            cmds: self.commands,
            filtered_cmds: self.filtered,
            encrypt_method: String::new(),
        };
        serde_json::to_string(&fields).unwrap_or_default()
    }

    pub fn parse(json: &[u8]) -> Result<Self, MetaError> {
        let fields: Fields = serde_json::from_slice(json).map_err(|error| MetaError::Json(error.to_string()))?;
        if fields.version != VERSION {
            return Err(MetaError::Version(fields.version));
        }
        if !["", UNENCRYPTED].contains(&fields.encrypt_method.as_str()) {
            return Err(MetaError::Encrypted(fields.encrypt_method));
        }
        Ok(Self {
            duration: Duration::from_nanos(fields.duration.try_into().unwrap_or(0)),
            commands: fields.cmds,
            filtered: fields.filtered_cmds,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const META: Meta = Meta { duration: Duration::from_millis(1500), commands: 7, filtered: 2 };

    #[test]
    fn meta_is_written_as_tiproxy_writes_it() {
        assert_eq!(META.to_json(), r#"{"Version":"v1","Duration":1500000000,"Cmds":7,"FilteredCmds":2}"#);
        let without_filtered = Meta { filtered: 0, ..META };
        assert_eq!(without_filtered.to_json(), r#"{"Version":"v1","Duration":1500000000,"Cmds":7}"#);
    }

    #[test]
    fn meta_is_read_back() {
        assert_eq!(Meta::parse(META.to_json().as_bytes()), Ok(META));
    }

    #[test]
    fn unencrypted_files_are_supported_and_others_are_not() {
        assert!(Meta::parse(br#"{"Version":"v1","Duration":1,"Cmds":7,"EncryptMethod":"plaintext"}"#).is_ok());
        let cases = [
            (
                r#"{"Version":"v1","EncryptMethod":"aes256-ctr"}"#,
                "files are encrypted by aes256-ctr; encryption is not supported",
            ),
            (r#"{"Version":"v2"}"#, "version 'v2' is not supported, only v1"),
            (r#"{"Version":1}"#, "invalid type: integer `1`, expected a string at line 1 column 12"),
            ("", "EOF while parsing a value at line 1 column 0"),
        ];
        for (json, expected) in cases {
            assert_eq!(Meta::parse(json.as_bytes()).expect_err("wrong meta").to_string(), expected, "{json}");
        }
    }
}
