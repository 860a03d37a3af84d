//! Conversations for each kind of response.

use crate::build::*;
use crate::events::CommandEvents;
use crate::play::Sent::{Client, Node};
use crate::play::*;
use mysql_proto::command::Command::*;
use mysql_proto::packet::MAX_PAYLOAD;
use mysql_proto::tracker::CommandOutcome::{self, Error, Silent};
use mysql_proto::tracker::TrackerState::{Busy, Idle, InTransaction, Opaque};
use mysql_proto::tracker::{PinReason, Tracker};

#[test]
fn new_session_is_idle() {
    play_both(|_| vec![], &[], Idle, None);
}

#[test]
fn response_of_one_packet_ends_its_command() {
    let commands = [
        InitDb,
        Refresh,
        ProcessKill,
        Debug,
        Ping,
        ResetStatement,
        SetOption,
        ResetConnection,
        Query,
        Execute,
        BulkExecute,
    ];
    for what in commands {
        for reply in [ok(AUTOCOMMIT), long_ok(AUTOCOMMIT)] {
            let script = |_| vec![Client(on(what, 1)), Node(reply.clone())];
            play_both(script, &done(what, CommandOutcome::Ok), Idle, None);
        }
        let script = |capabilities| vec![Client(on(what, 1)), Node(end(capabilities, IN))];
        play_both(script, &done(what, CommandOutcome::Ok), InTransaction, Some(PinReason::Transaction));
        play(NEW, &[Client(on(what, 1)), Node(eof(AUTOCOMMIT))], &done(what, CommandOutcome::Ok), Idle, None);
        play_both(|_| vec![Client(on(what, 1)), Node(err(1053))], &done(what, Error(1053)), Idle, None);
        play_both(|_| vec![Client(on(what, 1))], &[started(what)], Busy, None);
    }
}

#[test]
fn unknown_command_is_answered_with_an_error() {
    let unknown = message(b"\x20clone");
    play_both(|_| vec![Client(unknown.clone()), Node(err(1047))], &done(Other, Error(1047)), Idle, None);
    play_both(|_| vec![Client(message(b"")), Node(err(1047))], &done(Other, Error(1047)), Idle, None);
    play_both(
        |_| vec![Client(unknown.clone()), Node(result_set(OLD, 1, 0))],
        &[started(Other)],
        Opaque,
        Some(PinReason::Opaque),
    );
}

#[test]
fn commands_without_a_response_end_at_once() {
    for (what, pinned) in [(Quit, None), (CloseStatement, None), (SendLongData, Some(PinReason::LongData))] {
        play_both(|_| vec![Client(on(what, 1))], &done(what, Silent), Idle, pinned);
    }
}

#[test]
fn result_set_ends_its_command() {
    for what in [Query, Execute, BulkExecute, ProcessInfo] {
        for columns in [1, 250] {
            let script = |capabilities| vec![Client(on(what, 1)), Node(result_set(capabilities, columns, AUTOCOMMIT))];
            play_both(script, &done(what, CommandOutcome::Ok), Idle, None);
        }
    }
    let empty = |capabilities| {
        let reply = [head(capabilities, 2, IN), end(capabilities, IN)].concat();
        vec![Client(query()), Node(reply)]
    };
    play_both(empty, &done(Query, CommandOutcome::Ok), InTransaction, Some(PinReason::Transaction));
    let many = |capabilities| {
        let reply =
            [message(b"\xfc\x2c\x01"), definitions(capabilities, 300, 2), rows(), end(capabilities, 2)].concat();
        vec![Client(query()), Node(reply)]
    };
    play_both(many, &done(Query, CommandOutcome::Ok), Idle, None);
}

#[test]
fn error_ends_a_result_set_anywhere() {
    let parts = |capabilities| {
        let head = head(capabilities, 2, AUTOCOMMIT);
        let definition = [message(&[2]), definition()].concat();
        [definition, head.clone(), [head, rows()].concat()]
    };
    for part in 0..3 {
        let script =
            |capabilities| vec![Client(query()), Node([parts(capabilities)[part].clone(), err(1317)].concat())];
        play_both(script, &done(Query, Error(1317)), Idle, None);
    }
}

#[test]
fn error_keeps_the_last_status_flags() {
    let script = |_| vec![Client(query()), Node(ok(IN)), Client(query()), Node(err(1213))];
    let events = [done(Query, CommandOutcome::Ok), done(Query, Error(1213))].concat();
    play_both(script, &events, InTransaction, Some(PinReason::Transaction));
}

#[test]
fn row_of_16_mib_may_begin_like_an_end_packet() {
    let mut row = vec![0xfe, 0, 0, 0, 1, 0, 0, 0, 0];
    row.resize(9 + (1 << 24), b'x');
    for capabilities in [OLD, NEW] {
        let reply = [head(capabilities, 1, 2), message(&row), rows(), end(capabilities, IN)].concat();
        let (mut tracker, mut seen) = (Tracker::new(capabilities), CommandEvents::default());
        tracker.on_client_bytes(&query(), &mut seen);
        for bytes in reply.chunks(65_521) {
            tracker.on_node_bytes(bytes, &mut seen);
        }
        assert_eq!((tracker.state(), &seen.0[..]), (InTransaction, &done(Query, CommandOutcome::Ok)[..]));
    }
}

#[test]
fn command_ends_with_the_last_of_several_results() {
    let script = |capabilities| {
        let reply = [
            ok(MORE),
            result_set(capabilities, 1, MORE),
            result_set(capabilities, 2, MORE),
            long_ok(MORE),
            end(capabilities, MORE),
            result_set(capabilities, 1, IN),
        ];
        vec![Client(query()), Node(reply.concat())]
    };
    play_both(script, &done(Query, CommandOutcome::Ok), InTransaction, Some(PinReason::Transaction));
    let script = |capabilities| vec![Client(query()), Node([result_set(capabilities, 1, MORE), err(1064)].concat())];
    play_both(script, &done(Query, Error(1064)), Idle, None);
    play_both(|_| vec![Client(query()), Node(ok(MORE))], &[started(Query)], Busy, None);
}

#[test]
fn progress_reports_do_not_end_a_response() {
    let script = |capabilities| {
        let reply = [progress(), progress(), result_set(capabilities, 1, AUTOCOMMIT)].concat();
        vec![Client(query()), Node(reply)]
    };
    play_both(script, &done(Query, CommandOutcome::Ok), Idle, None);
    play_both(|_| vec![Client(query()), Node(progress())], &[started(Query)], Busy, None);
}

#[test]
fn result_set_may_have_no_definitions() {
    let kept = |capabilities| {
        let reply = [message(b"\x02\x01"), definitions(capabilities, 2, 2), rows(), end(capabilities, 2)];
        vec![Client(on(Execute, 1)), Node(reply.concat())]
    };
    play_both(kept, &done(Execute, CommandOutcome::Ok), Idle, None);
    let left_out = |capabilities| {
        let separator = if capabilities == OLD { eof(2) } else { vec![] };
        let reply = [message(b"\x02\x00"), separator, rows(), end(capabilities, 2)].concat();
        vec![Client(on(Execute, 1)), Node(reply)]
    };
    play_both(left_out, &done(Execute, CommandOutcome::Ok), Idle, None);
}

#[test]
fn field_list_ends_its_command() {
    let script = |capabilities| {
        vec![Client(command(FieldList, b"t\0")), Node([definition().repeat(3), end(capabilities, 2)].concat())]
    };
    play_both(script, &done(FieldList, CommandOutcome::Ok), Idle, None);
    play_both(|_| vec![Client(command(FieldList, b"t\0")), Node(err(1146))], &done(FieldList, Error(1146)), Idle, None);
}

#[test]
fn statistics_response_is_one_packet_of_any_text() {
    for text in [&b"Uptime: 5  Threads: 1"[..], b"", b"\0", b"\xfe", b"\xfb", b"\x05"] {
        let script = |_| vec![Client(command(Statistics, b"")), Node(message(text))];
        play_both(script, &done(Statistics, CommandOutcome::Ok), Idle, None);
    }
    play_both(|_| vec![Client(command(Statistics, b"")), Node(err(1227))], &done(Statistics, Error(1227)), Idle, None);
}

#[test]
fn file_upload_ends_with_an_empty_message() {
    let ask = message(b"\xfb/tmp/file");
    let upload = |reply: Vec<u8>| {
        let ask = ask.clone();
        move |_| {
            let file = [message(b"\x01looks like quit"), message(&[b'x'; 3000]).repeat(300)].concat();
            vec![Client(query()), Node(ask.clone()), Client(file), Client(message(b"")), Node(reply.clone())]
        }
    };
    play_both(upload(ok(IN)), &done(Query, CommandOutcome::Ok), InTransaction, Some(PinReason::Transaction));
    play_both(upload(err(1062)), &done(Query, Error(1062)), Idle, None);
    play_both(upload([ok(MORE), ok(AUTOCOMMIT)].concat()), &done(Query, CommandOutcome::Ok), Idle, None);
    let waiting = |_| vec![Client(query()), Node(ask.clone()), Client(message(b"1,2"))];
    play_both(waiting, &[started(Query)], Busy, None);
    // A packet of the maximum length and the empty packet that ends it are one message, which is not empty.
    let full = message(&vec![b'x'; MAX_PAYLOAD]);
    let mut tracker = Tracker::new(NEW);
    let mut seen = CommandEvents::default();
    tracker.on_client_bytes(&query(), &mut seen);
    tracker.on_node_bytes(&ask, &mut seen);
    tracker.on_client_bytes(&full, &mut seen);
    tracker.on_client_bytes(&message(b""), &mut seen);
    tracker.on_node_bytes(&ok(AUTOCOMMIT), &mut seen);
    assert_eq!((tracker.state(), &seen.0[..]), (Idle, &done(Query, CommandOutcome::Ok)[..]));
}

#[test]
fn change_user_ends_after_any_number_of_authentication_rounds() {
    let ask = || message(b"\xfemysql_native_password\0abcdefghijklmnopqrst\0");
    let request = command(ChangeUser, b"root\0\0test\0");
    let rounds: [Vec<Sent>; 4] = [
        vec![],
        vec![Node(ask()), Client(message(b""))],
        vec![Node(ask()), Client(message(&[1; 32])), Node(message(b"\x01\x03"))],
        vec![
            Node(ask()),
            Client(message(&[1; 32])),
            Node(message(b"\x01\x04")),
            Client(message(b"\x02")),
            Node(message(b"\x01-----BEGIN PUBLIC KEY-----")),
            Client(message(&[3; 256])),
            Node(message(b"\x02factor\0")),
            Client(message(b"\x0e")),
        ],
    ];
    for round in rounds {
        for (reply, outcome) in [(ok(AUTOCOMMIT), CommandOutcome::Ok), (err(1045), Error(1045))] {
            let script = |_| {
                let mut script = vec![Client(request.clone())];
                script.extend(round.iter().map(|from| match from {
                    Client(bytes) => Client(bytes.clone()),
                    Node(bytes) => Node(bytes.clone()),
                }));
                script.extend([Node(reply.clone()), Client(command(Ping, b"")), Node(ok(IN))]);
                script
            };
            let events = [done(ChangeUser, outcome), done(Ping, CommandOutcome::Ok)].concat();
            play_both(script, &events, InTransaction, Some(PinReason::Transaction));
        }
    }
    let next = || Client([request.clone(), command(Ping, b"")].concat());
    play_both(|_| vec![next()], &[started(ChangeUser)], Opaque, Some(PinReason::Opaque));
    // A client's answer, or the end of the response, uses up the node's request for authentication data.
    let twice = |_| vec![Client(request.clone()), Node(ask()), Client(message(b"").repeat(2))];
    play_both(twice, &[started(ChangeUser)], Opaque, Some(PinReason::Opaque));
    let after = |_| vec![Client(request.clone()), Node([message(b"\x01\x03"), ok(AUTOCOMMIT)].concat()), next()];
    let events = [&done(ChangeUser, CommandOutcome::Ok)[..], &[started(ChangeUser)]].concat();
    play_both(after, &events, Opaque, Some(PinReason::Opaque));
}
