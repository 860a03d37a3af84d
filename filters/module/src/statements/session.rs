//! The statements of one session.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;
use std::vec::IntoIter;

use mysql_proto::command::Command;
use mysql_proto::query::{statement_id, statement_text};
use mysql_proto::request_reader::Request;
use mysql_proto::tracker::{CommandOutcome, ResultSize};

use super::collector::StatementCollector;
use super::rows::Statement;
use super::window::Execution;
use crate::node::SharedNode;

/// MariaDB: the statement id that stands for the statement prepared last.
const LAST_PREPARED: u32 = u32::MAX;

/// Executions of other prepared statements count as unknown statements.
const MAX_PREPARED: usize = 65_536;

/// Follows the statements of a session from its beginning. Prepared statements and the database are always known;
/// statistics are collected only on request.
#[derive(Debug)]
pub(crate) struct SessionStatements {
    /// Client and node have agreed on query attributes.
    has_attributes: bool,
    /// The commands without a complete response, oldest first.
    commands: VecDeque<RunningCommand>,
    prepared: HashMap<u32, Arc<Statement>>,
    /// The selected database. Empty: none.
    database: Box<[u8]>,
    /// The user for statistics. None: no statistics are collected.
    user: Option<Arc<str>>,
}

#[derive(Debug)]
struct RunningCommand {
    /// When the command has begun, or its result before has ended. None: no statistics are collected.
    since: Option<Instant>,
    request_bytes: usize,
    content: Content,
}

/// What a command does.
#[derive(Debug)]
enum Content {
    Other,
    Prepares(Arc<Statement>),
    Selects(Box<[u8]>),
    Runs(Run, IntoIter<Run>),
}

/// A statement that runs.
#[derive(Debug, Default)]
struct Run {
    /// None: it is not known.
    statement: Option<Arc<Statement>>,
    /// The database that it selects.
    database: Option<Box<[u8]>>,
}

impl Content {
    fn runs(mut runs: IntoIter<Run>) -> Self {
        Self::Runs(runs.next().unwrap_or_default(), runs)
    }
}

impl SessionStatements {
    pub(crate) fn new(has_attributes: bool, database: &[u8]) -> Self {
        Self {
            has_attributes,
            commands: VecDeque::new(),
            prepared: HashMap::new(),
            database: database.into(),
            user: None,
        }
    }

    /// Whether client and node have agreed on query attributes.
    pub(crate) fn has_attributes(&self) -> bool {
        self.has_attributes
    }

    /// The selected database. Empty: none.
    pub(crate) fn database(&self) -> &[u8] {
        &self.database
    }

    /// The statement that runs. None: no statement runs, or it is not known.
    pub(crate) fn running(&self) -> Option<&Statement> {
        match &self.commands.front()?.content {
            Content::Runs(run, _) => run.statement.as_deref(),
            Content::Prepares(_) | Content::Selects(_) | Content::Other => None,
        }
    }

    /// Whether statistics are collected.
    pub(crate) fn is_collecting(&self) -> bool {
        self.user.is_some()
    }

    /// Collects statistics from now on, for this user.
    pub(crate) fn collect(&mut self, collector: &StatementCollector, user: &[u8]) {
        self.user = Some(collector.user(user));
    }

    pub(crate) fn stop_collecting(&mut self) {
        self.user = None;
    }

    /// Whether [`Self::on_request`] has to see a command. `start`: its first bytes.
    pub(crate) fn is_observed(&self, command: Command, start: &[u8]) -> bool {
        match command {
            Command::Prepare | Command::CloseStatement | Command::InitDb => true,
            Command::Query => self.is_collecting() || self.may_use_database(start),
            Command::Execute | Command::BulkExecute => self.is_collecting(),
            _ => false,
        }
    }

    fn may_use_database(&self, start: &[u8]) -> bool {
        self.has_attributes || sql_digest::may_begin_with(start, b"use")
    }

    pub(crate) fn on_command_started(&mut self, command: Command) {
        let content = match command {
            Command::Query | Command::Execute | Command::BulkExecute => Content::runs(Vec::new().into_iter()),
            _ => Content::Other,
        };
        let since = self.is_collecting().then(Instant::now);
        self.commands.push_back(RunningCommand { since, request_bytes: 0, content });
    }

    /// The request of the newest command is complete.
    pub(crate) fn on_request(&mut self, collector: &StatementCollector, request: &Request<'_>) {
        let payload = request.payload();
        let Some(command) = payload.first().map(|command| Command::from(*command)) else { return };
        let content = match command {
            Command::CloseStatement => {
                statement_id(&payload).and_then(|id| self.prepared.remove(&id));
                return; // it has ended already
            }
            Command::Query => {
                let Some(text) = statement_text(&payload, self.has_attributes) else { return };
                let is_collecting = self.is_collecting();
                let runs = sql_digest::statements(text).map(|text| Run {
                    statement: is_collecting.then(|| collector.identify(text)),
                    database: sql_digest::may_begin_with(text, b"use")
                        .then(|| sql_digest::used_database(text))
                        .flatten()
                        .map(Vec::into_boxed_slice),
                });
                Content::runs(runs.collect::<Vec<_>>().into_iter())
            }
            Command::Prepare => Content::Prepares(collector.identify(&payload[1..])),
            Command::InitDb => Content::Selects(payload[1..].into()),
            Command::Execute | Command::BulkExecute => {
                let statement = statement_id(&payload).and_then(|id| self.prepared.get(&id)).cloned();
                Content::Runs(Run { statement, database: None }, Vec::new().into_iter())
            }
            _ => return,
        };
        if let Some(newest) = self.commands.back_mut() {
            newest.request_bytes = request.len();
            newest.content = content;
        }
    }

    /// The node has prepared the statement of the oldest command.
    pub(crate) fn on_prepared(&mut self, id: u32) {
        if let Some(RunningCommand { content: Content::Prepares(statement), .. }) = self.commands.front()
            && self.prepared.len() < MAX_PREPARED
        {
            self.prepared.insert(LAST_PREPARED, Arc::clone(statement));
            self.prepared.insert(id, Arc::clone(statement));
        }
    }

    /// A result of the oldest command is complete.
    pub(crate) fn on_result_ended(
        &mut self,
        collector: &StatementCollector,
        node: &Arc<SharedNode>,
        outcome: CommandOutcome,
        size: ResultSize,
    ) {
        let Some(oldest) = self.commands.front_mut() else { return };
        let Content::Runs(run, others) = &mut oldest.content else { return };
        if outcome == CommandOutcome::Ok
            && let Some(database) = run.database.take()
        {
            self.database = database;
        }
        if let (Some(user), Some(since)) = (&self.user, oldest.since) {
            let now = Instant::now();
            let execution = Execution {
                is_error: matches!(outcome, CommandOutcome::Error(_)),
                rows: size.rows,
                request_bytes: oldest.request_bytes as u64,
                response_bytes: size.bytes,
                microseconds: u64::try_from((now - since).as_micros()).unwrap_or(u64::MAX),
            };
            collector.record(run.statement.as_ref(), user, node, &execution);
            oldest.since = Some(now);
            oldest.request_bytes = 0;
        }
        if let Some(next) = others.next() {
            *run = next;
        }
    }

    /// The oldest command has ended.
    pub(crate) fn on_command_ended(&mut self, command: Command, outcome: CommandOutcome) {
        let ended = self.commands.pop_front();
        if outcome != CommandOutcome::Ok {
            return;
        }
        match (command, ended.map(|ended| ended.content)) {
            (Command::InitDb, Some(Content::Selects(database))) => self.database = database,
            (Command::ResetConnection | Command::ChangeUser, _) => self.prepared.clear(),
            _ => {}
        }
    }

    /// The user has changed. `database`: the database that was selected with it.
    pub(crate) fn on_user_changed(&mut self, collector: &StatementCollector, user: &[u8], database: &[u8]) {
        self.database = database.into();
        if self.is_collecting() {
            self.collect(collector, user);
        }
    }
}
