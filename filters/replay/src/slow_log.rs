//! Reads TiDB's slow log (pingcap/tidb `pkg/sessionctx/variable/slow_log.go`, `SlowLogFormat`;
//! `pkg/executor/adapter.go`, `FormatSQL`; `pkg/types/datum.go`, `datumsToString`).
//!
//! An entry has lines `# Key: value`, perhaps `use db;`, and the statement in one line, which ends with a semicolon.
//! TiDB replaces line breaks and tabs in the statement by spaces, and cuts what is longer than
//! `tidb_query_log_max_len`.

use std::io::{self, BufRead};
use std::path::Path;
use std::sync::Arc;

use mysql_proto::command::Command;
use traffic_files::TrafficError;
use traffic_files::directory::{Position, Statement};
use traffic_files::record::Record;
use traffic_files::result::ResultLine;

/// The entries of a slow log that can be replayed.
pub(crate) struct SlowLogReader<R> {
    source: R,
    file: Arc<Path>,
    offset: u64,
    line: Vec<u8>,
    entry: Entry,
    /// What could not be replayed so far.
    pub(crate) skipped: u64,
}

/// What was read of an entry.
#[derive(Debug, Default)]
struct Entry {
    offset: u64,
    /// When the statement ended: nanoseconds since 1970. None: outside of an entry.
    end_ns: Option<i64>,
    connection: u64,
    query_seconds: f64,
    user: String,
    database: String,
    rows: u64,
    is_prepared: bool,
    is_internal: bool,
    has_failed: bool,
}

impl<R: BufRead> SlowLogReader<R> {
    pub(crate) fn new(source: R, file: Arc<Path>) -> Self {
        Self { source, file, offset: 0, line: Vec::new(), entry: Entry::default(), skipped: 0 }
    }

    fn next_statement(&mut self) -> io::Result<Option<Statement>> {
        loop {
            self.line.clear();
            let start = self.offset;
            let length = self.source.read_until(b'\n', &mut self.line)?;
            if length == 0 {
                return Ok(None);
            }
            self.offset += length as u64;
            let line = self.line.trim_ascii_end();
            if let Some(time) = line.strip_prefix(b"# Time: ") {
                self.entry = Entry { offset: start, end_ns: traffic_files::parse_rfc3339(time), ..Entry::default() };
            } else if let Some(fields) = line.strip_prefix(b"# ") {
                self.entry.read_fields(fields);
            } else if is_use(line) || line.is_empty() {
                // The database is in `# DB` as well.
            } else {
                let entry = std::mem::take(&mut self.entry);
                if entry.is_internal || entry.end_ns.is_none() || entry.connection == 0 {
                    continue;
                }
                let position = Position { file: Arc::clone(&self.file), offset: entry.offset };
                match entry.statement(line) {
                    Some((record, result)) => return Ok(Some(Statement { record, result: Some(result), position })),
                    None => self.skipped += 1,
                }
            }
        }
    }
}

impl<R: BufRead> Iterator for SlowLogReader<R> {
    type Item = Result<Statement, TrafficError>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.next_statement().transpose()?;
        Some(next.map_err(|source| TrafficError::Io { file: self.file.to_path_buf(), source }))
    }
}

impl Entry {
    fn read_fields(&mut self, line: &[u8]) {
        let text = String::from_utf8_lossy(line);
        let Some((key, value)) = text.split_once(": ") else { return };
        match key {
            "Conn_ID" => self.connection = value.parse().unwrap_or_default(),
            "Query_time" => self.query_seconds = value.parse().unwrap_or_default(),
            // `name[name] @ host [address]`
            "User@Host" => value.split('[').next().unwrap_or_default().clone_into(&mut self.user),
            "DB" => value.clone_into(&mut self.database),
            "Result_rows" => self.rows = value.parse().unwrap_or_default(),
            "Prepared" => self.is_prepared = value == "true",
            "Is_internal" => self.is_internal = value == "true",
            "Succ" => self.has_failed = value == "false",
            _ => {}
        }
    }

    /// None: the statement cannot be replayed.
    fn statement(self, line: &[u8]) -> Option<(Record, ResultLine)> {
        let text = executable_text(line, self.is_prepared)?;
        let latency_ns = (self.query_seconds * 1e9) as i64;
        let time_ns = self.end_ns?.saturating_sub(latency_ns);
        let result = ResultLine {
            connection: self.connection,
            time_ns,
            latency_us: (latency_ns / 1000).unsigned_abs(),
            rows: self.rows,
            bytes: 0,
            // The log does not say which error.
            error: if self.has_failed { UNKNOWN_ERROR } else { 0 },
            checksum: None,
            digest: None,
            user: self.user,
            database: self.database,
            node: String::new(),
        };
        let record = Record {
            time_ns,
            connection: self.connection,
            command: Command::Query,
            is_success: !self.has_failed,
            prepared_id: None,
            prepared_text: None,
            payload: text,
        };
        Some((record, result))
    }
}

/// ER_UNKNOWN_ERROR.
const UNKNOWN_ERROR: u16 = 1105;

fn is_use(line: &[u8]) -> bool {
    line.get(..4).is_some_and(|start| start.eq_ignore_ascii_case(b"use ")) && line.ends_with(b";")
}

/// The statement as it can be sent: the arguments of a prepared one replace its parameters. None: something is missing.
fn executable_text(line: &[u8], is_prepared: bool) -> Option<Vec<u8>> {
    let text = line.strip_suffix(b";")?;
    if is_cut(text) {
        return None;
    }
    if !is_prepared {
        // With redaction, literals are question marks or have marks around them.
        let is_redacted = !sql_text::parameters(text).is_empty() || contains(text, "‹".as_bytes());
        return (!is_redacted).then(|| text.to_vec());
    }
    let Some(start) = find_last(text, b" [arguments: ") else {
        return sql_text::parameters(text).is_empty().then(|| text.to_vec());
    };
    let (text, arguments) = (&text[..start], text[start + b" [arguments: ".len()..].strip_suffix(b"]")?);
    let parameters = sql_text::parameters(text);
    let arguments = split_arguments(arguments, parameters.len())?;
    let mut whole = Vec::with_capacity(line.len() + 2 * parameters.len());
    let mut end = 0;
    for (parameter, argument) in parameters.into_iter().zip(arguments) {
        whole.extend_from_slice(&text[end..parameter]);
        whole.extend(literal(argument)?);
        end = parameter + 1;
    }
    whole.extend_from_slice(&text[end..]);
    Some(whole)
}

/// Whether TiDB has cut the text: `SELECT ... (len:5000)`.
fn is_cut(text: &[u8]) -> bool {
    let Some(start) = find_last(text, b"(len:") else { return false };
    let digits = &text[start + 5..];
    digits.strip_suffix(b")").is_some_and(|digits| !digits.is_empty() && digits.iter().all(u8::is_ascii_digit))
}

/// The arguments of so many parameters: one as it is, several as `(1, "a", NULL)`. Strings are in quotes, but quotes
/// within them are not escaped. None: the text has another number, or may be read in two ways.
fn split_arguments(text: &[u8], count: usize) -> Option<Vec<&[u8]>> {
    if count == 1 {
        return Some(vec![text]);
    }
    let mut rest = text.strip_prefix(b"(")?.strip_suffix(b")")?;
    let mut arguments = Vec::with_capacity(count);
    loop {
        let end = if rest.first() == Some(&b'"') {
            // A string ends where the next argument, or nothing, follows.
            (1..rest.len())
                .find(|at| rest[*at] == b'"' && (at + 1 == rest.len() || rest[at + 1..].starts_with(b", ")))?
                + 1
        } else {
            rest.windows(2).position(|pair| pair == b", ").unwrap_or(rest.len())
        };
        arguments.push(&rest[..end]);
        match rest[end..].strip_prefix(b", ") {
            Some(behind) => rest = behind,
            None => return (arguments.len() == count).then_some(arguments),
        }
    }
}

/// An argument as a literal. None: TiDB has cut it.
fn literal(argument: &[u8]) -> Option<Vec<u8>> {
    if argument.ends_with(b")") && contains(argument, b" len(") {
        return None;
    }
    if let Some(content) = argument.strip_prefix(b"\"") {
        return Some(sql_text::quoted_string(content.strip_suffix(b"\"")?));
    }
    let text = std::str::from_utf8(argument).ok();
    let is_number = text.is_some_and(|text| {
        text.parse::<f64>().is_ok_and(f64::is_finite)
            && text.starts_with(|first: char| first.is_ascii_digit() || first == '-')
    });
    let is_hexadecimal = argument.strip_prefix(b"0x").is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit));
    if is_number || is_hexadecimal || argument == b"NULL" {
        Some(argument.to_vec())
    } else {
        Some(sql_text::quoted_string(argument)) // such as a time
    }
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    find_last(text, part).is_some()
}

fn find_last(text: &[u8], part: &[u8]) -> Option<usize> {
    text.windows(part.len()).rposition(|window| window == part)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{Strategy, prop, prop_assert_eq, prop_oneof, proptest};

    use super::*;

    const ENTRY: &str = "\
# Time: 2026-11-27T22:27:02.500000001Z
# Txn_start_ts: 406315658548871171
# User@Host: app[app] @ localhost [127.0.0.1]
# Conn_ID: 2097158
# Query_time: 1.5
# Parse_time: 0.1
# DB: shop
# Index_names: [t:a: b]
# Is_internal: false
# Prepared: false
# Result_rows: 7
# Succ: true
# Prev_stmt: begin;
use shop;
select * from t where a = 'x; y';
";

    fn read(log: &str) -> (Vec<Statement>, u64) {
        let mut reader = SlowLogReader::new(log.as_bytes(), Path::new("slow.log").into());
        let statements = reader.by_ref().collect::<Result<Vec<_>, _>>().expect("a log");
        (statements, reader.skipped)
    }

    fn text(statement: &str, is_prepared: bool) -> Option<String> {
        executable_text(statement.as_bytes(), is_prepared).map(|text| String::from_utf8_lossy(&text).into_owned())
    }

    #[test]
    fn entry_becomes_a_statement() {
        let (statements, skipped) = read(&ENTRY.repeat(2));
        assert_eq!((statements.len(), skipped), (2, 0));
        let Statement { record, result, position } = &statements[1];
        let result = result.as_ref().expect("a result");
        assert_eq!(record.payload, b"select * from t where a = 'x; y'");
        assert_eq!((record.connection, record.command, record.is_success), (2_097_158, Command::Query, true));
        assert_eq!(record.time_ns, traffic_files::parse_rfc3339(b"2026-11-27T22:27:01.000000001Z").expect("a time"));
        assert_eq!((result.time_ns, result.latency_us, result.rows), (record.time_ns, 1_500_000, 7));
        assert_eq!((&*result.user, &*result.database, result.error), ("app", "shop", 0));
        assert_eq!(position.offset, ENTRY.len() as u64);
    }

    #[test]
    fn entries_that_cannot_be_replayed_are_counted_or_ignored() {
        let cut = ENTRY.replace("'x; y'", "'x(len:5000)");
        let internal = ENTRY.replace("Is_internal: false", "Is_internal: true");
        let (statements, skipped) = read(&format!("[warning] no entry\n{cut}{internal}select 2;\n"));
        assert_eq!((statements.len(), skipped), (0, 1));
        let failed = read(&ENTRY.replace("Succ: true", "Succ: false")).0.remove(0);
        assert_eq!((failed.record.is_success, failed.result.expect("a result").error), (false, 1105));
    }

    #[test]
    fn arguments_replace_parameters() {
        for (log, expected) in [
            ("select sleep(?), 1 [arguments: 0.01];", "select sleep(0.01), 1"),
            ("select ?, '?' [arguments: \"it's, \"x\"\"];", "select 'it''s, \"x\"', '?'"),
            ("a ? ? ? ? [arguments: (1, \"b, c\", NULL, -2.5e3)];", "a 1 'b, c' NULL -2.5e3"),
            ("a ? ? [arguments: (0xFF, 2024-01-02 03:04:05)];", "a 0xFF '2024-01-02 03:04:05'"),
            ("a ? ? [arguments: (\"b\\\", \"\")];", "a 'b\\\\' ''"),
            ("select 1;", "select 1"),
        ] {
            assert_eq!(text(log, true).as_deref(), Some(expected), "{log}");
        }
    }

    #[test]
    fn statement_of_which_a_part_is_missing_is_not_replayed() {
        for (log, is_prepared) in [
            ("select ?;", true),
            ("select ?;", false),
            ("select ‹1›;", false),
            ("a ? ? [arguments: (1, 2, 3)];", true),
            // It may be read in two ways, and here it has three arguments.
            ("a ? ? [arguments: (\"b\", \"c\", \"d\")];", true),
            ("a ? [arguments: \"abc\" len(3000)];", true),
            ("select 1 from t where a = 'b(len:5000);", false),
            ("select 1", false),
        ] {
            assert_eq!(text(log, is_prepared), None, "{log}");
        }
    }

    proptest! {
        #[test]
        fn no_log_panics(line in "[a?'\"`‹ (,)]{0,20}( \\[arguments: [(\", a0\\])]{0,12})?;?", is_prepared: bool) {
            executable_text(line.as_bytes(), is_prepared);
            let kind = if is_prepared { "true" } else { "false" };
            read(&ENTRY.replace("Prepared: false", &format!("Prepared: {kind}")).replace("select *", &line));
        }

        #[test]
        fn arguments_are_put_in_place_of_parameters(
            arguments in prop::collection::vec(prop_oneof!["[a-z' ]{0,6}".prop_map(|text| format!("\"{text}\"")), "-?[1-9][0-9]{0,4}"], 1..6),
        ) {
            let count = arguments.len();
            let list = if count == 1 { arguments[0].clone() } else { format!("({})", arguments.join(", ")) };
            let log = format!("select {} [arguments: {list}];", vec!["?"; count].join(", "));
            let literals = arguments.iter().map(|argument| match argument.strip_prefix('"') {
                Some(content) => format!("'{}'", content.trim_end_matches('"').replace('\'', "''")),
                None => argument.clone(),
            });
            let expected = format!("select {}", literals.collect::<Vec<_>>().join(", "));
            prop_assert_eq!(text(&log, true), Some(expected));
        }
    }
}
