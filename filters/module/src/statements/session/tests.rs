use mysql_proto::capability::Capabilities;
use mysql_proto::packet::Header;
use mysql_proto::request_reader::{Found, Interest, RequestReader, RequestStart};
use mysql_proto::tracker::{CommandObserver, Tracker};

use super::*;

const CAPABILITIES: Capabilities =
    Capabilities::PROTOCOL_41.with(Capabilities::DEPRECATE_EOF).with(Capabilities::MULTI_STATEMENTS);
const OK: &[u8] = &[0, 0, 0, 2, 0, 0, 0];
const OK_AND_MORE: &[u8] = &[0, 0, 0, 0x0a, 0, 0, 0];
const ERROR: &[u8] = b"\xff\x28\x04#42000no";

/// A session whose requests and responses are given.
struct Session {
    collector: StatementCollector,
    node: Arc<SharedNode>,
    reader: RequestReader,
    tracker: Tracker,
    statements: SessionStatements,
}

struct Observer<'a> {
    collector: &'a StatementCollector,
    node: &'a Arc<SharedNode>,
    statements: &'a mut SessionStatements,
}

impl CommandObserver for Observer<'_> {
    fn on_command_started(&mut self, command: Command) {
        self.statements.on_command_started(command);
    }

    fn on_prepared(&mut self, statement: u32) {
        self.statements.on_prepared(statement);
    }

    fn on_result_ended(&mut self, outcome: CommandOutcome, size: ResultSize, is_in_transaction: bool) {
        self.statements.on_result_ended(self.collector, self.node, outcome, size, is_in_transaction);
    }

    fn on_command_ended(&mut self, command: Command, outcome: CommandOutcome) {
        self.statements.on_command_ended(command, outcome, "n");
    }
}

fn packet(sequence: u8, payload: &[u8]) -> Vec<u8> {
    [&Header { length: payload.len(), sequence }.bytes()[..], payload].concat()
}

impl Session {
    fn new() -> Self {
        crate::statements::IS_ON.store(true, std::sync::atomic::Ordering::Relaxed);
        let collector = StatementCollector::default();
        let mut statements = SessionStatements::new(CAPABILITIES, b"first");
        statements.collect(&collector, b"app", ClientConnection::default());
        Self {
            node: Arc::new(SharedNode::default()),
            reader: RequestReader::default(),
            tracker: Tracker::new(CAPABILITIES),
            statements,
            collector,
        }
    }

    fn send(&mut self, command: u8, content: &[u8]) {
        let bytes = packet(0, &[&[command], content].concat());
        self.receive_from_client(&bytes);
    }

    fn receive_from_client(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let statements = &self.statements;
            let interest = |start: RequestStart<'_>| {
                if statements.needs_request(start) { Interest::Observe } else { Interest::None }
            };
            let (passed, request) = match self.reader.next(&mut rest, true, interest) {
                Some(Found::Bytes(bytes)) => (bytes, None),
                Some(Found::Observed(bytes, request)) => (bytes, Some(request)),
                other => panic!("{other:?}"),
            };
            let Self { collector, node, statements, .. } = self;
            self.tracker.on_client_bytes(passed, &mut Observer { collector, node, statements });
            if let Some(request) = request {
                self.statements.on_request(&self.collector, &request, None, "n");
            }
        }
    }

    fn answer(&mut self, payloads: &[&[u8]]) {
        let Self { collector, node, statements, .. } = self;
        let mut observer = Observer { collector, node, statements };
        for (index, payload) in payloads.iter().enumerate() {
            self.tracker.on_node_bytes(&packet(index as u8 + 1, payload), &mut observer);
        }
    }

    /// Text, executions, errors, rows and bytes of requests and responses, by text.
    fn seen(&self) -> Vec<(String, u64, u64, u64, u64, u64)> {
        let mut seen = Vec::new();
        for row in self.collector.take_rows() {
            let text = row.statement.map(|statement| statement.text.clone()).unwrap_or_default();
            assert_eq!(row.user, if text.is_empty() { "" } else { "app" });
            assert_eq!(row.stats.latency.iter().sum::<u64>(), row.stats.count);
            let stats = row.stats;
            seen.push((text, stats.count, stats.errors, stats.rows, stats.request_bytes, stats.response_bytes));
        }
        seen.sort();
        seen
    }
}

fn row(
    text: &str,
    count: u64,
    errors: u64,
    rows: u64,
    request: u64,
    response: u64,
) -> (String, u64, u64, u64, u64, u64) {
    (text.to_owned(), count, errors, rows, request, response)
}

#[test]
fn query_counts_with_its_rows_and_bytes() {
    let mut session = Session::new();
    session.send(0x03, b"select a from t");
    session.answer(&[b"\x01", b"definition", b"\x011", b"\x012", b"\xfe\0\0\x02\0\0\0"]);
    session.send(0x03, b"select a from u");
    session.answer(&[ERROR]);
    session.send(0x0e, b"");
    session.answer(&[OK]);
    let response = 5 * 4 + 1 + 10 + 2 + 2 + 7;
    assert_eq!(
        session.seen(),
        [
            row("select `a` from `t`", 1, 0, 2, 20, response),
            row("select `a` from `u`", 1, 1, 0, 20, 4 + ERROR.len() as u64)
        ]
    );
}

#[test]
fn each_statement_of_a_query_counts_with_its_own_result() {
    let mut session = Session::new();
    session.send(0x03, b"set @a = 1; begin; selec 1; commit");
    session.answer(&[OK_AND_MORE, OK_AND_MORE, ERROR]);
    assert_eq!(
        session.seen(),
        [
            row("`selec` ?", 1, 1, 0, 0, 4 + ERROR.len() as u64),
            row("begin", 1, 0, 0, 0, 11),
            row("set @a = ?", 1, 0, 0, 39, 11)
        ]
    );
}

#[test]
fn prepared_statement_counts_when_it_runs() {
    let prepared = |id: u8| [0, id, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut session = Session::new();
    session.send(0x16, b"insert into t values (?)");
    session.answer(&[&prepared(7)]);
    for id in [7, 7, 9, u32::MAX] {
        session.send(0x17, &id.to_le_bytes());
        session.answer(&[OK]);
    }
    session.send(0x19, &7_u32.to_le_bytes());
    session.send(0x17, &7_u32.to_le_bytes());
    session.answer(&[ERROR]);
    let error = 4 + ERROR.len() as u64;
    assert_eq!(
        session.seen(),
        [row("", 2, 1, 0, 18, 11 + error), row("insert into `t` values ( ? )", 3, 0, 0, 27, 33)]
    );
    session.send(0x1f, b"");
    session.answer(&[OK]);
    session.send(0x17, &u32::MAX.to_le_bytes());
    session.answer(&[OK]);
    assert_eq!(session.seen(), [row("", 1, 0, 0, 9, 11)]);
}

#[test]
fn pipelined_and_split_requests_count_like_others() {
    let mut session = Session::new();
    let requests =
        [packet(0, b"\x03select 1"), packet(0, b"\x0e"), packet(0, b"\x03select b"), packet(0, b"\x03select 2")];
    let bytes = requests.concat();
    let (one, other) = bytes.split_at(bytes.len() - 3);
    session.receive_from_client(one);
    session.receive_from_client(other);
    for _ in 0..4 {
        session.answer(&[OK]);
    }
    assert_eq!(session.seen(), [row("select ?", 2, 0, 0, 26, 22), row("select `b`", 1, 0, 0, 13, 11)]);
}

#[test]
fn other_request_that_is_shown_does_not_count() {
    let mut session = Session::new();
    let bytes = packet(0, b"\x11other\0\0\0");
    let request = Request::Received(&bytes);
    session.receive_from_client(&bytes);
    session.statements.on_request(&session.collector, &request, None, "n");
    session.answer(&[OK]);
    assert_eq!(session.seen(), []);
}

#[test]
fn statement_that_is_too_long_counts_as_unknown() {
    let mut session = Session::new();
    session.send(0x03, &[b'1'; 2 * 1024 * 1024]);
    session.answer(&[OK]);
    assert_eq!(session.seen(), [row("", 1, 0, 0, 0, 11)]);
}

#[test]
fn database_is_known_also_without_statistics() {
    let mut session = Session::new();
    session.statements.stop_collecting();
    assert_eq!(&*session.statements.database, b"first");
    for (command, content, answers, expected) in [
        (0x02, &b"second"[..], &[OK][..], &b"second"[..]),
        (0x02, b"none", &[ERROR], b"second"),
        (0x03, b"use `third`", &[OK], b"third"),
        (0x03, b"use none", &[ERROR], b"third"),
        (0x03, b"/* c */ use a; use b; use c", &[OK_AND_MORE, OK_AND_MORE, ERROR], b"b"),
        (0x03, b"select 1", &[OK], b"b"),
        (0x03, b"select 1; use fourth", &[OK_AND_MORE, OK], b"fourth"),
    ] {
        session.send(command, content);
        session.answer(answers);
        assert_eq!(&*session.statements.database, expected);
    }
    let bytes = packet(0, b"\x03select 1; use fifth");
    let (one, other) = bytes.split_at(12);
    session.receive_from_client(one);
    session.receive_from_client(other);
    session.answer(&[OK_AND_MORE, OK]);
    assert_eq!(&*session.statements.database, b"fifth");
    session.statements.on_user_changed(&session.collector, b"other", b"");
    assert_eq!(&*session.statements.database, b"");
    assert_eq!(session.seen(), []);
}

#[test]
fn zero_byte_behind_a_text_is_no_part_of_it() {
    let mut session = Session::new();
    session.send(0x16, b"select a\0");
    session.answer(&[&[0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]]);
    let prepared = session.statements.prepared(b"\x17\x01\0\0\0").expect("the statement");
    assert_eq!(&*prepared.text, b"select a");
}

#[test]
fn statement_that_was_prepared_before_statistics_were_collected_is_known() {
    let mut session = Session::new();
    session.statements.stop_collecting();
    session.send(0x16, b"select 1");
    session.answer(&[&[0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]]);
    session.send(0x17, &1_u32.to_le_bytes());
    session.answer(&[OK]);
    session.statements.collect(&session.collector, b"app", ClientConnection::default());
    session.send(0x17, &1_u32.to_le_bytes());
    session.answer(&[OK]);
    assert_eq!(session.seen(), [row("select ?", 1, 0, 0, 9, 11)]);
}

#[test]
fn open_transaction_is_known_from_results() {
    const OK_IN_TRANSACTION: &[u8] = &[0, 0, 0, 3, 0, 0, 0];
    let mut session = Session::new();
    for (text, answer, expected) in [
        (&b"select 1"[..], OK, false),
        (b"begin", OK_IN_TRANSACTION, true),
        (b"selec 1", ERROR, true),
        (b"commit", OK, false),
    ] {
        session.send(0x03, text);
        session.answer(&[answer]);
        assert_eq!(session.statements.is_in_transaction, expected);
    }
}
