//! Exports the states of a session that is already open when a capture of traffic starts. Its next command is held
//! while its node exports the states, which become the first captured commands of the session. The session does not
//! migrate.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use migration::state_export::{ExportOutcome, StateExport, export_query};
use migration::state_summary::StateSummary;
use mysql_proto::capability::Capabilities;
use mysql_proto::command::Command;
use mysql_proto::request_reader::{MAX_OBSERVED_BYTES, RequestStart};

use super::Session;
use super::traffic::Traffic;
use crate::node::SessionState;
use crate::{clock, states_memory};

/// Time until an export is tried again, if the node has rejected it, or the states cannot be restored or queued. It
/// doubles with each attempt.
const FIRST_RETRY_INTERVAL: Duration = Duration::from_secs(10);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(300);

/// The export of one session.
#[derive(Default)]
pub(super) struct SessionExport {
    /// None: no export runs.
    running: RefCell<Option<RunningExport>>,
    /// Before this time, no export is tried.
    retry_at: Cell<Duration>,
    /// Zero: no export has failed.
    retry_interval: Cell<Duration>,
    /// The node has failed during an export.
    is_interrupted: Cell<bool>,
}

struct RunningExport {
    answer: StateExport,
    /// The states were received, and the node undoes what the export has changed in the session.
    is_undoing: bool,
}

impl Session {
    /// Whether a request must be held, in order to export the session's states first.
    pub(super) fn needs_states_before(&self, start: RequestStart<'_>, traffic: &Traffic) -> bool {
        // The other commands replace the states.
        let needs_states =
            !matches!(Command::from(start.command), Command::Quit | Command::ChangeUser | Command::ResetConnection);
        start.is_first
            && start.length < MAX_OBSERVED_BYTES
            && needs_states
            && traffic.commands.statements.needs_states()
            && self.may_export_states()
    }

    fn may_export_states(&self) -> bool {
        self.counted_state().is_some_and(|counted| counted.state == SessionState::Idle && counted.pinned.is_none())
            && !self.migration.is_client_held()
            && self.export.running.borrow().is_none()
            && clock::now() >= self.export.retry_at.get()
    }

    /// Starts the export if a request was held for it. True: the request has to wait.
    pub(super) fn start_state_export(&self) -> bool {
        let needs_states = self.with_traffic(|traffic| traffic.commands.statements.needs_states()).unwrap_or_default();
        let (true, true, Some(upstream)) = (needs_states, self.may_export_states(), self.upstream()) else {
            return false;
        };
        if !upstream.conn().is_quiescent() || upstream.conn().has_unread() {
            return false; // what is unread would be taken for the states
        }
        let deprecate_eof = self.with_traffic(|traffic| traffic.capabilities.has(Capabilities::DEPRECATE_EOF));
        let answer = StateExport::new(deprecate_eof.unwrap_or_default(), states_memory::limits());
        self.export.running.replace(Some(RunningExport { answer, is_undoing: false }));
        // If the connection is broken, an event reports it.
        let _ = upstream.conn().write_or_queue(&export_query());
        true
    }

    /// Whether an export runs that is not a part of a migration.
    pub(crate) fn is_exporting_states(&self) -> bool {
        self.export.running.borrow().is_some()
    }

    /// Whether the next bytes of the node may be states, which must not stay in buffers.
    pub(crate) fn may_receive_states(&self) -> bool {
        self.migration.is_client_held() || self.is_exporting_states()
    }

    /// Handles bytes of the node while an export runs.
    pub(crate) fn on_exported_bytes(self: &Rc<Self>, bytes: &[u8]) {
        let Some(mut export) = self.export.running.take() else { return };
        let Some(outcome) = export.answer.receive(bytes) else {
            self.export.running.replace(Some(export));
            return;
        };
        if export.answer.has_trailing_bytes() {
            return self.end_with_connection(); // a node sends unrequested bytes when it closes
        }
        match outcome {
            ExportOutcome::States(mut states) if !export.is_undoing => {
                let packets =
                    states.statement.pieces().iter().flat_map(|piece| piece.iter().copied()).collect::<Vec<_>>();
                let node = self.node_name();
                let is_waiting = self.with_traffic(|traffic| {
                    let statements = &mut traffic.commands.statements;
                    statements.begin_capture(&packets, &node);
                    statements.needs_states()
                });
                if is_waiting.unwrap_or_default() {
                    self.delay_next_export(); // the queue has no room for the states, or the capture has ended
                }
                self.undo_export(&mut states.summary);
            }
            ExportOutcome::NoToken(mut summary) | ExportOutcome::Unusable(_, mut summary) if !export.is_undoing => {
                self.delay_next_export();
                self.undo_export(&mut summary);
            }
            ExportOutcome::Rejected(_) => {
                self.delay_next_export();
                self.decide_again();
            }
            ExportOutcome::Ok if export.is_undoing => self.decide_again(),
            _ => self.end_with_connection(),
        }
    }

    /// The node has failed, so the export ends. If the session fails over, its request goes to the other node.
    pub(super) fn interrupt_state_export(&self) {
        if self.export.running.take().is_some() {
            self.export.is_interrupted.set(true);
        }
    }

    /// The session has arrived at another node. Returns whether a request waits that an interrupted export has held.
    pub(super) fn take_interrupted_export(&self) -> bool {
        self.export.is_interrupted.take()
    }

    fn delay_next_export(&self) {
        let interval = (2 * self.export.retry_interval.get()).clamp(FIRST_RETRY_INTERVAL, MAX_RETRY_INTERVAL);
        self.export.retry_interval.set(interval);
        self.export.retry_at.set(clock::now() + interval);
    }

    fn undo_export(self: &Rc<Self>, summary: &mut StateSummary) {
        match (summary.undo.take(), self.upstream()) {
            (Some(undo), Some(upstream)) => {
                let answer = StateExport::awaiting_ok();
                self.export.running.replace(Some(RunningExport { answer, is_undoing: true }));
                let _ = upstream.conn().write_or_queue(&undo);
            }
            _ => self.decide_again(),
        }
    }
}
