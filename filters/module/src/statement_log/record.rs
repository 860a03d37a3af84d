//! One execution of a statement, and its line of JSON.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use serde::Serialize;

use super::text::{self, SentText};
use crate::line_log::json;
use crate::statements::Statement;

/// A statement that has ended.
pub(crate) struct StatementRecord<'a> {
    pub(crate) time: SystemTime,
    /// `query`, `prepare` or `execute`.
    pub(crate) kind: &'static str,
    pub(crate) error_code: Option<u16>,
    /// From the arrival of the request to the last byte of the result.
    pub(crate) duration: Duration,
    pub(crate) user: &'a str,
    /// Empty: none is selected.
    pub(crate) database: &'a str,
    pub(crate) client: Option<SocketAddr>,
    pub(crate) node: &'a str,
    /// Of the client's connection to this Envoy.
    pub(crate) connection_id: u64,
    /// Of the connection to the node, by the node.
    pub(crate) node_connection_id: Option<u32>,
    /// How often the session has migrated.
    pub(crate) moves: u32,
    /// A transaction was open before or after the statement.
    pub(crate) is_in_transaction: bool,
    pub(crate) rows: u64,
    pub(crate) request_bytes: u64,
    pub(crate) response_bytes: u64,
    /// None: the module does not know the statement.
    pub(crate) statement: Option<&'a Statement>,
    /// None: the text was not kept.
    pub(crate) sent_text: Option<Cow<'a, SentText>>,
}

/// The fields of a line, in order.
#[derive(Serialize)]
struct Line<'a> {
    #[serde(serialize_with = "json::write_time")]
    time: SystemTime,
    kind: &'static str,
    result: &'static str,
    error_code: Option<u16>,
    #[serde(rename = "duration_ms", serialize_with = "json::write_milliseconds")]
    duration: Duration,
    user: &'a str,
    database: Option<&'a str>,
    #[serde(serialize_with = "json::write_address")]
    client: Option<SocketAddr>,
    node: &'a str,
    connection_id: u64,
    node_connection_id: Option<u32>,
    moves: u32,
    in_transaction: bool,
    rows: u64,
    request_bytes: u64,
    response_bytes: u64,
    digest: Option<String>,
    text: Option<&'a str>,
    text_bytes: Option<usize>,
    text_cut: bool,
    redacted: bool,
}

impl StatementRecord<'_> {
    /// The line, with its line break.
    pub(super) fn to_json(&self, redacts: bool) -> Vec<u8> {
        let text = text::shown_text(self.statement, self.sent_text.as_deref(), redacts);
        json::to_line(&Line {
            time: self.time,
            kind: self.kind,
            result: if self.error_code.is_none() { "ok" } else { "failed" },
            error_code: self.error_code,
            duration: self.duration,
            user: self.user,
            database: Some(self.database).filter(|database| !database.is_empty()),
            client: self.client,
            node: self.node,
            connection_id: self.connection_id,
            node_connection_id: self.node_connection_id,
            moves: self.moves,
            in_transaction: self.is_in_transaction,
            rows: self.rows,
            request_bytes: self.request_bytes,
            response_bytes: self.response_bytes,
            digest: self.statement.map(Statement::digest_text),
            text: text.as_ref().map(|text| &*text.text),
            text_bytes: text.as_ref().map(|text| text.length),
            text_cut: text.as_ref().is_some_and(|text| text.is_cut),
            redacted: text.as_ref().is_some_and(|text| text.is_redacted),
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(in super::super) fn record(statement: Option<&Statement>) -> StatementRecord<'_> {
        StatementRecord {
            time: SystemTime::UNIX_EPOCH + Duration::from_micros(1_795_818_422_123_456),
            kind: "query",
            error_code: None,
            duration: Duration::from_micros(512_345),
            user: "app",
            database: "shop",
            client: Some("[::ffff:10.0.0.9]:51234".parse().expect("an address")),
            node: "tidb-0:4000",
            connection_id: 17,
            node_connection_id: Some(2_097_154),
            moves: 1,
            is_in_transaction: true,
            rows: 3,
            request_bytes: 40,
            response_bytes: 900,
            statement,
            sent_text: None,
        }
    }

    fn line(record: &StatementRecord<'_>, redacts: bool) -> String {
        String::from_utf8(record.to_json(redacts)).expect("UTF-8")
    }

    #[test]
    fn line_has_all_fields_in_order() {
        let statement = Statement::new(b"select ?");
        assert_eq!(
            line(&record(Some(&statement)), true),
            "{\"time\":\"2026-11-27T22:27:02.123Z\",\"kind\":\"query\",\"result\":\"ok\",\"error_code\":null,\
             \"duration_ms\":512.345,\"user\":\"app\",\"database\":\"shop\",\"client\":\"10.0.0.9:51234\",\
             \"node\":\"tidb-0:4000\",\"connection_id\":17,\"node_connection_id\":2097154,\"moves\":1,\
             \"in_transaction\":true,\"rows\":3,\
             \"request_bytes\":40,\"response_bytes\":900,\
             \"digest\":\"e1c71d1661ae46e09b7aaec1c390957f0d6260410df4e4bc71b9c8d681021471\",\
             \"text\":\"select ?\",\"text_bytes\":8,\"text_cut\":false,\"redacted\":true}\n"
        );
    }

    #[test]
    fn unknown_values_are_null() {
        let unknown = StatementRecord {
            database: "",
            client: None,
            node_connection_id: None,
            error_code: Some(1064),
            ..record(None)
        };
        let read: serde_json::Value = serde_json::from_str(&line(&unknown, false)).expect("JSON");
        for field in ["database", "client", "node_connection_id", "digest", "text", "text_bytes"] {
            assert_eq!(read.get(field), Some(&serde_json::Value::Null), "{field}");
        }
        assert_eq!((read["result"].as_str(), read["error_code"].as_u64()), (Some("failed"), Some(1064)));
    }

    proptest! {
        #[test]
        fn line_of_any_text_is_one_line_of_printable_json(text in prop::collection::vec(any::<u8>(), 0..600)) {
            let mut normalizer = sql_text::Normalizer::default();
            let statement = Statement::new(normalizer.normalize(&text));
            let sent = SentText::new(&text);
            for redacts in [false, true] {
                let line = line(&StatementRecord { sent_text: Some(Cow::Borrowed(&sent)), ..record(Some(&statement)) }, redacts);
                let content = line.strip_suffix('\n').expect("a line break");
                prop_assert!(content.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
                let read: serde_json::Value = serde_json::from_str(content).expect("JSON");
                prop_assert!(read["text"].is_string());
            }
        }
    }
}
