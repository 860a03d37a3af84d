//! The tracker against conversations that are built by hand and generated ([`properties`]).

mod build;
mod irregular;
mod play;
mod properties;
mod responses;
mod statements;

use wire::command::Command;
use wire::tracker::{Listener, Outcome};

/// What a listener was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Started(Command),
    Ended(Command, Outcome),
}

/// Writes down what it is told.
#[derive(Debug, Default, PartialEq, Eq)]
struct Events(Vec<Event>);

impl Listener for Events {
    fn started(&mut self, command: Command) {
        self.0.push(Event::Started(command));
    }

    fn ended(&mut self, command: Command, outcome: Outcome) {
        self.0.push(Event::Ended(command, outcome));
    }
}
