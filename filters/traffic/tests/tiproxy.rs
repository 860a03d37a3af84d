//! Files that TiProxy's own code wrote; see data/README.md.

use std::fs::{self, File};
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use flate2::bufread::MultiGzDecoder;
use mysql_proto::command::Command;
use serde::Deserialize;
use traffic_files::directory::{Reader, Statement, find, read_meta};
use traffic_files::meta::Meta;
use traffic_files::record::{Record, encode};

/// What interop.go prints of a command.
#[derive(Deserialize)]
struct Shown {
    time_ns: i64,
    connection: u64,
    command: String,
    is_success: bool,
    prepared_id: u32,
    prepared_text_hex: String,
    payload_hex: String,
}

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn bytes(hexadecimal: &str) -> Vec<u8> {
    let digits = |pair: &[u8]| u8::from_str_radix(str::from_utf8(pair).expect("ASCII"), 16).expect("digits");
    hexadecimal.as_bytes().chunks(2).map(digits).collect()
}

fn command(name: &str) -> Command {
    match name {
        "Quit" => Command::Quit,
        "InitDB" => Command::InitDb,
        "Query" => Command::Query,
        "FieldList" => Command::FieldList,
        "Refresh" => Command::Refresh,
        "Statistics" => Command::Statistics,
        "ProcessInfo" => Command::ProcessInfo,
        "ProcessKill" => Command::ProcessKill,
        "Debug" => Command::Debug,
        "Ping" => Command::Ping,
        "StmtPrepare" => Command::Prepare,
        "StmtExecute" => Command::Execute,
        "StmtSendLongData" => Command::SendLongData,
        "StmtClose" => Command::CloseStatement,
        "StmtReset" => Command::ResetStatement,
        "SetOption" => Command::SetOption,
        "StmtFetch" => Command::Fetch,
        "ResetConnect" => Command::ResetConnection,
        _ => panic!("{name}"),
    }
}

fn written() -> Vec<Record> {
    let lines = fs::read_to_string(data("tiproxy-commands.jsonl")).expect("file");
    let record = |line: &str| {
        let shown: Shown = serde_json::from_str(line).expect("line of interop.go");
        Record {
            time_ns: shown.time_ns,
            connection: shown.connection,
            command: command(&shown.command),
            is_success: shown.is_success,
            prepared_id: Some(shown.prepared_id).filter(|id| *id != 0),
            prepared_text: Some(bytes(&shown.prepared_text_hex)).filter(|text| !text.is_empty()),
            payload: bytes(&shown.payload_hex),
        }
    };
    lines.lines().map(record).collect()
}

fn read(directory: &Path) -> Vec<Statement> {
    Reader::open(directory).expect("directory").map(|statement| statement.expect("statement")).collect()
}

#[test]
fn directories_of_tiproxy_are_read() {
    for name in ["tiproxy-plain", "tiproxy-gzip"] {
        let directories = find(&[data(name)]).expect("directory");
        assert_eq!(directories.len(), 1);
        let statements = read(&directories[0]);
        assert!(statements.iter().all(|statement| statement.result.is_none()));
        let records: Vec<Record> = statements.into_iter().map(|statement| statement.record).collect();
        assert_eq!(records, written(), "{name}");
        let meta = Meta { duration: Duration::from_millis(1500), commands: records.len() as u64, filtered: 2 };
        assert_eq!(read_meta(&directories[0]).expect("meta"), Some(meta));
    }
}

/// Except the time zone, and characters outside ASCII that cannot be printed, which TiProxy escapes.
#[test]
fn records_are_written_byte_by_byte_as_tiproxy_writes_them() {
    let mut compared = 0;
    for file in find(&[data("tiproxy-gzip")]).expect("directory").iter().flat_map(|directory| files(directory)) {
        let mut content = Vec::new();
        MultiGzDecoder::new(BufReader::new(File::open(&file).expect("file"))).read_to_end(&mut content).expect("gzip");
        let statements: Vec<Statement> = read(file.parent().expect("directory"))
            .into_iter()
            .filter(|statement| *statement.position.file == *file)
            .collect();
        let ends = statements.iter().skip(1).map(|statement| statement.position.offset as usize).chain([content.len()]);
        for (statement, end) in statements.iter().zip(ends) {
            let mut out = Vec::new();
            encode(statement.record.as_ref(), &mut out);
            let theirs = &content[statement.position.offset as usize..end];
            if statement.record.prepared_text.is_some() {
                let text = String::from_utf8_lossy(theirs).replace("\\u00ad", "\u{ad}").replace("\\u2028", "\u{2028}");
                assert_eq!(String::from_utf8_lossy(&out), text);
            } else {
                assert_eq!(out, theirs, "{}", theirs.escape_ascii());
            }
            compared += 1;
        }
    }
    assert_eq!(compared, written().len());
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).expect("directory").map(|entry| entry.expect("entry").path());
    entries.filter(|path| path.extension().is_some_and(|extension| extension == "gz")).collect()
}
