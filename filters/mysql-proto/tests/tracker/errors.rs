//! The sequence number of an ERR packet that replaces what a node owes.

use crate::build::*;
use crate::events::CommandEvents;
use crate::play::MORE;
use mysql_proto::capability::Capabilities;
use mysql_proto::command::Command;
use mysql_proto::packet::{HEADER, Header};
use mysql_proto::tracker::Tracker;

/// Splits `messages` into packets, with sequence numbers from `first` on.
fn numbered(first: u8, messages: &[u8]) -> Vec<Vec<u8>> {
    let (mut rest, mut packets, mut sequence) = (messages, Vec::new(), first);
    while let Some(header) = Header::parse(rest) {
        let (packet, behind) = rest.split_at(HEADER + header.length);
        let header = Header { length: header.length, sequence };
        packets.push([&header.bytes()[..], &packet[HEADER..]].concat());
        (rest, sequence) = (behind, sequence.wrapping_add(1));
    }
    packets
}

/// Passes the client's bytes, then the node's packets. Before each packet, an error must have its sequence number;
/// within a packet, no error is possible.
#[track_caller]
fn check_sequence(tracker: &mut Tracker, client: &[u8], packets: &[Vec<u8>]) {
    let seen = &mut CommandEvents::default();
    tracker.on_client_bytes(client, seen);
    for packet in packets {
        assert_eq!(tracker.error_sequence(), Some(packet[3]));
        tracker.on_node_bytes(&packet[..HEADER + 1], seen);
        if packet.len() > HEADER + 1 {
            assert_eq!(tracker.error_sequence(), None, "within a packet");
        }
        tracker.on_node_bytes(&packet[HEADER + 1..], seen);
    }
}

#[test]
fn error_continues_the_sequence_of_the_response() {
    for capabilities in [OLD, NEW] {
        let mut tracker = Tracker::new(capabilities);
        assert_eq!(tracker.error_sequence(), None, "the node owes nothing");
        let results = [result_set(capabilities, 2, MORE), ok(AUTOCOMMIT)].concat();
        check_sequence(&mut tracker, &query(), &numbered(1, &results));
        assert_eq!(tracker.error_sequence(), None);
        check_sequence(&mut tracker, &query(), &numbered(1, &ok(AUTOCOMMIT)));
        let many = [head(capabilities, 2, AUTOCOMMIT), rows().repeat(60), end(capabilities, AUTOCOMMIT)].concat();
        check_sequence(&mut tracker, &query(), &numbered(1, &many));
    }
}

#[test]
fn skipped_rows_advance_the_sequence() {
    let mut tracker = Tracker::new(NEW);
    let seen = &mut CommandEvents::default();
    tracker.on_client_bytes(&query(), seen);
    let packets = numbered(1, &[head(NEW, 2, AUTOCOMMIT), rows().repeat(70)].concat());
    tracker.on_node_bytes(&packets.concat(), seen);
    assert_eq!(tracker.error_sequence(), Some(packets[packets.len() - 1][3].wrapping_add(1)));
}

#[test]
fn error_continues_the_sequence_of_a_command_with_two_packets() {
    let long = message(&[&[Command::Query as u8][..], &vec![b' '; mysql_proto::packet::MAX_PAYLOAD]].concat());
    let mut tracker = Tracker::new(NEW);
    let seen = &mut CommandEvents::default();
    tracker.on_client_bytes(&long[..long.len() - 1], seen);
    assert_eq!(tracker.error_sequence(), None, "the command is incomplete");
    tracker.on_client_bytes(&long[long.len() - 1..], seen);
    assert_eq!(tracker.error_sequence(), Some(2));
}

#[test]
fn client_packets_within_a_response_advance_the_sequence() {
    let mut tracker = Tracker::new(NEW);
    check_sequence(&mut tracker, &query(), &numbered(1, &message(b"\xfbfile")));
    assert_eq!(tracker.error_sequence(), None, "the client must send the file");
    let file = numbered(2, &[message(b"\x03abc"), message(b"")].concat()).concat();
    check_sequence(&mut tracker, &file, &numbered(4, &ok(AUTOCOMMIT)));
    let change = command(Command::ChangeUser, b"root\0");
    check_sequence(&mut tracker, &change, &numbered(1, &message(b"\xfemysql_native_password\0salt")));
    check_sequence(&mut tracker, &numbered(2, &message(b"answer")).concat(), &numbered(3, &ok(AUTOCOMMIT)));
}

#[test]
fn response_to_a_pipelined_command_begins_a_new_sequence() {
    let mut tracker = Tracker::new(NEW);
    let set = numbered(1, &result_set(NEW, 1, AUTOCOMMIT));
    check_sequence(&mut tracker, &[query(), query()].concat(), &set);
    check_sequence(&mut tracker, &query(), &set);
    check_sequence(&mut tracker, &[], &set);
    assert_eq!(tracker.error_sequence(), None);
}

#[test]
fn opaque_session_has_no_error_sequence() {
    let mut tracker = Tracker::new(NEW.with(Capabilities::COMPRESS));
    tracker.on_client_bytes(&query(), &mut CommandEvents::default());
    assert_eq!(tracker.error_sequence(), None);
}
