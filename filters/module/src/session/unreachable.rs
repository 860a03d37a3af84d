//! What a session does when its node no longer answers.

use std::time::Duration;

use migration::sentinel::Reachability;
use mysql_proto::error;
use socket2::{SockRef, TcpKeepalive};

use super::{Session, SessionPhase};

/// The shortest keepalive time that Linux allows. A connection that the module probes has been silent for longer.
const PROBE_NOW: Duration = Duration::from_secs(1);

/// Why the session was closed, in the access log.
const CLOSE_REASON: &str = "node_unreachable";

impl Session {
    /// How long ago the kernel received the last packet of the node. None: the node has not greeted, so the kernel
    /// would report the age of the connection attempt; or the session no longer uses the node.
    pub(crate) fn since_heard(&self) -> Option<Duration> {
        if self.phase() == SessionPhase::Connecting || self.phase().is_over() {
            return None;
        }
        self.upstream()?.conn().socket.with_descriptor(envoy_abi::tcp::since_heard)?
    }

    /// Makes the kernel send a keepalive probe now. Unlike data, a probe is sent and answered even if a window is full.
    pub(crate) fn send_keepalive_probe(&self) {
        if self.keepalive_time_before.get().is_some() {
            return;
        }
        let Some(upstream) = self.upstream() else { return };
        let before = upstream.conn().socket.with_descriptor(|connection| {
            let connection = SockRef::from(&connection);
            let before = connection.tcp_keepalive_time().ok()?;
            // With this time a probe is overdue, so Linux sends it at once (`tcp_sock_set_keepidle_locked`,
            // net/ipv4/tcp.c).
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

    /// Whether the session depends on its node, the node is unreachable, and the session has not reacted yet.
    pub(crate) fn has_lost_node(&self) -> bool {
        self.is_node_unreachable() && self.depends_on_node()
    }

    fn is_node_unreachable(&self) -> bool {
        self.monitored_endpoint().is_some_and(|endpoint| endpoint.has_state(Reachability::Unreachable))
    }

    fn depends_on_node(&self) -> bool {
        match self.phase() {
            SessionPhase::Login => true,
            // A running probe times out by itself. A connection that is being closed may wait for a client that does
            // not read.
            SessionPhase::Established => {
                !self.migration.is_probing()
                    && !self.migration.driver().is_some_and(|driver| driver.is_without_old_node())
                    && !self.upstream().is_some_and(|upstream| upstream.conn().is_closing())
            }
            // A connection attempt has its own timeout, after which another node is tried.
            SessionPhase::Connecting | SessionPhase::LoginFailover => false,
            SessionPhase::Waiting | SessionPhase::Rejected | SessionPhase::NodeClosed | SessionPhase::Closed => false,
        }
    }

    /// The error for an idle session that could not fail over. The client reads it as the response to its next command.
    pub(super) fn node_loss_error(&self) -> Vec<u8> {
        if self.is_node_unreachable() {
            error::node_unreachable_while_idle(&self.node_name())
        } else {
            error::node_gone()
        }
    }

    /// Ends the session because its node no longer answers. The client gets an error that names the node, if an error
    /// can be sent.
    pub(super) fn end_without_node(&self) {
        // Envoy first sends the buffered bytes to the client. No error can be sent after these.
        let has_unsent = self.client_socket().is_none_or(|client| client.conn().has_unsent());
        if has_unsent && let Some(upstream) = self.upstream() {
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
