//! Replays recorded conversations of real clients with MariaDB (`corpus/`) through a login and a tracker.
//!
//! The expected events come from the complete recording by simple rules: a packet with the sequence number 0 begins a
//! command, and the client waited if the packet before it is the node's.

mod events;

use events::{CommandEvent, CommandEvents};
use mysql_proto::capability::Capabilities;
use mysql_proto::command::Command;
use mysql_proto::login::{ClientTls, Compression, Login, NodeTls, Output, PasswordKey, Progress, Rules};
use mysql_proto::packet::{HEADER, Header};
use mysql_proto::secret::SecretBytes;
use mysql_proto::tracker::{CommandOutcome, Tracker, TrackerState};
use proptest::prelude::*;
use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::path::Path;

/// The recorder used no TLS. Compression is as client and server agreed.
const RULES: Rules = Rules {
    client_tls: ClientTls::Disabled,
    node_tls: NodeTls::Disabled,
    compression: Compression::Passthrough,
    allow_cleartext_backend: false,
};

/// The bytes of one record.
#[derive(Debug, Clone, PartialEq, Eq)]
enum RecordedBytes {
    Client(Vec<u8>),
    Node(Vec<u8>),
    /// The client closed the connection.
    Closed,
}

#[derive(Debug)]
struct Conversation {
    /// File, step, and number of the conversation in the file.
    name: String,
    step: String,
    sent: Vec<RecordedBytes>,
}

/// Reads a file of the corpus; `corpus/README.md` has its format.
fn read(path: &Path) -> Vec<Conversation> {
    let file = fs::read(path).expect("a file");
    let client = path.file_stem().expect("a name").to_string_lossy();
    let mut conversations: Vec<Conversation> = Vec::new();
    let mut rest = &file[..];
    while let Some((&kind, after)) = rest.split_first() {
        let (length, after) = after.split_first_chunk().expect("a length");
        let (bytes, after) = after.split_at(u32::from_le_bytes(*length) as usize);
        rest = after;
        if kind == 0 {
            let step = String::from_utf8(bytes.to_vec()).expect("a name");
            let name = format!("{client}, {step}, conversation {}", conversations.len());
            conversations.push(Conversation { name, step, sent: Vec::new() });
            continue;
        }
        let sent = &mut conversations.last_mut().expect("a conversation").sent;
        match kind {
            1 => sent.push(RecordedBytes::Client(bytes.to_vec())),
            2 => sent.push(RecordedBytes::Node(bytes.to_vec())),
            3 => sent.push(RecordedBytes::Closed),
            4 => {}
            other => panic!("{}: no record has the kind {other}", path.display()),
        }
    }
    conversations
}

fn corpus() -> Vec<Conversation> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let entries = fs::read_dir(directory).expect("the corpus").map(|entry| entry.expect("an entry").path());
    let files: BTreeSet<_> = entries.filter(|path| path.extension().is_some_and(|ending| ending == "bin")).collect();
    files.iter().flat_map(|path| read(path)).collect()
}

/// Without TLS on both connections, no client encrypts a password for the proxy.
struct NoKey;

impl PasswordKey for NoKey {
    fn public_pem(&self) -> &[u8] {
        panic!("the key is asked for")
    }

    fn decrypt(&self, _: &[u8]) -> Option<SecretBytes> {
        panic!("a password is to be decrypted")
    }
}

/// The result of a replay.
#[derive(Debug, Default, PartialEq)]
struct Replay {
    to_node: Vec<u8>,
    to_client: Vec<u8>,
    login: Option<Progress>,
    events: CommandEvents,
    /// After each record: the state of the tracker, and the number of events so far.
    states: Vec<(TrackerState, usize)>,
}

/// Replays a conversation. `cut` gets the number of bytes left in a record and returns how many to pass next.
fn replay(conversation: &Conversation, mut cut: impl FnMut(usize) -> usize) -> Replay {
    let mut login = Login::new(RULES);
    let mut tracker = None;
    let mut seen = Replay::default();
    for sent in &conversation.sent {
        let (from_client, mut rest) = match sent {
            RecordedBytes::Client(bytes) => (true, &bytes[..]),
            RecordedBytes::Node(bytes) => (false, &bytes[..]),
            RecordedBytes::Closed => (true, &[][..]),
        };
        while !rest.is_empty() {
            let mut piece;
            (piece, rest) = rest.split_at(cut(rest.len()).clamp(1, rest.len()));
            if seen.login.is_none() {
                let mut out = Output::default();
                let (taken, progress) = if from_client {
                    login.on_client_bytes(piece, &NoKey, &mut out)
                } else {
                    login.on_node_bytes(piece, &mut out)
                };
                piece = &piece[taken..];
                if from_client { &mut seen.to_node } else { &mut seen.to_client }.extend(out.onward.iter());
                assert!(out.back.is_empty(), "{}: {progress:?}", conversation.name);
                if progress != Progress::More {
                    seen.login = Some(progress);
                }
                if let Progress::Established(capabilities) = progress {
                    tracker = Some(Tracker::new(capabilities));
                }
            }
            match &mut tracker {
                Some(tracker) if from_client => tracker.on_client_bytes(piece, &mut seen.events),
                Some(tracker) => tracker.on_node_bytes(piece, &mut seen.events),
                None => assert!(piece.is_empty(), "{}: bytes behind {:?}", conversation.name, seen.login),
            }
        }
        seen.states.push((tracker.as_ref().map_or(TrackerState::Busy, Tracker::state), seen.events.0.len()));
    }
    seen
}

/// A packet of a recording, and the record in which it ends.
#[derive(Debug)]
struct Packet {
    record: usize,
    from_client: bool,
    number: u8,
    payload: Vec<u8>,
}

/// All packets, in the order in which they became complete.
fn packets(sent: &[RecordedBytes]) -> Vec<Packet> {
    let mut begun = [Vec::new(), Vec::new()];
    let mut packets = Vec::new();
    for (record, sent) in sent.iter().enumerate() {
        let (from_client, bytes) = match sent {
            RecordedBytes::Client(bytes) => (true, bytes),
            RecordedBytes::Node(bytes) => (false, bytes),
            RecordedBytes::Closed => continue,
        };
        let begun = &mut begun[usize::from(from_client)];
        begun.extend(bytes);
        while let Some(header) = Header::parse(begun).filter(|header| begun.len() >= HEADER + header.length) {
            let rest = begun.split_off(HEADER + header.length);
            let payload = std::mem::replace(begun, rest).split_off(HEADER);
            packets.push(Packet { record, from_client, number: header.sequence, payload });
        }
    }
    packets
}

/// The response to a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RecordedAnswer {
    /// No response.
    None,
    /// Incomplete: the node asks for a file that the client does not send.
    Half,
    Ok,
    Error(u16),
}

/// The expected commands of a session, and the records after which the session must be between two commands.
#[derive(Debug, Default)]
struct Expected {
    commands: Vec<(Command, RecordedAnswer)>,
    between: BTreeSet<usize>,
}

fn expected(sent: &[RecordedBytes]) -> Expected {
    let packets = packets(sent);
    let mut expected = Expected::default();
    let mut before: Option<&Packet> = None;
    let mut node_number = None;
    let mut answering = 0;
    // The login ends before the client's first packet with sequence number 0.
    for packet in packets.iter().skip_while(|packet| !(packet.from_client && packet.number == 0)) {
        if packet.from_client && packet.number == 0 {
            let command = packet.payload.first().map_or(Command::Other, |byte| Command::from(*byte));
            expected.commands.push((command, RecordedAnswer::None));
            // MariaDB Connector/J sends a command right after a PREPARE, but no client sends during a response.
            if before.is_none_or(|before| !before.from_client) {
                expected.between.insert(packet.record - 1);
            }
        } else if !packet.from_client {
            // Each response begins with sequence number 1. In a long response the number wraps and 1 follows 0.
            if packet.number == 1 && node_number != Some(0) {
                let is_next = |(command, answer): &(Command, RecordedAnswer)| {
                    *answer == RecordedAnswer::None && !is_silent(*command)
                };
                answering = expected.commands.iter().position(is_next).expect("a command");
            }
            node_number = Some(packet.number);
            let (_, answer) = &mut expected.commands[answering];
            *answer = match packet.payload[..] {
                [0xff, low, high, ..] => RecordedAnswer::Error(u16::from_le_bytes([low, high])),
                [0xfb, ..] if packet.number == 1 => RecordedAnswer::Half,
                _ => RecordedAnswer::Ok,
            };
        }
        before = Some(packet);
    }
    let left = sent.iter().position(|sent| *sent == RecordedBytes::Closed);
    let answered = matches!(expected.commands.last(), Some((_, RecordedAnswer::Ok | RecordedAnswer::Error(_))));
    if let Some(left) = left.filter(|_| answered) {
        expected.between.insert(left - 1);
    }
    expected
}

/// Whether a command has no response ("Command Phase", dev.mysql.com).
fn is_silent(command: Command) -> bool {
    matches!(command, Command::Quit | Command::SendLongData | Command::CloseStatement)
}

/// Puts each end of a command behind its start, even if the client pipelined other commands. Responses come in the
/// order of the commands.
fn by_command(events: &[CommandEvent]) -> Vec<CommandEvent> {
    let mut commands: Vec<(CommandEvent, Option<CommandEvent>)> = Vec::new();
    for event in events {
        match event {
            CommandEvent::Started(_) => commands.push((*event, None)),
            CommandEvent::Ended(command, _) => {
                let is_of = |(started, end): &&mut (CommandEvent, Option<CommandEvent>)| {
                    end.is_none() && matches!(started, CommandEvent::Started(one) if one == command)
                };
                commands.iter_mut().find(is_of).expect("a started command").1 = Some(*event);
            }
        }
    }
    commands.into_iter().flat_map(|(started, end)| [Some(started), end]).flatten().collect()
}

/// All bytes that the client or the node sent.
fn bytes_sent(conversation: &Conversation, by_client: bool) -> Vec<u8> {
    let of = |sent: &RecordedBytes| match sent {
        RecordedBytes::Client(bytes) if by_client => bytes.clone(),
        RecordedBytes::Node(bytes) if !by_client => bytes.clone(),
        _ => vec![],
    };
    conversation.sent.iter().flat_map(of).collect()
}

#[test]
fn logins_are_relayed_without_other_changes() {
    for conversation in corpus() {
        let name = &conversation.name;
        let seen = replay(&conversation, |left| left);
        match seen.login {
            Some(Progress::Denied(1045)) => assert_eq!(conversation.step, "wrong_password"),
            Some(Progress::Established(capabilities)) => {
                assert!(capabilities.has(Capabilities::PROTOCOL_41), "{name}");
                assert_ne!(conversation.step, "wrong_password");
            }
            other => panic!("{name}: {other:?}"),
        }
        for (trace, sent) in
            [(seen.to_node, bytes_sent(&conversation, true)), (seen.to_client, bytes_sent(&conversation, false))]
        {
            assert!(!trace.is_empty() && trace.len() <= sent.len(), "{name}");
            // The login clears the bit that offers TLS, and bits in one byte of MariaDB's capabilities.
            let changed = trace.iter().zip(&sent).filter(|(trace, sent)| trace != sent).count();
            assert!(changed <= 2, "{name}: {changed} bytes were changed");
        }
    }
}

#[test]
fn every_recorded_command_is_tracked_to_its_end() {
    let mut transactions = 0;
    for conversation in corpus() {
        let name = &conversation.name;
        let seen = replay(&conversation, |left| left);
        let expected = expected(&conversation.sent);
        let mut events = Vec::new();
        for (command, answer) in expected.commands {
            events.push(CommandEvent::Started(command));
            let outcome = match answer {
                RecordedAnswer::Ok => CommandOutcome::Ok,
                RecordedAnswer::Error(code) => CommandOutcome::Error(code),
                RecordedAnswer::None if is_silent(command) => CommandOutcome::Silent,
                // The client or the node closed the connection.
                RecordedAnswer::None | RecordedAnswer::Half => continue,
            };
            events.push(CommandEvent::Ended(command, outcome));
        }
        assert_eq!(by_command(&seen.events.0), events, "{name}");
        for (record, (state, _)) in seen.states.iter().enumerate() {
            assert_ne!(*state, TrackerState::Opaque, "{name}: after record {record}");
            if expected.between.contains(&record) {
                assert!(
                    matches!(state, TrackerState::Idle | TrackerState::InTransaction),
                    "{name}: {state:?} after record {record}"
                );
            }
            transactions += usize::from(*state == TrackerState::InTransaction);
        }
    }
    assert!(transactions > 0, "no recording has a transaction");
}

#[test]
fn replay_of_single_bytes_gives_the_same_result() {
    for conversation in corpus() {
        let whole = replay(&conversation, |left| left);
        assert_eq!(replay(&conversation, |_| 1), whole, "{}", conversation.name);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn replay_is_equal_for_any_splitting(cuts in prop::collection::vec(prop_oneof![1..8_usize, 1..200_usize], 1..60)) {
        for conversation in corpus() {
            let whole = replay(&conversation, |left| left);
            let mut cuts = cuts.iter().cycle().copied();
            prop_assert_eq!(replay(&conversation, |_| cuts.next().unwrap_or(1)), whole, "{}", conversation.name);
        }
    }
}

/// Checks that the recordings have the commands and steps that the other tests rely on.
#[test]
fn corpus_has_the_expected_commands_and_steps() {
    let corpus = corpus();
    let commands: HashSet<_> = corpus
        .iter()
        .flat_map(|conversation| expected(&conversation.sent).commands)
        .map(|(command, _)| command)
        .collect();
    for command in [
        Command::Query,
        Command::Ping,
        Command::Prepare,
        Command::Execute,
        Command::CloseStatement,
        Command::Fetch,
        Command::ChangeUser,
        Command::ResetConnection,
        Command::Quit,
    ] {
        assert!(commands.contains(&command), "no recording has {command:?}");
    }
    let steps: HashSet<_> = corpus.iter().map(|conversation| &conversation.step[..]).collect();
    for step in ["transactions", "load_data", "multi", "batch", "kill", "wrong_password"] {
        assert!(steps.contains(step), "no recording of {step}");
    }
}
