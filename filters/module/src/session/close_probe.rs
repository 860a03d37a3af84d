//! A node closes the connection of an idle session: the session ends, or fails over to another node.
//!
//! TiDB closes a connection without an error packet after KILL or `wait_timeout`, and then the session has to end. Only if
//! the node itself is gone does the session fail over. So the node's port is probed; the client is held meanwhile.

use std::net::SocketAddr;
use std::rc::{Rc, Weak};

use super::{Session, SessionPhase};
use crate::deadlines::{Deadline, DeadlineOwner, PANIC_REASON};
use crate::port_probe::{self, ProbeClient};
use crate::worker::WorkerContext;
use crate::{clock, migration_driver::MigrationDriver, switches};

/// Which node has closed the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClosedBy {
    /// The session's node.
    Node,
    /// The target of its migration, after the login there.
    Target,
}

/// A probe of a node that has closed a connection of the session: whether it is still there.
pub(crate) struct CloseProbe {
    worker: Rc<WorkerContext>,
    session: Weak<Session>,
    closed_by: ClosedBy,
    address: SocketAddr,
    deadline: Deadline,
}

impl DeadlineOwner for CloseProbe {
    /// The port has not answered in time.
    fn on_deadline(self: Rc<Self>) {
        // If it waits for the next probe of that port, it does so for this time.
        self.deadline.set(port_probe::TIMEOUT);
        self.worker.ports.time_out(self.address);
    }

    fn close_after_panic(&self) {
        if let Some(session) = self.session.upgrade() {
            session.close_now(PANIC_REASON);
        }
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
    /// Its node has closed the connection, or reset it. False: the session ends with it. True: the node is probed, or was
    /// before, and the result decides.
    pub(crate) fn probe_node(self: &Rc<Self>, is_reset: bool) -> bool {
        let closed_by = self.migration.probe.borrow().as_ref().map(|probe| probe.closed_by);
        if self.phase() != SessionPhase::Established || closed_by == Some(ClosedBy::Node) {
            return closed_by == Some(ClosedBy::Node);
        }
        let driver = self.migration.driver().filter(|driver| driver.is_client_held());
        if driver.as_ref().is_some_and(|driver| driver.is_failover()) {
            return true; // the failover runs already
        }
        let is_saveable = switches::is_migration_on()
            && self.is_idle()
            && self.kept_states.are_valid(clock::now())
            && self.try_offload();
        let Some(address) = self.migration.node_address.get().filter(|_| driver.is_some() || is_saveable) else {
            return false;
        };
        if let Some(driver) = &driver {
            driver.on_old_conn_closed();
            if closed_by == Some(ClosedBy::Target) {
                driver.on_target_lost();
            }
        }
        // A process that ends with unread bytes resets the connection. So a reset shows nothing if the node was sent something.
        self.start_probe(
            ClosedBy::Node,
            address,
            is_reset && driver.as_ref().is_none_or(|driver| !driver.awaits_old_node()),
        );
        true
    }

    /// The target of its migration has closed the connection after the login. False: another probe is running already.
    pub(crate) fn probe_target(self: &Rc<Self>, address: SocketAddr) -> bool {
        let is_started = !self.migration.is_probing();
        if is_started {
            self.start_probe(ClosedBy::Target, address, false);
        }
        is_started
    }

    fn start_probe(self: &Rc<Self>, closed_by: ClosedBy, address: SocketAddr, is_reset: bool) {
        let probe = Rc::new_cyclic(|probe| CloseProbe {
            worker: Rc::clone(&self.worker),
            session: Rc::downgrade(self),
            closed_by,
            address,
            deadline: Deadline::new(&self.worker.deadlines, port_probe::TIMEOUT, probe),
        });
        self.migration.probe.replace(Some(Rc::clone(&probe)));
        let header = || self.upstream().map_or_else(Vec::new, |upstream| upstream.proxy_header());
        if let Some(is_there) = self.worker.ports.probe(address, &probe, is_reset, &header) {
            probe.on_probe_result(is_there);
        }
    }

    fn is_current_probe(&self, probe: &Rc<CloseProbe>) -> bool {
        self.migration.probe.borrow().as_ref().is_some_and(|asked| Rc::ptr_eq(asked, probe))
    }

    /// Nothing depends on probes any more.
    pub(super) fn cancel_probes(&self) {
        let probed = self.migration.probe.take().map(|probe| probe.address);
        let probed = probed.into_iter().chain(self.migration.old_conn.take().and_then(|old| old.address()));
        probed.for_each(|address| self.worker.ports.remove_abandoned(address));
    }

    fn on_probe_result(self: &Rc<Self>, closed_by: ClosedBy, is_there: bool) {
        self.migration.probe.replace(None);
        if is_there {
            self.end_with_connection();
        } else if closed_by == ClosedBy::Node {
            self.on_node_gone();
        } else if let Some(driver) = self.migration.driver().filter(|driver| driver.is_client_held()) {
            driver.on_target_lost();
        }
        if !self.migration.is_client_held() {
            self.rearm_client();
        }
        self.return_to_envoy_if_switched_off();
    }

    /// Its node is gone. If it was idle and has valid states, it fails over. Otherwise it ends.
    pub(crate) fn on_node_gone(self: &Rc<Self>) {
        match self.migration.driver().filter(|driver: &Rc<MigrationDriver>| driver.is_client_held()) {
            Some(driver) => driver.on_old_node_lost(),
            None if self.try_failover() => {}
            None => self.end_with_connection(),
        }
    }

    /// Its node has ended it, for KILL or `wait_timeout`: the client sees what it would see without a proxy.
    pub(crate) fn end_with_connection(&self) {
        self.kept_states.set(None);
        self.abandon_migration();
        if let Some(upstream) = self.upstream() {
            upstream.conn().abort();
        }
    }
}
