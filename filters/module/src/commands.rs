//! Counts and times the commands of a session, and counts their errors.

use std::time::{Duration, Instant};

use mysql_proto::command::Command;
use mysql_proto::tracker::{CommandObserver, CommandOutcome, PasswordRequest, ResultSize};

use crate::node::{self, WorkerNode};
use crate::statements::{SessionStatements, StatementCollector};

/// The commands of one session.
#[derive(Debug)]
pub(crate) struct Commands {
    /// How many commands have begun and not ended.
    outstanding: u32,
    /// When the node started with the first outstanding command: when it began, or when the command before ended.
    started_at: Option<Instant>,
    /// When the last command ended.
    idle_since: Option<Instant>,
    /// When the last COM_PING ended.
    pinged_at: Option<Instant>,
    /// How the node has requested the password itself.
    password_request: Option<PasswordRequest>,
    /// The client has sent COM_QUIT.
    has_quit: bool,
    /// The progress since the last [`Self::take_identity_change`].
    identity_change: IdentityChange,
    /// The end of the last change of user since the last [`Self::take_change_user_result`].
    change_user_result: Option<ChangeUserResult>,
    pub(crate) statements: SessionStatements,
}

/// How COM_CHANGE_USER has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChangeUserResult {
    /// The code of the node's error. None: the node has accepted the user.
    pub(crate) error: Option<u16>,
    pub(crate) duration: Duration,
}

/// The progress of COM_CHANGE_USER or COM_SET_OPTION, which change the session's identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum IdentityChange {
    #[default]
    None,
    Began,
    Done,
    Failed,
}

impl Commands {
    pub(crate) fn new(statements: SessionStatements) -> Self {
        Self {
            outstanding: 0,
            started_at: None,
            idle_since: None,
            pinged_at: None,
            password_request: None,
            has_quit: false,
            identity_change: IdentityChange::default(),
            change_user_result: None,
            statements,
        }
    }

    /// An observer that adds to the counts of `node`, and its statements to `collector`.
    pub(crate) fn recorder<'a>(
        &'a mut self,
        node: &'a WorkerNode,
        collector: &'a StatementCollector,
    ) -> CommandRecorder<'a> {
        CommandRecorder { commands: self, node, collector }
    }

    /// When the last command ended. None: no command has ended.
    pub(crate) fn idle_since(&self) -> Option<Instant> {
        self.idle_since
    }

    /// When the last COM_PING ended. None: there was none.
    pub(crate) fn pinged_at(&self) -> Option<Instant> {
        self.pinged_at
    }

    /// How the node has requested the password itself since the last call.
    pub(crate) fn take_password_request(&mut self) -> Option<PasswordRequest> {
        self.password_request.take()
    }

    /// Whether the client has sent COM_QUIT.
    pub(crate) fn has_quit(&self) -> bool {
        self.has_quit
    }

    /// How a change of user has ended since the last call.
    pub(crate) fn take_change_user_result(&mut self) -> Option<ChangeUserResult> {
        self.change_user_result.take()
    }

    /// How long the node has been running the present command. Zero: none runs.
    pub(crate) fn running_time(&self) -> Duration {
        self.started_at.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// The progress of a command that changes the identity, since the last call.
    pub(crate) fn take_identity_change(&mut self) -> IdentityChange {
        std::mem::take(&mut self.identity_change)
    }
}

pub(crate) struct CommandRecorder<'a> {
    commands: &'a mut Commands,
    node: &'a WorkerNode,
    collector: &'a StatementCollector,
}

impl CommandObserver for CommandRecorder<'_> {
    fn on_password_request(&mut self, request: PasswordRequest) {
        self.commands.password_request = Some(request);
    }

    fn on_command_started(&mut self, command: Command) {
        self.node.counts.commands[kind_index(command)].add(1);
        if matches!(command, Command::ChangeUser | Command::SetOption) {
            self.commands.identity_change = IdentityChange::Began;
        }
        if command == Command::Quit {
            self.commands.has_quit = true;
        }
        if self.commands.outstanding == 0 {
            self.commands.started_at = Some(Instant::now());
        }
        self.commands.statements.on_command_started(command);
        self.commands.outstanding += 1;
    }

    fn on_prepared(&mut self, statement: u32) {
        self.commands.statements.on_prepared(statement);
    }

    fn wants_rows(&self) -> bool {
        self.commands.statements.wants_rows()
    }

    fn on_row_bytes(&mut self, bytes: &[u8]) {
        self.commands.statements.on_row_bytes(bytes);
    }

    fn on_result_ended(&mut self, outcome: CommandOutcome, size: ResultSize, is_in_transaction: bool) {
        let statements = &mut self.commands.statements;
        statements.on_result_ended(self.collector, &self.node.shared, outcome, size, is_in_transaction);
    }

    fn on_command_ended(&mut self, command: Command, outcome: CommandOutcome) {
        if matches!(command, Command::ChangeUser | Command::SetOption) {
            self.commands.identity_change =
                if outcome == CommandOutcome::Ok { IdentityChange::Done } else { IdentityChange::Failed };
        }
        self.commands.outstanding = self.commands.outstanding.saturating_sub(1);
        self.commands.statements.on_command_ended(command, outcome, &self.node.shared.name);
        match outcome {
            CommandOutcome::Silent => return,
            CommandOutcome::Ok => {}
            CommandOutcome::Error(code) => self.node.counts.errors[error_class_index(code)].add(1),
        }
        let now = Instant::now();
        self.commands.idle_since = Some(now);
        if command == Command::Ping {
            self.commands.pinged_at = Some(now);
        }
        // A node runs pipelined commands one after the other.
        let next_started_at = (self.commands.outstanding > 0).then_some(now);
        if let Some(since) = std::mem::replace(&mut self.commands.started_at, next_started_at) {
            if command == Command::ChangeUser {
                let error = if let CommandOutcome::Error(code) = outcome { Some(code) } else { None };
                self.commands.change_user_result = Some(ChangeUserResult { error, duration: now - since });
            }
            let took = u64::try_from((now - since).as_micros()).unwrap_or(u64::MAX);
            self.node.counts.latency[node::BUCKETS.partition_point(|&end| end < took)].add(1);
            self.node.counts.command_microseconds.add(took);
        }
    }
}

fn kind_index(command: Command) -> usize {
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
fn error_class_index(code: u16) -> usize {
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
