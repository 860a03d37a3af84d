//! Records the events of a tracker. Shared by the tests of trackers.

use mysql_proto::command::Command;
use mysql_proto::tracker::{CommandObserver, CommandOutcome};

/// An event of the tracker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CommandEvent {
    Started(Command),
    Ended(Command, CommandOutcome),
}

/// Collects the events.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct CommandEvents(pub(crate) Vec<CommandEvent>);

impl CommandObserver for CommandEvents {
    fn on_command_started(&mut self, command: Command) {
        self.0.push(CommandEvent::Started(command));
    }

    fn on_command_ended(&mut self, command: Command, outcome: CommandOutcome) {
        self.0.push(CommandEvent::Ended(command, outcome));
    }
}
