//! The sequence number of an ERR packet that takes the place of what a node owes.

use crate::build::*;
use crate::events::CommandEvents;
use crate::play::MORE;
use mysql_proto::capability::Capabilities;
use mysql_proto::command::Command;
use mysql_proto::packet::{HEADER, Header};
use mysql_proto::tracker::Tracker;

/// One packet each, numbered on from `first`.
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

/// The client's bytes, then the node's packets: before each an error would have its number, and within it there is none.
#[track_caller]
fn answers(tracker: &mut Tracker, client: &[u8], packets: &[Vec<u8>]) {
    let told = &mut CommandEvents::default();
    tracker.on_client_bytes(client, told);
    for packet in packets {
        assert_eq!(tracker.error_sequence(), Some(packet[3]));
        tracker.on_node_bytes(&packet[..HEADER + 1], told);
        if packet.len() > HEADER + 1 {
            assert_eq!(tracker.error_sequence(), None, "in the middle of a packet");
        }
        tracker.on_node_bytes(&packet[HEADER + 1..], told);
    }
}

#[test]
fn an_error_goes_on_where_the_response_is() {
    for capabilities in [OLD, NEW] {
        let mut tracker = Tracker::new(capabilities);
        assert_eq!(tracker.error_sequence(), None, "nothing is owed");
        let results = [result_set(capabilities, 2, MORE), ok(AUTOCOMMIT)].concat();
        answers(&mut tracker, &query(), &numbered(1, &results));
        assert_eq!(tracker.error_sequence(), None);
        answers(&mut tracker, &query(), &numbered(1, &ok(AUTOCOMMIT)));
        let many = [head(capabilities, 2, AUTOCOMMIT), rows().repeat(60), end(capabilities, AUTOCOMMIT)].concat();
        answers(&mut tracker, &query(), &numbered(1, &many));
    }
}

#[test]
fn rows_that_are_skipped_count() {
    let mut tracker = Tracker::new(NEW);
    let told = &mut CommandEvents::default();
    tracker.on_client_bytes(&query(), told);
    let packets = numbered(1, &[head(NEW, 2, AUTOCOMMIT), rows().repeat(70)].concat());
    tracker.on_node_bytes(&packets.concat(), told);
    assert_eq!(tracker.error_sequence(), Some(packets[packets.len() - 1][3].wrapping_add(1)));
}

#[test]
fn a_long_command_has_more_packets_than_one() {
    let long = message(&[&[Command::Query as u8][..], &vec![b' '; mysql_proto::packet::MAX_PAYLOAD]].concat());
    let mut tracker = Tracker::new(NEW);
    let told = &mut CommandEvents::default();
    tracker.on_client_bytes(&long[..long.len() - 1], told);
    assert_eq!(tracker.error_sequence(), None, "the command is not whole");
    tracker.on_client_bytes(&long[long.len() - 1..], told);
    assert_eq!(tracker.error_sequence(), Some(2));
}

#[test]
fn what_the_client_says_within_a_response_counts() {
    let mut tracker = Tracker::new(NEW);
    answers(&mut tracker, &query(), &numbered(1, &message(b"\xfbfile")));
    assert_eq!(tracker.error_sequence(), None, "the client is to send a file");
    let file = numbered(2, &[message(b"\x03abc"), message(b"")].concat()).concat();
    answers(&mut tracker, &file, &numbered(4, &ok(AUTOCOMMIT)));
    let change = command(Command::ChangeUser, b"root\0");
    answers(&mut tracker, &change, &numbered(1, &message(b"\xfemysql_native_password\0salt")));
    answers(&mut tracker, &numbered(2, &message(b"answer")).concat(), &numbered(3, &ok(AUTOCOMMIT)));
}

#[test]
fn each_command_that_was_sent_ahead_begins_anew() {
    let mut tracker = Tracker::new(NEW);
    let set = numbered(1, &result_set(NEW, 1, AUTOCOMMIT));
    answers(&mut tracker, &[query(), query()].concat(), &set);
    answers(&mut tracker, &query(), &set);
    answers(&mut tracker, &[], &set);
    assert_eq!(tracker.error_sequence(), None);
}

#[test]
fn nobody_knows_in_what_is_not_followed() {
    let mut tracker = Tracker::new(NEW.with(Capabilities::COMPRESS));
    tracker.on_client_bytes(&query(), &mut CommandEvents::default());
    assert_eq!(tracker.error_sequence(), None);
}
