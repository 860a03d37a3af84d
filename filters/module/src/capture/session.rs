//! What is captured of one session.

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use mysql_proto::command::Command;
use mysql_proto::packet::{HEADER, Header, MAX_PAYLOAD};
use mysql_proto::tracker::CommandOutcome;

use super::ActiveCapture;
use super::command::{CapturedCommand, SessionNames, SharedNames, is_captured};

/// A session in a capture.
pub(crate) struct SessionCapture {
    active: Arc<ActiveCapture>,
    /// The number of the client's connection in the files.
    connection: u64,
    /// The time of the last command, in nanoseconds since 1970: times in a session increase.
    last_time: i64,
    /// The session's state before its next command is in the files. Until then, commands are left out.
    has_begun: bool,
    /// Those of the last command.
    names: Arc<SharedNames>,
    /// COM_QUIT is in the files.
    has_quit: bool,
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
        Self { active, connection, last_time: 0, has_begun: false, names: Arc::default(), has_quit: false }
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
        let names_statement = matches!(
            command,
            Command::Execute
                | Command::SendLongData
                | Command::CloseStatement
                | Command::ResetStatement
                | Command::Fetch
        );
        if names_statement {
            captured.set_prepared_id(content.first_chunk().map(|id| u32::from_le_bytes(*id)));
        }
        Some(Box::new(captured))
    }

    /// A command is lost, since its request is too long, or has parameters that the files have no place for.
    pub(crate) fn on_lost_command(&self) {
        self.active.count_dropped();
    }

    /// The command has ended.
    pub(crate) fn end(&mut self, ended: CapturedCommand, outcome: CommandOutcome, names: &SessionNames<'_>) {
        if self.names.as_names() != *names {
            self.names = SharedNames::new(names);
        }
        self.active.push(ended.end(self.connection, outcome, Arc::clone(&self.names)));
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
        self.end(added, CommandOutcome::Silent, names);
    }

    fn next_time(&mut self) -> i64 {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.last_time = i64::try_from(now.as_nanos()).unwrap_or(i64::MAX).max(self.last_time + 1);
        self.last_time
    }
}

impl std::fmt::Debug for SessionCapture {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "SessionCapture({})", self.connection)
    }
}
