//! The statements of one session.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use std::vec::IntoIter;

use mysql_proto::command::Command;
use mysql_proto::login_names::MAX_NAME_BYTES;
use mysql_proto::query::{statement_id, statement_text};
use mysql_proto::request_reader::Request;
use mysql_proto::tracker::{CommandOutcome, ResultSize};

use super::collector::StatementCollector;
use super::window::{Execution, Statement};
use crate::node::SharedNode;
use crate::statement_log::{self, SentText, StatementRecord};

/// MariaDB: the statement id that stands for the statement prepared last.
const LAST_PREPARED: u32 = u32::MAX;

/// Executions of other prepared statements count as unknown statements.
const MAX_PREPARED: usize = 65_536;

/// Follows the statements of a session from a time at which no command runs.
#[derive(Debug)]
pub(crate) struct SessionStatements {
    user: Arc<str>,
    details: SessionDetails,
    /// Whether a transaction is open according to the last result, and according to the one before.
    is_in_transaction: bool,
    was_in_transaction: bool,
    /// Client and node have agreed on query attributes.
    has_attributes: bool,
    /// The commands without a complete response, oldest first.
    commands: VecDeque<RunningCommand>,
    prepared: HashMap<u32, SentStatement>,
}

/// What the log says about the session of a statement.
#[derive(Debug, Default)]
pub(crate) struct SessionDetails {
    pub(crate) connection_id: u64,
    pub(crate) client: Option<SocketAddr>,
    /// In lower case. None: the session has none, or the module does not know it.
    pub(crate) database: Option<Box<str>>,
    /// How often the session has migrated.
    pub(crate) moves: u32,
    pub(crate) is_in_transaction: bool,
}

#[derive(Debug)]
struct RunningCommand {
    command: Command,
    /// When the command has begun, or its result before has ended.
    since: Instant,
    request_bytes: usize,
    content: Content,
}

/// What a command does with statements. None: an unknown statement.
#[derive(Debug)]
enum Content {
    Nothing,
    SelectsDatabase(Box<str>),
    Prepares(SentStatement),
    Runs(Option<SentStatement>),
    /// Runs this statement, and then the others.
    RunsSeveral(SentStatement, IntoIter<SentStatement>),
}

/// A statement that the client has sent.
#[derive(Debug, Clone)]
struct SentStatement {
    statement: Arc<Statement>,
    /// None: the log does not show texts as clients have sent them.
    text: Option<Arc<SentText>>,
}

impl SentStatement {
    fn new(collector: &StatementCollector, text: &[u8]) -> Self {
        let sent = statement_log::keeps_texts().then(|| Arc::new(SentText::new(text)));
        Self { statement: collector.identify(text), text: sent }
    }
}

impl SessionStatements {
    pub(crate) fn new(
        collector: &StatementCollector,
        user: &[u8],
        has_attributes: bool,
        details: SessionDetails,
    ) -> Self {
        Self {
            user: collector.user(user),
            is_in_transaction: details.is_in_transaction,
            was_in_transaction: details.is_in_transaction,
            details,
            has_attributes,
            commands: VecDeque::new(),
            prepared: HashMap::new(),
        }
    }

    /// Whether [`Self::on_request`] has to see this command.
    pub(crate) fn is_observed(command: u8) -> bool {
        matches!(
            Command::from(command),
            Command::Query
                | Command::Prepare
                | Command::Execute
                | Command::BulkExecute
                | Command::CloseStatement
                | Command::InitDb
        )
    }

    pub(crate) fn set_user(&mut self, collector: &StatementCollector, user: &[u8]) {
        self.user = collector.user(user);
    }

    /// Sets the session's database. Empty: it has none.
    pub(crate) fn set_database(&mut self, name: &[u8]) {
        self.details.database = lowercase(name).filter(|name| !name.is_empty());
    }

    /// The session has migrated, `moves` times by now.
    pub(crate) fn set_moves(&mut self, moves: u32) {
        self.details.moves = moves;
    }

    /// The node has reported with a result whether a transaction is open.
    pub(crate) fn on_transaction_reported(&mut self, is_open: bool) {
        self.is_in_transaction = is_open;
    }

    pub(crate) fn on_command_started(&mut self, command: Command, now: Instant) {
        let content = match command {
            Command::Query | Command::Execute | Command::BulkExecute => Content::Runs(None),
            _ => Content::Nothing,
        };
        self.commands.push_back(RunningCommand { command, since: now, request_bytes: 0, content });
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
                let mut statements = sql_digest::statements(text).map(|text| SentStatement::new(collector, text));
                match (statements.next(), statements.next()) {
                    (Some(first), Some(second)) => {
                        let others = std::iter::once(second).chain(statements).collect::<Vec<_>>();
                        Content::RunsSeveral(first, others.into_iter())
                    }
                    (first, _) => Content::Runs(first),
                }
            }
            Command::Prepare => Content::Prepares(SentStatement::new(collector, &payload[1..])),
            Command::InitDb => lowercase(&payload[1..]).map_or(Content::Nothing, Content::SelectsDatabase),
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
            self.prepared.insert(LAST_PREPARED, statement.clone());
            self.prepared.insert(id, statement.clone());
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
        let was_in_transaction = std::mem::replace(&mut self.was_in_transaction, self.is_in_transaction);
        let Some(oldest) = self.commands.front_mut() else { return };
        let (statement, is_run) = match &oldest.content {
            Content::Nothing | Content::SelectsDatabase(_) => return,
            Content::Prepares(statement) => (Some(statement), false),
            Content::Runs(statement) => (statement.as_ref(), true),
            Content::RunsSeveral(statement, _) => (Some(statement), true),
        };
        let now = Instant::now();
        let error_code = if let CommandOutcome::Error(code) = outcome { Some(code) } else { None };
        let execution = Execution {
            is_error: error_code.is_some(),
            rows: size.rows,
            request_bytes: oldest.request_bytes as u64,
            response_bytes: size.bytes,
            microseconds: u64::try_from((now - oldest.since).as_micros()).unwrap_or(u64::MAX),
        };
        if is_run && super::is_summing() {
            collector.record(statement.map(|sent| &sent.statement), &self.user, node, &execution);
        }
        if statement_log::may_log(execution.microseconds, execution.is_error) {
            statement_log::push(&StatementRecord {
                time: SystemTime::now(),
                kind: kind_of(oldest.command),
                error_code,
                duration: Duration::from_micros(execution.microseconds),
                user: &self.user,
                database: self.details.database.as_deref(),
                client: self.details.client,
                node: &node.name,
                connection_id: self.details.connection_id,
                moves: self.details.moves,
                is_in_transaction: was_in_transaction || self.is_in_transaction,
                rows: execution.rows,
                request_bytes: execution.request_bytes,
                response_bytes: execution.response_bytes,
                statement: statement.map(|sent| &*sent.statement),
                sent_text: statement.and_then(|sent| sent.text.as_deref()),
            });
        }
        let used = statement.filter(|_| is_run && error_code.is_none()).and_then(|sent| sent.statement.used_database());
        if let Some(database) = used {
            self.details.database = Some(database.into());
        }
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
        let ended = self.commands.pop_front();
        if outcome != CommandOutcome::Ok {
            return;
        }
        if matches!(command, Command::ResetConnection | Command::ChangeUser) {
            self.prepared.clear();
        }
        match ended.map(|ended| ended.content) {
            Some(Content::SelectsDatabase(name)) => self.details.database = Some(name),
            _ if command == Command::ChangeUser => self.details.database = None, // until it is set
            _ => {}
        }
    }
}

/// None: the name is too long to be valid.
fn lowercase(name: &[u8]) -> Option<Box<str>> {
    (name.len() <= MAX_NAME_BYTES).then(|| String::from_utf8_lossy(name).to_lowercase().into())
}

/// The name of a command in the log, which is that in the metric `commands`.
fn kind_of(command: Command) -> &'static str {
    match command {
        Command::Query => "query",
        Command::Prepare => "prepare",
        _ => "execute",
    }
}
