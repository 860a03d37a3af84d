//! What is captured of one session.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Instant, SystemTime};

use mysql_proto::command::Command;
use mysql_proto::packet::{HEADER, Header, MAX_PAYLOAD};
use mysql_proto::secret::SecretBytes;
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
    /// The records that restore the session's states are queued. Until then, commands are left out.
    has_begun: bool,
    /// The names of the last command, which the next one shares if they are the same.
    names: Arc<SharedNames>,
    /// COM_QUIT was captured.
    has_quit: bool,
}

impl SessionCapture {
    /// `id`: of the client's connection to this Envoy. `last_time`: of the session's last captured command; 0: there is
    /// none.
    pub(crate) fn new(active: Arc<ActiveCapture>, id: u64, last_time: i64) -> Self {
        let connection = active.connection(id);
        active.counts().waiting.fetch_add(1, Ordering::Relaxed);
        Self { active, connection, last_time, has_begun: false, names: Arc::default(), has_quit: false }
    }

    /// Begins with a session that has run nothing yet: its only state is the database.
    pub(crate) fn begin(&mut self, names: &SessionNames<'_>) {
        if names.database.is_empty() || self.add_command(Command::InitDb, names.database, names) {
            self.set_begun();
        }
    }

    /// Whether the session's states are captured, so that its commands can follow.
    pub(crate) fn has_begun(&self) -> bool {
        self.has_begun
    }

    pub(crate) fn last_time(&self) -> i64 {
        self.last_time
    }

    /// Begins with an open session. `packets`: the statements that restore its states. If the queue has no room for all
    /// of them, the session has not begun.
    pub(crate) fn begin_with_states(&mut self, packets: &[u8], names: &SessionNames<'_>) {
        let mut rest = packets;
        let mut payload = SecretBytes::default();
        while let Some(header) = Header::parse(rest) {
            let (packet, behind) = rest.split_at(rest.len().min(HEADER + header.length));
            payload.extend_from_slice(&packet[HEADER..]);
            rest = behind;
            if header.length < MAX_PAYLOAD {
                let query = std::mem::take(&mut payload);
                if !self.add_command(Command::Query, query.get(1..).unwrap_or_default(), names) {
                    return;
                }
            }
        }
        self.set_begun();
    }

    fn set_begun(&mut self) {
        self.has_begun = true;
        self.active.counts().waiting.fetch_sub(1, Ordering::Relaxed);
    }

    /// A command has arrived. None: it is not captured. `content`: the message without its first byte, the command.
    /// `is_hidden`: it may hold a secret.
    pub(crate) fn start(
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
        if !captured.reserve_memory() {
            self.active.count_dropped();
            return None;
        }
        if command.names_statement() {
            captured.set_prepared_id(content.first_chunk().map(|id| u32::from_le_bytes(*id)));
        }
        Some(Box::new(captured))
    }

    /// A command is lost, since its request is too long, or has parameters that the files have no place for.
    pub(crate) fn on_lost_command(&self) {
        self.active.count_dropped();
    }

    /// The command has ended. Returns whether it was queued.
    pub(crate) fn end(&mut self, ended: CapturedCommand, outcome: CommandOutcome, names: &SessionNames<'_>) -> bool {
        if self.names.as_names() != *names {
            self.names = SharedNames::new(names);
        }
        self.active.push(ended.end(self.connection, outcome, Arc::clone(&self.names)))
    }

    /// The client's connection has ended, perhaps without COM_QUIT.
    pub(crate) fn quit(&mut self, names: &SessionNames<'_>) {
        if self.has_begun && !self.has_quit {
            self.add_command(Command::Quit, b"", names);
        }
    }

    /// Adds a command that the client has not sent. Returns whether it was queued.
    fn add_command(&mut self, command: Command, content: &[u8], names: &SessionNames<'_>) -> bool {
        let added = CapturedCommand::new(command, content, self.next_time(), Instant::now());
        self.end(added, CommandOutcome::Silent, names)
    }

    fn next_time(&mut self) -> i64 {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.last_time = i64::try_from(now.as_nanos()).unwrap_or(i64::MAX).max(self.last_time + 1);
        self.last_time
    }
}

impl Drop for SessionCapture {
    fn drop(&mut self) {
        if !self.has_begun {
            self.active.counts().waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl std::fmt::Debug for SessionCapture {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "SessionCapture({})", self.connection)
    }
}
