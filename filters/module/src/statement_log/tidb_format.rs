//! Entries as in TiDB's slow log (pingcap/tidb v8.5.3, `SlowLogFormat` in `pkg/sessionctx/variable/session.go`), which
//! TiDB's own parser reads (`pkg/executor/slow_query.go`, `parseLog`). They have only the fields that the module knows.

use std::fmt::Write;

use super::record::StatementRecord;
use super::text::{self, ShownText};
use crate::statements::Statement;

impl StatementRecord<'_> {
    /// The entry, with its line breaks.
    pub(super) fn to_tidb_entry(&self, redacts: bool) -> Vec<u8> {
        let mut entry = String::with_capacity(1024);
        let mut field = |name: &str, value: &dyn std::fmt::Display| {
            let _ = writeln!(entry, "# {name}: {value}"); // writing to memory cannot fail
        };
        field("Time", &humantime::format_rfc3339_micros(self.time));
        let (user, host) = (readable_name(self.user), self.client.map(|client| client.ip().to_canonical().to_string()));
        let host = host.unwrap_or_default();
        field("User@Host", &format_args!("{user}[{user}] @ {host} [{host}]"));
        if let Some(id) = self.node_connection_id {
            field("Conn_ID", &id);
        }
        field("Query_time", &format_args!("{:.6}", self.duration.as_secs_f64()));
        if !self.database.is_empty() {
            field("DB", &readable_name(&self.database.to_lowercase())); // as TiDB does
        }
        field("Is_internal", &false);
        if let Some(digest) = self.statement.map(Statement::digest_text) {
            field("Digest", &digest);
        }
        field("Prepared", &(self.kind != "query"));
        field("Result_rows", &self.rows);
        field("Succ", &self.error_code.is_none());
        // TiDB ignores names that it does not know. A value must not begin with the bracket of an IPv6 address.
        field("Tidevoy_node", &format_args!("tcp({})", self.node));
        field("Tidevoy_connection_id", &format_args!("{} Tidevoy_moves: {}", self.connection_id, self.moves));
        field(
            "Tidevoy_request_bytes",
            &format_args!("{} Tidevoy_response_bytes: {}", self.request_bytes, self.response_bytes),
        );
        if let Some(code) = self.error_code {
            field("Tidevoy_error_code", &code);
        }
        entry.push_str(&text_line(text::shown_text(self.statement, self.sent_text.as_deref(), redacts).as_ref()));
        entry.into_bytes()
    }
}

/// A name without characters that separate fields or names.
fn readable_name(name: &str) -> String {
    let is_separator = |character: char| is_unprintable(character) || matches!(character, ' ' | '@' | '[' | '{' | ':');
    name.replace(is_separator, "?")
}

/// The line of the statement. Only this line of an entry ends with a semicolon.
fn text_line(shown: Option<&ShownText<'_>>) -> String {
    let Some(shown) = shown else { return "/* the statement is not known */;\n".to_owned() };
    let text = shown.text.replace(is_unprintable, " "); // as TiDB does with line breaks
    let text = text.trim_matches(|character| matches!(character, ' ' | ';'));
    // TiDB skips a line that begins with `use`, and takes one that begins with `# ` for a field.
    let space = if text.starts_with("use") || text.starts_with('#') { " " } else { "" };
    if shown.is_cut { format!("{space}{text}(len:{});\n", shown.length) } else { format!("{space}{text};\n") }
}

/// Control characters, line breaks, and characters that change the direction of text.
fn is_unprintable(character: char) -> bool {
    character.is_control() || matches!(character, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use proptest::prelude::*;

    use super::super::record::tests::record;
    use super::*;
    use crate::statement_log::SentText;

    fn entry(record: &StatementRecord<'_>, redacts: bool) -> String {
        String::from_utf8(record.to_tidb_entry(redacts)).expect("UTF-8")
    }

    fn last_line(text: &str) -> String {
        let statement = Statement::new(sql_text::Normalizer::default().normalize(text.as_bytes()));
        let sent = SentText::new(text.as_bytes());
        let entry =
            entry(&StatementRecord { sent_text: Some(Cow::Borrowed(&sent)), ..record(Some(&statement)) }, false);
        entry.trim_end_matches('\n').rsplit('\n').next().expect("a line").to_owned()
    }

    #[test]
    fn entry_has_the_fields_of_a_slow_log() {
        let statement = Statement::new(b"select ?");
        let failed = StatementRecord { error_code: Some(1062), kind: "execute", ..record(Some(&statement)) };
        assert_eq!(
            entry(&failed, true),
            "# Time: 2026-11-27T22:27:02.123456Z\n\
             # User@Host: app[app] @ 10.0.0.9 [10.0.0.9]\n\
             # Conn_ID: 2097154\n\
             # Query_time: 0.512345\n\
             # DB: shop\n\
             # Is_internal: false\n\
             # Digest: e1c71d1661ae46e09b7aaec1c390957f0d6260410df4e4bc71b9c8d681021471\n\
             # Prepared: true\n\
             # Result_rows: 3\n\
             # Succ: false\n\
             # Tidevoy_node: tcp(tidb-0:4000)\n\
             # Tidevoy_connection_id: 17 Tidevoy_moves: 1\n\
             # Tidevoy_request_bytes: 40 Tidevoy_response_bytes: 900\n\
             # Tidevoy_error_code: 1062\n\
             select ?;\n"
        );
        assert!(entry(&record(None), false).ends_with("\n/* the statement is not known */;\n"));
    }

    #[test]
    fn statement_is_one_line_that_the_parser_accepts() {
        for (text, expected) in [
            ("select 1;", "select 1;"),
            (" select\n'a;\t' \n; ", "select 'a; ';"),
            ("use shop", " use shop;"),
            ("# c\nselect 1", " # c select 1;"),
            ("select '\u{202e}\u{9b}31m'", "select '  31m';"),
        ] {
            assert_eq!(last_line(text), expected, "{text:?}");
        }
        let long = format!("select '{}'", "a".repeat(5000));
        assert!(last_line(&long).ends_with("aaa(len:5009);"));
    }

    #[test]
    fn names_cannot_forge_fields() {
        let forged = StatementRecord {
            user: "a@[b]\n# Succ: true",
            database: "{X y: z",
            node: "[fd00::1]:4000",
            ..record(None)
        };
        let entry = entry(&forged, true);
        assert!(entry.contains("\n# User@Host: a??b]?#?Succ??true[a??b]?#?Succ??true] @ 10.0.0.9 [10.0.0.9]\n"));
        assert!(entry.contains("\n# DB: ?x?y??z\n") && entry.contains("\n# Tidevoy_node: tcp([fd00::1]:4000)\n"));
    }

    proptest! {
        #[test]
        fn entry_of_any_text_has_one_line_without_a_hash_sign(text in "\\PC{0,80}|[ ;#\n\r]{0,9}[a-z ;#\n]{0,40}") {
            let statement = Statement::new(sql_text::Normalizer::default().normalize(text.as_bytes()));
            let sent = SentText::new(text.as_bytes());
            for redacts in [false, true] {
                let entry = entry(&StatementRecord { sent_text: Some(Cow::Borrowed(&sent)), ..record(Some(&statement)) }, redacts);
                let (fields, last) = entry.trim_end_matches('\n').rsplit_once('\n').expect("two lines");
                prop_assert!(fields.lines().all(|line| line.starts_with("# ") && !line.ends_with(';')));
                prop_assert!(last.ends_with(';') && !last.starts_with("# ") && !last.starts_with("use"));
            }
        }
    }
}
