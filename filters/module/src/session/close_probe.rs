//! Probes nodes that have closed a connection of a session. The module holds the client until the result of the probe
//! is known, and [`node_loss`] decides what follows.

use std::net::SocketAddr;
use std::rc::{Rc, Weak};

use super::node_loss::{self, ClosedBy, Ending, LossEvent, MigrationStage, Reaction, Situation};
use super::{Session, SessionPhase};
use crate::deadlines::{Deadline, DeadlineOwner};
use crate::panics::{CloseAfterPanic, PANIC_REASON};
use crate::port_probe::{self, ProbeClient};
use crate::worker::WorkerContext;
use crate::{clock, switches};

/// A probe that finds out whether a node that has closed a connection of the session is still running.
pub(crate) struct CloseProbe {
    worker: Rc<WorkerContext>,
    session: Weak<Session>,
    closed_by: ClosedBy,
    address: SocketAddr,
    deadline: Deadline,
}

impl CloseAfterPanic for CloseProbe {
    fn close_after_panic(&self) {
        if let Some(session) = self.session.upgrade() {
            session.close_now(PANIC_REASON);
        }
    }
}

impl DeadlineOwner for CloseProbe {
    /// The port has not answered in time.
    fn on_deadline(self: Rc<Self>) {
        // If the request waits for the next probe of that port, this probe gets the same time.
        self.deadline.set(port_probe::TIMEOUT);
        self.worker.ports.time_out(self.address);
    }
}

impl ProbeClient for CloseProbe {
    fn on_probe_result(self: Rc<Self>, is_there: bool) {
        let session = self.session.upgrade();
        if let Some(session) = session.filter(|session| session.is_current_probe(&self)) {
            session.on_probe_result(self.closed_by, is_there);
        }
    }
}

impl Session {
    /// The session's node has closed or reset the connection. False: the session ends, too. True: the result of a probe
    /// or of a migration decides.
    pub(crate) fn probe_node(self: &Rc<Self>, is_reset: bool) -> bool {
        if self.phase() != SessionPhase::Established {
            return false;
        }
        let is_restorable = switches::is_migration_on()
            && self.is_idle()
            && self.kept_states.are_valid(clock::now())
            && self.try_offload();
        let reactions = node_loss::react(LossEvent::NodeClosed { is_restorable }, self.loss_situation());
        if reactions == [Reaction::End] {
            return false;
        }
        self.apply_reactions(reactions, is_reset);
        true
    }

    /// The target of the migration has closed the connection after the login.
    pub(crate) fn on_target_closed(self: &Rc<Self>) {
        self.on_node_loss(LossEvent::TargetClosed);
    }

    fn on_probe_result(self: &Rc<Self>, closed_by: ClosedBy, is_there: bool) {
        self.migration.probe.replace(None);
        self.on_node_loss(LossEvent::Probed { closed_by, is_there });
        if !self.migration.is_client_held() {
            self.rearm_client();
        }
        self.return_to_envoy_if_switched_off();
    }

    pub(super) fn on_node_loss(self: &Rc<Self>, event: LossEvent) {
        self.apply_reactions(node_loss::react(event, self.loss_situation()), false);
    }

    fn loss_situation(&self) -> Situation {
        let has_address = self.migration.node_address.get().is_some();
        Situation { stage: self.migration_stage(), probed: self.probed(), has_address }
    }

    fn migration_stage(&self) -> MigrationStage {
        match self.migration.driver() {
            None => MigrationStage::None,
            Some(driver) if !driver.is_client_held() => MigrationStage::Preparing,
            Some(driver) if driver.is_failover() => MigrationStage::FailingOver,
            Some(_) => MigrationStage::Holding,
        }
    }

    fn probed(&self) -> Option<ClosedBy> {
        self.migration.probe.borrow().as_ref().map(|probe| probe.closed_by)
    }

    fn apply_reactions(self: &Rc<Self>, reactions: Vec<Reaction>, is_reset: bool) {
        for reaction in reactions {
            match (reaction, self.migration.driver()) {
                (Reaction::End, _) => self.end_with_connection(),
                // The loss of the target, a reaction before this one, has ended the session or made it fail over.
                (Reaction::Probe(ClosedBy::Node), _)
                    if self.phase() != SessionPhase::Established
                        || self.migration_stage() == MigrationStage::FailingOver => {}
                (Reaction::Probe(closed_by), driver) => {
                    let address = match closed_by {
                        ClosedBy::Node => self.migration.node_address.get(),
                        ClosedBy::Target => driver.as_ref().map(|driver| driver.target_node().address),
                    };
                    // A process that ends with unread bytes resets the connection. So a reset proves nothing if the
                    // module has just sent something to the node.
                    let is_idle_reset = is_reset && driver.is_none_or(|driver| !driver.awaits_old_node());
                    if let Some(address) = address {
                        self.start_probe(closed_by, address, is_idle_reset);
                    }
                }
                (Reaction::DoubtOldNode, Some(driver)) => driver.on_old_conn_closed(),
                (Reaction::LoseOldNode, Some(driver)) => driver.on_old_node_lost(),
                (Reaction::LoseTarget, Some(driver)) => {
                    // While a probe runs, the session could not fail over.
                    if self.probed() == Some(ClosedBy::Target) {
                        let probed = self.migration.probe.take().map(|probe| probe.address);
                        probed.into_iter().for_each(|address| self.worker.ports.remove_abandoned(address));
                    }
                    driver.on_target_lost();
                }
                (Reaction::DoubtOldNode | Reaction::LoseOldNode | Reaction::LoseTarget, None) => {}
                (Reaction::FailOver(ending), _) => {
                    if !self.try_failover() {
                        match ending {
                            Ending::Close => self.end_with_connection(),
                            Ending::NameNode => self.end_without_node(),
                        }
                    }
                }
            }
        }
    }

    fn start_probe(self: &Rc<Self>, closed_by: ClosedBy, address: SocketAddr, is_idle_reset: bool) {
        let probe = Rc::new_cyclic(|probe| CloseProbe {
            worker: Rc::clone(&self.worker),
            session: Rc::downgrade(self),
            closed_by,
            address,
            deadline: Deadline::new(&self.worker.deadlines, port_probe::TIMEOUT, probe),
        });
        self.migration.probe.replace(Some(Rc::clone(&probe)));
        let header = || self.upstream().map_or_else(Vec::new, |upstream| upstream.proxy_header());
        if let Some(is_there) = self.worker.ports.probe(address, &probe, is_idle_reset, &header) {
            probe.on_probe_result(is_there);
        }
    }

    fn is_current_probe(&self, probe: &Rc<CloseProbe>) -> bool {
        self.migration.probe.borrow().as_ref().is_some_and(|current| Rc::ptr_eq(current, probe))
    }

    /// The session no longer needs the results of its probes.
    pub(super) fn cancel_probes(&self) {
        let probed = self.migration.probe.take().map(|probe| probe.address);
        let probed = probed.into_iter().chain(self.migration.old_conn.take().and_then(|old| old.address()));
        probed.for_each(|address| self.worker.ports.remove_abandoned(address));
    }

    /// Ends the session after its node has ended it, for KILL or `wait_timeout`: the client's connection closes, as
    /// without a proxy.
    pub(crate) fn end_with_connection(&self) {
        self.kept_states.set(None);
        self.abandon_migration();
        if let Some(upstream) = self.upstream() {
            upstream.conn().abort();
        }
    }
}
