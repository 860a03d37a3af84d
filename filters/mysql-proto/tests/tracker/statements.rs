//! Prepared statements, and how they pin a session.

use crate::build::*;
use crate::play::Sent::{self, Client, Node};
use crate::play::*;
use mysql_proto::capability::Capabilities;
use mysql_proto::command::Command::*;
use mysql_proto::status::{CURSOR_EXISTS, LAST_ROW_SENT};
use mysql_proto::tracker::CommandOutcome::{self, Error, Silent};
use mysql_proto::tracker::TrackerState::{Busy, Idle, Opaque};
use mysql_proto::tracker::{PinReason, Tracker};

#[test]
fn prepare_ends_after_its_definitions() {
    for (columns, parameters) in [(0, 0), (1, 0), (0, 1), (3, 300)] {
        let script = |capabilities| {
            vec![Client(command(Prepare, b"SELECT ?")), Node(prepared(capabilities, 9, columns, parameters))]
        };
        play_both(script, &done(Prepare, CommandOutcome::Ok), Idle, None);
        let cut = |capabilities| {
            let mut reply = prepared(capabilities, 9, columns, parameters);
            reply.pop();
            vec![Client(command(Prepare, b"SELECT ?")), Node(reply)]
        };
        play_both(cut, &[started(Prepare)], Busy, None);
    }
    play_both(|_| vec![Client(command(Prepare, b"SELEC")), Node(err(1064))], &done(Prepare, Error(1064)), Idle, None);
}

#[test]
fn error_within_a_prepare_response_resets_the_response_state() {
    let script = |capabilities| {
        let mut reply = prepared(capabilities, 1, 0, 0);
        reply[9..13].copy_from_slice(&[2, 0, 2, 0]);
        let empty = [head(capabilities, 1, AUTOCOMMIT), end(capabilities, AUTOCOMMIT)].concat();
        let failed = [reply, definition(), err(1317)].concat();
        vec![Client(command(Prepare, b"SELECT ?")), Node(failed), Client(query()), Node(empty)]
    };
    play_both(script, &[done(Prepare, Error(1317)), done(Query, CommandOutcome::Ok)].concat(), Idle, None);
}

fn open_cursor(capabilities: Capabilities, statement: u32) -> Vec<Sent> {
    let status = AUTOCOMMIT | CURSOR_EXISTS;
    let mut reply = head(capabilities, 1, status);
    if capabilities == NEW {
        reply.extend(end(capabilities, status));
    }
    vec![Client(on(Execute, statement)), Node(reply)]
}

#[test]
fn cursor_pins_the_session_until_its_last_row() {
    let opened = done(Execute, CommandOutcome::Ok);
    play_both(|capabilities| open_cursor(capabilities, 1), &opened, Idle, Some(PinReason::Cursor));
    for (status, pinned) in [(CURSOR_EXISTS, Some(PinReason::Cursor)), (LAST_ROW_SENT, None)] {
        let script = |capabilities| {
            let mut script = open_cursor(capabilities, 1);
            script.extend([Client(on(Fetch, 1)), Node([rows(), end(capabilities, status)].concat())]);
            script
        };
        play_both(script, &[opened, done(Fetch, CommandOutcome::Ok)].concat(), Idle, pinned);
    }
    // TiDB resets the statement (pingcap/tidb `pkg/server/conn_stmt.go`, `handleStmtFetch`).
    let failed = |capabilities| {
        let mut script = open_cursor(capabilities, 1);
        script.extend([Client(on(Fetch, 1)), Node(err(8176))]);
        script
    };
    play_both(failed, &[opened, done(Fetch, Error(8176))].concat(), Idle, None);
}

#[test]
fn reset_close_and_execution_unpin_a_statement() {
    let opened = done(Execute, CommandOutcome::Ok);
    let unpin = [ResetStatement, Execute, BulkExecute, ChangeUser, ResetConnection];
    for (what, outcome) in unpin.map(|what| (what, CommandOutcome::Ok)).into_iter().chain([(CloseStatement, Silent)]) {
        let script = |capabilities, statement| {
            let mut script = open_cursor(capabilities, 1);
            script.extend([Client(on(SendLongData, 1)), Client(on(what, statement))]);
            if outcome != Silent {
                script.push(Node(ok(AUTOCOMMIT)));
            }
            script
        };
        let events = [opened, done(SendLongData, Silent), done(what, outcome)].concat();
        // Until the next response, the node may still reject the data.
        let unconfirmed = (outcome == Silent).then_some(PinReason::LongData);
        play_both(|capabilities| script(capabilities, 1), &events, Idle, unconfirmed);
        if outcome == Silent {
            let confirmed = |capabilities| {
                let mut script = script(capabilities, 1);
                script.extend([Client(command(Ping, b"")), Node(ok(AUTOCOMMIT))]);
                script
            };
            play_both(confirmed, &[&events[..], &done(Ping, CommandOutcome::Ok)].concat(), Idle, None);
        }
        // Another statement keeps the cursor of statement 1.
        let other = if matches!(what, ChangeUser | ResetConnection) { None } else { Some(PinReason::Cursor) };
        play_both(|capabilities| script(capabilities, 2), &events, Idle, other);
        if outcome == Silent {
            continue;
        }
        let failed = |capabilities| {
            let mut script = open_cursor(capabilities, 1);
            script.extend([Client(on(what, 1)), Node(err(1105))]);
            script
        };
        play_both(failed, &[opened, done(what, Error(1105))].concat(), Idle, Some(PinReason::Cursor));
        // The node does not know the statement, so there is no cursor either (ER_UNKNOWN_STMT_HANDLER).
        let unknown = |capabilities| {
            let mut script = open_cursor(capabilities, 1);
            script.extend([Client(on(what, 1)), Node(err(1243))]);
            script
        };
        let pinned = matches!(what, ChangeUser | ResetConnection).then_some(PinReason::Cursor);
        play_both(unknown, &[opened, done(what, Error(1243))].concat(), Idle, pinned);
    }
}

#[test]
fn id_ffffffff_names_the_statement_prepared_last() {
    let script = |capabilities| {
        let mut script = vec![Client(command(Prepare, b"SELECT 1")), Node(prepared(capabilities, 77, 1, 0))];
        script.extend(open_cursor(capabilities, u32::MAX));
        script.push(Client(on(CloseStatement, 77)));
        script
    };
    let events =
        [done(Prepare, CommandOutcome::Ok), done(Execute, CommandOutcome::Ok), done(CloseStatement, Silent)].concat();
    play_both(script, &events, Idle, None);
}

#[test]
fn cursors_beyond_the_slots_pin_while_a_slot_has_an_open_cursor() {
    let mut tracker = Tracker::new(NEW);
    let mut take = |from: Sent| match from {
        Client(bytes) => tracker.on_client_bytes(&bytes, &mut ()),
        Node(bytes) => tracker.on_node_bytes(&bytes, &mut ()),
    };
    (1..=100).flat_map(|statement| open_cursor(NEW, statement)).for_each(&mut take);
    (2..=100).for_each(|statement| take(Client(on(CloseStatement, statement))));
    assert_eq!((tracker.state(), tracker.pin_reason()), (Idle, Some(PinReason::Cursor)));
    tracker.on_client_bytes(&on(CloseStatement, 1), &mut ());
    assert_eq!((tracker.state(), tracker.pin_reason()), (Idle, None));
}

#[test]
fn long_data_pins_the_session_until_the_execution() {
    let data = command(SendLongData, &[&[1, 0, 0, 0, 0, 0][..], &[b'x'; 5000]].concat());
    let script = |_| vec![Client(data.repeat(3))];
    play_both(script, &done(SendLongData, Silent).repeat(3), Idle, Some(PinReason::LongData));
    let fetched = |capabilities| {
        let mut script = vec![Client(data.clone())];
        script.extend(open_cursor(capabilities, 1));
        script.extend([Client(on(Fetch, 1)), Node(end(capabilities, LAST_ROW_SENT))]);
        script
    };
    let events = [done(SendLongData, Silent), done(Execute, CommandOutcome::Ok), done(Fetch, CommandOutcome::Ok)];
    play_both(fetched, &events.concat(), Idle, None);
    let script = |_| vec![Client(data.clone()), Client(on(Execute, 1)), Node(ok(AUTOCOMMIT))];
    play_both(script, &[done(SendLongData, Silent), done(Execute, CommandOutcome::Ok)].concat(), Idle, None);
}

/// TiDB's response to a COM_STMT_SEND_LONG_DATA that failed.
fn data_rejection(code: u16) -> Sent {
    let mut packet = err(code);
    packet[3] = 1;
    Node(packet)
}

#[test]
fn failed_execution_uses_up_long_data() {
    let failed = |_| vec![Client(on(SendLongData, 1)), Client(on(Execute, 1)), Node(err(1062))];
    let events = [done(SendLongData, Silent), done(Execute, Error(1062))].concat();
    // The ERR packet may be TiDB's response to the data, so the one to the execution may still come.
    play_both(failed, &events, Idle, Some(PinReason::LongData));
    let confirmed = |capabilities| {
        let mut script = failed(capabilities);
        script.extend([Client(command(Ping, b"")), Node(ok(AUTOCOMMIT))]);
        script
    };
    play_both(confirmed, &[events, done(Ping, CommandOutcome::Ok).to_vec()].concat(), Idle, None);
}

#[test]
fn rejected_long_data_for_an_unknown_statement_does_not_pin() {
    let sent = done(SendLongData, Silent);
    // TiDB responds to the data.
    let rejected = |_| vec![Client(on(SendLongData, 9)), data_rejection(1243)];
    play_both(rejected, &sent, Idle, None);
    let text =
        b"\xff\x51\x04#HY000ERROR 1243 (HY000): Unknown prepared statement handler 9 given to stmt_send_longdata";
    let mut packet = message(text);
    packet[3] = 1;
    let with_code_in_text = |_| vec![Client(on(SendLongData, 9)), Node(packet.clone())];
    play_both(with_code_in_text, &sent, Idle, None);
    let twice = |_| vec![Client(on(SendLongData, 9).repeat(2)), data_rejection(1243), data_rejection(1243)];
    play_both(twice, &sent.repeat(2), Idle, None);
    let executed = [sent, done(Execute, Error(1243))].concat();
    let pipelined = |_| vec![Client([on(SendLongData, 9), on(Execute, 9)].concat()), data_rejection(1243)];
    let started_both =
        [started(SendLongData), ended(SendLongData, Silent), started(Execute), ended(Execute, Error(1243))];
    play_both(pipelined, &started_both, Idle, Some(PinReason::LongData));
    let answered = |capabilities| {
        let mut script = pipelined(capabilities);
        script.push(data_rejection(1243));
        script
    };
    play_both(answered, &started_both, Idle, None);
    // MySQL responds only to the execution.
    let silent = |_| {
        let execution = [Client(on(SendLongData, 9)), Client(on(Execute, 9)), Node(err(1243))];
        execution.into_iter().chain([Client(command(Ping, b"")), Node(ok(AUTOCOMMIT))]).collect()
    };
    play_both(silent, &[executed, done(Ping, CommandOutcome::Ok).to_vec()].concat(), Idle, None);
}

#[test]
fn rejected_parameter_keeps_other_long_data() {
    // The data of other parameters stays at the node.
    let rejected = |_| vec![Client(on(SendLongData, 1).repeat(2)), data_rejection(1210)];
    play_both(rejected, &done(SendLongData, Silent).repeat(2), Idle, Some(PinReason::LongData));
}

#[test]
fn other_unrequested_bytes_after_long_data_stop_tracking() {
    let sent = done(SendLongData, Silent);
    let shutdown = err(1053); // has sequence number 0
    for bytes in [shutdown, ok(AUTOCOMMIT)] {
        play_both(|_| vec![Client(on(SendLongData, 1)), Node(bytes.clone())], &sent, Opaque, Some(PinReason::Opaque));
    }
    // A successful response shows that the data was accepted.
    let accepted =
        |_| vec![Client(on(SendLongData, 1)), Client(on(Execute, 1)), Node(ok(AUTOCOMMIT)), data_rejection(1243)];
    let events = [sent, done(Execute, CommandOutcome::Ok)].concat();
    play_both(accepted, &events, Opaque, Some(PinReason::Opaque));
}
