//! The sentinels: one silent connection to each node, which shows when the node can no longer be reached. They run on
//! Envoy's main thread; [`migration::sentinel`] makes the decisions.
//!
//! Sentinels connect to the SQL port, as sessions do, and do not log in. On TiDB such a connection does not count
//! towards `max_connections`, is not in the process list, has no timeout, and leaves no line in the log when it is
//! closed (pingcap/tidb `pkg/server/server.go`, `onConn`; `conn.go`, `openSession`).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use migration::sentinel::{Reachability, Sentinel, SentinelTimeouts};
use socket2::{Socket, TcpKeepalive};

use crate::config::ProxyProtocol;
use crate::ejection::{self, EjectReason};
use crate::hosts::WorkerHosts;
use crate::reachability::{self, EndpointKey, MonitoredEndpoint};
use crate::worker::WorkerContext;
use crate::{clock, nonblocking, proxy_header};

/// Time between two observations of a node.
const INTERVAL: Duration = Duration::from_millis(200);
/// Time between two keepalive probes of the kernel.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// The number of unanswered probes after which the kernel closes the connection. The sentinel decides earlier.
const PROBES: u32 = 8;
/// How long a connection attempt may take.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a node is ejected after it was found to be unreachable.
const EJECTION: Duration = Duration::from_secs(3);

/// The PROXY header that nodes expect, as [`ProxyProtocol`].
static HEADER: AtomicU8 = AtomicU8::new(ProxyProtocol::Off as u8);

/// Whether sentinels are enabled.
static ENABLED: AtomicBool = AtomicBool::new(false);

/// Configures all sentinels. `kind`: the PROXY header that nodes expect.
pub(crate) fn configure(enabled: bool, kind: ProxyProtocol) {
    ENABLED.store(enabled, Ordering::Relaxed);
    HEADER.store(kind as u8, Ordering::Relaxed);
}

/// The PROXY header of a connection that has no client (haproxy.org, proxy-protocol.txt, 2.1 and 2.2).
fn header() -> Vec<u8> {
    match HEADER.load(Ordering::Relaxed) {
        kind if kind == ProxyProtocol::V1 as u8 => proxy_header::v1_unknown(),
        kind if kind == ProxyProtocol::V2 as u8 => proxy_header::v2_local(),
        _ => Vec::new(),
    }
}

/// The sentinels of this Envoy.
#[derive(Default)]
pub(crate) struct Sentinels {
    watches: RefCell<HashMap<EndpointKey, Watch>>,
    observed_at: Cell<Option<Duration>>,
}

impl Sentinels {
    /// Observes all nodes, if [`INTERVAL`] has passed since the last time.
    pub(crate) fn tick(&self) {
        let now = clock::now();
        if self.observed_at.get().is_some_and(|observed_at| now < observed_at + INTERVAL) {
            return;
        }
        self.observed_at.set(Some(now));
        // The main thread needs the current hosts to eject nodes. Without a session, it is not woken when they change.
        let worker = WorkerContext::current();
        let _ = worker.hosts.apply_published(); // the main thread has no session to migrate
        let mut before = self.watches.take();
        let endpoints = reachability::list_watched(|key| before.contains_key(key));
        if !ENABLED.load(Ordering::Relaxed) {
            reachability::set_outage(false);
            // Nothing would find out that these nodes answer again.
            let doubted = endpoints.iter().filter(|endpoint| !endpoint.has_state(Reachability::Reachable));
            doubted.for_each(|endpoint| endpoint.set_state(Reachability::Reachable));
            return;
        }
        let mut watches = HashMap::new();
        for endpoint in endpoints {
            let key = (endpoint.address, endpoint.node.clone());
            let mut watch = before.remove(&key).unwrap_or_else(|| Watch::new(endpoint, now));
            watch.observe(&worker.hosts, now);
            watches.insert(key, watch);
        }
        let ports: HashMap<SocketAddr, PortState> =
            watches.values().map(|watch| (watch.endpoint.address, watch.port_state())).collect();
        let state = |address| ports.get(&address).copied().unwrap_or(PortState::Unknown);
        let of_open_nodes: Vec<PortState> = worker.hosts.open_addresses().into_iter().map(state).collect();
        reachability::set_outage(is_outage(reachability::is_outage(), &of_open_nodes));
        self.watches.replace(watches);
    }

    /// Closes all connections.
    pub(crate) fn stop(&self) {
        self.watches.take();
    }
}

/// Whether a node accepts connections, as far as its sentinel knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PortState {
    Unknown,
    Open,
    /// The node's machine refuses connections, or does not answer.
    Closed,
}

/// Whether no node in service accepts connections. `ports`: those of all nodes in service. As long as nothing new is
/// known, the answer stays as it was `before`: for example while the control plane changes which nodes are in service.
fn is_outage(before: bool, ports: &[PortState]) -> bool {
    let all_closed = !ports.is_empty() && ports.iter().all(|port| *port == PortState::Closed);
    !ports.contains(&PortState::Open) && (before || all_closed)
}

/// The state of a connection after a read.
enum ConnectionState {
    Open,
    /// The node has closed or reset the connection.
    Closed,
    /// The kernel has closed the connection, since the node does not answer.
    TimedOut,
}

struct SentinelConnection {
    socket: Socket,
    began: Duration,
}

/// The sentinel of one node, with its connection and its connection attempts.
struct Watch {
    endpoint: Arc<MonitoredEndpoint>,
    sentinel: Sentinel,
    connection: Option<SentinelConnection>,
    attempts: Vec<SentinelConnection>,
    /// Whether the workers were notified again shortly before the decision, to check their sessions for signs of life
    /// of a suspected node.
    has_notified_again: bool,
    /// What the last connection attempt has found.
    port: PortState,
}

impl Watch {
    fn new(endpoint: Arc<MonitoredEndpoint>, now: Duration) -> Self {
        let sentinel = Sentinel::new(SentinelTimeouts::default(), now);
        Self {
            endpoint,
            sentinel,
            connection: None,
            attempts: Vec::new(),
            has_notified_again: false,
            port: PortState::Unknown,
        }
    }

    fn port_state(&self) -> PortState {
        if self.endpoint.has_state(Reachability::Unreachable) { PortState::Closed } else { self.port }
    }

    fn record_refusal(&mut self, now: Duration) {
        self.port = PortState::Closed;
        self.sentinel.record_close(Duration::ZERO, now);
    }

    fn observe(&mut self, hosts: &WorkerHosts, now: Duration) {
        if let Some(at) = self.endpoint.take_received_at() {
            self.sentinel.record_heard(at);
        }
        self.read(now);
        self.check_attempts(now);
        if self.sentinel.needs_attempt(self.connection.is_some(), now) {
            self.connect(now);
        }
        let changed = self.sentinel.observe(now);
        if let Some(state) = changed {
            self.log(state);
            if state == Reachability::Reachable {
                self.restore(hosts);
            }
            self.endpoint.set_state(state);
            self.has_notified_again = false;
        } else if self.sentinel.is_nearly_lost(now) && !self.has_notified_again {
            self.has_notified_again = true;
            reachability::notify_workers();
        }
        if self.endpoint.has_state(Reachability::Unreachable) {
            for node in hosts.find_nodes(&self.endpoint.address, &self.endpoint.node) {
                ejection::eject(hosts, &node, EjectReason::Vanished, EJECTION);
            }
        }
    }

    fn log(&self, state: Reachability) {
        let MonitoredEndpoint { address, node, .. } = &*self.endpoint;
        match state {
            Reachability::Suspected => envoy_abi::log!(Debug, "{node} ({address}) has not answered for 2 s"),
            Reachability::Unreachable => envoy_abi::log!(
                Warn,
                "{node} ({address}) does not answer any more, neither on a connection nor to new ones: it gets no new \
                 sessions, and those that it has end or go on elsewhere"
            ),
            Reachability::Reachable => envoy_abi::log!(Info, "{node} ({address}) answers"),
        }
    }

    /// The node answers again: ends its ejection.
    fn restore(&self, hosts: &WorkerHosts) {
        for node in hosts.find_nodes(&self.endpoint.address, &self.endpoint.node) {
            if node.shared.ejection_details().is_some_and(|ejected| ejected.reason == EjectReason::Vanished) {
                node.shared.end_ejection();
            }
        }
    }

    fn forget_connection(&mut self) {
        self.connection = None;
        self.port = PortState::Unknown;
    }

    /// Checks the connection, and discards what the node has sent on it.
    fn read(&mut self, now: Duration) {
        let Some(connection) = &self.connection else { return };
        if let Some(quiet) = envoy_abi::tcp::since_heard(connection.socket.as_fd()) {
            self.sentinel.record_heard(now.saturating_sub(quiet));
        }
        match discard_received(&connection.socket) {
            ConnectionState::Open => {}
            ConnectionState::Closed => {
                self.sentinel.record_close(now.saturating_sub(connection.began), now);
                self.forget_connection();
            }
            ConnectionState::TimedOut => self.forget_connection(),
        }
    }

    /// Replaces the connection by an attempt that has succeeded, at most once per observation. The next observation
    /// reads the greeting of the new connection before it may be replaced: if a connection is closed with an unread
    /// greeting, the kernel resets it, and TiDB logs that.
    fn check_attempts(&mut self, now: Duration) {
        let mut is_replaced = false;
        for attempt in std::mem::take(&mut self.attempts) {
            match attempt.socket.take_error() {
                Ok(None) if is_replaced => self.attempts.push(attempt),
                Ok(None) if attempt.socket.peer_addr().is_ok() => {
                    is_replaced = true;
                    self.port = PortState::Open;
                    self.sentinel.record_heard(now);
                    let _ = (&attempt.socket).write(&header());
                    self.connection = Some(attempt);
                }
                Ok(None) if now < attempt.began + ATTEMPT_TIMEOUT => self.attempts.push(attempt),
                Ok(Some(error)) | Err(error) if is_answer(error.kind()) => self.record_refusal(now),
                _ => {}
            }
        }
    }

    fn connect(&mut self, now: Duration) {
        match begin_connect(self.endpoint.address) {
            Ok(socket) => {
                self.sentinel.record_attempt(now);
                self.attempts.push(SentinelConnection { socket, began: now });
            }
            Err(error) if is_answer(error.kind()) => self.record_refusal(now),
            // This machine has no route to the node.
            Err(error) if matches!(error.kind(), ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable) => {
                self.sentinel.record_attempt(now);
            }
            // This process has no free descriptor or local port, which says nothing about the node.
            Err(error) => envoy_abi::log!(Debug, "cannot begin to connect to {}: {error}", self.endpoint.address),
        }
    }
}

/// Whether this error is an answer of the node's machine.
fn is_answer(error: ErrorKind) -> bool {
    matches!(error, ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset)
}

/// Begins to connect.
fn begin_connect(address: SocketAddr) -> std::io::Result<Socket> {
    let socket = nonblocking::socket(address)?;
    let probes = TcpKeepalive::new().with_time(PROBE_INTERVAL).with_interval(PROBE_INTERVAL).with_retries(PROBES);
    socket.set_tcp_keepalive(&probes)?;
    nonblocking::connect(&socket, address)?;
    Ok(socket)
}

/// Reads and discards what the node has sent.
fn discard_received(mut socket: &Socket) -> ConnectionState {
    let mut buffer = [0; 4096];
    loop {
        match socket.read(&mut buffer) {
            Ok(0) => return ConnectionState::Closed,
            Ok(_) => {}
            Err(error) => match error.kind() {
                ErrorKind::Interrupted => {}
                ErrorKind::WouldBlock => return ConnectionState::Open,
                kind if is_answer(kind) => return ConnectionState::Closed,
                _ => return ConnectionState::TimedOut,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::PortState::{Closed, Open, Unknown};
    use super::*;

    #[test]
    fn outage_lasts_until_a_node_accepts_connections() {
        let after = |before, ports: &[PortState]| is_outage(before, ports);
        assert!(after(false, &[Closed, Closed]) && !after(false, &[Closed, Unknown]) && !after(false, &[]));
        assert!(after(true, &[Closed, Unknown]) && after(true, &[Unknown]) && after(true, &[]));
        assert!(!after(true, &[Closed, Open]) && !after(false, &[Open]));
    }
}
