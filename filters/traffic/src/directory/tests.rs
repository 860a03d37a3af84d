use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::{ProptestConfig, any, prop, proptest};
use tempfile::TempDir;

use super::*;
use crate::gzip::gzip_member;
use crate::record::{self, Record};
use crate::result::{self, ResultLine};

const FIRST: &str = "2026-11-27T22-27-02";
const SECOND: &str = "2026-11-27T22-27-02.1";

fn record(connection: u64, time_ns: i64) -> Record {
    Record::query(connection, time_ns, &format!("SELECT {time_ns}"))
}

fn result_of(record: &Record) -> ResultLine {
    ResultLine {
        connection: record.connection,
        time_ns: record.time_ns,
        latency_us: 5,
        rows: 1,
        bytes: 100,
        error: 0,
        checksum: Some(1),
        digest: None,
        user: "app".into(),
        database: String::new(),
        node: String::new(),
    }
}

/// A gzip file with a member for each of `members`.
fn gzip(members: &[Vec<u8>]) -> Vec<u8> {
    let mut out = Vec::new();
    members.iter().for_each(|member| gzip_member(member, &mut out));
    out
}

fn traffic(records: &[Record]) -> Vec<u8> {
    let mut out = Vec::new();
    records.iter().for_each(|record| record::encode(record.as_ref(), &mut out));
    out
}

fn results(records: &[Record]) -> Vec<u8> {
    let mut out = Vec::new();
    records.iter().for_each(|record| result::encode(result_of(record).as_ref(), &mut out));
    out
}

/// A directory with the files that a test gives.
struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("temporary directory"))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn add(&self, name: &str, content: &[u8]) -> &Self {
        let path = self.path().join(name);
        fs::create_dir_all(path.parent().expect("within the directory")).expect("directory");
        fs::write(path, content).expect("file");
        self
    }

    /// A pair of files with a member for each record.
    fn add_pair(&self, stamp: &str, open: &str, records: &[Record]) -> &Self {
        let members = |content: fn(&[Record]) -> Vec<u8>| gzip(&records.chunks(1).map(content).collect::<Vec<_>>());
        self.add(&format!("traffic-{stamp}.log.gz{open}"), &members(traffic));
        self.add(&format!("results-{stamp}.jsonl.gz{open}"), &members(results))
    }

    fn truncate(&self, name: &str, bytes: usize) -> &Self {
        let content = fs::read(self.path().join(name)).expect("file");
        self.add(name, &content[..content.len() - bytes])
    }

    fn read(&self) -> Vec<(Record, Option<ResultLine>)> {
        let reader = Reader::open(self.path()).expect("directory");
        let statements = reader.map(|statement| statement.expect("statement"));
        statements.map(|statement| (statement.record, statement.result)).collect()
    }

    /// The statements before the error, and the error without the directory.
    fn error(&self) -> (usize, String) {
        let reader = match Reader::open(self.path()) {
            Ok(reader) => reader,
            Err(error) => return (0, self.without_directory(&error)),
        };
        let mut count = 0;
        for statement in reader {
            match statement {
                Ok(_) => count += 1,
                Err(error) => return (count, self.without_directory(&error)),
            }
        }
        panic!("no error after {count} statements");
    }

    fn without_directory(&self, error: &TrafficError) -> String {
        let text = error.to_string();
        text.strip_prefix(&format!("{}/", self.path().display())).expect("names the file").to_owned()
    }
}

fn with_results(records: &[Record]) -> Vec<(Record, Option<ResultLine>)> {
    records.iter().map(|record| (record.clone(), Some(result_of(record)))).collect()
}

fn without_results(records: &[Record]) -> Vec<(Record, Option<ResultLine>)> {
    records.iter().map(|record| (record.clone(), None)).collect()
}

#[test]
fn files_are_read_by_time_and_open_ones_last() {
    let files = Files::new();
    let records: Vec<Record> = (1..=6).map(|time_ns| record(1, time_ns)).collect();
    // As text, the second name is before the first.
    files.add_pair(SECOND, "", &records[2..4]).add_pair(FIRST, "", &records[..2]);
    files.add_pair("2026-11-27T22-27-01", ".open", &records[4..]);
    files.add("meta", br#"{"Version":"v1","Duration":1,"Cmds":6}"#).add("notes.txt", b"");
    assert_eq!(files.read(), with_results(&records));
    let lines: Result<Vec<ResultLine>, TrafficError> = ResultsReader::open(files.path()).expect("directory").collect();
    assert_eq!(lines.expect("lines"), records.iter().map(result_of).collect::<Vec<_>>());
}

#[test]
fn files_of_tiproxy_have_no_results_and_may_be_plain() {
    let files = Files::new();
    let records = [record(1, 1), record(2, 2)];
    files.add(&format!("traffic-{FIRST}.log"), &traffic(&records[..1]));
    files.add(&format!("traffic-{SECOND}.log.gz"), &gzip(&[traffic(&records[1..])]));
    assert_eq!(files.read(), without_results(&records));
}

#[test]
fn a_statement_knows_where_it_is() {
    let files = Files::new();
    let records = [record(1, 1), record(2, 2)];
    files.add_pair(FIRST, "", &records);
    let positions: Vec<Position> = Reader::open(files.path())
        .expect("directory")
        .map(|statement| statement.expect("statement").position)
        .collect();
    let file: std::sync::Arc<Path> = files.path().join(format!("traffic-{FIRST}.log.gz")).into();
    let second = traffic(&records[..1]).len() as u64;
    assert_eq!(positions, [0, second].map(|offset| Position { file: file.clone(), offset }));
}

#[test]
fn an_open_file_may_end_anywhere() {
    let records = [record(1, 1), record(1, 2), record(1, 3)];
    let last = gzip(&[traffic(&records[2..])]).len();
    for missing in [1, 8, 9, last - 1, last] {
        let files = Files::new();
        files.add_pair(FIRST, ".open", &records).truncate(&format!("traffic-{FIRST}.log.gz.open"), missing);
        assert_eq!(files.read(), with_results(&records[..2]), "{missing} bytes are missing");
    }
    let files = Files::new();
    files.add_pair(FIRST, ".open", &records).truncate(&format!("results-{FIRST}.jsonl.gz.open"), last + 5);
    let mut expected = with_results(&records);
    expected[2].1 = None;
    assert_eq!(files.read(), expected);
    let files = Files::new();
    files.add(&format!("traffic-{FIRST}.log.gz.open"), b"").add(&format!("results-{FIRST}.jsonl.gz.open"), b"");
    assert_eq!(files.read(), []);
}

#[test]
fn a_pair_of_which_one_file_was_closed_is_still_a_pair() {
    let records = [record(1, 1), record(1, 2)];
    for (traffic_name, results_name) in [
        (format!("traffic-{SECOND}.log.gz"), format!("results-{FIRST}.jsonl.gz.open")),
        (format!("traffic-{FIRST}.log.gz.open"), format!("results-{SECOND}.jsonl.gz")),
    ] {
        let files = Files::new();
        files.add_pair("2026-11-27T22-27-01", "", &records[..1]);
        files.add(&traffic_name, &gzip(&[traffic(&records[1..])]));
        files.add(&results_name, &gzip(&[results(&records[1..])]));
        assert_eq!(files.read(), with_results(&records), "{traffic_name}");
    }
}

#[test]
fn dropped_commands_are_counted() {
    let files = Files::new();
    let records = [record(1, 1), record(1, 2)];
    let mut lines = results(&records[..1]);
    result::encode_dropped(3, 5, &mut lines);
    lines.extend(results(&records[1..]));
    result::encode_dropped(4, 6, &mut lines);
    files.add(&format!("traffic-{FIRST}.log.gz"), &gzip(&[traffic(&records)]));
    files.add(&format!("results-{FIRST}.jsonl.gz"), &gzip(&[lines]));
    let mut reader = Reader::open(files.path()).expect("directory");
    assert_eq!(reader.by_ref().filter(Result::is_ok).count(), 2);
    assert_eq!(reader.dropped(), 7);
    let mut results = ResultsReader::open(files.path()).expect("directory");
    assert_eq!(results.by_ref().filter(Result::is_ok).count(), 2);
    assert_eq!(results.dropped(), 7);
}

#[test]
fn damage_is_reported_with_file_and_place() {
    let records = [record(1, 1), record(1, 2)];
    let name = format!("traffic-{FIRST}.log.gz");
    let first_length = gzip(&[traffic(&records[..1])]).len();

    let files = Files::new();
    files.add_pair(FIRST, "", &records).truncate(&name, 3);
    let (count, error) = files.error();
    let length = fs::metadata(files.path().join(&name)).expect("file").len();
    assert_eq!(error, format!("{name}, byte {length}: the file ends within a gzip member"));
    assert_eq!(count, 0);

    // The checksum of the first member.
    let files = Files::new();
    files.add_pair(FIRST, "", &records);
    let mut content = fs::read(files.path().join(&name)).expect("file");
    content[first_length - 6] ^= 1;
    let (count, error) = files.add(&name, &content).error();
    assert!(error.starts_with(&format!("{name}, byte {first_length}: damaged gzip data: ")), "{error}");
    assert_eq!(count, 0);

    // What follows a member is not one.
    let files = Files::new();
    files.add_pair(FIRST, "", &records);
    let mut content = fs::read(files.path().join(&name)).expect("file");
    content.extend_from_slice(&[0; 64]);
    let (count, error) = files.add(&name, &content).error();
    assert!(error.starts_with(&format!("{name}, byte ")), "{error}");
    assert!(error.contains("damaged gzip data: "), "{error}");
    assert_eq!(count, 0);

    let files = Files::new();
    let damaged = [traffic(&records), b"# Time: never\n".to_vec()].concat();
    let offset = traffic(&records).len();
    let expected = "not a value that this key can have: '# Time: never'";
    files.add(&name, &gzip(std::slice::from_ref(&damaged)));
    assert_eq!(files.error(), (2, format!("{name}, decompressed byte {offset}: {expected}")));
    let files = Files::new();
    let plain_name = name.strip_suffix(".gz").expect("suffix");
    files.add(plain_name, &damaged);
    assert_eq!(files.error(), (2, format!("{plain_name}, byte {offset}: {expected}")));
    let files = Files::new();
    files.add(plain_name, &damaged[..offset - 1]);
    assert_eq!(files.error().0, 1);
    assert!(files.error().1.ends_with("the last record is not complete"));
}

#[test]
fn lines_that_do_not_belong_to_the_records_are_reported() {
    let records = [record(1, 1), record(1, 2)];
    let results_name = format!("results-{FIRST}.jsonl.gz");
    let first = results(&records[..1]);
    let cases = [
        (first.clone(), 1, first.len(), "the traffic file has more records than this file lines"),
        (
            results(&[records[0].clone(), record(2, 2)]),
            1,
            2 * first.len(),
            "the line before is of connection 2 at 2 ns, the record of connection 1 at 2 ns",
        ),
        (
            results(&[records.to_vec(), vec![record(1, 3)]].concat()),
            2,
            3 * first.len(),
            "this file has more lines than the traffic file records",
        ),
        (
            [results(&records), b"{".to_vec()].concat(),
            2,
            2 * first.len(),
            "the line does not end, or has more than 1 MiB",
        ),
        ([first.clone(), b"{}\n".to_vec()].concat(), 1, first.len(), "missing field `time`"),
    ];
    for (lines, count, offset, expected) in cases {
        let files = Files::new();
        files.add(&format!("traffic-{FIRST}.log.gz"), &gzip(&[traffic(&records)]));
        files.add(&results_name, &gzip(&[lines]));
        assert_eq!(files.error(), (count, format!("{results_name}, decompressed byte {offset}: {expected}")));
    }
}

#[test]
fn nothing_follows_an_error() {
    let files = Files::new();
    files.add(&format!("traffic-{FIRST}.log"), b"x\n").add(&format!("traffic-{SECOND}.log"), &traffic(&[record(1, 1)]));
    let found: Vec<bool> = Reader::open(files.path()).expect("directory").map(|statement| statement.is_ok()).collect();
    assert_eq!(found, [false]);
}

#[test]
fn encrypted_directories_are_refused() {
    let files = Files::new();
    files.add_pair(FIRST, "", &[record(1, 1)]);
    files.add("meta", br#"{"Version":"v1","Duration":1,"Cmds":1,"EncryptMethod":"aes256-ctr"}"#);
    let expected = "meta: files are encrypted by aes256-ctr; encryption is not supported";
    assert_eq!(files.error(), (0, expected.to_owned()));
}

#[test]
fn directories_are_found_below_paths() {
    let files = Files::new();
    let name = format!("traffic-{FIRST}.log.gz");
    for directory in ["capture/envoy-1", "capture/envoy-2", "other"] {
        files.add(&format!("{directory}/{name}"), b"");
    }
    files.add("capture/meta", b"{}").add("empty/meta", b"{}").add("replayed/results-2026-11-27T22-27-02.jsonl.gz", b"");
    let path = |name: &str| files.path().canonicalize().expect("directory").join(name);
    let found = |names: &[&str]| find(&names.iter().map(|name| files.path().join(name)).collect::<Vec<PathBuf>>());
    let both = vec![path("capture/envoy-1"), path("capture/envoy-2")];
    assert_eq!(found(&["capture"]).expect("found"), both);
    assert_eq!(found(&["capture/envoy-2", "capture", "capture/../capture"]).expect("found"), both);
    assert_eq!(found(&["."]).expect("found").len(), 3);
    assert_eq!(find_results(&[files.path().into()]).expect("found"), [path("replayed")]);
    for name in ["empty", "replayed"] {
        assert!(matches!(found(&["other", name]), Err(TrafficError::NothingFound { .. })), "{name}");
    }
    assert!(matches!(found(&["missing"]), Err(TrafficError::Io { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_damage_ends_with_an_error_at_most(
        changes in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>(), any::<u8>()), 1..4),
        open in any::<bool>(),
        length in any::<prop::sample::Index>(),
    ) {
        let files = Files::new();
        let records: Vec<Record> = (1..=20).map(|time_ns| record(1, time_ns)).collect();
        let open = if open { ".open" } else { "" };
        files.add_pair(FIRST, open, &records);
        let name = |is_traffic: bool| {
            if is_traffic { format!("traffic-{FIRST}.log.gz{open}") } else { format!("results-{FIRST}.jsonl.gz{open}") }
        };
        for (is_traffic, index, byte) in changes {
            let mut content = fs::read(files.path().join(name(is_traffic))).expect("file");
            let index = index.index(content.len());
            content[index] = byte;
            files.add(&name(is_traffic), &content);
        }
        let content = fs::read(files.path().join(name(true))).expect("file");
        files.truncate(&name(true), length.index(content.len()) / 8);
        for statement in Reader::open(files.path()).expect("directory") {
            match statement {
                Ok(statement) => assert!(records.contains(&statement.record), "{statement:?}"),
                Err(error) => assert!(files.without_directory(&error).contains(".gz"), "{error}"),
            }
        }
        ResultsReader::open(files.path()).expect("directory").for_each(drop);
    }
}
