//! A command that is captured: while it runs, and when it has ended.

use std::sync::{Arc, LazyLock};
use std::time::Instant;

use migration::budget::{Budget, Reservation};
use mysql_proto::command::Command;
use mysql_proto::secret::SecretBytes;
use mysql_proto::tracker::{CommandOutcome, ResultSize};
use traffic_files::response::ResponseContent;

use crate::statements::Statement;

/// Bytes of long commands that may run at the same time.
const MAX_RUNNING_BYTES: usize = 128 << 20;

/// Shorter commands are not counted.
const MIN_COUNTED_BYTES: usize = 16 << 10;

static RUNNING: LazyLock<Arc<Budget>> = LazyLock::new(|| Budget::new(MAX_RUNNING_BYTES));

/// A command that runs, and will be captured when it has ended.
pub(crate) struct CapturedCommand {
    command: Command,
    /// The message without its first byte, the command, and without query attributes.
    content: SecretBytes,
    /// For a long content, while the command runs. After that, the queue limits the memory.
    reservation: Option<Reservation>,
    /// When it arrived, in nanoseconds since 1970.
    time: i64,
    since: Instant,
    /// The id of the prepared statement that it uses or has prepared.
    prepared_id: Option<u32>,
    /// The text of the prepared statement that it executes.
    prepared_text: Option<Arc<[u8]>>,
    /// None: the encoder identifies it by its text.
    statement: Option<Arc<Statement>>,
    response: ResponseContent,
}

/// What the results tell about the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SessionNames<'a> {
    pub(crate) user: &'a str,
    pub(crate) database: &'a [u8],
    pub(crate) node: &'a str,
}

/// [`SessionNames`] that commands share.
#[derive(Debug, Default)]
pub(super) struct SharedNames {
    user: Box<str>,
    database: Box<[u8]>,
    node: Box<str>,
}

impl SharedNames {
    pub(super) fn new(names: &SessionNames<'_>) -> Arc<Self> {
        Arc::new(Self { user: names.user.into(), database: names.database.into(), node: names.node.into() })
    }

    pub(super) fn as_names(&self) -> SessionNames<'_> {
        SessionNames { user: &self.user, database: &self.database, node: &self.node }
    }
}

/// A command that has ended, on its way to the writer.
pub(super) struct EndedCommand {
    pub(super) connection: u64,
    pub(super) command: Command,
    pub(super) content: SecretBytes,
    pub(super) time: i64,
    pub(super) prepared_id: Option<u32>,
    pub(super) prepared_text: Option<Arc<[u8]>>,
    pub(super) statement: Option<Arc<Statement>>,
    pub(super) latency_us: u64,
    pub(super) size: ResultSize,
    /// 0: none.
    pub(super) error: u16,
    pub(super) checksum: Option<u64>,
    pub(super) names: Arc<SharedNames>,
}

impl EndedCommand {
    /// About how much memory it takes.
    pub(super) fn bytes(&self) -> usize {
        size_of::<Self>() + self.content.len()
    }
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
    pub(super) fn new(command: Command, content: &[u8], time: i64, since: Instant) -> Self {
        let (command, content) = match command {
            Command::ChangeUser => (Command::ResetConnection, &b""[..]),
            _ => (command, content),
        };
        Self {
            command,
            content: content.into(),
            reservation: None,
            time,
            since,
            prepared_id: None,
            prepared_text: None,
            statement: None,
            response: ResponseContent::default(),
        }
    }

    /// False: the long commands that run exceed [`MAX_RUNNING_BYTES`] together.
    pub(super) fn reserve_memory(&mut self) -> bool {
        if self.content.len() < MIN_COUNTED_BYTES {
            return true;
        }
        let mut reservation = RUNNING.reservation();
        let has_room = reservation.grow(self.content.len());
        self.reservation = has_room.then_some(reservation);
        has_room
    }

    /// The command names this prepared statement.
    pub(super) fn set_prepared_id(&mut self, id: Option<u32>) {
        self.prepared_id = id;
    }

    /// The command runs this statement. `prepared_text`: it executes a prepared statement with this text.
    pub(crate) fn set_statement(&mut self, statement: Option<Arc<Statement>>, prepared_text: Option<Arc<[u8]>>) {
        self.statement = statement;
        self.prepared_text = prepared_text;
    }

    /// The node has prepared the statement of the command.
    pub(crate) fn on_prepared(&mut self, id: u32) {
        self.prepared_id = Some(id);
    }

    /// Bytes of rows, with packet headers.
    pub(crate) fn on_row_bytes(&mut self, bytes: &[u8]) {
        self.response.on_row_bytes(bytes);
    }

    pub(crate) fn on_result_ended(&mut self, size: ResultSize) {
        self.response.on_result_ended(size);
    }

    pub(super) fn end(self, connection: u64, outcome: CommandOutcome, names: Arc<SharedNames>) -> EndedCommand {
        let error = if let CommandOutcome::Error(code) = outcome { code } else { 0 };
        let latency_us = match outcome {
            CommandOutcome::Silent => 0,
            _ => u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX),
        };
        EndedCommand {
            connection,
            command: self.command,
            content: self.content,
            time: self.time,
            prepared_id: self.prepared_id,
            prepared_text: self.prepared_text,
            statement: self.statement,
            latency_us,
            size: self.response.size(),
            error,
            checksum: self.response.checksum(error),
            names,
        }
    }
}

/// Hides the client's data.
impl std::fmt::Debug for CapturedCommand {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "CapturedCommand({:?})", self.command)
    }
}
