//! A session: capabilities (4 bytes), then what client and node say (see `fuzz::script`).

#![no_main]

use fuzz::script::{self, Cut, Turn};
use libfuzzer_sys::fuzz_target;
use wire::capability::Capabilities;
use wire::command::Command;
use wire::tracker::{Listener, Outcome, Pinned, State, Tracker};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Started(Command),
    Ended(Command, Outcome),
    AskedForClearText,
}

/// Keeps all that it is told, and checks that commands end in the order in which they began.
#[derive(Debug, Default, PartialEq, Eq)]
struct Told {
    events: Vec<Event>,
    started: Vec<Command>,
    ended: usize,
}

impl Listener for Told {
    fn started(&mut self, command: Command) {
        self.started.push(command);
        self.events.push(Event::Started(command));
    }

    fn ended(&mut self, command: Command, outcome: Outcome) {
        assert_eq!(self.started.get(self.ended), Some(&command), "{command:?} ended out of order");
        self.ended += 1;
        self.events.push(Event::Ended(command, outcome));
    }

    fn asked_for_clear_text(&mut self) {
        let running = self.started.get(self.ended);
        assert_eq!(running, Some(&Command::ChangeUser), "asked for a password out of turn");
        self.events.push(Event::AskedForClearText);
    }
}

fn show(tracker: &mut Tracker, from_node: bool, bytes: &[u8], listener: &mut impl Listener) {
    if from_node { tracker.node(bytes, listener) } else { tracker.client(bytes, listener) }
}

/// All that can be seen of a session after each of its turns.
type Seen = (Vec<(usize, State, Option<Pinned>)>, Told);

fn play(capabilities: Capabilities, turns: &[Turn], cut: Cut) -> Seen {
    let mut tracker = Tracker::new(capabilities);
    let mut told = Told::default();
    let mut seen = Vec::new();
    for (from_node, pieces) in turns {
        for piece in pieces {
            cut.each(piece, |bytes| {
                let (before, events) = (tracker.state(), told.events.len());
                show(&mut tracker, *from_node, bytes, &mut told);
                if before == State::Opaque {
                    assert_eq!((tracker.state(), told.events.len()), (before, events), "followed again");
                }
            });
            check(&tracker, &told);
        }
        seen.push((told.events.len(), tracker.state(), tracker.pinned()));
    }
    (seen, told)
}

/// Where the session stands fits what was told of it.
fn check(tracker: &Tracker, told: &Told) {
    let (state, pinned) = (tracker.state(), tracker.pinned());
    let outstanding = told.started.len() - told.ended;
    match state {
        State::Opaque => assert_eq!(pinned, Some(Pinned::Opaque)),
        State::Busy => assert_ne!(pinned, Some(Pinned::Opaque)),
        State::InTransaction => assert_eq!((pinned, outstanding), (Some(Pinned::Transaction), 0)),
        State::Idle => {
            assert_eq!(outstanding, 0);
            assert!(!matches!(pinned, Some(Pinned::Transaction | Pinned::Opaque)));
        }
    }
    if outstanding > 0 {
        assert!(matches!(state, State::Busy | State::Opaque), "{outstanding} outstanding");
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((head, rest)) = input.split_first_chunk() else { return };
    // Mostly what can be followed: else there is nothing to see.
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
        pieces.iter().for_each(|piece| show(&mut tracker, *from_node, piece, &mut ()));
    }
    assert_eq!(fuzz::held(), before, "a session has memory of its own");
});
