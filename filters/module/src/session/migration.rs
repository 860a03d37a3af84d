//! The migration of a session, and its failover when its node has failed.

use std::rc::Rc;
use std::time::Duration;

use migration::state_machine::AbortReason;
use migration::state_snapshot::StateSnapshot;
use migration::state_summary::UnusableStates;

use super::assigned_node::CountedState;
use super::{METADATA, Session, SessionPhase};
use crate::deadlines::Deadline;
use crate::migration_driver::{self, MigrationDriver, MigrationResult};
use crate::node::{SessionState, WorkerNode};
use crate::{clock, envoy_drain, migration_scheduler, offload, reachability, states_memory, switches};

/// Whether a migration has started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StartResult {
    Started,
    /// It cannot start now.
    Blocked(MigrationBlocker),
    /// Envoy's buffers hold bytes of the session, or a probe runs. The migration is tried again when the session is
    /// idle.
    Deferred,
}

/// What prevents a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MigrationBlocker {
    /// The session itself. Other sessions may be able to migrate.
    Session,
    /// The session is busy, or no longer has to migrate.
    NotNow,
    /// The target, the network, or the old node, which does not export the session.
    Nodes,
}

impl MigrationBlocker {
    pub(crate) fn from_abort_reason(reason: AbortReason) -> Self {
        match reason {
            AbortReason::Cancelled => Self::NotNow,
            reason if reason.is_session_fault() => Self::Session,
            _ => Self::Nodes,
        }
    }
}

impl Session {
    /// Whether the session's node is draining.
    pub(crate) fn is_on_draining_node(&self) -> bool {
        self.phase() == SessionPhase::Established && self.is_node(|node| node.is_draining())
    }

    /// Whether the session is to migrate: migrations are switched on, and its node is draining or rebalancing has
    /// selected the session.
    pub(crate) fn has_to_migrate(&self) -> bool {
        switches::is_migration_on() && (self.is_on_draining_node() || self.migration.rebalance_round().is_some())
    }

    /// Whether rebalancing may select the session: its node is one of `sources`. `idle`: the session must be idle,
    /// otherwise busy.
    pub(crate) fn may_rebalance(&self, idle: bool, sources: &[Rc<WorkerNode>], now: Duration) -> bool {
        self.is_movable(idle)
            && !self.migration.is_migration_requested()
            && self.is_node(|node| sources.iter().any(|source| Rc::ptr_eq(source, node)))
            && self.identity.is_known()
            && self.migration.export_backoff.get().may_retry(now)
            && !self.migration.is_in_cooldown(now)
    }

    /// Selects the session for rebalancing, if the quota of its node is not used up. True: the session is selected.
    pub(crate) fn reserve_rebalance(&self) -> bool {
        let round = self.node().and_then(|node| node.shared.outgoing_quota().reserve());
        if round.is_some() {
            self.migration.request_migration();
            self.migration.set_rebalance_round(round);
        }
        round.is_some()
    }

    /// Clears the rebalancing round of the session if the round is over.
    pub(crate) fn check_rebalance_round(&self) {
        if let Some(round) = self.migration.rebalance_round()
            && !self.is_node(|node| node.has_surplus.get() && node.shared.outgoing_quota().is_in_round(round))
        {
            self.migration.set_rebalance_round(None);
        }
    }

    /// Whether rebalancing is the only reason to migrate, and the session is pinned, for example by a transaction.
    pub(crate) fn is_rebalance_blocked(&self) -> bool {
        self.is_rebalancing() && !self.is_movable(true) && !self.is_movable(false)
    }

    /// A migration has failed. True: the session stays at its node, since rebalancing was the only reason to migrate.
    pub(crate) fn give_up_rebalance(&self, why: MigrationBlocker) -> bool {
        let is_given_up = self.is_rebalancing();
        if is_given_up {
            if let (Some(node), Some(round)) = (self.node(), self.migration.rebalance_round())
                && why != MigrationBlocker::Nodes
            {
                node.shared.outgoing_quota().release(round);
            }
            if why == MigrationBlocker::Session {
                self.migration.start_cooldown(clock::now());
            }
            self.migration.clear_request();
        }
        is_given_up
    }

    /// Whether rebalancing is the only reason to migrate.
    fn is_rebalancing(&self) -> bool {
        self.migration.rebalance_round().is_some() && !self.is_on_draining_node()
    }

    /// Whether the session is not pinned, and idle (`idle`) or busy (otherwise).
    fn is_movable(&self, idle: bool) -> bool {
        match self.counted_state() {
            Some(CountedState { state: SessionState::Idle, pinned: None }) => idle,
            Some(CountedState { state: SessionState::Busy, pinned: None }) => !idle,
            _ => false,
        }
    }

    /// Whether the session must be closed with all remaining sessions of its node.
    pub(crate) fn is_on_force_closed_node(&self) -> bool {
        self.is_on_draining_node() && self.is_node(|node| node.must_close_sessions.get())
    }

    /// Starts a migration. `snapshot`: the session's states, for a failover.
    pub(crate) fn start_migration(self: &Rc<Self>, snapshot: Option<StateSnapshot>) -> StartResult {
        let result = self.try_start_migration(snapshot);
        if result != StartResult::Started {
            self.return_to_envoy_if_switched_off();
        }
        result
    }

    fn try_start_migration(self: &Rc<Self>, snapshot: Option<StateSnapshot>) -> StartResult {
        let (Some(upstream), Some(client)) = (self.upstream(), self.client_socket()) else {
            return StartResult::Blocked(MigrationBlocker::Session);
        };
        if self.migration.is_probing()
            || self.is_exporting_states()
            || self.is_request_resuming()
            || self.has_quit()
            || !(client.conn().is_quiescent() && upstream.conn().is_quiescent())
        {
            return StartResult::Deferred;
        }
        let Some(identity) = self.identity.get().filter(|_| self.try_offload()) else {
            return StartResult::Blocked(MigrationBlocker::Session);
        };
        if snapshot.is_none() {
            self.migration.node_address.set(upstream.conn().peer_address());
        }
        let is_rebalancing_now = snapshot.is_none() && self.is_rebalancing();
        let target = self.node().and_then(|node| {
            self.worker.hosts.find_target(&node, &self.migration.backoff.borrow(), is_rebalancing_now)
        });
        if is_rebalancing_now && target.is_none() {
            return StartResult::Blocked(MigrationBlocker::NotNow);
        }
        let reason =
            if target.is_none() { migration_driver::REASON_NO_NODE } else { migration_driver::REASON_UNREACHABLE };
        let driver = target.and_then(|to| MigrationDriver::start(self, upstream, *identity, to, snapshot));
        if driver.is_none() {
            self.with_counts(|counts| migration_driver::count_result(reason, counts));
            return StartResult::Blocked(MigrationBlocker::Nodes);
        }
        self.migration.driver.replace(driver);
        StartResult::Started
    }

    /// All received bytes have been forwarded. If the session is to migrate and is idle, advances the migration. If
    /// this Envoy drains, an idle session ends.
    pub(crate) fn on_quiescent(self: &Rc<Self>) {
        if self.is_ended_by_drain() {
            return;
        }
        self.continue_after_responses();
        if self.client.is_corked() {
            if envoy_drain::must_end_sessions() && self.may_end_after_response() {
                self.finish_in_drain();
                return;
            }
            if !self.client.has_unsent() {
                self.client.set_cork(false);
            }
        }
        if self.has_quit() {
            if let Some(driver) = self.migration.driver().filter(|driver| !driver.is_client_held()) {
                driver.cancel();
            }
        } else if self.migration.is_migration_requested() {
            if let Some(driver) = self.migration.driver().filter(|driver| driver.is_client_held()) {
                driver.retry_switch();
            } else if self.try_prepare_migration() {
                self.advance_migration();
            }
        }
    }

    /// Advances the migration of an idle session.
    fn advance_migration(self: &Rc<Self>) {
        match self.migration.driver() {
            // Unread bytes of the node are no response to the export. After they have been read, this is called again.
            Some(driver)
                if driver.is_waiting_for_idle() && self.upstream().is_some_and(|node| node.conn().has_unread()) => {}
            // A KILL is about to reach the session at its present node. After that, this is called again.
            Some(driver) if driver.is_waiting_for_idle() && self.is_pinned() => {}
            Some(driver) if driver.is_waiting_for_idle() => match self.identity.get() {
                Some(identity) if migration_scheduler::try_hold(self) => driver.start_export(*identity),
                Some(_) => {}
                None => driver.cancel(),
            },
            Some(_) => {}
            // The states were too large, but the client has run something since.
            None if self.migration.export_backoff.get().retry_at().is_some() && self.migration.take_deferred() => {
                migration_scheduler::enqueue(self);
                self.worker.waker.wake();
            }
            None => {}
        }
    }

    /// Keeps the session's states as long as their token is valid, if the memory budget allows.
    fn keep_snapshot(self: &Rc<Self>, snapshot: Option<StateSnapshot>) {
        let now = clock::now();
        let snapshot = snapshot.filter(|snapshot| states_memory::retain(self, &snapshot.states.statement));
        let kept = snapshot.map(|snapshot| {
            let valid_for = snapshot.expires_at().saturating_sub(now);
            (snapshot, Deadline::new(&self.worker.deadlines, valid_for, &Rc::downgrade(self)))
        });
        self.kept_states.set(kept);
    }

    /// Keeps the states that a failed migration has exported. If it has exported none, the states that were kept before
    /// stay valid, since the session has run nothing since then.
    fn keep_exported_snapshot(self: &Rc<Self>, driver: &MigrationDriver) {
        if let Some(snapshot) = driver.take_snapshot() {
            self.keep_snapshot(Some(snapshot));
        }
    }

    /// Whether the session is idle and not pinned.
    pub(crate) fn is_idle(&self) -> bool {
        self.is_movable(true)
    }

    /// True: the session is idle, no probe runs, no request is about to be read again, and both connections are offloaded
    /// or could be.
    pub(super) fn try_prepare_migration(&self) -> bool {
        if !self.is_idle() || self.migration.is_probing() || self.is_exporting_states() || self.is_request_resuming() {
            return false;
        }
        if switches::is_offload_on() || self.migration.driver().is_some() {
            self.try_offload()
        } else {
            // The connections stay with Envoy until the migration starts.
            self.upstream().is_some_and(|upstream| upstream.conn().is_quiescent()) && self.client.is_quiescent()
        }
    }

    /// If offloading is switched off, returns the connections to Envoy, unless a migration, a login failover or a probe
    /// needs their events.
    pub(crate) fn return_to_envoy_if_switched_off(&self) {
        if switches::is_offload_on()
            || self.migration.driver.borrow().is_some()
            || self.migration.old_conn.borrow().is_some()
            || self.migration.is_probing()
            || self.phase() == SessionPhase::LoginFailover
        {
            return;
        }
        self.client.onload();
        if let Some(upstream) = self.upstream() {
            upstream.conn().onload();
        }
    }

    /// Offloads both connections, if that is possible now. True: both are offloaded. While a request is about to be read
    /// again, Envoy must keep the client's connection, since no event of the socket announces the request.
    pub(super) fn try_offload(&self) -> bool {
        if self.is_request_resuming() {
            return false;
        }
        let (Some(client), Some(upstream)) = (self.client_socket(), self.upstream()) else { return false };
        offload::try_offload(client) && offload::try_offload(upstream)
    }

    /// The migration has ended.
    pub(crate) fn on_migration_finished(self: &Rc<Self>, result: MigrationResult) {
        let Some(driver) = self.migration.driver.take() else { return };
        if result != MigrationResult::Lost {
            self.with_counts(|counts| driver.count_result(result, counts));
        }
        match result {
            MigrationResult::Migrated => {
                let to = &driver.target_node().node;
                let endpoint = reachability::monitor(&driver.target_node().endpoint, &to.shared.name);
                // The target has restored the session, so the session is idle.
                self.assign_node(to, endpoint, self.counted_state().unwrap_or(CountedState::LOGIN));
                self.migration.node_address.set(Some(driver.target_node().address));
                self.set_node_id(driver.target_connection_id());
                self.resume_idle_timeout(driver.wait_timeout());
                self.keep_snapshot(driver.take_snapshot());
                if self.upstream().is_some_and(|upstream| upstream.conn().has_tls()) {
                    self.clear_plain_node_side();
                }
                let migrations = self.migration.record_migration(clock::now());
                let id = driver.target_connection_id();
                self.with_traffic(|traffic| traffic.commands.statements.on_migrated(migrations, id));
                if let Some(filter) = self.logged_filter() {
                    filter.set_metadata(METADATA, "node", &to.shared.name);
                    filter.set_metadata_number(METADATA, "moves", f64::from(migrations));
                }
            }
            MigrationResult::Aborted(reason) => {
                envoy_abi::log!(Debug, "a session stays at its node: {reason:?}");
                self.resume_idle_timeout(driver.wait_timeout());
                self.keep_exported_snapshot(&driver);
                if reason == AbortReason::UnusableStates(UnusableStates::TooLarge) {
                    let mut backoff = self.migration.export_backoff.get();
                    backoff.record_failure(clock::now());
                    self.migration.export_backoff.set(backoff);
                }
                if reason != AbortReason::Cancelled {
                    let blamed = reason.is_target_fault().then_some(driver.target_node().endpoint.as_str());
                    self.migration.backoff.borrow_mut().record_failure(blamed, clock::now());
                }
            }
            MigrationResult::Lost => {
                self.keep_exported_snapshot(&driver);
                self.migration.backoff.borrow_mut().record_failure(Some(&driver.target_node().endpoint), clock::now());
                if !self.fail_over() {
                    self.with_counts(|counts| driver.count_result(result, counts));
                    self.final_error.replace(self.node_loss_error());
                    self.close_now("move_lost");
                }
                return;
            }
        }
        self.rearm_client();
    }

    /// The target of the failover is draining, too. Tries another target.
    pub(crate) fn retarget_failover(self: &Rc<Self>, driver: &MigrationDriver) {
        self.keep_exported_snapshot(driver);
        if !self.fail_over() {
            self.close_now("move_lost");
        }
    }

    /// The node has failed. True: a failover to another node has started. This requires that the session is idle and
    /// has valid states, and that migrations are switched on.
    pub(crate) fn try_failover(self: &Rc<Self>) -> bool {
        switches::is_migration_on() && self.fail_over()
    }

    /// Like [`Self::try_failover`], even if migrations are switched off: after the old node has ended the session for a
    /// migration, the session cannot stay.
    fn fail_over(self: &Rc<Self>) -> bool {
        let snapshot = self.kept_states.take(clock::now()).filter(|_| self.is_idle());
        let Some(snapshot) = snapshot else { return false };
        self.abandon_migration();
        // Unsent statements that undo the failed migration cannot be sent any more. They would delay the failover, like
        // unsent bytes of the session.
        if let Some(upstream) = self.upstream() {
            upstream.conn().discard_unsent();
        }
        self.migration.request_migration();
        let has_export = self.take_state_export();
        let has_started = self.start_migration(Some(snapshot)) == StartResult::Started;
        if has_started {
            if has_export {
                self.decide_again(); // the new node gets the request that waits
            }
            migration_scheduler::start_failover();
        }
        has_started
    }

    /// Reads from the client again, unless a probe still holds the client.
    pub(super) fn rearm_client(&self) {
        if self.migration.is_probing() {
            return;
        }
        if self.is_request_resuming() {
            self.client.read_again();
        } else {
            offload::rearm(&self.client);
        }
    }

    pub(super) fn abandon_migration(&self) {
        if let Some(driver) = self.migration.driver.take() {
            driver.abandon();
            migration_scheduler::release_slots(&self.worker, &driver);
        }
    }
}
