//! One session of the capture, which a thread replays on a connection of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use mysql_proto::command::Command;
use mysql_proto::status;
use sql_text::Normalizer;
use traffic_files::directory::Statement;
use traffic_files::result::ResultLine;

use crate::budget;
use crate::checkpoint::RecordKey;
use crate::connection::{Answer, Connection, ConnectionError};
use crate::context::{Context, Counters, Reports};
use crate::login::LoginError;
use crate::lost_transaction::LostTransaction;
use crate::recorder::{Event, Finished, Replayed, SERVER_LOST};
use crate::response::Response;
use crate::selection::was_refused;
use crate::session_state::{Plan, SessionState};
use crate::skip::SkipReason;

/// How long an unreachable server is waited for. Then the replay ends; it can be resumed.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(60);
const FIRST_RECONNECT_PAUSE: Duration = Duration::from_millis(50);
const MAX_RECONNECT_PAUSE: Duration = Duration::from_secs(1);
/// Errors of the login after which it is tried again: ER_CON_COUNT_ERROR, ER_SERVER_SHUTDOWN.
const TRANSIENT_ERRORS: [u16; 2] = [1040, 1053];

/// What a session does with a record.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Task {
    Replay {
        /// None: as soon as possible.
        due: Option<Instant>,
        is_recorded: bool,
    },
    /// It does not run the record, but keeps what the record changes in the session's state. None: the record was
    /// reported already.
    Remember(Option<SkipReason>),
    /// It only reports the record, after those before it. A checkpoint says of each session how far it is.
    Ignore,
}

pub(crate) struct Work {
    pub(crate) statement: Statement,
    pub(crate) sequence: u64,
    pub(crate) task: Task,
}

/// What the thread that reads the input sees of a session.
#[derive(Debug, Default)]
pub(crate) struct SessionStatus {
    /// Records that wait or run.
    pub(crate) queued: AtomicUsize,
    pub(crate) is_in_transaction: AtomicBool,
    /// Grows with each record that is done, in the order of all sessions.
    pub(crate) last_used: AtomicU64,
}

pub(crate) struct Session<'a> {
    context: &'a Context,
    reports: Reports,
    status: Arc<SessionStatus>,
    state: SessionState,
    normalizer: Normalizer,
    connection: Option<Connection<'a>>,
    lost_transaction: LostTransaction,
}

/// How the attempt to run a command ended.
enum Outcome {
    Answered(Answer),
    /// There is no answer. The error stands for it.
    Failed(u16),
    /// The replay ends, so nothing is known about the command.
    Unknown,
}

impl<'a> Session<'a> {
    /// `lost_transaction`: that of the connection on which the session was replayed before.
    pub(crate) fn new(
        context: &'a Context,
        reports: Reports,
        status: Arc<SessionStatus>,
        lost_transaction: LostTransaction,
    ) -> Self {
        let (state, normalizer) = (SessionState::default(), Normalizer::default());
        Self { context, reports, status, state, normalizer, connection: None, lost_transaction }
    }

    /// Replays what comes, until there are no more senders.
    pub(crate) fn run(mut self, work: &Receiver<Work>, clock: &AtomicU64) {
        for one in work {
            let size = budget::size(&one.statement.record);
            if !self.context.stop.is_requested() {
                self.handle(one);
            }
            self.status.last_used.store(clock.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
            self.status.queued.fetch_sub(1, Ordering::Release);
            self.context.budget.release(size);
        }
        self.disconnect();
    }

    fn handle(&mut self, work: Work) {
        let Work { statement, sequence, task } = work;
        let key = RecordKey { conn: statement.record.connection, time: statement.record.time_ns };
        let event = match task {
            Task::Ignore => Some(Event::Skipped(SkipReason::Filtered)),
            Task::Remember(reason) => {
                if statement.record.is_success {
                    self.state.learn(&statement.record, None, false);
                }
                reason.map(Event::Skipped)
            }
            Task::Replay { due, is_recorded } => {
                let lag = match due {
                    Some(due) if !self.context.stop.sleep_until(due) => return,
                    Some(due) => due.elapsed(),
                    None => Duration::ZERO,
                };
                self.replay(&statement, is_recorded, lag)
            }
        };
        if let Some(event) = event {
            let _ = self.reports.send(Finished { sequence, key, event });
        }
    }

    /// None: the replay ends, so the record is not done.
    fn replay(&mut self, statement: &Statement, is_recorded: bool, lag: Duration) -> Option<Event> {
        let record = &statement.record;
        if was_refused(statement) {
            return Some(Event::Skipped(SkipReason::NeverReplayed));
        }
        if !self.lost_transaction.admits(record, self.state.statement(record)) {
            let text = self.state.statement(record).map(<[u8]>::to_vec);
            if record.is_success {
                self.state.learn(record, None, false);
            }
            let line = self.line(statement, None, SERVER_LOST);
            return Some(self.replayed(line, text, is_recorded, 0, lag));
        }
        loop {
            let (command, payload) = match self.state.plan(record, self.context.reads_only) {
                Plan::Skip(reason) => return Some(Event::Skipped(reason)),
                Plan::Quit => {
                    self.disconnect();
                    let line = self.line(statement, None, 0);
                    return Some(self.replayed(line, None, is_recorded, 0, lag));
                }
                Plan::Prepare { captured_id, text } => match self.execute(statement, Command::Prepare, &text) {
                    Outcome::Answered(Answer { response: Response { prepared_id: Some(id), .. }, .. }) => {
                        self.state.on_prepared(captured_id, id);
                        continue;
                    }
                    Outcome::Answered(Answer { response, .. }) => {
                        // Success without a statement id breaks the protocol. Nothing was executed.
                        let error = if response.error() == 0 { SERVER_LOST } else { response.error() };
                        let line = self.line(statement, None, error);
                        return Some(self.replayed(line, Some(text), is_recorded, 0, lag));
                    }
                    Outcome::Failed(error) => {
                        let line = self.line(statement, None, error);
                        return Some(self.replayed(line, Some(text), is_recorded, 0, lag));
                    }
                    Outcome::Unknown => return None,
                },
                Plan::Send { command, payload } => (command, payload),
            };
            let text = self.state.statement(record).map(<[u8]>::to_vec);
            return match self.execute(statement, command, &payload) {
                Outcome::Answered(answer) => {
                    if answer.response.error() == 0 {
                        self.state.learn(record, answer.response.prepared_id, true);
                    }
                    let local_files = answer.local_files;
                    let line = self.line(statement, Some(&answer), answer.response.error());
                    Some(self.replayed(line, text, is_recorded, local_files, lag))
                }
                Outcome::Failed(error) => {
                    let line = self.line(statement, None, error);
                    Some(self.replayed(line, text, is_recorded, 0, lag))
                }
                Outcome::Unknown => None,
            };
        }
    }

    fn execute(&mut self, statement: &Statement, command: Command, payload: &[u8]) -> Outcome {
        // The limit is for reads alone. Writes could have all permits while they wait for a lock of a session that waits
        // for a permit.
        let Some(_permit) = self.context.running.begin(&self.context.stop) else { return Outcome::Unknown };
        if let Err(outcome) = self.connect(statement) {
            return outcome;
        }
        let Some(connection) = &mut self.connection else { return Outcome::Unknown };
        match connection.run(command, payload, self.context.timeout) {
            Ok(answer) => {
                if let Some(status) = answer.response.status {
                    let is_in_transaction = status & status::IN_TRANSACTION != 0;
                    self.status.is_in_transaction.store(is_in_transaction, Ordering::Relaxed);
                }
                Outcome::Answered(answer)
            }
            Err(ConnectionError::Stopped) => Outcome::Unknown,
            Err(error) => {
                let reason = format!("connection of session {} is lost: {error}", statement.record.connection);
                self.context.warnings.show(&reason);
                self.connection = None;
                self.state.on_disconnected();
                let was_in_transaction = self.status.is_in_transaction.swap(false, Ordering::Relaxed);
                if !self.context.reads_only {
                    let text = self.state.statement(&statement.record);
                    self.lost_transaction.on_connection_lost(&statement.record, text, was_in_transaction);
                }
                Counters::add(&self.context.counters.lost_connections);
                Outcome::Failed(SERVER_LOST)
            }
        }
    }

    /// Makes a connection if there is none.
    fn connect(&mut self, statement: &Statement) -> Result<(), Outcome> {
        if self.connection.is_some() {
            return Ok(());
        }
        if self.state.database.is_empty()
            && let Some(result) = &statement.result
            && statement.record.command != Command::InitDb
        {
            self.state.database = result.database.clone().into_bytes();
        }
        let deadline = Instant::now() + RECONNECT_TIMEOUT;
        let mut pause = FIRST_RECONNECT_PAUSE;
        loop {
            let error = match Connection::open(&self.context.target, &self.state.database, &self.context.stop) {
                Ok(connection) => {
                    self.connection = Some(connection);
                    Counters::add(&self.context.counters.connections);
                    return Ok(());
                }
                Err(error) => error,
            };
            let is_last = Instant::now() + pause >= deadline;
            match &error {
                ConnectionError::Stopped => return Err(Outcome::Unknown),
                ConnectionError::Login(LoginError::Refused { code, .. }) if !TRANSIENT_ERRORS.contains(code) => {
                    let connection = statement.record.connection;
                    self.context.warnings.show(&format!("session {connection} cannot log in: {error}"));
                    return Err(Outcome::Failed(*code));
                }
                ConnectionError::Login(LoginError::Refused { .. })
                | ConnectionError::Io(_)
                | ConnectionError::Closed
                | ConnectionError::TimedOut
                    if !is_last => {}
                _ => {
                    let name = &self.context.target.name;
                    let reason = format!("cannot connect to {name}: {error}; when it is possible, --resume continues");
                    self.context.failure.set(reason, &self.context.stop);
                    return Err(Outcome::Unknown);
                }
            }
            if !self.context.stop.sleep_until(Instant::now() + pause) {
                return Err(Outcome::Unknown);
            }
            pause = (2 * pause).min(MAX_RECONNECT_PAUSE);
        }
    }

    fn disconnect(&mut self) {
        if let Some(connection) = self.connection.take() {
            connection.quit();
        }
        self.state.on_disconnected();
    }

    fn line(&self, statement: &Statement, answer: Option<&Answer>, error: u16) -> ResultLine {
        let captured = statement.result.as_ref();
        let database = captured.map(|result| result.database.clone());
        let response = answer.map(|answer| &answer.response);
        let size = response.map(|response| response.content.size()).unwrap_or_default();
        ResultLine {
            connection: statement.record.connection,
            time_ns: statement.record.time_ns,
            latency_us: answer.map_or(0, |answer| answer.latency.as_micros() as u64),
            rows: size.rows,
            bytes: size.bytes,
            error,
            checksum: response.and_then(Response::checksum),
            digest: captured.and_then(|result| result.digest),
            user: captured.map(|result| result.user.clone()).unwrap_or_default(),
            database: database.unwrap_or_else(|| String::from_utf8_lossy(&self.state.database).into_owned()),
            node: self.context.target.name.clone(),
        }
    }

    /// `text`: that of the statement, if there is one.
    fn replayed(
        &mut self,
        mut line: ResultLine,
        text: Option<Vec<u8>>,
        is_recorded: bool,
        local_files: u64,
        lag: Duration,
    ) -> Event {
        let mut new_text = None;
        if let Some(text) = text {
            if line.digest.is_none() {
                line.digest = Some(sql_text::digest(self.normalizer.normalize(&text)));
            }
            if is_recorded && line.digest.is_some_and(|digest| self.context.digests.insert(&digest)) {
                new_text = Some(self.normalizer.normalize(&text).to_vec());
            }
        }
        Event::Replayed(Box::new(Replayed { line, text: new_text, is_recorded, local_files, lag }))
    }
}
