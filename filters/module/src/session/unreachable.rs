//! A session whose node no longer answers.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use session::sentinel::State;
use socket2::{SockRef, TcpKeepalive};
use wire::error::{self, Refusal};
use wire::tracker::Tracker;

use super::{Phase, Session};
use crate::reachability::MonitoredEndpoint;

/// The shortest keepalive time there is. A connection that is to be probed has been silent for longer.
const PROBE_NOW: Duration = Duration::from_secs(1);

/// Why the session was closed, in the access log.
const WHY: &str = "node_unreachable";

impl Session {
    /// The endpoint of its node.
    pub(crate) fn monitored_endpoint(&self) -> Option<Arc<MonitoredEndpoint>> {
        self.endpoint.borrow().clone()
    }

    /// How long ago its node was heard from. None: the node has not greeted, and the kernel would report the age of the
    /// connection attempt.
    pub(crate) fn since_heard(&self) -> Option<Duration> {
        if matches!(self.phase.get(), Phase::Connecting | Phase::Over) {
            return None;
        }
        self.travel.vehicle()?.link().socket.with_descriptor(abi::tcp::since_heard)?
    }

    /// Has the kernel send a keepalive probe now. Unlike data, a probe and its answer can be sent whatever the window is.
    pub(crate) fn sends_keepalive_probe(&self) {
        if self.keepalive_time_before.get().is_some() {
            return;
        }
        let Some(vehicle) = self.travel.vehicle() else { return };
        let before = vehicle.link().socket.with_descriptor(|connection| {
            let connection = SockRef::from(&connection);
            let before = connection.tcp_keepalive_time().ok()?;
            // By the new time a probe is overdue, and Linux sends it at once (`tcp_sock_set_keepidle_locked`, net/ipv4/tcp.c).
            connection.set_tcp_keepalive(&TcpKeepalive::new().with_time(PROBE_NOW)).ok()?;
            Some(before)
        });
        self.keepalive_time_before.set(before.flatten());
    }

    /// Restores the keepalive time that Envoy has set.
    pub(crate) fn restores_keepalive_time(&self) {
        if let Some(before) = self.keepalive_time_before.take()
            && let Some(vehicle) = self.travel.vehicle()
        {
            let _ = vehicle.link().socket.with_descriptor(|connection| {
                SockRef::from(&connection).set_tcp_keepalive(&TcpKeepalive::new().with_time(before))
            });
        }
    }

    /// Whether it depends on its node, which is unreachable, and nothing was done about that yet.
    pub(crate) fn depends_on_lost_node(&self) -> bool {
        match self.phase.get() {
            // A connection attempt fails by itself, and another node is tried.
            Phase::Connecting | Phase::Over => false,
            // So does one of a login that goes on elsewhere.
            Phase::Login => self.login_elsewhere.borrow().is_none(),
            // The probe of a port, which will not answer, ends by itself. A connection that is to be closed may have to wait
            // for a client that does not read.
            Phase::Established => {
                !self.travel.is_asking()
                    && !self.travel.moving().is_some_and(|moving| moving.is_alone())
                    && !self.travel.vehicle().is_some_and(|vehicle| vehicle.link().is_doomed())
            }
        }
    }

    /// Its node no longer answers. A session that runs nothing, and whose states are at hand, goes on elsewhere. Others end,
    /// with an error that names the node if one can be sent.
    pub(crate) fn node_is_unreachable(self: &Rc<Self>) {
        match self.phase.get() {
            Phase::Connecting | Phase::Over => return,
            Phase::Login => return self.close(Refusal::NodeUnreachable),
            Phase::Established => {}
        }
        if self.travel.holds() {
            if let Some(moving) = self.travel.moving() {
                moving.old_lost();
            }
            return;
        }
        if !self.is_rescued() {
            self.end_without_node();
        }
    }

    /// The error for an idle session that could not go on elsewhere. Its client reads it as the answer to its next command.
    pub(super) fn lost_with_its_node(&self) -> Vec<u8> {
        if self.monitored_endpoint().is_some_and(|endpoint| endpoint.is(State::Unreachable)) {
            error::node_unreachable_while_idle(&self.node_name())
        } else {
            error::node_gone()
        }
    }

    fn node_name(&self) -> String {
        self.node.borrow().as_ref().map(|here| here.node.name.clone()).unwrap_or_default()
    }

    fn end_without_node(&self) {
        // The client first gets what Envoy has buffered for it. No error can be sent behind that.
        let unread = self.travel.client().is_none_or(|client| client.link().has_unsent());
        if unread && let Some(vehicle) = self.travel.vehicle() {
            return vehicle.link().doom();
        }
        let name = self.node_name();
        let sequence = self.tracker.borrow().as_ref().and_then(Tracker::error_sequence);
        if self.awaits_client() {
            self.last_words.replace(error::node_unreachable_while_idle(&name));
        } else if let Some(sequence) = sequence {
            self.last_words.replace(error::node_unreachable(&name, sequence));
        }
        self.cut(WHY);
    }
}
