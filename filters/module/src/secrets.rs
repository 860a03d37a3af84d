//! Statements whose texts may hold secrets, such as passwords and the keys of storage. Their literals are neither
//! logged nor captured.

use mysql_proto::secret::SecretBytes;

/// The first words of statements that hold passwords, URLs with keys, or the text of another statement. TiDB hides
/// parts of most of them in its own logs (pingcap/tidb v8.5.3, `SecureText` in `pkg/parser/ast`).
const KINDS: [&[&str]; 11] = [
    &["create", "user"],
    &["alter", "user"],
    &["set", "password"],
    &["grant"],
    &["change"],
    &["backup"],
    &["restore"],
    &["import"],
    &["load"],
    &["prepare"],
    &["traffic"],
];

/// Words that often stand next to a secret, in lower case. They also find statements within strings and comments, and
/// names of columns.
const WORDS: [&str; 16] = [
    "identified",
    "password",
    "passwd",
    "passphrase",
    "secret",
    "credential",
    "token",
    "access-key",
    "access_key",
    "account-key",
    "account_key",
    "api_key",
    "api-key",
    "private_key",
    "encrypt",
    "decrypt",
];

/// Whether a text may hold a secret. `normalized`: the same statement without literals.
pub(crate) fn may_have_secret(normalized: &str, text: &[u8]) -> bool {
    is_secret_kind(normalized) || has_secret_word(text)
}

/// Whether a statement with this normalized text is of a kind that holds secrets.
pub(crate) fn is_secret_kind(normalized: &str) -> bool {
    let begins_with = |kind: &&[&str]| {
        let mut words = normalized.split(' ').map(|word| word.trim_matches('`'));
        kind.iter().all(|expected| words.next() == Some(expected))
    };
    KINDS.iter().any(begins_with)
}

/// Whether a text has a word that often stands next to a secret.
pub(crate) fn has_secret_word(text: &[u8]) -> bool {
    has_word(text, &WORDS)
}

/// Whether a text has one of these words, which are in lower case.
pub(crate) fn has_word(text: &[u8], words: &[&str]) -> bool {
    let mut lowercase = SecretBytes::from(text);
    lowercase.make_ascii_lowercase();
    let lowercase = String::from_utf8_lossy(&lowercase);
    words.iter().any(|word| lowercase.contains(word))
}

#[cfg(test)]
mod tests {
    use sql_text::Normalizer;

    use super::*;

    fn has_secret(text: &str) -> bool {
        let mut normalizer = Normalizer::default();
        let normalized = normalizer.normalize(text.as_bytes());
        may_have_secret(std::str::from_utf8(normalized).expect("UTF-8"), text.as_bytes())
    }

    #[test]
    fn statements_with_passwords_and_keys_are_found() {
        for text in [
            "CREATE USER u IDENTIFIED BY 'x'",
            "/* c */ create /* d */ user if not exists `u` require ssl",
            "alter user u identified with mysql_native_password as '*AB'",
            "ALTER USER USER() IDENTIFIED BY 'x'",
            "set Password = 'x'",
            "SET PASSWORD FOR u = PASSWORD('x')",
            "grant select on *.* to u identified by 'x'",
            "change master to master_user = 'u'",
            "BACKUP DATABASE d TO 's3://b/p?access-key=K'",
            "restore database d from 's3://b/p'",
            "import into t from 's3://b/p'",
            "load data infile 's3://b/p' into table t",
            "explain import into t from 's3://b/p?Access-Key=K&secret-access-key=S'",
            "set global tidb_cloud_storage_uri = 's3://b/p?access-key=K'",
            "prepare s from 'select ''x'''",
            "PREPARE s FROM 'create user u identified by ''x'''",
            "set @a = 'create user u IDENTIFIED by ''x'''",
            "select 1 -- the Password is x",
            "update users set passwd = 'x'",
            "select aes_encrypt('x', 'y')",
            "select \u{1} ; alter user u identified by 'x'",
        ] {
            assert!(has_secret(text), "{text}");
        }
    }

    #[test]
    fn other_statements_have_none() {
        for text in [
            "select * from t where a = 'x'",
            "create table user (a int)",
            "alter table t add column b int",
            "set @a = 1",
            "set names utf8mb4",
            "select user, created from users",
            "execute s using @a",
        ] {
            assert!(!has_secret(text), "{text}");
        }
    }
}
