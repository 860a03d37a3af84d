//! Prepared statements, and what they pin.

use crate::build::*;
use crate::play::From::{self, Client, Node};
use crate::play::*;
use wire::capability::Capabilities;
use wire::command::Command::*;
use wire::status::{CURSOR_EXISTS, LAST_ROW_SENT};
use wire::tracker::Outcome::{self, Error, Silent};
use wire::tracker::State::{Busy, Idle};
use wire::tracker::{Pinned, Tracker};

#[test]
fn prepare() {
    for (columns, parameters) in [(0, 0), (1, 0), (0, 1), (3, 300)] {
        let script = |capabilities| {
            vec![Client(command(Prepare, b"SELECT ?")), Node(prepared(capabilities, 9, columns, parameters))]
        };
        play_both(script, &done(Prepare, Outcome::Ok), Idle, None);
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
fn an_error_in_the_middle_of_prepare_leaves_nothing() {
    let script = |capabilities| {
        let mut reply = prepared(capabilities, 1, 0, 0);
        reply[9..13].copy_from_slice(&[2, 0, 2, 0]);
        let empty = [head(capabilities, 1, AUTOCOMMIT), end(capabilities, AUTOCOMMIT)].concat();
        let failed = [reply, definition(), err(1317)].concat();
        vec![Client(command(Prepare, b"SELECT ?")), Node(failed), Client(query()), Node(empty)]
    };
    play_both(script, &[done(Prepare, Error(1317)), done(Query, Outcome::Ok)].concat(), Idle, None);
}

fn open_cursor(capabilities: Capabilities, statement: u32) -> Vec<From> {
    let status = AUTOCOMMIT | CURSOR_EXISTS;
    let mut reply = head(capabilities, 1, status);
    if capabilities == NEW {
        reply.extend(end(capabilities, status));
    }
    vec![Client(on(Execute, statement)), Node(reply)]
}

#[test]
fn a_cursor_pins_until_its_last_row() {
    let opened = done(Execute, Outcome::Ok);
    play_both(|capabilities| open_cursor(capabilities, 1), &opened, Idle, Some(Pinned::Cursor));
    for (status, pinned) in [(CURSOR_EXISTS, Some(Pinned::Cursor)), (LAST_ROW_SENT, None)] {
        let script = |capabilities| {
            let mut script = open_cursor(capabilities, 1);
            script.extend([Client(on(Fetch, 1)), Node([rows(), end(capabilities, status)].concat())]);
            script
        };
        play_both(script, &[opened, done(Fetch, Outcome::Ok)].concat(), Idle, pinned);
    }
    let failed = |capabilities| {
        let mut script = open_cursor(capabilities, 1);
        script.extend([Client(on(Fetch, 1)), Node(err(8176))]);
        script
    };
    play_both(failed, &[opened, done(Fetch, Error(8176))].concat(), Idle, Some(Pinned::Cursor));
}

#[test]
fn what_unpins_a_statement() {
    let opened = done(Execute, Outcome::Ok);
    let unpin = [ResetStatement, Execute, BulkExecute, ChangeUser, ResetConnection];
    for (what, outcome) in unpin.map(|what| (what, Outcome::Ok)).into_iter().chain([(CloseStatement, Silent)]) {
        let script = |capabilities, statement| {
            let mut script = open_cursor(capabilities, 1);
            script.extend([Client(on(SendLongData, 1)), Client(on(what, statement))]);
            if outcome != Silent {
                script.push(Node(ok(AUTOCOMMIT)));
            }
            script
        };
        let events = [opened, done(SendLongData, Silent), done(what, outcome)].concat();
        play_both(|capabilities| script(capabilities, 1), &events, Idle, None);
        // MariaDB: the statement prepared last, which is none here.
        let other = if matches!(what, ChangeUser | ResetConnection) { None } else { Some(Pinned::Cursor) };
        play_both(|capabilities| script(capabilities, 2), &events, Idle, other);
        if outcome == Silent {
            continue;
        }
        let failed = |capabilities| {
            let mut script = open_cursor(capabilities, 1);
            script.extend([Client(on(what, 1)), Node(err(1105))]);
            script
        };
        play_both(failed, &[opened, done(what, Error(1105))].concat(), Idle, Some(Pinned::Cursor));
    }
}

#[test]
fn the_statement_prepared_last_has_a_second_name() {
    let script = |capabilities| {
        let mut script = vec![Client(command(Prepare, b"SELECT 1")), Node(prepared(capabilities, 77, 1, 0))];
        script.extend(open_cursor(capabilities, u32::MAX));
        script.push(Client(on(CloseStatement, 77)));
        script
    };
    let events = [done(Prepare, Outcome::Ok), done(Execute, Outcome::Ok), done(CloseStatement, Silent)].concat();
    play_both(script, &events, Idle, None);
}

#[test]
fn more_cursors_than_are_remembered_pin_until_all_is_reset() {
    let mut tracker = Tracker::new(NEW);
    let mut take = |from: From| match from {
        Client(bytes) => tracker.client(&bytes, &mut ()),
        Node(bytes) => tracker.node(&bytes, &mut ()),
    };
    (1..=100).flat_map(|statement| open_cursor(NEW, statement)).for_each(&mut take);
    (1..=100).for_each(|statement| take(Client(on(CloseStatement, statement))));
    assert_eq!((tracker.state(), tracker.pinned()), (Idle, Some(Pinned::Cursor)));
    tracker.client(&command(ResetConnection, b""), &mut ());
    tracker.node(&ok(AUTOCOMMIT), &mut ());
    assert_eq!((tracker.state(), tracker.pinned()), (Idle, None));
}

#[test]
fn long_data_pins_until_it_is_executed() {
    let data = command(SendLongData, &[&[1, 0, 0, 0, 0, 0][..], &[b'x'; 5000]].concat());
    let script = |_| vec![Client(data.repeat(3))];
    play_both(script, &done(SendLongData, Silent).repeat(3), Idle, Some(Pinned::LongData));
    let fetched = |capabilities| {
        let mut script = vec![Client(data.clone())];
        script.extend(open_cursor(capabilities, 1));
        script.extend([Client(on(Fetch, 1)), Node(end(capabilities, LAST_ROW_SENT))]);
        script
    };
    let events = [done(SendLongData, Silent), done(Execute, Outcome::Ok), done(Fetch, Outcome::Ok)];
    play_both(fetched, &events.concat(), Idle, None);
    let script = |_| vec![Client(data.clone()), Client(on(Execute, 1)), Node(ok(AUTOCOMMIT))];
    play_both(script, &[done(SendLongData, Silent), done(Execute, Outcome::Ok)].concat(), Idle, None);
}
