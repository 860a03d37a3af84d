//! A session whose node no longer answers.

use std::time::Duration;

use migration::sentinel::Reachability;
use mysql_proto::error;
use socket2::{SockRef, TcpKeepalive};

use super::{Session, SessionPhase};

/// The shortest keepalive time there is. A connection that is to be probed has been silent for longer.
const PROBE_NOW: Duration = Duration::from_secs(1);

/// Why the session was closed, in the access log.
const CLOSE_REASON: &str = "node_unreachable";

impl Session {
    /// How long ago its node was heard from. None: the node has not greeted, and the kernel would report the age of the
    /// connection attempt.
    pub(crate) fn since_heard(&self) -> Option<Duration> {
        if self.phase() == SessionPhase::Connecting || self.phase().is_over() {
            return None;
        }
        self.upstream()?.conn().socket.with_descriptor(envoy_abi::tcp::since_heard)?
    }

    /// Has the kernel send a keepalive probe now. Unlike data, a probe and its answer can be sent whatever the window is.
    pub(crate) fn send_keepalive_probe(&self) {
        if self.keepalive_time_before.get().is_some() {
            return;
        }
        let Some(upstream) = self.upstream() else { return };
        let before = upstream.conn().socket.with_descriptor(|connection| {
            let connection = SockRef::from(&connection);
            let before = connection.tcp_keepalive_time().ok()?;
            // By the new time a probe is overdue, and Linux sends it at once (`tcp_sock_set_keepidle_locked`, net/ipv4/tcp.c).
            connection.set_tcp_keepalive(&TcpKeepalive::new().with_time(PROBE_NOW)).ok()?;
            Some(before)
        });
        self.keepalive_time_before.set(before.flatten());
    }

    /// Restores the keepalive time that Envoy has set.
    pub(crate) fn restore_keepalive_time(&self) {
        if let Some(before) = self.keepalive_time_before.take()
            && let Some(upstream) = self.upstream()
        {
            let _ = upstream.conn().socket.with_descriptor(|connection| {
                SockRef::from(&connection).set_tcp_keepalive(&TcpKeepalive::new().with_time(before))
            });
        }
    }

    /// Whether it depends on its node, which is unreachable, and nothing was done about that yet.
    pub(crate) fn has_lost_node(&self) -> bool {
        self.is_node_unreachable() && self.depends_on_node()
    }

    fn is_node_unreachable(&self) -> bool {
        self.monitored_endpoint().is_some_and(|endpoint| endpoint.has_state(Reachability::Unreachable))
    }

    fn depends_on_node(&self) -> bool {
        match self.phase() {
            SessionPhase::Login => true,
            // The probe of a port, which will not answer, ends by itself. A connection that is to be closed may have to wait
            // for a client that does not read.
            SessionPhase::Established => {
                !self.migration.is_probing()
                    && !self.migration.driver().is_some_and(|driver| driver.is_without_old_node())
                    && !self.upstream().is_some_and(|upstream| upstream.conn().is_closing())
            }
            // A connection attempt fails by itself, and another node is tried.
            SessionPhase::Connecting | SessionPhase::LoginFailover => false,
            SessionPhase::Rejected | SessionPhase::NodeClosed | SessionPhase::Closed => false,
        }
    }

    /// The error for an idle session that could not fail over. Its client reads it as the answer to its next command.
    pub(super) fn node_loss_error(&self) -> Vec<u8> {
        if self.is_node_unreachable() {
            error::node_unreachable_while_idle(&self.node_name())
        } else {
            error::node_gone()
        }
    }

    /// The session ends because its node no longer answers, with an error that names the node if one can be sent.
    pub(super) fn end_without_node(&self) {
        // The client first gets what Envoy has buffered for it. No error can be sent behind that.
        let unread = self.client_socket().is_none_or(|client| client.conn().has_unsent());
        if unread && let Some(upstream) = self.upstream() {
            return upstream.conn().abort();
        }
        let name = self.node_name();
        let sequence = self.with_traffic(|traffic| traffic.tracker.error_sequence()).flatten();
        if self.awaits_client() {
            self.final_error.replace(error::node_unreachable_while_idle(&name));
        } else if let Some(sequence) = sequence {
            self.final_error.replace(error::node_unreachable(&name, sequence));
        }
        self.close_now(CLOSE_REASON);
    }
}
