//! What becomes of a session whose node does not answer any more.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use session::sentinel::State;
use socket2::{SockRef, TcpKeepalive};
use wire::error::{self, Refusal};
use wire::tracker::Tracker;

use super::{Phase, Session};
use crate::reachability::MonitoredEndpoint;

/// The shortest time until a probe; it has passed on a connection that is asked.
const PROBE_NOW: Duration = Duration::from_secs(1);

/// As the access log has it.
const WHY: &str = "node_unreachable";

impl Session {
    /// Where its node is.
    pub(crate) fn monitored_endpoint(&self) -> Option<Arc<MonitoredEndpoint>> {
        self.endpoint.borrow().clone()
    }

    /// How long ago something of its node came. None: the node has not greeted; the kernel would tell the age of the
    /// attempt to connect.
    pub(crate) fn since_heard(&self) -> Option<Duration> {
        if matches!(self.phase.get(), Phase::Connecting | Phase::Over) {
            return None;
        }
        self.travel.vehicle()?.link().socket.with_descriptor(abi::tcp::since_heard)?
    }

    /// Has the kernel send one keepalive probe now: no window can keep it, nor its answer, from being sent.
    pub(crate) fn asks_for_sign(&self) {
        if self.asked_for_sign.get().is_some() {
            return;
        }
        let Some(vehicle) = self.travel.vehicle() else { return };
        let before = vehicle.link().socket.with_descriptor(|connection| {
            let connection = SockRef::from(&connection);
            let before = connection.tcp_keepalive_time().ok()?;
            // Linux sends at once what is due by the new time (`tcp_sock_set_keepidle_locked`, net/ipv4/tcp.c).
            connection.set_tcp_keepalive(&TcpKeepalive::new().with_time(PROBE_NOW)).ok()?;
            Some(before)
        });
        self.asked_for_sign.set(before.flatten());
    }

    /// The connection has the options again that Envoy has given it.
    pub(crate) fn asks_no_more(&self) {
        if let Some(before) = self.asked_for_sign.take()
            && let Some(vehicle) = self.travel.vehicle()
        {
            let _ = vehicle.link().socket.with_descriptor(|connection| {
                SockRef::from(&connection).set_tcp_keepalive(&TcpKeepalive::new().with_time(before))
            });
        }
    }

    /// Whether it is with its node, which is unreachable, and not on its way to another.
    pub(crate) fn stays_at_lost_node(&self) -> bool {
        match self.phase.get() {
            // A connection that is not there yet fails by itself, and another node is tried.
            Phase::Connecting | Phase::Over => false,
            Phase::Login => true,
            // Why a connection has ended is asked of the node's port, which will not answer.
            Phase::Established => {
                !self.travel.is_asking() && !self.travel.moving().is_some_and(|moving| moving.is_alone())
            }
        }
    }

    /// Its node does not answer any more: it goes on elsewhere if its states are at hand and it runs nothing. Else it ends,
    /// with an error that names the node where one can be sent.
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

    /// The error for a session that nobody could save: as the answer to what its client sends next.
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
        // What Envoy still has for the client comes first, and an error cannot be put behind it.
        let unread = self.travel.client().is_none_or(|client| client.link().has_unsent());
        if unread && let Some(vehicle) = self.travel.vehicle() {
            vehicle.link().doom();
            vehicle.link().socket.set_readable();
            return;
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
