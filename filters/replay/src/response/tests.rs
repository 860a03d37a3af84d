use proptest::prelude::{any, prop, proptest};

use mysql_proto::packet::{Header, MAX_PAYLOAD};
use traffic_files::checksum::RowsChecksum;

use super::*;

const OK_PACKET: &[u8] = b"\0\0\0\x02\0\0\0";
const OK_MORE: &[u8] = b"\0\x01\0\x0a\0\0\0";
const EOF: &[u8] = b"\xfe\0\0\x02\0";
const END_OK: &[u8] = b"\xfe\0\0\x02\0\0\0";
const END_OK_MORE: &[u8] = b"\xfe\0\0\x0a\0\0\0";
const ERROR: &[u8] = b"\xff\x7a\x04#42S02no table";

/// A command whose response is received packet by packet.
struct Exchange {
    responses: CommandResponses,
    response: Response,
    has_response: bool,
    sequence: u8,
}

impl Exchange {
    fn new(command: Command, deprecate_eof: bool) -> Self {
        let eof = if deprecate_eof { Capabilities::DEPRECATE_EOF } else { Capabilities::default() };
        let mut responses = CommandResponses::new(Capabilities::PROTOCOL_41.with(eof));
        let mut response = Response::default();
        let has_response = responses.on_request(&packets(&[command as u8, 1, 0, 0, 0], 0), &mut response);
        Self { responses, response, has_response, sequence: 0 }
    }

    fn receive(&mut self, payload: &[u8]) -> Result<ResponseStep, InvalidResponse> {
        self.sequence = self.sequence.wrapping_add(1);
        let header = Header { length: payload.len(), sequence: self.sequence };
        let packet = [&header.bytes()[..], payload].concat();
        self.responses.receive(self.sequence, &packet, &mut self.response)
    }
}

/// Feeds the packets, of which only the last one ends the response.
fn receive(command: Command, deprecate_eof: bool, packets: &[&[u8]]) -> Response {
    let mut exchange = Exchange::new(command, deprecate_eof);
    for (index, packet) in packets.iter().enumerate() {
        let step = exchange.receive(packet).expect("a valid packet");
        assert_eq!(step == ResponseStep::Done, index + 1 == packets.len(), "packet {index}");
    }
    exchange.response
}

/// Rows, error and status.
fn summary(response: &Response) -> (u64, u16, Option<u16>) {
    (response.content.size().rows, response.error(), response.status)
}

fn checksum(rows: &[&[u8]]) -> Option<u64> {
    let mut checksum = RowsChecksum::default();
    rows.iter().for_each(|row| checksum.add_row(row));
    Some(checksum.value())
}

#[test]
fn rows_are_counted_with_both_kinds_of_end() {
    for (deprecate_eof, packets) in [
        (true, vec![&b"\x02"[..], b"a", b"b", b"\x01x", b"\xfb", END_OK]),
        (false, vec![&b"\x02"[..], b"a", b"b", EOF, b"\x01x", b"\xfb", EOF]),
    ] {
        let response = receive(Command::Query, deprecate_eof, &packets);
        assert_eq!(summary(&response), (2, 0, Some(2)));
        assert_eq!(response.checksum(), checksum(&[b"\xfb", b"\x01x"]));
    }
}

#[test]
fn results_of_several_statements_are_one_response() {
    let packets = [OK_MORE, b"\x01", b"a", b"\x01x", END_OK_MORE, b"\x01", b"a", END_OK_MORE, OK_PACKET];
    let response = receive(Command::Query, true, &packets);
    assert_eq!(summary(&response).0, 1);
    let failed = receive(Command::Query, true, &[b"\x01", b"a", b"\x01x", END_OK_MORE, ERROR]);
    assert_eq!((summary(&failed), failed.checksum()), ((1, 1146, None), None));
}

#[test]
fn response_without_a_result_set_has_no_checksum() {
    assert!(receive(Command::Query, true, &[OK_PACKET]).checksum().is_none());
    let failed = receive(Command::Query, true, &[ERROR]);
    assert!(failed.checksum().is_none());
    assert_eq!(summary(&failed), (0, 1146, None));
    assert_eq!(receive(Command::Query, true, &[b"\x01", b"a", END_OK]).checksum(), Some(0));
}

#[test]
fn prepared_statement_ends_behind_its_definitions() {
    let prepared = b"\0\x04\0\0\0\x01\0\x02\0\0\0\0";
    let response = receive(Command::Prepare, true, &[prepared, b"p", b"p", b"c"]);
    assert_eq!((response.prepared_id, summary(&response).0), (Some(4), 0));
    receive(Command::Prepare, false, &[prepared, b"p", b"p", EOF, b"c", EOF]);
    let none = b"\0\x04\0\0\0\0\0\0\0\0\0\0";
    assert_eq!(receive(Command::Prepare, true, &[none]).prepared_id, Some(4));
    assert_eq!(receive(Command::Prepare, true, &[ERROR]).prepared_id, None);
}

#[test]
fn rows_of_a_cursor_come_with_fetch() {
    let cursor = b"\xfe\0\0\x42\0";
    assert_eq!(receive(Command::Execute, false, &[b"\x01", b"a", cursor]).checksum(), None);
    assert_eq!(receive(Command::Execute, true, &[b"\x01", b"a", b"\xfe\0\0\x42\0\0\0"]).content.size().rows, 0);
    let fetched = receive(Command::Fetch, true, &[b"\0\0x", b"\0\0y", b"\xfe\0\0\x82\0\0\0"]);
    assert_eq!(summary(&fetched), (2, 0, Some(0x82)));
    assert_eq!(fetched.checksum(), checksum(&[b"\0\0x", b"\0\0y"]));
}

#[test]
fn row_in_several_packets_is_one_row() {
    let full = vec![0xfe; MAX_PAYLOAD];
    let response = receive(Command::Query, true, &[b"\x01", b"a", &full, &full, b"rest", b"\x01x", END_OK]);
    let whole = [&full[..], &full, b"rest"].concat();
    assert_eq!(summary(&response).0, 2);
    assert_eq!(response.checksum(), checksum(&[b"\x01x", &whole]));
    assert_eq!(receive(Command::Query, true, &[b"\x01", b"a", &full, b"", END_OK]).content.size().rows, 1);
}

#[test]
fn server_that_asks_for_a_file_gets_an_empty_one() {
    let mut exchange = Exchange::new(Command::Query, true);
    assert_eq!(exchange.receive(b"\xfb/etc/passwd"), Ok(ResponseStep::SendEmptyFile(packets(b"", 2))));
    assert_eq!(exchange.receive(OK_PACKET), Ok(ResponseStep::Done));
}

#[test]
fn single_packets_end_other_commands() {
    assert_eq!(receive(Command::SetOption, false, &[EOF]).status, Some(2));
    assert_eq!(receive(Command::InitDb, true, &[OK_PACKET]).status, Some(2));
    receive(Command::Statistics, true, &[b"Uptime: 1"]);
    assert!(!Exchange::new(Command::CloseStatement, true).has_response);
    receive(Command::FieldList, false, &[b"def", EOF]);
}

#[test]
fn unknown_packets_are_rejected() {
    for (command, packet) in [
        (Command::Query, &b""[..]),
        (Command::Prepare, b"\x01"),
        (Command::InitDb, b"\x07abc"),
        (Command::Query, b"\0"),
    ] {
        assert_eq!(Exchange::new(command, true).receive(packet), Err(InvalidResponse));
    }
    // A progress report of MariaDB is no error.
    let mut exchange = Exchange::new(Command::Query, true);
    assert_eq!(exchange.receive(b"\xff\xff\xff\x01\x01"), Ok(ResponseStep::Read));
}

proptest! {
    #[test]
    fn no_response_panics(
        command in any::<u8>(),
        deprecate_eof in any::<bool>(),
        packets in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..20),
    ) {
        let mut exchange = Exchange::new(Command::from(command), deprecate_eof);
        for packet in packets {
            if exchange.receive(&packet) != Ok(ResponseStep::Read) {
                break;
            }
        }
    }
}
