//! The commands that were sent and not answered yet, oldest first.

use crate::command::Command;

/// Runs of equal commands that are held. A client that pipelines mostly repeats one command (MariaDB Connector/J
/// sends hundreds of executions of one statement); one that mixes more than this is not followed any more.
pub(crate) const RUNS: usize = 12;

/// A command and how often it stands there in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    /// The statement that it names; 0 for commands that name none.
    statement: u32,
    count: u16,
    command: Command,
}

/// A queue of a fixed size.
#[derive(Debug)]
pub(crate) struct Ring {
    runs: [Run; RUNS],
    first: u8,
    length: u8,
}

impl Ring {
    pub(crate) const fn new() -> Self {
        Self { runs: [Run { statement: 0, count: 0, command: Command::Other }; RUNS], first: 0, length: 0 }
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Whether exactly one command is outstanding.
    pub(crate) fn is_single(&self) -> bool {
        self.length == 1 && self.runs[self.slot(0)].count == 1
    }

    /// The command whose response is next, and its statement.
    pub(crate) fn front(&self) -> Option<(Command, u32)> {
        let run = self.runs[self.slot(0)];
        (self.length > 0).then_some((run.command, run.statement))
    }

    /// The command that was sent last.
    pub(crate) fn back(&self) -> Option<Command> {
        let last = self.length.checked_sub(1)?;
        Some(self.runs[self.slot(last)].command)
    }

    /// Takes one more command. False, and nothing is taken, when there is no room.
    #[must_use]
    pub(crate) fn push(&mut self, command: Command, statement: u32) -> bool {
        if let Some(last) = self.length.checked_sub(1) {
            let slot = self.slot(last);
            let run = &mut self.runs[slot];
            if run.command == command && run.statement == statement && run.count < u16::MAX {
                run.count += 1;
                return true;
            }
        }
        if usize::from(self.length) == RUNS {
            return false;
        }
        let slot = self.slot(self.length);
        self.runs[slot] = Run { statement, count: 1, command };
        self.length += 1;
        true
    }

    /// Drops the front.
    pub(crate) fn pop(&mut self) {
        if self.length == 0 {
            return;
        }
        let slot = self.slot(0);
        let run = &mut self.runs[slot];
        run.count -= 1;
        if run.count == 0 {
            self.first = self.slot(1) as u8;
            self.length -= 1;
        }
    }

    const fn slot(&self, offset: u8) -> usize {
        (self.first as usize + offset as usize) % RUNS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    #[test]
    fn equal_commands_take_one_place() {
        let mut ring = Ring::new();
        for _ in 0..u32::from(u16::MAX) + 1 {
            assert!(ring.push(Command::Execute, 7));
        }
        assert_eq!(ring.length, 2);
        assert!(ring.push(Command::Execute, 8));
        assert_eq!(ring.length, 3);
    }

    #[test]
    fn a_full_ring_takes_only_what_it_ends_with() {
        let mut ring = Ring::new();
        for statement in 0..RUNS as u32 {
            assert!(ring.push(Command::Fetch, statement));
        }
        assert!(!ring.push(Command::Ping, 0));
        assert!(ring.push(Command::Fetch, RUNS as u32 - 1));
        ring.pop();
        assert!(ring.push(Command::Ping, 0));
    }

    proptest! {
        #[test]
        fn it_is_a_queue(steps in prop::collection::vec(prop::option::of((0..3_u8, 0..2_u32)), 0..200)) {
            let commands = [Command::Query, Command::Execute, Command::Ping];
            let (mut ring, mut model) = (Ring::new(), VecDeque::new());
            for step in steps {
                match step {
                    Some((command, statement)) => {
                        let pair = (commands[usize::from(command)], statement);
                        if ring.push(pair.0, pair.1) {
                            model.push_back(pair);
                        } else {
                            prop_assert!(model.len() >= RUNS);
                        }
                    }
                    None => {
                        ring.pop();
                        model.pop_front();
                    }
                }
                prop_assert_eq!(ring.front(), model.front().copied());
                prop_assert_eq!(ring.back(), model.back().map(|pair| pair.0));
                prop_assert_eq!(ring.is_empty(), model.is_empty());
                prop_assert_eq!(ring.is_single(), model.len() == 1);
            }
        }
    }
}
