//! Plays conversations that are written down.

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

/// A command that was answered before the next was sent.
pub(crate) fn done(command: Command, outcome: CommandOutcome) -> [CommandEvent; 2] {
    [started(command), ended(command, outcome)]
}

/// Plays a conversation at once and in small pieces; all must give `events`, and end in `state`.
#[track_caller]
pub(crate) fn play(
    capabilities: Capabilities,
    script: &[Sent],
    events: &[CommandEvent],
    state: TrackerState,
    pinned: Option<PinReason>,
) {
    for most in [usize::MAX, 1, 7] {
        let mut tracker = Tracker::new(capabilities);
        let mut told = CommandEvents::default();
        for from in script {
            match from {
                Sent::Client(bytes) => bytes.chunks(most).for_each(|bytes| tracker.on_client_bytes(bytes, &mut told)),
                Sent::Node(bytes) => bytes.chunks(most).for_each(|bytes| tracker.on_node_bytes(bytes, &mut told)),
            }
        }
        assert_eq!(
            (&told.0[..], tracker.state(), tracker.pin_reason()),
            (events, state, pinned),
            "in pieces of {most}"
        );
    }
}

/// As [`play`], where the way of ending rows makes no difference.
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
