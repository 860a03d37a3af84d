//! Generated conversations, whose expected events come from the generator.

use crate::build::*;
use crate::events::{CommandEvent, CommandEvents};
use mysql_proto::capability::Capabilities;
use mysql_proto::command::Command;
use mysql_proto::status::{CURSOR_EXISTS, IN_TRANSACTION, LAST_ROW_SENT, MORE_RESULTS};
use mysql_proto::tracker::{CommandOutcome, PinReason, Tracker, TrackerState};
use proptest::prelude::*;
use proptest::sample::Index;
use std::collections::BTreeMap;

/// A command and its conversation: `turns` are alternately bytes of the client and of the node.
#[derive(Debug, Clone)]
struct Exchange {
    command: Command,
    outcome: CommandOutcome,
    turns: Vec<Vec<u8>>,
    /// The status flags after the exchange; None leaves those from before.
    status: Option<u16>,
    statement: u32,
}

impl Exchange {
    fn new(command: Command, outcome: CommandOutcome, status: Option<u16>, turns: Vec<Vec<u8>>) -> Self {
        Self { command, outcome, turns, status, statement: 0 }
    }

    /// Whether the client may pipeline more commands: no bytes of the client depend on the response.
    fn allows_pipelining(&self) -> bool {
        self.turns.len() <= 2 && self.command != Command::ChangeUser
    }
}

fn transaction() -> impl Strategy<Value = u16> {
    prop::sample::select(vec![AUTOCOMMIT, AUTOCOMMIT | IN_TRANSACTION, 0])
}

/// All results but the last, each with MORE_RESULTS.
fn more(capabilities: Capabilities, kinds: &[u8]) -> Vec<u8> {
    let each = |kind: &u8| match kind {
        0 => ok(MORE_RESULTS),
        1 => long_ok(MORE_RESULTS),
        columns => result_set(capabilities, *columns, MORE_RESULTS),
    };
    kinds.iter().flat_map(each).collect()
}

fn query_exchange(capabilities: Capabilities) -> impl Strategy<Value = Exchange> {
    (transaction(), prop::collection::vec(0..4_u8, 0..3), 0..6_u8, any::<bool>()).prop_map(
        move |(status, kinds, last, marks)| {
            let before = more(capabilities, &kinds);
            let before_status = (!kinds.is_empty()).then_some(MORE_RESULTS);
            let before = if marks { [progress(), before].concat() } else { before };
            let ok_outcome = CommandOutcome::Ok;
            let query = query();
            match last {
                0 => {
                    Exchange::new(Command::Query, ok_outcome, Some(status), vec![query, [before, ok(status)].concat()])
                }
                1 => {
                    let reply = [before, result_set(capabilities, 3, status)].concat();
                    Exchange::new(Command::Query, ok_outcome, Some(status), vec![query, reply])
                }
                2 => {
                    let reply = [before, err(1064)].concat();
                    Exchange::new(Command::Query, CommandOutcome::Error(1064), before_status, vec![query, reply])
                }
                3 => {
                    // The result ends with an error after some rows. The status of the EOF packet before the rows
                    // counts.
                    let seen = if capabilities == OLD { Some(status) } else { before_status };
                    let reply = [before, head(capabilities, 2, status), rows(), err(1317)].concat();
                    Exchange::new(Command::Query, CommandOutcome::Error(1317), seen, vec![query, reply])
                }
                _ => {
                    let ask = [before, message(b"\xfbfile")].concat();
                    let file = [message(b"\x03abc"), message(&[b'y'; 40]), message(b"")].concat();
                    let turns = vec![query, ask, file, ok(status)];
                    Exchange::new(Command::Query, ok_outcome, Some(status), turns)
                }
            }
        },
    )
}

fn statement_exchange(capabilities: Capabilities) -> impl Strategy<Value = Exchange> {
    (0..9_u8, 1..5_u32, transaction(), any::<bool>()).prop_map(move |(kind, statement, status, fails)| {
        let mut status = status;
        let (command, reply) = match kind {
            0 => (Command::Execute, result_set(capabilities, 2, status)),
            1 => (Command::Execute, ok(status)),
            2 => {
                status |= CURSOR_EXISTS;
                let rest = if capabilities == NEW { end(capabilities, status) } else { vec![] };
                (Command::Execute, [head(capabilities, 2, status), rest].concat())
            }
            3 => (Command::Fetch, [rows(), end(capabilities, status)].concat()),
            4 => {
                status |= LAST_ROW_SENT;
                (Command::Fetch, [rows(), end(capabilities, status)].concat())
            }
            5 => (Command::ResetStatement, ok(status)),
            6 => (Command::BulkExecute, ok(status)),
            7 => (Command::SendLongData, vec![]),
            _ => (Command::CloseStatement, vec![]),
        };
        let request = on(command, statement);
        let mut exchange = if reply.is_empty() {
            Exchange::new(command, CommandOutcome::Silent, None, vec![request])
        } else if fails {
            Exchange::new(command, CommandOutcome::Error(1105), None, vec![request, err(1105)])
        } else {
            Exchange::new(command, CommandOutcome::Ok, Some(status), vec![request, reply])
        };
        exchange.statement = statement;
        exchange
    })
}

fn other_exchange(capabilities: Capabilities) -> impl Strategy<Value = Exchange> {
    (0..8_u8, transaction(), 0..3_u16, 0..3_u16).prop_map(move |(kind, status, columns, parameters)| {
        let single =
            |what, reply| Exchange::new(what, CommandOutcome::Ok, Some(status), vec![command(what, b""), reply]);
        let prepare = command(Command::Prepare, b"SELECT ?");
        let change = command(Command::ChangeUser, b"root\0");
        let ask = message(b"\xfecaching_sha2_password\0abc\0");
        match kind {
            0 => single(Command::Ping, ok(status)),
            1 => single(Command::SetOption, end(capabilities, status)),
            2 => single(Command::ResetConnection, long_ok(status)),
            3 => single(Command::FieldList, [definition(), definition(), end(capabilities, status)].concat()),
            4 => {
                let turns = vec![command(Command::Statistics, b""), message(b"Uptime: 5")];
                Exchange::new(Command::Statistics, CommandOutcome::Ok, None, turns)
            }
            5 => {
                let turns = vec![prepare, prepared(capabilities, 3, columns, parameters)];
                Exchange::new(Command::Prepare, CommandOutcome::Ok, None, turns)
            }
            6 => {
                let turns = vec![change, ask, message(&[7; 32]), [message(b"\x01\x03"), ok(status)].concat()];
                Exchange::new(Command::ChangeUser, CommandOutcome::Ok, Some(status), turns)
            }
            _ => {
                let turns = vec![change, ask, message(b""), err(1045)];
                Exchange::new(Command::ChangeUser, CommandOutcome::Error(1045), None, turns)
            }
        }
    })
}

fn conversation() -> impl Strategy<Value = (Capabilities, Vec<Exchange>)> {
    prop::sample::select(vec![OLD, NEW]).prop_flat_map(|capabilities| {
        let exchange =
            prop_oneof![query_exchange(capabilities), statement_exchange(capabilities), other_exchange(capabilities),];
        (Just(capabilities), prop::collection::vec(exchange, 0..10))
    })
}

/// What pins the session after all `exchanges`.
fn pinned_after(exchanges: &[Exchange]) -> Option<PinReason> {
    let mut status = AUTOCOMMIT;
    // For each statement: whether it has an open cursor, and long data.
    let mut marks: BTreeMap<u32, (bool, bool)> = BTreeMap::new();
    // Whether long data was sent since the last successful response, and whether an error has come since then.
    let (mut is_unconfirmed, mut is_ambiguous) = (false, false);
    for exchange in exchanges {
        status = exchange.status.unwrap_or(status);
        match exchange.outcome {
            CommandOutcome::Silent => is_unconfirmed |= exchange.command == Command::SendLongData,
            CommandOutcome::Error(1064 | 1105) if exchange.status.is_none() => is_ambiguous = is_unconfirmed,
            // Other errors follow successful packets, such as results with a status.
            _ => (is_unconfirmed, is_ambiguous) = (false, false),
        }
        let mark = marks.entry(exchange.statement).or_default();
        match (exchange.command, exchange.outcome) {
            (Command::Execute | Command::BulkExecute, CommandOutcome::Error(_)) => mark.1 = false,
            (Command::Fetch, CommandOutcome::Error(_)) => mark.0 = false,
            _ => {}
        }
        if matches!(exchange.outcome, CommandOutcome::Error(_)) {
            continue;
        }
        match exchange.command {
            Command::Execute => *mark = (status & CURSOR_EXISTS != 0, false),
            Command::Fetch => mark.0 = status & LAST_ROW_SENT == 0,
            Command::SendLongData => mark.1 = true,
            Command::BulkExecute | Command::ResetStatement | Command::CloseStatement => *mark = (false, false),
            Command::ResetConnection | Command::ChangeUser => marks.clear(),
            _ => {}
        }
    }
    if status & IN_TRANSACTION != 0 {
        Some(PinReason::Transaction)
    } else if marks.values().any(|mark| mark.0) {
        Some(PinReason::Cursor)
    } else if is_unconfirmed || is_ambiguous || marks.values().any(|mark| mark.1) {
        Some(PinReason::LongData)
    } else {
        None
    }
}

/// How far one side is: index of the exchange, index of its turn, bytes of that turn.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct ReplayPosition {
    exchange: usize,
    turn: usize,
    byte: usize,
}

impl ReplayPosition {
    /// Moves to this side's next unfinished turn (even turns: client, odd turns: node).
    fn settle(&mut self, exchanges: &[Exchange], side: usize) {
        while let Some(exchange) = exchanges.get(self.exchange) {
            if self.turn % 2 != side {
                self.turn += 1;
            } else if self.turn >= exchange.turns.len() {
                (self.exchange, self.turn, self.byte) = (self.exchange + 1, side, 0);
            } else if self.byte == exchange.turns[self.turn].len() {
                (self.turn, self.byte) = (self.turn + 1, 0);
            } else {
                break;
            }
        }
    }

    /// Whether this side is past the turn.
    fn passed(self, exchange: usize, turn: usize) -> bool {
        (self.exchange, self.turn) > (exchange, turn)
    }
}

/// Whether the client sends first if both sides may, whether it may pipeline, and the maximum number of bytes.
type ReplayStep = (bool, bool, usize);

/// Plays a conversation in the pieces and the order of `steps`, as far as causality allows.
fn play(
    capabilities: Capabilities,
    exchanges: &[Exchange],
    steps: &[ReplayStep],
) -> (Vec<CommandEvent>, TrackerState, Option<PinReason>) {
    let mut tracker = Tracker::new(capabilities);
    let mut seen = CommandEvents::default();
    let (mut client, mut node) = (ReplayPosition::default(), ReplayPosition { turn: 1, ..ReplayPosition::default() });
    for &(client_first, ahead, size) in steps.iter().cycle() {
        client.settle(exchanges, 0);
        node.settle(exchanges, 1);
        let asked = client.turn == 0 || node.passed(client.exchange, client.turn - 1);
        let begun = client.byte > 0 || client.turn > 0;
        let free = exchanges[..client.exchange].iter().skip(node.exchange).all(Exchange::allows_pipelining);
        let can_begin = node.exchange >= client.exchange || (ahead && free);
        let client_can_send = client.exchange < exchanges.len() && asked && (begun || can_begin);
        let node_can_send = node.exchange < exchanges.len() && client.passed(node.exchange, node.turn - 1);
        let from_client = client_can_send && (client_first || !node_can_send);
        if !from_client && !node_can_send {
            if client.exchange == exchanges.len() && node.exchange == exchanges.len() {
                break;
            }
            continue;
        }
        let position = if from_client { &mut client } else { &mut node };
        let rest = &exchanges[position.exchange].turns[position.turn][position.byte..];
        let piece = &rest[..rest.len().min(size)];
        position.byte += piece.len();
        if from_client {
            tracker.on_client_bytes(piece, &mut seen);
        } else {
            tracker.on_node_bytes(piece, &mut seen);
        }
        client.settle(exchanges, 0);
        node.settle(exchanges, 1);
        let begun = client.exchange + usize::from(client.turn > 0 || client.byte > 0);
        let complete = client.exchange.min(node.exchange);
        assert_eq!(tracker.state() == TrackerState::Busy, complete < begun, "client at {client:?}, node at {node:?}");
    }
    (seen.0, tracker.state(), tracker.pin_reason())
}

fn steps() -> impl Strategy<Value = Vec<ReplayStep>> {
    let size = prop_oneof![1..8_usize, 1..100_usize, Just(usize::MAX)];
    let steps = prop::collection::vec((any::<bool>(), any::<bool>(), size), 1..60);
    // At least one step lets a waiting side continue.
    steps.prop_map(|mut steps| {
        steps.push((true, false, 5));
        steps
    })
}

fn started(events: &[CommandEvent]) -> Vec<Command> {
    events
        .iter()
        .filter_map(|event| if let CommandEvent::Started(command) = event { Some(*command) } else { None })
        .collect()
}

fn ended(events: &[CommandEvent]) -> Vec<(Command, CommandOutcome)> {
    let ended = |event: &CommandEvent| {
        if let CommandEvent::Ended(command, outcome) = event { Some((*command, *outcome)) } else { None }
    };
    events.iter().filter_map(ended).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn events_do_not_depend_on_splitting_or_order((capabilities, exchanges) in conversation(), steps in steps()) {
        let (events, state, pinned) = play(capabilities, &exchanges, &steps);
        let commands = exchanges.iter().map(|exchange| exchange.command).collect::<Vec<_>>();
        let outcomes = exchanges.iter().map(|exchange| (exchange.command, exchange.outcome)).collect::<Vec<_>>();
        prop_assert_eq!(started(&events), commands);
        prop_assert_eq!(ended(&events), outcomes);
        let expected = pinned_after(&exchanges);
        prop_assert_eq!(pinned, expected);
        let idle = if expected == Some(PinReason::Transaction) { TrackerState::InTransaction } else { TrackerState::Idle };
        prop_assert_eq!(state, idle);
    }

    /// Without pipelining, the order of all events is fixed, too.
    #[test]
    fn order_of_events_does_not_depend_on_splitting((capabilities, exchanges) in conversation(), steps in steps()) {
        let steps = steps.into_iter().map(|(first, _, size)| (first, false, size)).collect::<Vec<_>>();
        let (events, ..) = play(capabilities, &exchanges, &steps);
        let (at_once, ..) = play(capabilities, &exchanges, &[(true, false, usize::MAX)]);
        prop_assert_eq!(events, at_once);
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(
        capabilities in any::<u32>(),
        pieces in prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 0..60)), 0..30),
    ) {
        let uncompressed = Capabilities(capabilities)
            .with(Capabilities::PROTOCOL_41)
            .without(Capabilities::COMPRESS)
            .without(Capabilities::ZSTD_COMPRESSION);
        let mut tracker = Tracker::new(uncompressed);
        let mut seen = CommandEvents::default();
        for (from_client, bytes) in &pieces {
            if *from_client { tracker.on_client_bytes(bytes, &mut seen) } else { tracker.on_node_bytes(bytes, &mut seen) }
        }
        let started = started(&seen.0);
        let ended = ended(&seen.0).into_iter().map(|(command, _)| command).collect::<Vec<_>>();
        prop_assert!(started.starts_with(&ended));
    }

    /// Damaged conversations reach more states than arbitrary bytes.
    #[test]
    fn damaged_conversations_do_not_panic(
        (capabilities, exchanges) in conversation(),
        damage in prop::collection::vec((any::<Index>(), any::<u8>()), 1..4),
        size in 1..50_usize,
    ) {
        let turns = || exchanges.iter().flat_map(|exchange| exchange.turns.iter().enumerate());
        let total = turns().map(|(_, turn)| turn.len()).sum::<usize>();
        let mut damage = damage.iter().map(|(at, byte)| (at.index(total.max(1)), *byte)).collect::<BTreeMap<_, _>>();
        let mut tracker = Tracker::new(capabilities);
        let mut seen = CommandEvents::default();
        let mut at = 0;
        for (turn, bytes) in turns() {
            let mut bytes = bytes.clone();
            for byte in &mut bytes {
                *byte = damage.remove(&at).unwrap_or(*byte);
                at += 1;
            }
            for piece in bytes.chunks(size) {
                if turn % 2 == 0 { tracker.on_client_bytes(piece, &mut seen) } else { tracker.on_node_bytes(piece, &mut seen) }
            }
        }
        let started = started(&seen.0);
        let ended = ended(&seen.0).into_iter().map(|(command, _)| command).collect::<Vec<_>>();
        prop_assert!(started.starts_with(&ended));
    }
}
