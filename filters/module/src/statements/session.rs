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
use super::window::{Execution, Statement};
use crate::node::SharedNode;

/// MariaDB: the statement id that stands for the statement prepared last.
const LAST_PREPARED: u32 = u32::MAX;

/// Executions of other prepared statements count as unknown statements.
const MAX_PREPARED: usize = 65_536;

/// Follows the statements of a session from a time at which no command runs.
#[derive(Debug)]
pub(crate) struct SessionStatements {
    user: Arc<str>,
    /// Client and node have agreed on query attributes.
    has_attributes: bool,
    /// The commands without a complete response, oldest first.
    commands: VecDeque<RunningCommand>,
    prepared: HashMap<u32, Arc<Statement>>,
}

#[derive(Debug)]
struct RunningCommand {
    /// When the command has begun, or its result before has ended.
    since: Instant,
    request_bytes: usize,
    content: Content,
}

/// What a command does with statements. None: an unknown statement.
#[derive(Debug)]
enum Content {
    Nothing,
    Prepares(Arc<Statement>),
    Runs(Option<Arc<Statement>>),
    /// Runs this statement, and then the others.
    RunsSeveral(Arc<Statement>, IntoIter<Arc<Statement>>),
}

impl SessionStatements {
    pub(crate) fn new(collector: &StatementCollector, user: &[u8], has_attributes: bool) -> Self {
        Self { user: collector.user(user), has_attributes, commands: VecDeque::new(), prepared: HashMap::new() }
    }

    /// Whether [`Self::on_request`] has to see this command.
    pub(crate) fn is_observed(command: u8) -> bool {
        matches!(
            Command::from(command),
            Command::Query | Command::Prepare | Command::Execute | Command::BulkExecute | Command::CloseStatement
        )
    }

    pub(crate) fn set_user(&mut self, collector: &StatementCollector, user: &[u8]) {
        self.user = collector.user(user);
    }

    pub(crate) fn on_command_started(&mut self, command: Command, now: Instant) {
        let content = match command {
            Command::Query | Command::Execute | Command::BulkExecute => Content::Runs(None),
            _ => Content::Nothing,
        };
        self.commands.push_back(RunningCommand { since: now, request_bytes: 0, content });
    }

    /// The request of the newest command is complete.
    pub(crate) fn on_request(&mut self, collector: &StatementCollector, request: &Request<'_>) {
        let payload = request.payload();
        let Some(command) = payload.first().map(|command| Command::from(*command)) else { return };
        if command == Command::CloseStatement {
            statement_id(&payload).and_then(|id| self.prepared.remove(&id));
            return;
        }
        let content = match command {
            Command::Query => {
                let Some(text) = statement_text(&payload, self.has_attributes) else { return };
                let mut statements = sql_text::statements(text).map(|text| collector.identify(text));
                match (statements.next(), statements.next()) {
                    (Some(first), Some(second)) => {
                        let others = std::iter::once(second).chain(statements).collect::<Vec<_>>();
                        Content::RunsSeveral(first, others.into_iter())
                    }
                    (first, _) => Content::Runs(first),
                }
            }
            Command::Prepare => Content::Prepares(collector.identify(&payload[1..])),
            _ => Content::Runs(statement_id(&payload).and_then(|id| self.prepared.get(&id)).cloned()),
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
        let statement = match &oldest.content {
            Content::Nothing | Content::Prepares(_) => return,
            Content::Runs(statement) => statement.as_ref(),
            Content::RunsSeveral(statement, _) => Some(statement),
        };
        let now = Instant::now();
        let execution = Execution {
            is_error: matches!(outcome, CommandOutcome::Error(_)),
            rows: size.rows,
            request_bytes: oldest.request_bytes as u64,
            response_bytes: size.bytes,
            microseconds: u64::try_from((now - oldest.since).as_micros()).unwrap_or(u64::MAX),
        };
        collector.record(statement, &self.user, node, &execution);
        oldest.since = now;
        oldest.request_bytes = 0;
        if let Content::RunsSeveral(statement, others) = &mut oldest.content
            && let Some(next) = others.next()
        {
            *statement = next;
        }
    }

    /// The oldest command has ended.
    pub(crate) fn on_command_ended(&mut self, command: Command, outcome: CommandOutcome) {
        self.commands.pop_front();
        if matches!(command, Command::ResetConnection | Command::ChangeUser) && outcome == CommandOutcome::Ok {
            self.prepared.clear();
        }
    }
}
