//! What a session has to do with a capture of traffic.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use mysql_proto::command::Command;
use mysql_proto::query::text_range;
use mysql_proto::tracker::CommandOutcome;

use super::super::collector::PreparedStatement;
use super::super::rows::Statement;
use super::SessionStatements;
use super::running::{CommandCapture, RunningCommand};
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

    /// Joins or leaves the capture, if one has begun or ended. Executions must be observed.
    pub(crate) fn follow_capture(&mut self, group: &str, node: &str) {
        self.capture_generation = capture::generation();
        let Some(client) = &self.client else { return };
        let active = capture::current().filter(|active| active.wants(&client.user, group));
        let (id, names) = (client.connection.id, SessionNames { user: &client.user, database: &self.database, node });
        self.capture = active.map(|active| {
            Box::new(if self.has_run {
                SessionCapture::of_running_session(active, id)
            } else {
                SessionCapture::of_new_session(active, id, &names)
            })
        });
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

    /// The client's connection has ended.
    pub(crate) fn on_disconnected(&mut self, node: &str) {
        if let (Some(capture), Some(client)) = (&mut self.capture, &self.client) {
            capture.quit(&SessionNames { user: &client.user, database: &self.database, node });
        }
        self.capture = None;
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
            return; // the files have no place for attributes of parameters, so the command is lost
        }
        let content = match text_range(payload, self.has_attributes) {
            Some(range) if command == Command::Query => &payload[range],
            _ => &payload[1..],
        };
        let newest = self.commands.back_mut().filter(|newest| newest.command == command);
        let since = newest.as_ref().and_then(|newest| newest.since).unwrap_or_else(Instant::now);
        // The writer looks at all other texts.
        let is_hidden = about.prepared.as_ref().is_some_and(|prepared| prepared.known.secrecy.hides(&prepared.text));
        let captured = capture.begin(command, content, since, is_hidden);
        let Some(mut captured) = captured else {
            newest.into_iter().for_each(|newest| newest.capture = CommandCapture::No);
            return;
        };
        let executed = about.prepared.filter(|_| command == Command::Execute);
        captured.set_statement(about.statement.map(Arc::clone), executed.map(|prepared| Arc::clone(&prepared.text)));
        match newest {
            Some(newest) => newest.capture = CommandCapture::Yes(captured),
            None => {
                // It has no response, and has ended already.
                let Some(client) = &self.client else { return };
                let names = SessionNames { user: &client.user, database: &self.database, node };
                capture.end(*captured, CommandOutcome::Silent, &names);
            }
        }
    }

    /// Whether [`Self::on_row_bytes`] is to be called.
    pub(crate) fn wants_rows(&self) -> bool {
        self.capture.is_some()
            && self.commands.front().is_some_and(|oldest| matches!(oldest.capture, CommandCapture::Yes(_)))
    }

    /// Bytes of rows of the oldest command.
    pub(crate) fn on_row_bytes(&mut self, bytes: &[u8]) {
        if let Some(captured) = self.commands.front_mut().and_then(RunningCommand::captured) {
            captured.on_row_bytes(bytes);
        }
    }

    /// A command has ended.
    pub(super) fn end_captured(&mut self, command: CommandCapture, outcome: CommandOutcome, node: &str) {
        let (Some(capture), Some(client)) = (&mut self.capture, &self.client) else { return };
        match command {
            CommandCapture::Yes(captured) => {
                let names = SessionNames { user: &client.user, database: &self.database, node };
                capture.end(*captured, outcome, &names);
            }
            CommandCapture::Awaited if outcome != CommandOutcome::Silent => capture.on_lost_command(),
            CommandCapture::Awaited | CommandCapture::No => {}
        }
    }
}
