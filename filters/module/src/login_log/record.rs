//! The line of one login.
//!
//! The names come from the client, which may not even have a password, so what [`json`] escapes matters.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use mysql_proto::login_names::LoginNames;
use serde::{Serialize, Serializer};

use crate::line_log::json;

/// A login or a change of user that has ended.
#[derive(Serialize)]
pub(crate) struct LoginRecord<'a> {
    #[serde(serialize_with = "json::write_time")]
    pub(crate) time: SystemTime,
    /// `login` or `change_user`.
    pub(crate) kind: &'static str,
    /// `ok` or `failed`.
    pub(crate) result: &'static str,
    /// Why it has failed: a reason of the metric `login_failures`.
    pub(crate) reason: Option<&'static str>,
    /// The code of the error that the client gets.
    pub(crate) error_code: Option<u16>,
    #[serde(flatten, serialize_with = "write_names")]
    pub(crate) names: Option<&'a LoginNames>,
    #[serde(serialize_with = "json::write_address")]
    pub(crate) client: Option<SocketAddr>,
    /// The address that the client has connected to.
    #[serde(serialize_with = "json::write_address")]
    pub(crate) listener: Option<SocketAddr>,
    pub(crate) node: Option<&'a str>,
    /// None: the client's connection has no TLS.
    pub(crate) tls: Option<TlsRecord>,
    #[serde(rename = "duration_ms", serialize_with = "json::write_milliseconds")]
    pub(crate) duration: Duration,
    pub(crate) connection_id: u64,
}

/// The TLS of a client's connection.
#[derive(Serialize)]
pub(crate) struct TlsRecord {
    pub(crate) version: &'static str,
    pub(crate) cipher: String,
    pub(crate) client_certificate: bool,
}

impl LoginRecord<'_> {
    /// The line, with its line break.
    pub(crate) fn to_line(&self) -> Vec<u8> {
        json::to_line(self)
    }
}

fn write_names<S: Serializer>(names: &Option<&LoginNames>, serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Names<'a> {
        user: Option<Cow<'a, str>>,
        database: Option<Cow<'a, str>>,
    }
    let text = |name| String::from_utf8_lossy(name);
    let user = names.map(|names| text(names.user()));
    let database = names.map(|names| text(names.database())).filter(|database| !database.is_empty());
    Names { user, database }.serialize(serializer)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(names: Option<&LoginNames>) -> LoginRecord<'_> {
        LoginRecord {
            time: SystemTime::UNIX_EPOCH + Duration::from_millis(1_795_818_422_123),
            kind: "login",
            result: "failed",
            reason: Some("denied"),
            error_code: Some(1045),
            names,
            client: Some("[::ffff:10.0.0.9]:51234".parse().expect("an address")),
            listener: Some("[fd00::1]:6000".parse().expect("an address")),
            node: Some("tidb-0:4000"),
            tls: None,
            duration: Duration::from_micros(3217),
            connection_id: 17,
        }
    }

    fn line(names: Option<&LoginNames>) -> String {
        String::from_utf8(record(names).to_line()).expect("UTF-8")
    }

    #[test]
    fn line_has_all_fields_in_order() {
        let names = LoginNames::new(b"app", b"shop");
        assert_eq!(
            line(Some(&names)),
            "{\"time\":\"2026-11-27T22:27:02.123Z\",\"kind\":\"login\",\"result\":\"failed\",\"reason\":\"denied\",\
             \"error_code\":1045,\"user\":\"app\",\"database\":\"shop\",\"client\":\"10.0.0.9:51234\",\
             \"listener\":\"[fd00::1]:6000\",\"node\":\"tidb-0:4000\",\"tls\":null,\"duration_ms\":3.217,\
             \"connection_id\":17}\n"
        );
    }

    #[test]
    fn unknown_values_are_null() {
        let unknown = LoginRecord { reason: None, error_code: None, client: None, node: None, ..record(None) };
        let line: serde_json::Value = serde_json::from_slice(&unknown.to_line()).expect("JSON");
        for field in ["reason", "error_code", "user", "database", "client", "node", "tls"] {
            assert_eq!(line.get(field), Some(&serde_json::Value::Null), "{field}");
        }
        assert!(self::line(Some(&LoginNames::new(b"", b""))).contains(r#""user":"","database":null"#));
    }

    #[test]
    fn tls_is_an_object() {
        let tls =
            TlsRecord { version: "TLSv1.3", cipher: "TLS_AES_128_GCM_SHA256".to_owned(), client_certificate: false };
        let line = LoginRecord { tls: Some(tls), ..record(None) }.to_line();
        let expected = br#""tls":{"version":"TLSv1.3","cipher":"TLS_AES_128_GCM_SHA256","client_certificate":false},"#;
        assert!(line.windows(expected.len()).any(|part| part == expected));
    }

    #[test]
    fn special_characters_are_escaped() {
        for (user, expected) in [
            (&b"a\"b\\c"[..], r#"a\"b\\c"#),
            (b"a\nb\r\t\x1b[31m", r"a\nb\r\t\u001b[31m"),
            (b"a\x7fb", r"a\u007fb"),
            ("\u{9b}31m\u{85}\u{2028}\u{202e}".as_bytes(), r"\u009b31m\u0085\u2028\u202e"),
            ("\u{540d}\u{1f600}z".as_bytes(), r"\u540d\ud83d\ude00z"),
            (b"a\xff\xfeb\xe5", r"a\ufffd\ufffdb\ufffd"),
        ] {
            let names = LoginNames::new(user, b"");
            assert!(
                line(Some(&names)).contains(&format!(r#""user":"{expected}","#)),
                "{expected}: {:?}",
                line(Some(&names))
            );
        }
    }

    proptest! {
        #[test]
        fn line_of_any_names_is_one_short_line_of_printable_json(
            user in prop::collection::vec(any::<u8>(), 0..600),
            database in prop::collection::vec(any::<u8>(), 0..600),
        ) {
            let names = LoginNames::new(&user, &database);
            let line = line(Some(&names));
            let content = line.strip_suffix('\n').expect("a line break");
            prop_assert!(content.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
            prop_assert!(line.len() < 4096);
            let read: serde_json::Value = serde_json::from_str(content).expect("JSON");
            prop_assert_eq!(read["user"].as_str(), Some(&*String::from_utf8_lossy(names.user())));
            prop_assert_eq!(read["connection_id"].as_u64(), Some(17));
        }
    }
}
