//! A session's commands as they begin and end: counted with their errors, and timed.

use std::cell::Cell;
use std::time::Instant;

use wire::command::Command;
use wire::tracker::{Listener, Outcome};

use crate::node::{self, Counts};

/// The commands of one session.
#[derive(Debug, Default)]
pub(crate) struct Commands {
    /// How many were begun and have not ended.
    outstanding: Cell<u32>,
    /// When the first of them began, or was left to be the first.
    since: Cell<Option<Instant>>,
    /// When the last one ended.
    rests_since: Cell<Option<Instant>>,
    /// The node has asked for a password as clear text.
    clear_text: Cell<bool>,
    /// The client has said that it goes.
    quit: Cell<bool>,
    /// A command that changes who the session is, or what it may do.
    change: Cell<Change>,
}

/// How far COM_CHANGE_USER or COM_SET_OPTION is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Change {
    #[default]
    Nothing,
    Began,
    Done,
    Failed,
}

impl Commands {
    /// What the tracker tells goes into `counts`.
    pub(crate) fn counted_in<'a>(&'a self, counts: &'a Counts) -> Watcher<'a> {
        Watcher { commands: self, counts }
    }

    /// When the last one ended; None: there was none.
    pub(crate) fn rests_since(&self) -> Option<Instant> {
        self.rests_since.get()
    }

    /// Whether the node has asked for a password as clear text since this was asked.
    pub(crate) fn take_clear_text(&self) -> bool {
        self.clear_text.take()
    }

    /// Whether the client has said that it goes.
    pub(crate) fn has_quit(&self) -> bool {
        self.quit.get()
    }

    /// What has happened of that kind since this was asked.
    pub(crate) fn take_change(&self) -> Change {
        self.change.take()
    }
}

pub(crate) struct Watcher<'a> {
    commands: &'a Commands,
    counts: &'a Counts,
}

impl Listener for Watcher<'_> {
    fn asked_for_clear_text(&mut self) {
        self.commands.clear_text.set(true);
    }

    fn started(&mut self, command: Command) {
        self.counts.commands[kind(command)].add(1);
        if matches!(command, Command::ChangeUser | Command::SetOption) {
            self.commands.change.set(Change::Began);
        }
        if command == Command::Quit {
            self.commands.quit.set(true);
        }
        let before = self.commands.outstanding.get();
        self.commands.outstanding.set(before + 1);
        if before == 0 {
            self.commands.since.set(Some(Instant::now()));
        }
    }

    fn ended(&mut self, command: Command, outcome: Outcome) {
        if matches!(command, Command::ChangeUser | Command::SetOption) {
            let change = if outcome == Outcome::Ok { Change::Done } else { Change::Failed };
            self.commands.change.set(change);
        }
        let left = self.commands.outstanding.get().saturating_sub(1);
        self.commands.outstanding.set(left);
        match outcome {
            Outcome::Silent => return,
            Outcome::Ok => {}
            Outcome::Error(code) => self.counts.errors[error_class(code)].add(1),
        }
        let now = Instant::now();
        self.commands.rests_since.set(Some(now));
        // A node works on commands that were sent ahead one after the other.
        if let Some(since) = self.commands.since.replace((left > 0).then_some(now)) {
            let took = u64::try_from((now - since).as_micros()).unwrap_or(u64::MAX);
            self.counts.latency[node::BUCKETS.partition_point(|&end| end < took)].add(1);
            self.counts.microseconds.add(took);
        }
    }
}

fn kind(command: Command) -> usize {
    match command {
        Command::Query => 0,
        Command::Prepare => 1,
        Command::Execute | Command::BulkExecute => 2,
        Command::Fetch => 3,
        Command::Ping => 4,
        Command::ChangeUser => 5,
        Command::ResetConnection => 6,
        _ => 7,
    }
}

/// Codes: MySQL's "Server Error Message Reference" and TiDB's "Error Codes and Troubleshooting".
fn error_class(code: u16) -> usize {
    match code {
        1044 | 1045 | 1142 | 1143 | 1227 | 1698 | 3118 => 0,
        1205 | 1213 | 8022 | 9007 => 1,
        1053 | 1927 | 4031 => 2,
        1317 | 3024 | 1028 => 3,
        1040 | 1041 | 1153 | 1203 | 1226 | 8175 | 8176 | 8200..=8259 => 4,
        8027 | 9001..=9006 | 9008..=9013 => 5,
        1054 | 1064 | 1146 | 1149 | 8104..=8108 => 6,
        _ => 7,
    }
}
