//! One attempt to migrate one session to one node, step by step.
//!
//! The slow steps come first: the connection to the target, its greeting and TLS, while the old node still serves the
//! session. When the session is idle, the client is held, the old node exports the session's states, and the target
//! restores them. Until [`Effect::Switch`], the session can still stay: the old node undoes the export, and the
//! migration ends with [`Effect::Abort`]. If the session cannot stay, the migration ends with [`Effect::Lost`].
//!
//! The caller executes the effects in order, and reports their results. All times come from one monotonic clock.

mod effect;

use std::time::Duration;

use mysql_proto::login::NodeTls;
use mysql_proto::secret::SecretBytes;

use crate::budget::MemoryLimits;
use crate::identity::Identity;
use crate::state_export::{self, ExportOutcome, ExportedStates, StateExport};
use crate::state_snapshot::StateSnapshot;
use crate::state_summary::{StateSummary, UnusableStates};
use crate::target_login::{LoginAction, LoginFailure, TargetLogin};
use crate::timeouts::{MigrationStep, MigrationTimeouts};
pub use effect::{AbortReason, Effect};

#[derive(Debug)]
enum MigrationPhase {
    /// The target is being connected or secured, or waits for the session to be idle.
    PreparingTarget,
    /// Like `PreparingTarget`, but the old node is gone, and the client is held.
    PreparingFailover,
    Exporting(StateExport),
    /// `undo`: the statement that undoes the export at the old node. None: the session cannot return to the old node.
    Restoring {
        undo: Option<SecretBytes>,
        /// The target has restored all states.
        is_restored: bool,
    },
    /// The old node undoes the export. Then the session stays, for this reason.
    Undoing {
        answer: StateExport,
        reason: AbortReason,
    },
    /// The migration ends for this reason, but the old node still owes the states.
    DiscardingExport {
        answer: StateExport,
        reason: AbortReason,
    },
    Finished,
}

/// One attempt.
#[derive(Debug)]
pub struct Migration {
    phase: MigrationPhase,
    step: MigrationStep,
    target_login: TargetLogin,
    deprecate_eof: bool,
    /// The old connection was closed, and the caller has not reported yet whether the node is gone.
    is_old_node_in_doubt: bool,
    /// The exported states. They are valid until the client sends something.
    snapshot: Option<StateSnapshot>,
    export_requested_at: Duration,
    /// How long the old node lets the session be idle, if known.
    wait_timeout: Option<Duration>,
    timeouts: MigrationTimeouts,
    memory_limits: MemoryLimits,
    step_deadline: Option<Duration>,
    overall_deadline: Duration,
}

impl Migration {
    /// Starts an attempt; the caller connects to the target. `tls`: whether that connection uses TLS.
    #[must_use]
    pub fn start(identity: Identity, tls: NodeTls, timeouts: MigrationTimeouts, now: Duration) -> Self {
        let deprecate_eof = identity.capabilities().has(mysql_proto::capability::Capabilities::DEPRECATE_EOF);
        let mut migration = Self {
            phase: MigrationPhase::PreparingTarget,
            step: MigrationStep::Connecting,
            target_login: TargetLogin::new(identity, tls),
            deprecate_eof,
            is_old_node_in_doubt: false,
            snapshot: None,
            export_requested_at: now,
            wait_timeout: None,
            timeouts,
            memory_limits: MemoryLimits::default(),
            step_deadline: None,
            overall_deadline: now + timeouts.overall,
        };
        migration.start_step(MigrationStep::Connecting, now);
        migration
    }

    /// Starts an attempt for a session whose node is gone. The client is held from the beginning.
    #[must_use]
    pub fn start_failover(
        identity: Identity,
        tls: NodeTls,
        timeouts: MigrationTimeouts,
        snapshot: StateSnapshot,
        now: Duration,
    ) -> Self {
        let overall_deadline = (now + timeouts.overall).min(snapshot.expires_at());
        Self {
            phase: MigrationPhase::PreparingFailover,
            snapshot: Some(snapshot),
            overall_deadline,
            ..Self::start(identity, tls, timeouts, now)
        }
    }

    /// Sets the memory limits of the states.
    #[must_use]
    pub fn with_memory_limits(self, memory: MemoryLimits) -> Self {
        Self { memory_limits: memory, ..self }
    }

    /// Takes the exported states, if any. They are valid until the client sends something.
    pub fn take_snapshot(&mut self) -> Option<StateSnapshot> {
        self.snapshot.take()
    }

    /// How long the old node lets the session be idle, if known from its export.
    #[must_use]
    pub const fn wait_timeout(&self) -> Option<Duration> {
        self.wait_timeout
    }

    /// The current step.
    #[must_use]
    pub const fn step(&self) -> MigrationStep {
        self.step
    }

    /// Whether the client is held.
    #[must_use]
    pub const fn is_client_held(&self) -> bool {
        !matches!(self.phase, MigrationPhase::PreparingTarget | MigrationPhase::Finished)
    }

    /// Whether the client is held, and the session cannot return to the old node.
    #[must_use]
    pub const fn is_without_old_node(&self) -> bool {
        matches!(self.phase, MigrationPhase::PreparingFailover | MigrationPhase::Restoring { undo: None, .. })
    }

    /// Whether the old node owes an answer.
    #[must_use]
    pub const fn awaits_old_node(&self) -> bool {
        matches!(
            self.phase,
            MigrationPhase::Exporting(_) | MigrationPhase::Undoing { .. } | MigrationPhase::DiscardingExport { .. }
        )
    }

    /// The session's connection id at the target. None: the target has not greeted.
    #[must_use]
    pub const fn target_connection_id(&self) -> Option<u32> {
        self.target_login.connection_id()
    }

    /// Whether the login at the target has succeeded, so that its process list shows the session.
    #[must_use]
    pub const fn is_logged_in(&self) -> bool {
        matches!(self.phase, MigrationPhase::Restoring { .. }) && self.target_login.is_logged_in()
    }

    /// The session is at the target. The caller can close the old connection.
    pub fn on_switched(&mut self) {
        self.phase = MigrationPhase::Finished;
    }

    /// Returns [`Effect::Switch`] again if the session is restored, and the old node is not in doubt.
    #[must_use]
    pub fn retry_switch(&mut self) -> Vec<Effect> {
        match self.phase {
            MigrationPhase::Restoring { is_restored: true, .. } if !self.is_old_node_in_doubt => vec![Effect::Switch],
            _ => Vec::new(),
        }
    }

    /// When [`Self::on_deadline`] is due, if ever.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        match self.phase {
            MigrationPhase::Finished => None,
            MigrationPhase::Undoing { .. } | MigrationPhase::DiscardingExport { .. } => self.step_deadline,
            _ => Some(self.step_deadline.map_or(self.overall_deadline, |step| step.min(self.overall_deadline))),
        }
    }

    /// Processes bytes of the target, decrypted if there is TLS.
    pub fn on_target_bytes(&mut self, bytes: &[u8], now: Duration) -> Vec<Effect> {
        if matches!(
            self.phase,
            MigrationPhase::Finished | MigrationPhase::Undoing { .. } | MigrationPhase::DiscardingExport { .. }
        ) {
            return Vec::new();
        }
        match self.target_login.receive(bytes) {
            Ok(actions) => self.apply_actions(actions, now),
            Err(failure) => self.abort(AbortReason::TargetFailed(failure), now),
        }
    }

    /// TLS with the target is established.
    pub fn on_target_tls_established(&mut self, now: Duration) -> Vec<Effect> {
        match self.target_login.on_tls_established() {
            Ok(actions) => self.apply_actions(actions, now),
            Err(failure) => self.abort(AbortReason::TargetFailed(failure), now),
        }
    }

    /// The target sent invalid bytes, such as more than its greeting before TLS began.
    pub fn on_target_invalid(&mut self, now: Duration) -> Vec<Effect> {
        self.abort(AbortReason::TargetFailed(LoginFailure::ProtocolError), now)
    }

    /// The target closed the connection, or cannot be reached.
    pub fn on_target_lost(&mut self, now: Duration) -> Vec<Effect> {
        self.abort(AbortReason::Unreachable(self.step), now)
    }

    /// Starts the export. The session must be idle, without unprocessed bytes of the client. `identity`: the session's
    /// current one.
    pub fn start_export(&mut self, identity: Identity, now: Duration) -> Vec<Effect> {
        if !matches!((&self.phase, self.step), (MigrationPhase::PreparingTarget, MigrationStep::WaitingForIdle)) {
            return Vec::new();
        }
        self.target_login.set_identity(identity);
        self.phase = MigrationPhase::Exporting(StateExport::new(self.deprecate_eof, self.memory_limits.clone()));
        self.start_step(MigrationStep::Exporting, now);
        self.export_requested_at = now;
        vec![Effect::HoldClient(state_export::export_query().into())]
    }

    /// Processes bytes of the old node, while the client is held.
    pub fn on_old_node_bytes(&mut self, bytes: &[u8], now: Duration) -> Vec<Effect> {
        let (answer, reason) = match &mut self.phase {
            MigrationPhase::Exporting(export) => (export, None),
            MigrationPhase::Undoing { answer, reason } | MigrationPhase::DiscardingExport { answer, reason } => {
                (answer, Some(*reason))
            }
            // Unrequested bytes of the old node: servers send an error before they close.
            MigrationPhase::Restoring { undo, .. } => {
                *undo = None;
                return Vec::new();
            }
            MigrationPhase::PreparingFailover => return Vec::new(),
            MigrationPhase::PreparingTarget | MigrationPhase::Finished => return self.finish(Effect::Lost),
        };
        let Some(exported) = answer.receive(bytes) else { return Vec::new() };
        let closes = answer.has_trailing_bytes();
        let is_undoing = matches!(self.phase, MigrationPhase::Undoing { .. });
        match (exported, reason) {
            (ExportOutcome::ProtocolError, _) | (ExportOutcome::Ok, None) => self.finish(Effect::Lost),
            (ExportOutcome::States(states), None) => self.restore_states(states, closes, now),
            (ExportOutcome::States(states), Some(_)) if closes && !is_undoing => {
                self.keep_snapshot(states);
                self.finish(Effect::Lost)
            }
            (_, _) if closes => self.finish(Effect::Lost),
            (ExportOutcome::NoToken(mut summary), None) => self.undo_export(&mut summary, AbortReason::NoToken, now),
            (ExportOutcome::Unusable(why, mut summary), None) => {
                self.undo_export(&mut summary, AbortReason::UnusableStates(why), now)
            }
            (ExportOutcome::Rejected(code), None) => self.finish(Effect::Abort(AbortReason::ExportRejected(code))),
            (ExportOutcome::States(mut states), Some(reason)) if !is_undoing => {
                let effects = self.undo_export(&mut states.summary, reason, now);
                self.keep_snapshot(states);
                effects
            }
            // This reason replaces the first one: the next export would take as long, and its states be too large
            // again.
            (ExportOutcome::Unusable(why @ UnusableStates::TooLarge, mut summary), Some(_)) if !is_undoing => {
                self.undo_export(&mut summary, AbortReason::UnusableStates(why), now)
            }
            (ExportOutcome::NoToken(mut summary) | ExportOutcome::Unusable(_, mut summary), Some(reason))
                if !is_undoing =>
            {
                self.undo_export(&mut summary, reason, now)
            }
            (_, Some(reason)) => self.finish(Effect::Abort(reason)),
        }
    }

    /// The old node closed or reset the connection. The cause may be a KILL, which ends the session. If the node is
    /// gone, [`Self::on_old_node_lost`] follows. Until then there is no [`Effect::Switch`].
    pub const fn on_old_conn_closed(&mut self) {
        self.is_old_node_in_doubt = true;
    }

    /// The old node is gone. After the export this does not matter, unless the target fails as well.
    pub fn on_old_node_lost(&mut self) -> Vec<Effect> {
        self.is_old_node_in_doubt = false;
        match &mut self.phase {
            MigrationPhase::Restoring { undo, .. } => {
                *undo = None;
                self.retry_switch()
            }
            MigrationPhase::PreparingFailover | MigrationPhase::Finished => Vec::new(),
            _ => self.finish(Effect::Lost),
        }
    }

    /// The deadline has passed.
    pub fn on_deadline(&mut self, now: Duration) -> Vec<Effect> {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return Vec::new();
        }
        if matches!(self.phase, MigrationPhase::Undoing { .. } | MigrationPhase::DiscardingExport { .. }) {
            self.step_deadline = None;
            return vec![Effect::ReleaseSlots];
        }
        self.abort(AbortReason::TimedOut(self.step), now)
    }

    /// The session need not migrate any more.
    pub fn cancel(&mut self, now: Duration) -> Vec<Effect> {
        self.abort(AbortReason::Cancelled, now)
    }

    fn start_step(&mut self, step: MigrationStep, now: Duration) {
        self.step = step;
        self.step_deadline = Some(now + self.timeouts.of_step(step));
    }

    fn apply_actions(&mut self, actions: Vec<LoginAction>, now: Duration) -> Vec<Effect> {
        let mut effects = Vec::new();
        for action in actions {
            effects.push(match action {
                LoginAction::Send(bytes) => Effect::SendToTarget(bytes),
                LoginAction::RestoreStates(statement) => Effect::RestoreStates(statement),
                LoginAction::StartTls(bytes) => {
                    self.start_step(MigrationStep::StartingTls, now);
                    Effect::StartTargetTls(bytes)
                }
                LoginAction::Greeted if matches!(self.phase, MigrationPhase::PreparingFailover) => {
                    match self.restore_snapshot(now) {
                        Some(login) => Effect::SendToTarget(login),
                        None => {
                            self.phase = MigrationPhase::Finished;
                            Effect::Lost
                        }
                    }
                }
                LoginAction::Greeted => {
                    self.start_step(MigrationStep::WaitingForIdle, now);
                    Effect::TargetReady
                }
                LoginAction::Restored => {
                    if let MigrationPhase::Restoring { is_restored, .. } = &mut self.phase {
                        *is_restored = true;
                    }
                    if self.is_old_node_in_doubt {
                        continue;
                    }
                    Effect::Switch
                }
            });
        }
        effects
    }

    /// Sends the states to the target. `closes`: after the states, the old node announced that it closes the
    /// connection.
    fn restore_states(&mut self, mut states: ExportedStates, closes: bool, now: Duration) -> Vec<Effect> {
        match self.target_login.log_in(&states) {
            Ok(login) => {
                self.wait_timeout = states.summary.wait_timeout;
                let undo = states.summary.undo.take().filter(|_| !closes);
                self.keep_snapshot(states);
                self.phase = MigrationPhase::Restoring { undo, is_restored: false };
                self.start_step(MigrationStep::Restoring, now);
                vec![Effect::SendToTarget(login)]
            }
            Err(failure) => {
                let effects = if closes {
                    self.finish(Effect::Lost)
                } else {
                    self.undo_export(&mut states.summary, AbortReason::TargetFailed(failure), now)
                };
                self.keep_snapshot(states);
                effects
            }
        }
    }

    fn restore_snapshot(&mut self, now: Duration) -> Option<SecretBytes> {
        let snapshot = self.snapshot.take()?;
        let login = self.target_login.log_in(&snapshot.states);
        self.wait_timeout = snapshot.states.summary.wait_timeout;
        self.snapshot = Some(snapshot);
        self.phase = MigrationPhase::Restoring { undo: None, is_restored: false };
        self.start_step(MigrationStep::Restoring, now);
        login.ok()
    }

    fn keep_snapshot(&mut self, states: ExportedStates) {
        self.snapshot = Some(StateSnapshot { states, requested_at: self.export_requested_at });
    }

    /// Ends the attempt. If the states were exported, the old node first undoes the export. If the session cannot stay
    /// at its node, it is lost.
    fn abort(&mut self, reason: AbortReason, now: Duration) -> Vec<Effect> {
        match std::mem::replace(&mut self.phase, MigrationPhase::Finished) {
            MigrationPhase::PreparingTarget => vec![Effect::Abort(reason)],
            MigrationPhase::PreparingFailover => self.finish(Effect::Lost),
            MigrationPhase::Exporting(answer) => {
                // The late answer of the old node must not reach the client.
                self.phase = MigrationPhase::DiscardingExport { answer, reason };
                self.step_deadline = None;
                vec![Effect::ReleaseSlots]
            }
            MigrationPhase::Restoring { undo: Some(undo), .. } => self.send_undo(undo, reason, now),
            MigrationPhase::Restoring { undo: None, .. } => self.finish(Effect::Lost),
            waiting @ (MigrationPhase::Undoing { .. } | MigrationPhase::DiscardingExport { .. }) => {
                self.phase = waiting;
                Vec::new()
            }
            MigrationPhase::Finished => Vec::new(),
        }
    }

    fn undo_export(&mut self, summary: &mut StateSummary, reason: AbortReason, now: Duration) -> Vec<Effect> {
        self.wait_timeout = summary.wait_timeout;
        match summary.undo.take() {
            Some(undo) => self.send_undo(undo, reason, now),
            None => self.finish(Effect::Abort(reason)),
        }
    }

    fn send_undo(&mut self, undo: SecretBytes, reason: AbortReason, now: Duration) -> Vec<Effect> {
        self.start_step(MigrationStep::Undoing, now);
        self.phase = MigrationPhase::Undoing { answer: StateExport::awaiting_ok(), reason };
        vec![Effect::SendToOldNode(undo)]
    }

    fn finish(&mut self, effect: Effect) -> Vec<Effect> {
        self.phase = MigrationPhase::Finished;
        vec![effect]
    }
}

#[cfg(test)]
mod tests;
