//! How the statements of a session take part in a capture of traffic.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use mysql_proto::command::Command;
use mysql_proto::query::text_range;
use mysql_proto::request_reader::{MAX_OBSERVED_BYTES, RequestStart};
use mysql_proto::tracker::CommandOutcome;

use super::super::collector::PreparedStatement;
use super::super::rows::Statement;
use super::SessionStatements;
use super::running::{CaptureState, RunningCommand};
use crate::capture::{self, SessionCapture, SessionNames};

/// The statement of a request.
pub(super) struct RequestStatement<'a> {
    /// The first one, if there are several.
    pub(super) statement: Option<&'a Arc<Statement>>,
    /// The prepared statement that the request names.
    pub(super) prepared: Option<Rc<PreparedStatement>>,
}

impl SessionStatements {
    /// Whether [`Self::follow_capture`] must be called.
    pub(crate) fn must_follow_capture(&self) -> bool {
        self.capture_generation != capture::generation()
    }

    /// Joins or leaves the capture, if one has begun or ended, or the user has changed. Executions must be observed.
    pub(crate) fn follow_capture(&mut self, group: &str, node: &str) {
        let Some(client) = &self.client else { return };
        self.capture_generation = capture::generation();
        let active = capture::current().filter(|active| active.wants(&client.user, group));
        let (id, names) = (client.connection.id, SessionNames { user: &client.user, database: &self.database, node });
        let before = self.capture.take();
        for command in &mut self.commands {
            command.capture = CaptureState::No; // it began before this capture, or before the states are captured
        }
        self.capture = match (active, before) {
            (Some(active), before) => {
                let last_time = before.map_or(0, |before| before.last_time());
                let mut capture = SessionCapture::new(active, id, last_time);
                if !self.has_run {
                    capture.begin(&names);
                }
                Some(Box::new(capture))
            }
            (None, Some(mut before)) => {
                before.quit(&names);
                None
            }
            (None, None) => None,
        };
    }

    /// Whether the session takes part in a capture.
    pub(crate) fn is_capturing(&self) -> bool {
        self.capture.is_some()
    }

    /// Whether the session cannot be captured before [`Self::begin_capture`].
    pub(crate) fn needs_states(&self) -> bool {
        self.capture.as_ref().is_some_and(|capture| !capture.has_begun())
    }

    /// `packets`: the statements that restore the states of the session.
    pub(crate) fn begin_capture(&mut self, packets: &[u8], node: &str) {
        if let (Some(capture), Some(client)) = (&mut self.capture, &self.client) {
            let names = SessionNames { user: &client.user, database: &self.database, node };
            capture.begin_with_states(packets, &names);
        }
    }

    /// The session has lost its node, or cannot be followed any more.
    pub(crate) fn end_capture(&mut self, node: &str) {
        if let (Some(mut capture), Some(client)) = (self.capture.take(), &self.client) {
            let is_unfinished = |command: &&RunningCommand| !matches!(command.capture, CaptureState::No);
            self.commands.iter().filter(is_unfinished).for_each(|_| capture.on_lost_command());
            capture.quit(&SessionNames { user: &client.user, database: &self.database, node });
        }
    }

    /// A request has begun.
    pub(crate) fn on_request_start(&self, start: RequestStart<'_>) {
        // The reader of requests skips what is so long, and COM_STMT_SEND_LONG_DATA has no response with which it could be
        // counted.
        if start.length > MAX_OBSERVED_BYTES
            && Command::from(start.command) == Command::SendLongData
            && let Some(capture) = self.capture.as_ref().filter(|capture| capture.has_begun())
        {
            capture.on_lost_command();
        }
    }

    /// Captures the newest command, which is complete.
    pub(super) fn capture_request(
        &mut self,
        command: Command,
        payload: &[u8],
        about: RequestStatement<'_>,
        node: &str,
    ) {
        let Some(capture) = &mut self.capture else { return };
        if self.has_attributes && command == Command::Execute {
            return; // the format has no place for query attributes; `end_captured` counts the command as lost
        }
        let content = match text_range(payload, self.has_attributes) {
            Some(range) if command == Command::Query => &payload[range],
            _ => &payload[1..],
        };
        let newest = self.commands.back_mut().filter(|newest| newest.command == command);
        let since = newest.as_ref().and_then(|newest| newest.since).unwrap_or_else(Instant::now);
        // The encoder checks all other texts.
        let is_hidden = about.prepared.as_ref().is_some_and(|prepared| prepared.known.secrecy.hides(&prepared.text));
        let captured = capture.start(command, content, since, is_hidden);
        let Some(mut captured) = captured else {
            newest.into_iter().for_each(|newest| newest.capture = CaptureState::No);
            return;
        };
        let executed = about.prepared.filter(|_| command == Command::Execute);
        captured.set_statement(about.statement.map(Arc::clone), executed.map(|prepared| Arc::clone(&prepared.text)));
        match newest {
            Some(newest) => newest.capture = CaptureState::Yes(captured),
            None => {
                // The command has no response, and has ended already.
                let Some(client) = &self.client else { return };
                let names = SessionNames { user: &client.user, database: &self.database, node };
                capture.end(*captured, CommandOutcome::Silent, &names);
            }
        }
    }

    /// Whether the oldest command is captured, so that it needs [`Self::on_row_bytes`].
    pub(crate) fn wants_rows(&self) -> bool {
        self.capture.is_some()
            && self.commands.front().is_some_and(|oldest| matches!(oldest.capture, CaptureState::Yes(_)))
    }

    /// Bytes of rows of the oldest command.
    pub(crate) fn on_row_bytes(&mut self, bytes: &[u8]) {
        if let Some(captured) = self.commands.front_mut().and_then(RunningCommand::captured) {
            captured.on_row_bytes(bytes);
        }
    }

    /// A command has ended.
    pub(super) fn end_captured(&mut self, command: CaptureState, outcome: CommandOutcome, node: &str) {
        let (Some(capture), Some(client)) = (&mut self.capture, &self.client) else { return };
        match command {
            CaptureState::Yes(captured) => {
                let names = SessionNames { user: &client.user, database: &self.database, node };
                capture.end(*captured, outcome, &names);
            }
            CaptureState::Awaited if outcome != CommandOutcome::Silent => capture.on_lost_command(),
            CaptureState::Awaited | CaptureState::No => {}
        }
    }
}
