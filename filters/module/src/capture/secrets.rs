//! Which statements are not captured, since they may hold passwords or keys.

use crate::secrets;

/// Whether statements with the same normalized text may hold secrets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Secrecy {
    /// All of them.
    Secret,
    /// Those whose text says so: it contains another statement, or sets a variable.
    ByText,
    /// None of them, as far as TiDB is concerned. Their literals are data of the application.
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
            Self::Open => false,
        }
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
}
