//! Fuzzes the tracker. Input: capabilities (4 bytes), then a conversation (see `fuzz::script`).

#![no_main]

use fuzz::script::{self, Cut, Turn};
use libfuzzer_sys::fuzz_target;
use mysql_proto::capability::Capabilities;
use mysql_proto::command::Command;
use mysql_proto::tracker::{CommandObserver, CommandOutcome, PasswordRequest, PinReason, Tracker, TrackerState};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Started(Command),
    Ended(Command, CommandOutcome),
    PasswordRequested(PasswordRequest),
}

/// Records all events, and checks that commands end in the order in which they started.
#[derive(Debug, Default, PartialEq, Eq)]
struct RecordingObserver {
    events: Vec<Event>,
    started: Vec<Command>,
    ended: usize,
}

impl CommandObserver for RecordingObserver {
    fn on_command_started(&mut self, command: Command) {
        self.started.push(command);
        self.events.push(Event::Started(command));
    }

    fn on_command_ended(&mut self, command: Command, outcome: CommandOutcome) {
        assert_eq!(self.started.get(self.ended), Some(&command), "{command:?} ended out of order");
        self.ended += 1;
        self.events.push(Event::Ended(command, outcome));
    }

    fn on_password_request(&mut self, request: PasswordRequest) {
        let running = self.started.get(self.ended);
        assert_eq!(running, Some(&Command::ChangeUser), "the password request belongs to another command");
        self.events.push(Event::PasswordRequested(request));
    }
}

fn feed(tracker: &mut Tracker, from_node: bool, bytes: &[u8], observer: &mut impl CommandObserver) {
    if from_node { tracker.on_node_bytes(bytes, observer) } else { tracker.on_client_bytes(bytes, observer) }
}

/// The observable state of a session after each turn, and its events.
type TrackerTrace = (Vec<(usize, TrackerState, Option<PinReason>)>, RecordingObserver);

fn play(capabilities: Capabilities, turns: &[Turn], cut: Cut) -> TrackerTrace {
    let mut tracker = Tracker::new(capabilities);
    let mut recorded = RecordingObserver::default();
    let mut seen = Vec::new();
    for (from_node, pieces) in turns {
        for piece in pieces {
            cut.each(piece, |bytes| {
                let (before, events) = (tracker.state(), recorded.events.len());
                feed(&mut tracker, *from_node, bytes, &mut recorded);
                if before == TrackerState::Opaque {
                    assert_eq!(
                        (tracker.state(), recorded.events.len()),
                        (before, events),
                        "an opaque session is tracked again"
                    );
                }
            });
            check(&tracker, &recorded);
        }
        seen.push((recorded.events.len(), tracker.state(), tracker.pin_reason()));
    }
    (seen, recorded)
}

/// Checks that the state fits the events.
fn check(tracker: &Tracker, recorded: &RecordingObserver) {
    let (state, pin_reason) = (tracker.state(), tracker.pin_reason());
    let outstanding = recorded.started.len() - recorded.ended;
    match state {
        TrackerState::Opaque => assert_eq!(pin_reason, Some(PinReason::Opaque)),
        TrackerState::Busy => assert_ne!(pin_reason, Some(PinReason::Opaque)),
        TrackerState::InTransaction => assert_eq!((pin_reason, outstanding), (Some(PinReason::Transaction), 0)),
        TrackerState::Idle => {
            assert_eq!(outstanding, 0);
            assert!(!matches!(pin_reason, Some(PinReason::Transaction | PinReason::Opaque)));
        }
    }
    if outstanding > 0 {
        assert!(matches!(state, TrackerState::Busy | TrackerState::Opaque), "{outstanding} outstanding");
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((head, rest)) = input.split_first_chunk() else { return };
    // A compressed session is not tracked, so compression is kept only if the first byte is 0xff.
    let mut capabilities = Capabilities(u32::from_le_bytes(*head)).with(Capabilities::PROTOCOL_41);
    if head[0] != 0xff {
        capabilities = capabilities.without(Capabilities::COMPRESS).without(Capabilities::ZSTD_COMPRESSION);
    }
    let turns = script::turns(rest);
    let whole = play(capabilities, &turns, Cut::Whole);
    for cut in script::cuts(input) {
        assert_eq!(play(capabilities, &turns, cut), whole, "cut by {cut:?}");
    }
    let before = fuzz::held();
    let mut tracker = Tracker::new(capabilities);
    for (from_node, pieces) in &turns {
        pieces.iter().for_each(|piece| feed(&mut tracker, *from_node, piece, &mut ()));
    }
    assert_eq!(fuzz::held(), before, "the tracker has allocated memory");
});
