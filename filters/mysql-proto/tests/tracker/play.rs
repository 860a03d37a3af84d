//! Plays scripted conversations.

use crate::build::{AUTOCOMMIT, NEW, OLD};
use crate::events::{CommandEvent, CommandEvents};
use mysql_proto::capability::Capabilities;
use mysql_proto::command::Command;
use mysql_proto::status::{IN_TRANSACTION, MORE_RESULTS};
use mysql_proto::tracker::{CommandOutcome, PinReason, Tracker, TrackerState};

pub(crate) const IN: u16 = AUTOCOMMIT | IN_TRANSACTION;
pub(crate) const MORE: u16 = AUTOCOMMIT | MORE_RESULTS;

pub(crate) enum Sent {
    Client(Vec<u8>),
    Node(Vec<u8>),
}

pub(crate) fn started(command: Command) -> CommandEvent {
    CommandEvent::Started(command)
}

pub(crate) fn ended(command: Command, outcome: CommandOutcome) -> CommandEvent {
    CommandEvent::Ended(command, outcome)
}

/// The events of a command that is answered before the next one is sent.
pub(crate) fn done(command: Command, outcome: CommandOutcome) -> [CommandEvent; 2] {
    [started(command), ended(command, outcome)]
}

/// Plays a conversation at once and in small pieces. Each time it must give `events` and end in `state`.
#[track_caller]
pub(crate) fn play(
    capabilities: Capabilities,
    script: &[Sent],
    events: &[CommandEvent],
    state: TrackerState,
    pinned: Option<PinReason>,
) {
    for size in [usize::MAX, 1, 7] {
        let mut tracker = Tracker::new(capabilities);
        let mut seen = CommandEvents::default();
        for from in script {
            match from {
                Sent::Client(bytes) => bytes.chunks(size).for_each(|bytes| tracker.on_client_bytes(bytes, &mut seen)),
                Sent::Node(bytes) => bytes.chunks(size).for_each(|bytes| tracker.on_node_bytes(bytes, &mut seen)),
            }
        }
        assert_eq!(
            (&seen.0[..], tracker.state(), tracker.pin_reason()),
            (events, state, pinned),
            "in pieces of {size}"
        );
    }
}

/// Like [`play`], with both ways to end rows.
#[track_caller]
pub(crate) fn play_both(
    script: impl Fn(Capabilities) -> Vec<Sent>,
    events: &[CommandEvent],
    state: TrackerState,
    pinned: Option<PinReason>,
) {
    for capabilities in [OLD, NEW] {
        play(capabilities, &script(capabilities), events, state, pinned);
    }
}
