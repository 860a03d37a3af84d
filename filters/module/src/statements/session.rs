//! The statements of one session.

mod captured;
mod running;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use mysql_proto::capability::Capabilities;
use mysql_proto::command::Command;
use mysql_proto::query::{LAST_PREPARED, known_text, statement_id, text_range};
use mysql_proto::request_reader::{Request, RequestStart};
use mysql_proto::tracker::{CommandOutcome, ResultSize};
use statement_rules::Permit;

use super::collector::{PreparedStatement, StatementCollector};
use super::rows::Statement;
use super::window::Execution;
use crate::capture::{SessionCapture, is_captured};
use crate::node::SharedNode;
use crate::statement_log::{self, SentText, StatementRecord};
use captured::RequestStatement;
use running::{CaptureState, Content, KeptText, Run, RunningCommand};

/// Executions of other prepared statements count as unknown statements, and rules refuse them.
const MAX_PREPARED: usize = 65_536;

/// The highest number of statements in one text. Rules refuse longer texts.
pub(crate) const MAX_STATEMENTS: usize = 1000;

/// Follows the statements of a session from its beginning. Prepared statements and the database are always known;
/// executions are observed only on request.
#[derive(Debug)]
pub(crate) struct SessionStatements {
    /// Client and node have agreed on query attributes.
    has_attributes: bool,
    /// The client may send several statements in one text. Otherwise a node refuses them, unless TiDB's
    /// `tidb_multi_statement_mode` is set.
    may_send_several: bool,
    /// The commands without a complete response, oldest first.
    commands: VecDeque<RunningCommand>,
    prepared: HashMap<u32, Rc<PreparedStatement>>,
    /// The client has prepared a `USE`.
    has_prepared_use: bool,
    /// The module has answered the last request to prepare a statement, so [`LAST_PREPARED`] names no statement.
    is_last_refused: bool,
    /// The selected database. Empty: none.
    database: Box<[u8]>,
    /// The database after COM_RESET_CONNECTION: that of the login, of the last change of user, or of COM_INIT_DB. TiDB does
    /// not change it with `USE` (pingcap/tidb `pkg/server/conn.go`, `cc.dbname`).
    connection_database: Box<[u8]>,
    /// The node's id of the session's connection. None: not known.
    node_connection_id: Option<u32>,
    /// How often the session has migrated.
    moves: u32,
    /// Whether a transaction was open at the end of the last result.
    is_in_transaction: bool,
    /// None: executions are not observed.
    client: Option<Box<Client>>,
    /// The client has sent a command.
    has_run: bool,
    /// None: the session is not captured.
    capture: Option<Box<SessionCapture>>,
    /// The value of [`capture::generation`] that `capture` belongs to.
    capture_generation: u64,
}

/// A client's connection to this Envoy.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ClientConnection {
    pub(crate) id: u64,
    pub(crate) address: Option<SocketAddr>,
}

#[derive(Debug)]
struct Client {
    user: Arc<str>,
    connection: ClientConnection,
}

impl SessionStatements {
    pub(crate) fn new(capabilities: Capabilities, database: &[u8]) -> Self {
        Self {
            has_attributes: capabilities.has(Capabilities::QUERY_ATTRIBUTES),
            may_send_several: capabilities.has(Capabilities::MULTI_STATEMENTS),
            commands: VecDeque::new(),
            prepared: HashMap::new(),
            has_prepared_use: false,
            is_last_refused: false,
            connection_database: selected_database(database),
            database: selected_database(database),
            node_connection_id: None,
            moves: 0,
            is_in_transaction: false,
            client: None,
            has_run: false,
            capture: None,
            capture_generation: 0,
        }
    }

    /// Whether client and node have agreed on query attributes.
    pub(crate) fn has_attributes(&self) -> bool {
        self.has_attributes
    }

    /// The statement that runs. None: no statement runs, or it is not known.
    pub(crate) fn running(&self) -> Option<&Statement> {
        match &self.commands.front()?.content {
            Content::Runs(run, _) => run.statement.as_deref(),
            Content::Prepares(_) | Content::Selects(_) | Content::Other => None,
        }
    }

    /// Whether executions are observed.
    pub(crate) fn is_collecting(&self) -> bool {
        self.client.is_some()
    }

    /// Observes executions from now on, for this user.
    pub(crate) fn collect(&mut self, collector: &StatementCollector, user: &[u8], connection: ClientConnection) {
        self.client = Some(Box::new(Client { user: collector.user(user), connection }));
    }

    pub(crate) fn stop_collecting(&mut self) {
        self.client = None;
        self.capture = None;
    }

    /// Forgets all commands and prepared statements, since the session cannot be followed any more.
    pub(crate) fn forget(&mut self) {
        self.commands.clear();
        self.prepared.clear();
        self.capture = None;
    }

    pub(crate) fn set_node_connection_id(&mut self, id: Option<u32>) {
        self.node_connection_id = id;
    }

    /// The session has migrated, `moves` times by now. The new node has this id for its connection.
    pub(crate) fn on_migrated(&mut self, moves: u32, node_connection_id: Option<u32>) {
        self.moves = moves;
        self.node_connection_id = node_connection_id;
    }

    /// Whether [`Self::on_request`] has to see a request.
    pub(crate) fn needs_request(&self, start: RequestStart<'_>) -> bool {
        match Command::from(start.command) {
            command if self.capture.is_some() && is_captured(command) => true,
            Command::Prepare | Command::CloseStatement | Command::InitDb => true,
            Command::Query => self.is_collecting() || self.may_use_database(start),
            Command::Execute | Command::BulkExecute => self.is_collecting() || self.has_prepared_use,
            _ => false,
        }
    }

    /// Whether one of the statements of a COM_QUERY may be a `USE`.
    fn may_use_database(&self, start: RequestStart<'_>) -> bool {
        let Some(text) = known_text(start.content, self.has_attributes) else { return true };
        let is_whole = 1 + start.content.len() == start.length;
        may_select_database(text) || (self.may_send_several && !is_whole)
    }

    pub(crate) fn on_command_started(&mut self, command: Command) {
        self.has_run = true;
        let content = match command {
            Command::Query | Command::Execute | Command::BulkExecute => Content::runs(Vec::new().into_iter()),
            Command::SetOption => {
                self.may_send_several = true; // turned on, or off: then some texts are read in vain
                Content::Other
            }
            _ => Content::Other,
        };
        let since = self.is_collecting().then(Instant::now);
        if let Some(newest) = self.commands.back_mut()
            && newest.can_stand_for(command)
            && since.is_none()
        {
            newest.more += 1;
            return;
        }
        let is_awaited = self.capture.as_ref().is_some_and(|capture| capture.has_begun()) && is_captured(command);
        let capture = if is_awaited { CaptureState::Awaited } else { CaptureState::No };
        let (permit, must_log) = (None, false);
        self.commands.push_back(RunningCommand {
            command,
            more: 0,
            since,
            request_bytes: 0,
            content,
            permit,
            must_log,
            capture,
        });
    }

    /// Where the text of COM_QUERY or COM_STMT_PREPARE is. None: another command, or invalid attributes.
    pub(crate) fn text_range(&self, payload: &[u8]) -> Option<Range<usize>> {
        text_range(payload, self.has_attributes)
    }

    /// Whether a command is outstanding that may select another database.
    pub(crate) fn may_change_database(&self) -> bool {
        self.commands.iter().any(|command| match &command.content {
            Content::Selects(_) => true,
            Content::Runs(run, others) => {
                run.database.is_some() || others.as_slice().iter().any(|run| run.database.is_some())
            }
            Content::Prepares(_) | Content::Other => {
                matches!(command.command, Command::ChangeUser | Command::ResetConnection)
            }
        })
    }

    /// The selected database. Empty: none.
    pub(crate) fn database(&self) -> &[u8] {
        &self.database
    }

    /// The prepared statement that a command names. None: it is not known.
    pub(crate) fn prepared(&self, payload: &[u8]) -> Option<&Rc<PreparedStatement>> {
        let id = statement_id(payload)?;
        if self.commands.iter().any(|running| forgets_statements(running.command)) {
            return None; // the ids begin again
        }
        if id == LAST_PREPARED {
            let preparing = |command: &'_ RunningCommand| matches!(command.content, Content::Prepares(_));
            if let Some(Content::Prepares(statement)) =
                self.commands.iter().rev().find(|command| preparing(command)).map(|command| &command.content)
            {
                return Some(statement).filter(|_| !self.is_last_refused);
            }
            return self.prepared.get(&id).filter(|_| !self.is_last_refused);
        }
        self.prepared.get(&id)
    }

    /// The module has answered a request that may have been to prepare a statement.
    pub(crate) fn on_prepare_refused(&mut self) {
        self.is_last_refused = true;
    }

    /// The request of the newest command is complete. `permit`: what it uses of limits. `node`: the name of the node.
    pub(crate) fn on_request(
        &mut self,
        collector: &StatementCollector,
        request: &Request<'_>,
        permit: Option<Permit>,
        node: &str,
    ) {
        let payload = request.payload();
        let Some(command) = payload.first().map(|command| Command::from(*command)) else { return };
        let prepared = command.names_statement().then(|| self.prepared(&payload).cloned()).flatten();
        let content = match command {
            Command::CloseStatement => {
                statement_id(&payload).and_then(|id| self.prepared.remove(&id));
                None // it has ended already
            }
            Command::Query => {
                let Some(range) = self.text_range(&payload) else { return };
                Some(Content::runs(self.runs(collector, &payload[range]).into_iter()))
            }
            Command::Prepare => {
                let Some(range) = self.text_range(&payload) else { return };
                self.is_last_refused = false;
                Some(Content::Prepares(collector.prepare(&payload[range])))
            }
            Command::InitDb => Some(Content::Selects(selected_database(&payload[1..]))),
            Command::Execute | Command::BulkExecute => {
                let statement = prepared.as_ref().map(|prepared| Arc::clone(&prepared.known.statement));
                let database = prepared.as_ref().and_then(|prepared| prepared.database.clone());
                let text = prepared.clone().map_or(KeptText::None, KeptText::Prepared);
                Some(Content::Runs(Run { statement, text, database }, Vec::new().into_iter()))
            }
            _ => None, // such as a change of user
        };
        if self.capture.is_some() {
            let statement = content.as_ref().and_then(Content::statement);
            self.capture_request(command, &payload, RequestStatement { statement, prepared }, node);
        }
        if let (Some(content), Some(newest)) = (content, self.commands.back_mut()) {
            newest.request_bytes = request.len();
            newest.content = content;
            newest.permit = permit;
        }
    }

    /// The statements of a COM_QUERY. If they need not be identified and none selects a database, the result is empty.
    fn runs(&self, collector: &StatementCollector, text: &[u8]) -> Vec<Run> {
        let identifies = self.is_collecting() && super::identifies_statements();
        if !identifies && !may_select_database(text) {
            return Vec::new();
        }
        let keeps_texts = identifies && statement_log::keeps_texts();
        let runs = sql_text::statements(text).take(MAX_STATEMENTS).map(|text| Run {
            statement: identifies.then(|| Arc::clone(&collector.identify(&text).statement)),
            text: if keeps_texts { KeptText::Sent(SentText::new(&text)) } else { KeptText::None },
            database: sql_text::may_begin_with(&text, b"use")
                .then(|| sql_text::used_database(&text))
                .flatten()
                .map(Vec::into_boxed_slice),
        });
        runs.collect()
    }

    /// A rule wants the newest command in the log.
    pub(crate) fn log_newest(&mut self) {
        if let Some(newest) = self.commands.back_mut() {
            newest.must_log = true;
        }
    }

    /// The node has prepared the statement of the oldest command.
    pub(crate) fn on_prepared(&mut self, id: u32) {
        if let Some(captured) = self.commands.front_mut().and_then(RunningCommand::captured) {
            captured.on_prepared(id);
        }
        if let Some(RunningCommand { content: Content::Prepares(statement), .. }) = self.commands.front() {
            self.has_prepared_use |= statement.database.is_some();
            self.prepared.insert(LAST_PREPARED, Rc::clone(statement));
            if self.prepared.len() < MAX_PREPARED {
                self.prepared.insert(id, Rc::clone(statement));
            }
        }
    }

    /// A result of the oldest command is complete. `is_in_transaction`: whether a transaction is open now.
    pub(crate) fn on_result_ended(
        &mut self,
        collector: &StatementCollector,
        node: &Arc<SharedNode>,
        outcome: CommandOutcome,
        size: ResultSize,
        is_in_transaction: bool,
    ) {
        let was_in_transaction = std::mem::replace(&mut self.is_in_transaction, is_in_transaction);
        self.observe_result(collector, node, outcome, size, was_in_transaction || is_in_transaction);
        if let Some(captured) = self.commands.front_mut().and_then(RunningCommand::captured) {
            captured.on_result_ended(size);
        }
        let Some(RunningCommand { content: Content::Runs(run, others), .. }) = self.commands.front_mut() else {
            return;
        };
        if outcome == CommandOutcome::Ok
            && let Some(database) = run.database.take()
        {
            self.database = database;
        }
        if let Some(next) = others.next() {
            *run = next;
        }
    }

    /// Counts and logs the statement of the oldest command, if executions are observed.
    fn observe_result(
        &mut self,
        collector: &StatementCollector,
        node: &Arc<SharedNode>,
        outcome: CommandOutcome,
        size: ResultSize,
        is_in_transaction: bool,
    ) {
        let (Some(oldest), Some(client)) = (self.commands.front_mut(), &self.client) else { return };
        let Some(since) = oldest.since else { return };
        if matches!(oldest.content, Content::Other | Content::Selects(_)) {
            return;
        }
        let is_run = matches!(oldest.content, Content::Runs(..));
        let now = Instant::now();
        let error_code = if let CommandOutcome::Error(code) = outcome { Some(code) } else { None };
        let execution = Execution {
            is_error: error_code.is_some(),
            rows: size.rows,
            request_bytes: oldest.request_bytes as u64,
            response_bytes: size.bytes,
            microseconds: u64::try_from((now - since).as_micros()).unwrap_or(u64::MAX),
        };
        if is_run && super::has_statistics() {
            collector.record(oldest.content.statement(), &client.user, node, &execution);
        }
        if oldest.must_log || statement_log::may_log(execution.microseconds, execution.is_error) {
            let record = StatementRecord {
                time: SystemTime::now(),
                kind: kind_of(oldest.command),
                error_code,
                duration: Duration::from_micros(execution.microseconds),
                user: &client.user,
                database: &String::from_utf8_lossy(&self.database),
                client: client.connection.address,
                node: &node.name,
                connection_id: client.connection.id,
                node_connection_id: self.node_connection_id,
                moves: self.moves,
                is_in_transaction,
                rows: execution.rows,
                request_bytes: execution.request_bytes,
                response_bytes: execution.response_bytes,
                statement: oldest.content.statement().map(|statement| &**statement),
                sent_text: oldest.content.sent_text(),
            };
            statement_log::push(&record, oldest.must_log);
        }
        oldest.since = Some(now);
        oldest.request_bytes = 0;
    }

    /// The oldest command has ended. `node`: the name of the node.
    pub(crate) fn on_command_ended(&mut self, command: Command, outcome: CommandOutcome, node: &str) {
        let ended = match self.commands.front_mut() {
            Some(oldest) if oldest.more > 0 => {
                oldest.more -= 1;
                return;
            }
            _ => self.commands.pop_front(),
        };
        let ended = ended.map(|ended| {
            self.end_captured(ended.capture, outcome, node);
            ended.content
        });
        if outcome != CommandOutcome::Ok {
            return;
        }
        match (command, ended) {
            (Command::InitDb, Some(Content::Selects(database))) => {
                self.database.clone_from(&database);
                self.connection_database = database;
            }
            (Command::ResetConnection, _) => {
                self.database.clone_from(&self.connection_database);
                self.prepared.clear();
            }
            (Command::ChangeUser, _) => self.prepared.clear(),
            _ => {}
        }
    }

    /// The user has changed. `database`: the database that was selected with it.
    pub(crate) fn on_user_changed(&mut self, collector: &StatementCollector, user: &[u8], database: &[u8]) {
        self.database = selected_database(database);
        self.connection_database.clone_from(&self.database);
        if let Some(client) = &mut self.client {
            client.user = collector.user(user);
        }
        // The new user may be chosen for the capture, or not. The session has no other state than the database.
        self.has_run = false;
        self.capture_generation = 0;
    }
}

/// Whether one of the statements of a text may be a `USE`.
fn may_select_database(text: &[u8]) -> bool {
    sql_text::may_begin_with(text, b"use") || text.contains(&b';')
}

/// Whether a node forgets the prepared statements of a session with this command.
fn forgets_statements(command: Command) -> bool {
    matches!(command, Command::ResetConnection | Command::ChangeUser)
}

/// The database that a command with this name selects. TiDB reads the name within backticks, as a part of `USE`
/// (pingcap/tidb `pkg/server/conn.go`, `useDB`).
fn selected_database(name: &[u8]) -> Box<[u8]> {
    let statement = [b"use `", name, b"`"].concat();
    sql_text::used_database(&statement).unwrap_or_default().into()
}

/// The name of a command in the log, which is that in the metric `commands`.
fn kind_of(command: Command) -> &'static str {
    match command {
        Command::Query => "query",
        Command::Prepare => "prepare",
        _ => "execute",
    }
}
