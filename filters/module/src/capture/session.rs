//! What is captured of one session.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use mysql_proto::command::Command;
use mysql_proto::packet::{HEADER, Header, MAX_PAYLOAD};
use mysql_proto::rows::{RowPiece, RowReader};
use mysql_proto::tracker::{CommandOutcome, ResultSize};
use traffic_files::checksum::RowsChecksum;
use traffic_files::record::RecordRef;
use traffic_files::result::ResultRef;

use super::ActiveCapture;
use crate::statements::{PreparedStatement, Statement};

/// A session in a capture.
pub(crate) struct SessionCapture {
    active: Arc<ActiveCapture>,
    /// The number of the client's connection in the files.
    connection: u64,
    /// The time of the last command, in nanoseconds since 1970: times in a session increase.
    last_time: i64,
    /// The session's state before its next command is in the files. Until then, commands are left out.
    has_begun: bool,
    /// COM_QUIT is in the files.
    has_quit: bool,
}

/// A command that runs, and will be captured when it has ended.
pub(crate) struct CapturedCommand {
    command: Command,
    /// What follows the command in its message, without query attributes.
    content: Vec<u8>,
    /// When it arrived, in nanoseconds since 1970.
    time: i64,
    since: Instant,
    /// The statement that it names, or that it has prepared.
    prepared_id: Option<u32>,
    prepared: Option<Rc<PreparedStatement>>,
    statement: Option<Arc<Statement>>,
    rows: RowReader,
    checksum: RowsChecksum,
    has_result_set: bool,
    size: ResultSize,
}

/// What the results tell about the session.
pub(crate) struct SessionNames<'a> {
    pub(crate) user: &'a str,
    pub(crate) database: &'a [u8],
    pub(crate) node: &'a str,
}

/// Whether commands of this kind are captured.
pub(crate) fn is_captured(command: Command) -> bool {
    match command {
        Command::Quit
        | Command::InitDb
        | Command::Query
        | Command::FieldList
        | Command::ChangeUser
        | Command::Prepare
        | Command::Execute
        | Command::SendLongData
        | Command::CloseStatement
        | Command::ResetStatement
        | Command::SetOption
        | Command::Fetch
        | Command::ResetConnection => true,
        Command::Ping
        | Command::Statistics
        | Command::ProcessInfo
        | Command::ProcessKill
        | Command::Refresh
        | Command::Shutdown
        | Command::Debug
        | Command::BinlogDump
        | Command::TableDump
        | Command::RegisterSlave
        | Command::BinlogDumpGtid
        | Command::BulkExecute
        | Command::Other => false,
    }
}

impl CapturedCommand {
    /// A change of user has a password, so it becomes a reset of the connection.
    fn new(command: Command, content: &[u8], time: i64, since: Instant) -> Self {
        let (command, content) = match command {
            Command::ChangeUser => (Command::ResetConnection, &b""[..]),
            _ => (command, content),
        };
        Self {
            command,
            content: content.to_vec(),
            time,
            since,
            prepared_id: None,
            prepared: None,
            statement: None,
            rows: RowReader::default(),
            checksum: RowsChecksum::default(),
            has_result_set: false,
            size: ResultSize::default(),
        }
    }

    /// The command runs or prepares this statement. `prepared`: it executes this prepared statement.
    pub(crate) fn set_statement(&mut self, statement: Option<Arc<Statement>>, prepared: Option<Rc<PreparedStatement>>) {
        self.statement = statement;
        self.prepared = prepared;
    }

    /// The node has prepared the statement of the command.
    pub(crate) fn on_prepared(&mut self, id: u32) {
        self.prepared_id = Some(id);
    }

    /// Bytes of rows, with packet headers.
    pub(crate) fn on_row_bytes(&mut self, mut bytes: &[u8]) {
        self.has_result_set = true;
        while let Some(piece) = self.rows.next(&mut bytes) {
            match piece {
                RowPiece::Whole(row) => self.checksum.add_row(row),
                RowPiece::Part(part) => self.checksum.extend(part),
                RowPiece::End => self.checksum.end(),
            }
        }
    }

    pub(crate) fn on_result_ended(&mut self, size: ResultSize) {
        self.size.rows += size.rows;
        self.size.bytes += size.bytes;
    }
}

impl SessionCapture {
    /// The session has run nothing yet, and has selected a database, or none. `id`: of the client's connection to this
    /// Envoy.
    pub(crate) fn of_new_session(active: Arc<ActiveCapture>, id: u64, names: &SessionNames<'_>) -> Self {
        let mut capture = Self::of_running_session(active, id);
        capture.has_begun = true;
        if !names.database.is_empty() {
            capture.add_command(Command::InitDb, names.database, names);
        }
        capture
    }

    /// The session has a state, which is to be passed to [`Self::begin_with_states`].
    pub(crate) fn of_running_session(active: Arc<ActiveCapture>, id: u64) -> Self {
        let connection = active.connection(id);
        Self { active, connection, last_time: 0, has_begun: false, has_quit: false }
    }

    /// Whether the session's state is in the files, so that its commands follow.
    pub(crate) fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// `packets`: the statements that restore the states of the session.
    pub(crate) fn begin_with_states(&mut self, packets: &[u8], names: &SessionNames<'_>) {
        self.has_begun = true;
        let mut rest = packets;
        let mut payload = Vec::new();
        while let Some(header) = Header::parse(rest) {
            let (packet, behind) = rest.split_at(rest.len().min(HEADER + header.length));
            payload.extend_from_slice(&packet[HEADER..]);
            rest = behind;
            if header.length < MAX_PAYLOAD {
                let query = std::mem::take(&mut payload);
                self.add_command(Command::Query, query.get(1..).unwrap_or_default(), names);
            }
        }
    }

    /// A command has arrived. None: it is not captured. `content`: what follows the command. `is_hidden`: it may hold a secret.
    pub(crate) fn begin(
        &mut self,
        command: Command,
        content: &[u8],
        since: Instant,
        is_hidden: bool,
    ) -> Option<Box<CapturedCommand>> {
        if !self.has_begun || !is_captured(command) {
            return None;
        }
        if is_hidden {
            self.active.count_filtered();
            return None;
        }
        self.has_quit |= command == Command::Quit;
        let mut captured = CapturedCommand::new(command, content, self.next_time(), since);
        captured.prepared_id = match command {
            Command::Execute
            | Command::SendLongData
            | Command::CloseStatement
            | Command::ResetStatement
            | Command::Fetch => content.first_chunk().map(|id| u32::from_le_bytes(*id)),
            _ => None,
        };
        Some(Box::new(captured))
    }

    /// A command is lost, since its request is too long, or has parameters that the files have no place for.
    pub(crate) fn on_lost_command(&self) {
        self.active.count_dropped();
    }

    /// The command has ended.
    pub(crate) fn end(&self, ended: &CapturedCommand, outcome: CommandOutcome, names: &SessionNames<'_>) {
        let error = if let CommandOutcome::Error(code) = outcome { code } else { 0 };
        let latency_us = match outcome {
            CommandOutcome::Silent => 0,
            _ => u64::try_from(ended.since.elapsed().as_micros()).unwrap_or(u64::MAX),
        };
        let record = RecordRef {
            time_ns: ended.time,
            connection: self.connection,
            command: ended.command,
            is_success: error == 0,
            prepared_id: ended.prepared_id,
            prepared_text: ended.prepared.as_ref().map(|prepared| &*prepared.text),
            payload: &ended.content,
        };
        let result = ResultRef {
            connection: self.connection,
            time_ns: ended.time,
            latency_us,
            rows: ended.size.rows,
            bytes: ended.size.bytes,
            error,
            checksum: (ended.has_result_set && error == 0).then(|| ended.checksum.value()),
            digest: ended.statement.as_ref().map(|statement| &statement.digest),
            user: names.user.as_bytes(),
            database: names.database,
            node: names.node.as_bytes(),
        };
        self.active.push(record, result);
    }

    /// The client's connection has ended, perhaps without COM_QUIT.
    pub(crate) fn quit(&mut self, names: &SessionNames<'_>) {
        if self.has_begun && !self.has_quit {
            self.add_command(Command::Quit, b"", names);
        }
    }

    /// Adds a command that the client has not sent, or that has no response.
    fn add_command(&mut self, command: Command, content: &[u8], names: &SessionNames<'_>) {
        let added = CapturedCommand::new(command, content, self.next_time(), Instant::now());
        self.end(&added, CommandOutcome::Silent, names);
    }

    fn next_time(&mut self) -> i64 {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.last_time = i64::try_from(now.as_nanos()).unwrap_or(i64::MAX).max(self.last_time + 1);
        self.last_time
    }
}

/// Hides the client's data.
impl std::fmt::Debug for CapturedCommand {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "CapturedCommand({:?})", self.command)
    }
}

impl std::fmt::Debug for SessionCapture {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "SessionCapture({})", self.connection)
    }
}
