//! What a tracker tells, written down. Shared by the tests of trackers.

use wire::command::Command;
use wire::tracker::{Listener, Outcome};

/// What a listener was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    Started(Command),
    Ended(Command, Outcome),
}

/// Writes down what it is told.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Events(pub(crate) Vec<Event>);

impl Listener for Events {
    fn started(&mut self, command: Command) {
        self.0.push(Event::Started(command));
    }

    fn ended(&mut self, command: Command, outcome: Outcome) {
        self.0.push(Event::Ended(command, outcome));
    }
}
