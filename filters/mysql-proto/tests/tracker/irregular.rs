//! Pipelined commands, unrequested errors, and reasons why the tracker stops tracking.

use crate::build::*;
use crate::events::CommandEvents;
use crate::play::Sent::{Client, Node};
use crate::play::*;
use mysql_proto::capability::Capabilities;
use mysql_proto::command::Command::{self, *};
use mysql_proto::tracker::CommandOutcome::{self, Error, Silent};
use mysql_proto::tracker::TrackerState::{Busy, Idle, InTransaction, Opaque};
use mysql_proto::tracker::{PinReason, Tracker};

#[test]
fn session_with_an_incomplete_command_is_busy() {
    for part in [1, 3, 4, 5, 8] {
        let (mut tracker, mut seen) = (Tracker::new(NEW), CommandEvents::default());
        tracker.on_client_bytes(&query()[..part], &mut seen);
        assert_eq!(tracker.state(), Busy, "{part}");
        assert_eq!(seen.0.len(), 0, "{part}");
    }
    let (mut tracker, mut seen) = (Tracker::new(NEW), CommandEvents::default());
    tracker.on_client_bytes(&query()[..9], &mut seen);
    assert_eq!(seen.0, [started(Query)]);
}

#[test]
fn session_is_busy_until_the_end_of_a_result_set() {
    for capabilities in [OLD, NEW] {
        let bytes = result_set(capabilities, 3, AUTOCOMMIT);
        let (mut tracker, mut seen) = (Tracker::new(capabilities), CommandEvents::default());
        tracker.on_client_bytes(&query(), &mut seen);
        for byte in &bytes[..bytes.len() - 1] {
            tracker.on_node_bytes(&[*byte], &mut seen);
            assert_eq!((tracker.state(), seen.0.len()), (Busy, 1));
        }
        tracker.on_node_bytes(&bytes[bytes.len() - 1..], &mut seen);
        assert_eq!((tracker.state(), seen.0.len()), (Idle, 2));
    }
}

#[test]
fn prepare_response_without_definitions_is_not_tracked() {
    let optional = NEW.with(Capabilities::OPTIONAL_RESULTSET_METADATA);
    let reply = |columns, parameters| message(&[0, 1, 0, 0, 0, columns, 0, parameters, 0, 0, 0, 0, 0]);
    for (columns, parameters) in [(1, 0), (0, 1), (1, 1)] {
        let script = [Client(command(Prepare, b"SELECT ?")), Node(reply(columns, parameters))];
        play(optional, &script, &[started(Prepare)], Opaque, Some(PinReason::Opaque));
    }
    let script = [Client(command(Prepare, b"DO 1")), Node(reply(0, 0))];
    play(optional, &script, &done(Prepare, CommandOutcome::Ok), Idle, None);
}

#[test]
fn ping_reply_is_due_only_when_all_earlier_commands_are_answered() {
    let mut tracker = Tracker::new(NEW);
    assert!(!tracker.owes_ping_reply());
    tracker.on_client_bytes(&[query(), command(Ping, b"")].concat(), &mut ());
    assert!(!tracker.owes_ping_reply());
    tracker.on_node_bytes(&ok(AUTOCOMMIT), &mut ());
    assert!(tracker.owes_ping_reply());
    tracker.on_node_bytes(&ok(AUTOCOMMIT), &mut ());
    assert!(!tracker.owes_ping_reply());
}

#[test]
fn error_may_answer_an_incomplete_file() {
    let script = |rest: &[u8]| {
        let rest = rest.to_vec();
        move |_| {
            let ask = message(b"\xfb/tmp/file");
            vec![Client(query()), Node(ask), Client(message(b"\x0e")), Node(err(1290)), Client(rest.clone())]
        }
    };
    play_both(script(&message(b"\x0e")), &done(Query, Error(1290)), Busy, None);
    play_both(script(&message(b"")), &done(Query, Error(1290)), Idle, None);
    let next = [message(b""), command(Ping, b"")].concat();
    play_both(script(&next), &[&done(Query, Error(1290))[..], &[started(Ping)]].concat(), Busy, None);
    let early = |_| vec![Client(query()), Node(message(b"\xfbf")), Client(message(b"\x0e")), Node(ok(AUTOCOMMIT))];
    play_both(early, &[started(Query)], Opaque, Some(PinReason::Opaque));
}

#[test]
fn error_may_answer_an_incomplete_command() {
    let large = command(Query, &[b' '; 5000]);
    let (sent, rest) = large.split_at(2000);
    let script = |_| vec![Client(sent.to_vec()), Node(err(1153))];
    play_both(script, &done(Query, Error(1153)), Busy, None);
    let script =
        |_| vec![Client(sent.to_vec()), Node(err(1153)), Client([rest, &command(Ping, b"")].concat()), Node(ok(2))];
    play_both(script, &[done(Query, Error(1153)), done(Ping, CommandOutcome::Ok)].concat(), Idle, None);
    let script = |_| vec![Client(sent.to_vec()), Node(ok(AUTOCOMMIT))];
    play_both(script, &[started(Query)], Opaque, Some(PinReason::Opaque));
    // The oldest command is complete, but not the one after it.
    let script = |_| vec![Client([&query(), sent].concat()), Node(ok(AUTOCOMMIT)), Client(rest.to_vec()), Node(ok(IN))];
    let events = [started(Query), started(Query), ended(Query, CommandOutcome::Ok), ended(Query, CommandOutcome::Ok)];
    play_both(script, &events, InTransaction, Some(PinReason::Transaction));
}

#[test]
fn pipelined_commands_are_tracked() {
    let script = |capabilities| {
        let requests = [
            command(Prepare, b"SELECT ?"),
            on(Execute, u32::MAX),
            on(CloseStatement, u32::MAX),
            query(),
            on(SendLongData, 5),
            on(SendLongData, 5),
        ];
        vec![
            Client(requests.concat()),
            Node(prepared(capabilities, 5, 1, 1)),
            Node(result_set(capabilities, 1, AUTOCOMMIT)),
            Node(ok(AUTOCOMMIT)),
        ]
    };
    let events = [
        &[Prepare, Execute, CloseStatement, Query, SendLongData, SendLongData].map(started)[..],
        &[ended(Prepare, CommandOutcome::Ok), ended(Execute, CommandOutcome::Ok), ended(CloseStatement, Silent)],
        &[ended(Query, CommandOutcome::Ok), ended(SendLongData, Silent), ended(SendLongData, Silent)],
    ];
    play_both(script, &events.concat(), Idle, Some(PinReason::LongData));
}

#[test]
fn silent_command_ends_when_it_is_complete_and_earlier_commands_have_ended() {
    let data = on(SendLongData, 1);
    let (sent, rest) = data.split_at(10);
    let sending = [started(Query), started(SendLongData), ended(Query, CommandOutcome::Ok)];
    let script = |_| vec![Client([&query(), sent].concat()), Node(ok(AUTOCOMMIT))];
    play_both(script, &sending, Busy, None);
    let script = |_| vec![Client([&query(), sent].concat()), Node(ok(AUTOCOMMIT)), Client(rest.to_vec())];
    play_both(script, &[&sending[..], &[ended(SendLongData, Silent)]].concat(), Idle, Some(PinReason::LongData));
    // An incomplete command behind the silent one does not delay its end.
    let script =
        |_| vec![Client([query(), on(CloseStatement, 1), query()[..10].to_vec()].concat()), Node(ok(AUTOCOMMIT))];
    let both = [Query, CloseStatement, Query].map(started);
    let events = [&both[..], &[ended(Query, CommandOutcome::Ok), ended(CloseStatement, Silent)]].concat();
    play_both(script, &events, Busy, None);
}

#[test]
fn many_pipelined_queries_are_tracked() {
    let queries = (0..1000).map(|nth| command(Query, &b"SELECT"[..nth % 7])).collect::<Vec<_>>().concat();
    let script = |_| vec![Client(queries.clone()), Node(ok(AUTOCOMMIT).repeat(1000))];
    let events = [[started(Query)].repeat(1000), [ended(Query, CommandOutcome::Ok)].repeat(1000)].concat();
    play_both(script, &events, Idle, None);
}

#[test]
fn many_equal_pipelined_commands_are_tracked() {
    let script = |_| vec![Client(on(Execute, 3).repeat(1000)), Node(ok(AUTOCOMMIT).repeat(1000))];
    let events = [[started(Execute)].repeat(1000), [ended(Execute, CommandOutcome::Ok)].repeat(1000)].concat();
    play_both(script, &events, Idle, None);
}

#[test]
fn too_many_runs_of_pipelined_commands_are_not_tracked() {
    let pairs =
        |count: usize| move |_: Capabilities| vec![Client([query(), command(Ping, b"")].concat().repeat(count))];
    let events = |count| [started(Query), started(Ping)].repeat(count);
    play_both(pairs(6), &events(6), Busy, None);
    play_both(pairs(7), &events(7)[..13], Opaque, Some(PinReason::Opaque));
}

#[test]
fn file_request_with_pipelined_commands_is_not_tracked() {
    let script = |_| vec![Client([query(), query()].concat()), Node(message(b"\xfbfile"))];
    play_both(script, &[started(Query), started(Query)], Opaque, Some(PinReason::Opaque));
}

#[test]
fn streams_are_not_tracked() {
    for what in [BinlogDump, BinlogDumpGtid, TableDump, RegisterSlave] {
        let script =
            |_| vec![Client(command(what, &[0; 20])), Node(ok(AUTOCOMMIT)), Node(vec![7; 100]), Client(query())];
        play_both(script, &[started(what)], Opaque, Some(PinReason::Opaque));
    }
}

#[test]
fn tracking_stops_after_a_successful_shutdown() {
    let script = |_| vec![Client(command(Shutdown, b"")), Node(ok(2)), Client(query()), Node(ok(2))];
    play_both(script, &done(Shutdown, CommandOutcome::Ok), Opaque, Some(PinReason::Opaque));
    play_both(|_| vec![Client(command(Shutdown, b"")), Node(err(1227))], &done(Shutdown, Error(1227)), Idle, None);
}

#[test]
fn unrequested_response_stops_tracking() {
    play_both(|_| vec![Node(err(4031))], &[], Opaque, Some(PinReason::Opaque));
    play_both(|_| vec![Node(vec![1])], &[], Opaque, Some(PinReason::Opaque));
    let script = |_| vec![Client(query()), Node([ok(AUTOCOMMIT), ok(AUTOCOMMIT)].concat())];
    play_both(script, &done(Query, CommandOutcome::Ok), Opaque, Some(PinReason::Opaque));
    let part = on(SendLongData, 1);
    let script = |_| vec![Client(part[..10].to_vec()), Node(err(1153))];
    play_both(script, &[started(SendLongData)], Opaque, Some(PinReason::Opaque));
}

#[test]
fn invalid_responses_stop_tracking() {
    let head = || head(OLD, 1, AUTOCOMMIT);
    let wrong: [(Command, Vec<u8>); 14] = [
        (Query, message(b"")),
        (Query, message(b"\xff")),
        (Query, message(b"\0\0\0")),
        (Query, message(b"\xfe\0\0")),
        (Query, message(b"\x01\x02")),
        (Query, message(b"\x01\x01\x01")),
        (Query, message(b"\xfd\0\0\x01")),
        (Query, [message(b"\x02"), definition(), eof(2)].concat()),
        (Query, [message(b"\x01"), definition(), definition()].concat()),
        (Query, [head(), message(b"")].concat()),
        (Query, [head(), message(b"\xfe\0\0\x02\0\0\0")].concat()),
        (Prepare, message(b"\xfe\0\0\x02\0\0\0\0\0\0\0\0")),
        (Ping, message(b"\x01\0\0\x02\0\0\0")),
        (ChangeUser, message(b"\x03\0\0\x02\0\0\0")),
    ];
    for (what, reply) in wrong {
        let script = [Client(on(what, 1)), Node(reply)];
        play(OLD, &script, &[started(what)], Opaque, Some(PinReason::Opaque));
    }
}

#[test]
fn sessions_with_compression_or_old_protocol_are_never_tracked() {
    let compressed = [Capabilities::COMPRESS, Capabilities::ZSTD_COMPRESSION].map(|bit| NEW.with(bit));
    for capabilities in compressed.into_iter().chain([NEW.without(Capabilities::PROTOCOL_41)]) {
        play(capabilities, &[Client(query()), Node(ok(AUTOCOMMIT))], &[], Opaque, Some(PinReason::Opaque));
    }
    let mut tracker = Tracker::new(NEW);
    tracker.stop_tracking();
    assert_eq!((tracker.state(), tracker.pin_reason()), (Opaque, Some(PinReason::Opaque)));
}
