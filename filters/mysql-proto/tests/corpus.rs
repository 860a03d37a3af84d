//! Conversations of real clients with a MariaDB (`corpus/`), replayed through a login and what follows it.
//!
//! What should come out is read from the recording in the simplest way, which needs both directions and all of the
//! bytes: a packet with the number 0 begins a command, and who answers a packet of whom tells who waited.

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

/// As the recorder had it: no TLS. Compression is as the two agreed.
const RULES: Rules = Rules {
    client_tls: ClientTls::Disabled,
    node_tls: NodeTls::Disabled,
    compression: Compression::Passthrough,
    allow_cleartext_backend: false,
};

/// What a recording says, in its order.
#[derive(Debug, Clone, PartialEq, Eq)]
enum RecordedBytes {
    Client(Vec<u8>),
    Node(Vec<u8>),
    /// The client closed: it had nothing more to say.
    Left,
}

#[derive(Debug)]
struct Conversation {
    /// File, step, and which of the step's conversations.
    name: String,
    step: String,
    said: Vec<RecordedBytes>,
}

/// Reads a file of the corpus; its format is written down beside it.
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
            conversations.push(Conversation { name, step, said: Vec::new() });
            continue;
        }
        let said = &mut conversations.last_mut().expect("a conversation").said;
        match kind {
            1 => said.push(RecordedBytes::Client(bytes.to_vec())),
            2 => said.push(RecordedBytes::Node(bytes.to_vec())),
            3 => said.push(RecordedBytes::Left),
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

/// Nobody encrypts a password where neither link has TLS.
struct NoKey;

impl PasswordKey for NoKey {
    fn public_pem(&self) -> &[u8] {
        panic!("the key is asked for")
    }

    fn decrypt(&self, _: &[u8]) -> Option<SecretBytes> {
        panic!("a password is to be decrypted")
    }
}

/// What came out of a replay.
#[derive(Debug, Default, PartialEq)]
struct Replay {
    to_node: Vec<u8>,
    to_client: Vec<u8>,
    login: Option<Progress>,
    events: CommandEvents,
    /// Where the session stood after each record behind the login, and how many events had come.
    states: Vec<(TrackerState, usize)>,
}

/// Replays, each record cut as `cut` says: it gets the bytes that are left and says how many come next.
fn replay(conversation: &Conversation, mut cut: impl FnMut(usize) -> usize) -> Replay {
    let mut login = Login::new(RULES);
    let mut tracker = None;
    let mut seen = Replay::default();
    for said in &conversation.said {
        let (from_client, mut rest) = match said {
            RecordedBytes::Client(bytes) => (true, &bytes[..]),
            RecordedBytes::Node(bytes) => (false, &bytes[..]),
            RecordedBytes::Left => (true, &[][..]),
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

/// A packet of a recording: in which record it ends, whether the client sent it, and what it is.
#[derive(Debug)]
struct Packet {
    record: usize,
    from_client: bool,
    number: u8,
    payload: Vec<u8>,
}

/// All packets, in the order in which they were complete.
fn packets(said: &[RecordedBytes]) -> Vec<Packet> {
    let mut begun = [Vec::new(), Vec::new()];
    let mut packets = Vec::new();
    for (record, said) in said.iter().enumerate() {
        let (from_client, bytes) = match said {
            RecordedBytes::Client(bytes) => (true, bytes),
            RecordedBytes::Node(bytes) => (false, bytes),
            RecordedBytes::Left => continue,
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

/// How a command is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RecordedAnswer {
    /// By no packet.
    None,
    /// It is not complete: the node asks for a file that does not come.
    Half,
    Ok,
    Error(u16),
}

/// What the recording says of the session: its commands, and the records after which the client waited between two of
/// them, or before it left.
#[derive(Debug, Default)]
struct Expected {
    commands: Vec<(Command, RecordedAnswer)>,
    between: BTreeSet<usize>,
}

fn expected(said: &[RecordedBytes]) -> Expected {
    let packets = packets(said);
    let mut expected = Expected::default();
    let mut before: Option<&Packet> = None;
    let mut node_number = None;
    let mut answering = 0;
    // The login ends before the client's first packet that has the number 0.
    for packet in packets.iter().skip_while(|packet| !(packet.from_client && packet.number == 0)) {
        if packet.from_client && packet.number == 0 {
            let command = packet.payload.first().map_or(Command::Other, |byte| Command::from(*byte));
            expected.commands.push((command, RecordedAnswer::None));
            // MariaDB Connector/J sends a command behind a PREPARE at once, but no client sends into an answer.
            if before.is_none_or(|before| !before.from_client) {
                expected.between.insert(packet.record - 1);
            }
        } else if !packet.from_client {
            // Each answer begins with the number 1; behind 255 and 0 it comes again within one.
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
    let left = said.iter().position(|said| *said == RecordedBytes::Left);
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

/// Each end of a command behind its beginning, also where the client has sent another one meanwhile. Answers come in the
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
                commands.iter_mut().find(is_of).expect("it has begun").1 = Some(*event);
            }
        }
    }
    commands.into_iter().flat_map(|(started, end)| [Some(started), end]).flatten().collect()
}

/// All that the node or the client said.
fn sent(conversation: &Conversation, by_client: bool) -> Vec<u8> {
    let of = |said: &RecordedBytes| match said {
        RecordedBytes::Client(bytes) if by_client => bytes.clone(),
        RecordedBytes::Node(bytes) if !by_client => bytes.clone(),
        _ => vec![],
    };
    conversation.said.iter().flat_map(of).collect()
}

#[test]
fn logins_pass_as_they_are() {
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
        for (trace, said) in [(seen.to_node, sent(&conversation, true)), (seen.to_client, sent(&conversation, false))] {
            assert!(!trace.is_empty() && trace.len() <= said.len(), "{name}");
            // What is taken out: the offer of TLS, and capabilities of MariaDB's own, which are bits of one byte.
            let changed = trace.iter().zip(&said).filter(|(trace, said)| trace != said).count();
            assert!(changed <= 2, "{name}: {changed} bytes were changed");
        }
    }
}

#[test]
fn each_command_is_followed_to_its_end() {
    let mut transactions = 0;
    for conversation in corpus() {
        let name = &conversation.name;
        let seen = replay(&conversation, |left| left);
        let expected = expected(&conversation.said);
        let mut events = Vec::new();
        for (command, answer) in expected.commands {
            events.push(CommandEvent::Started(command));
            let outcome = match answer {
                RecordedAnswer::Ok => CommandOutcome::Ok,
                RecordedAnswer::Error(code) => CommandOutcome::Error(code),
                RecordedAnswer::None if is_silent(command) => CommandOutcome::Silent,
                // The client left, or the node did.
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
fn single_bytes_give_the_same() {
    for conversation in corpus() {
        let whole = replay(&conversation, |left| left);
        assert_eq!(replay(&conversation, |_| 1), whole, "{}", conversation.name);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn any_cut_gives_the_same(cuts in prop::collection::vec(prop_oneof![1..8_usize, 1..200_usize], 1..60)) {
        for conversation in corpus() {
            let whole = replay(&conversation, |left| left);
            let mut cuts = cuts.iter().cycle().copied();
            prop_assert_eq!(replay(&conversation, |_| cuts.next().unwrap_or(1)), whole, "{}", conversation.name);
        }
    }
}

/// The tests above say something of every client and every kind of step only if there is a recording.
#[test]
fn the_corpus_has_what_it_should_have() {
    let corpus = corpus();
    let commands: HashSet<_> = corpus
        .iter()
        .flat_map(|conversation| expected(&conversation.said).commands)
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
