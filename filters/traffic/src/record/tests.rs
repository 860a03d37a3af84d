use proptest::prelude::{Just, Strategy, any, prop, prop_assert_eq, prop_oneof, proptest};

use super::*;

fn encoded(records: &[Record]) -> Vec<u8> {
    let mut out = Vec::new();
    for record in records {
        encode(record.as_ref(), &mut out);
    }
    out
}

/// All records, pushed in pieces that end at `ends`, and how it ends.
fn decoded(bytes: &[u8], ends: &[usize]) -> (Vec<Record>, Result<(), RecordError>) {
    let mut decoder = Decoder::default();
    let mut records = Vec::new();
    let mut start = 0;
    for end in ends.iter().copied().chain([bytes.len()]) {
        decoder.push(&bytes[start..end]);
        start = end;
        loop {
            match decoder.next_record() {
                Ok(Some(record)) => records.push(record),
                Ok(None) => break,
                Err(error) => return (records, Err(error)),
            }
        }
    }
    (records, decoder.finish())
}

fn error_of(text: &str) -> RecordError {
    decoded(text.as_bytes(), &[]).1.expect_err("wrong record")
}

fn query(text: &str) -> Record {
    Record::query(7, 1_795_818_422_123_456_789, text)
}

#[test]
fn a_query_has_the_fewest_lines() {
    let text = encoded(&[query("SELECT 1")]);
    let expected = "# Time: 2026-11-27T22:27:02.123456789Z\n# Conn_ID: 7\n# Payload_len: 8\nSELECT 1\n";
    assert_eq!(String::from_utf8_lossy(&text), expected);
}

#[test]
fn a_failed_execution_has_all_lines() {
    let record = Record {
        command: Command::Execute,
        is_success: false,
        prepared_id: Some(3),
        prepared_text: Some(b"SELECT ?\n\"x\"".to_vec()),
        ..query("\x03\0\0\0")
    };
    let expected = "# Time: 2026-11-27T22:27:02.123456789Z\n# Conn_ID: 7\n# Cmd_type: StmtExecute\n# Success: false\n\
        # Captured_ps_id: 3\n# Prepared_stmt: \"SELECT ?\\n\\\"x\\\"\"\n# Payload_len: 4\n\x03\0\0\0\n";
    assert_eq!(String::from_utf8_lossy(&encoded(&[record])), expected);
}

#[test]
fn unknown_keys_and_carriage_returns_are_skipped() {
    let text =
        "# Time: 2026-11-27T22:27:02.123456789Z\r\n# Cur_db: a: b\n# Conn_ID: 7\n# Success: true\n# Payload_len: 0\n\n";
    assert_eq!(decoded(text.as_bytes(), &[]), (vec![query("")], Ok(())));
}

#[test]
fn errors_say_what_is_wrong_and_where() {
    let cases = [
        ("Time: 1\n", 0, "a line of a record begins with '# ', not with 'Time: 1'"),
        ("# Conn_ID: 1\n# Time:\n", 13, "'# Time:' is not '# key: value'"),
        ("# Conn_ID: \n", 0, "'# Conn_ID: ' is not '# key: value'"),
        ("# Conn_ID: -1\n", 0, "not a value that this key can have: '# Conn_ID: -1'"),
        ("# Time: today\n", 0, "not a value that this key can have: '# Time: today'"),
        ("# Captured_ps_id: 4294967296\n", 0, "not a value that this key can have: '# Captured_ps_id: 4294967296'"),
        ("# Prepared_stmt: a\n", 0, "not a value that this key can have: '# Prepared_stmt: a'"),
        ("# Conn_ID: 1\n# Conn_ID: 2\n", 13, "a record has one Time and one Conn_ID, not a second '# Conn_ID: 2'"),
        ("# Conn_ID: 1\n# Payload_len: 1\na\n", 30, "the record has no Time"),
        ("# Time: 2026-11-27T22:27:02Z\n# Payload_len: 1\na\n", 46, "the record has no Conn_ID"),
        ("# Payload_len: 1\nab\n", 17, "the payload does not end with a line feed after 1 bytes"),
        ("# Payload_len: 1073741825\n", 0, "a length of more than 1073741824 bytes"),
        (
            "# Payload_len: 99999999999999999999\n",
            0,
            "not a value that this key can have: '# Payload_len: 99999999999999999999'",
        ),
        ("# Payload_len: 4\nabc", 17, "the last record is not complete"),
        ("# Conn_ID: 1\n", 13, "the last record is not complete"),
        ("# Conn", 0, "the last record is not complete"),
    ];
    for (text, offset, expected) in cases {
        let error = error_of(text);
        assert_eq!((error.to_string().as_str(), error.offset), (expected, offset), "{text:?}");
    }
}

#[test]
fn a_long_wrong_line_is_shortened() {
    let RecordProblem::NoKey(shown) = error_of(&("x".repeat(1000) + "\n")).problem else {
        panic!("another problem");
    };
    assert_eq!(shown.len(), 83);
}

#[test]
fn an_error_stays() {
    let mut decoder = Decoder::default();
    decoder.push(b"x\n");
    let error = decoder.next_record().expect_err("wrong line");
    decoder.push(&encoded(&[query("SELECT 1")]));
    assert_eq!(decoder.next_record(), Err(error.clone()));
    assert_eq!(decoder.finish(), Err(error));
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let text = any::<String>().prop_map(String::into_bytes);
    // Payloads that look like the beginning of a record.
    prop_oneof![prop::collection::vec(any::<u8>(), 0..64), text, Just(b"\n# Time: \n# Payload_len: 9\n".to_vec())]
}

fn record() -> impl Strategy<Value = Record> {
    let command = any::<u8>().prop_map(Command::from);
    let prepared_id = prop::option::of(1..=u32::MAX);
    let prepared_text = prop::option::of(bytes().prop_filter("not empty", |text| !text.is_empty()));
    (any::<i64>(), 1..=u64::MAX, command, any::<bool>(), prepared_id, prepared_text, bytes()).prop_map(
        |(time_ns, connection, command, is_success, prepared_id, prepared_text, payload)| Record {
            time_ns,
            connection,
            command,
            is_success,
            prepared_id,
            prepared_text,
            payload,
        },
    )
}

proptest! {
    #[test]
    fn records_are_read_back_however_their_bytes_are_split(
        records in prop::collection::vec(record(), 0..4),
        ends in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let bytes = encoded(&records);
        let mut ends: Vec<usize> = ends.iter().map(|end| end.index(bytes.len() + 1)).collect();
        ends.sort_unstable();
        prop_assert_eq!(decoded(&bytes, &ends), (records, Ok(())));
    }

    #[test]
    fn a_truncated_file_has_the_records_before_its_end(
        records in prop::collection::vec(record(), 1..4),
        end in any::<prop::sample::Index>(),
    ) {
        let bytes = encoded(&records);
        let end = end.index(bytes.len());
        let mut complete = 0;
        while encoded(&records[..=complete]).len() <= end {
            complete += 1;
        }
        let whole = encoded(&records[..complete]).len();
        let (found, result) = decoded(&bytes[..end], &[]);
        prop_assert_eq!(&found[..], &records[..complete]);
        if whole == end {
            prop_assert_eq!(result, Ok(()));
        } else {
            let error = result.expect_err("incomplete");
            prop_assert_eq!(error.problem, RecordProblem::Incomplete);
            assert!((whole as u64..=end as u64).contains(&error.offset));
        }
    }

    #[test]
    fn damaged_bytes_do_not_panic(
        records in prop::collection::vec(record(), 1..3),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = encoded(&records);
        for (index, byte) in changes {
            let index = index.index(bytes.len());
            bytes[index] = byte;
        }
        decoded(&bytes, &[bytes.len() / 2]).1.ok();
    }
}
