//! The commands without a complete response, oldest first.

use crate::command::Command;

/// Limit of runs of equal commands. A client that pipelines mostly repeats one command (MariaDB Connector/J sends
/// hundreds of executions of one statement). Sessions with more runs are not tracked any more.
pub(crate) const MAX_RUNS: usize = 12;

/// Limit of commands in a run, since observers keep something for each command. A longer run takes several slots.
const MAX_RUN_COMMANDS: u16 = 4096;

/// Equal commands in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    /// The statement that the command names; 0 for commands that name none.
    statement: u32,
    count: u16,
    command: Command,
}

/// A queue of fixed size.
#[derive(Debug)]
pub(crate) struct PipelineQueue {
    runs: [Run; MAX_RUNS],
    first: u8,
    length: u8,
}

impl PipelineQueue {
    pub(crate) const fn new() -> Self {
        Self { runs: [Run { statement: 0, count: 0, command: Command::Other }; MAX_RUNS], first: 0, length: 0 }
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Whether exactly one command is outstanding.
    pub(crate) fn has_one_command(&self) -> bool {
        self.length == 1 && self.runs[self.slot(0)].count == 1
    }

    /// The oldest command, and its statement.
    pub(crate) fn front(&self) -> Option<(Command, u32)> {
        let run = self.runs[self.slot(0)];
        (self.length > 0).then_some((run.command, run.statement))
    }

    /// The newest command.
    pub(crate) fn back(&self) -> Option<Command> {
        let last = self.length.checked_sub(1)?;
        Some(self.runs[self.slot(last)].command)
    }

    /// Adds a command. Returns false if there is no room.
    #[must_use]
    pub(crate) fn push(&mut self, command: Command, statement: u32) -> bool {
        if let Some(last) = self.length.checked_sub(1) {
            let slot = self.slot(last);
            let run = &mut self.runs[slot];
            if run.command == command && run.statement == statement && run.count < MAX_RUN_COMMANDS {
                run.count += 1;
                return true;
            }
        }
        if usize::from(self.length) == MAX_RUNS {
            return false;
        }
        let slot = self.slot(self.length);
        self.runs[slot] = Run { statement, count: 1, command };
        self.length += 1;
        true
    }

    /// Removes the oldest command.
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
        (self.first as usize + offset as usize) % MAX_RUNS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    #[test]
    fn run_of_equal_commands_takes_one_slot() {
        let mut queue = PipelineQueue::new();
        for _ in 0..MAX_RUN_COMMANDS + 1 {
            assert!(queue.push(Command::Execute, 7));
        }
        assert_eq!(queue.length, 2);
        assert!(queue.push(Command::Execute, 8));
        assert_eq!(queue.length, 3);
    }

    #[test]
    fn full_queue_accepts_only_a_repeat_of_its_newest_command() {
        let mut queue = PipelineQueue::new();
        for statement in 0..MAX_RUNS as u32 {
            assert!(queue.push(Command::Fetch, statement));
        }
        assert!(!queue.push(Command::Ping, 0));
        assert!(queue.push(Command::Fetch, MAX_RUNS as u32 - 1));
        queue.pop();
        assert!(queue.push(Command::Ping, 0));
    }

    proptest! {
        #[test]
        fn queue_matches_vec_deque(steps in prop::collection::vec(prop::option::of((0..3_u8, 0..2_u32)), 0..200)) {
            let commands = [Command::Query, Command::Execute, Command::Ping];
            let (mut queue, mut model) = (PipelineQueue::new(), VecDeque::new());
            for step in steps {
                match step {
                    Some((command, statement)) => {
                        let pair = (commands[usize::from(command)], statement);
                        if queue.push(pair.0, pair.1) {
                            model.push_back(pair);
                        } else {
                            prop_assert!(model.len() >= MAX_RUNS);
                        }
                    }
                    None => {
                        queue.pop();
                        model.pop_front();
                    }
                }
                prop_assert_eq!(queue.front(), model.front().copied());
                prop_assert_eq!(queue.back(), model.back().map(|pair| pair.0));
                prop_assert_eq!(queue.is_empty(), model.is_empty());
                prop_assert_eq!(queue.has_one_command(), model.len() == 1);
            }
        }
    }
}
