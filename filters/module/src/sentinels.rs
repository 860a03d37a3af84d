//! The sentinels: a connection to each node on which nothing is said, to know when the node can be reached no more. On
//! Envoy's main thread; the decisions are those of [`session::sentinel`].
//!
//! They go to the SQL port, since it is that way which has to work, and they do not log in. On TiDB such a connection takes
//! none of `max_connections`, is in no list of processes, may stay for ever, and leaves no line in the log when it is
//! closed (pingcap/tidb `pkg/server/server.go`, `onConn`; `conn.go`, `openSession`).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use session::sentinel::{Limits, Sentinel, State};
use socket2::{Domain, Protocol, Socket, TcpKeepalive, Type};

use crate::config::ProxyProtocol;
use crate::ejection::{self, EjectReason};
use crate::reachability::{self, Key, MonitoredEndpoint};
use crate::{clock, hosts, proxy_header};

/// Between two observations of each node.
const INTERVAL: Duration = Duration::from_millis(200);
/// From one probe of the kernel to the next.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// Probes without an answer until the kernel gives the connection up, later than anybody waits for.
const PROBES: u32 = 8;
/// After so long an attempt to connect is given up.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(3);
/// For so long a node is ejected at a time while it is unreachable.
const EJECTION: Duration = Duration::from_secs(3);
/// EINPROGRESS, which std has no stable name for.
const IN_PROGRESS: i32 = 115;

/// What nodes expect before they greet, as [`ProxyProtocol`].
static HEADER: AtomicU8 = AtomicU8::new(ProxyProtocol::Off as u8);

/// Whether nodes are watched.
static ENABLED: AtomicBool = AtomicBool::new(false);

/// What holds from now on. `kind`: of the PROXY header that nodes get.
pub(crate) fn set(enabled: bool, kind: ProxyProtocol) {
    ENABLED.store(enabled, Ordering::Relaxed);
    HEADER.store(kind as u8, Ordering::Relaxed);
}

/// The header that says "a connection of the proxy's own" (haproxy.org, proxy-protocol.txt, 2.1 and 2.2).
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
    watches: RefCell<HashMap<Key, Watch>>,
    observed: Cell<Option<Duration>>,
}

impl Sentinels {
    /// Looks at all nodes, when it is time.
    pub(crate) fn tick(&self) {
        let now = clock::now();
        if self.observed.get().is_some_and(|observed| now < observed + INTERVAL) {
            return;
        }
        self.observed.set(Some(now));
        // No session wakes the main thread, which ejects nodes as well.
        hosts::look();
        if !ENABLED.load(Ordering::Relaxed) {
            return self.stop();
        }
        let mut before = self.watches.take();
        let mut watches = HashMap::new();
        for endpoint in reachability::watched(|key| before.contains_key(key)) {
            let key = (endpoint.address, endpoint.node.clone());
            let mut watch = before.remove(&key).unwrap_or_else(|| Watch::new(endpoint, now));
            watch.observe(now);
            watches.insert(key, watch);
        }
        self.watches.replace(watches);
    }

    /// Ends all connections.
    pub(crate) fn stop(&self) {
        self.watches.take();
    }
}

/// What has come of a connection.
enum Came {
    Nothing,
    /// The node has ended it.
    End,
    /// The kernel has given it up.
    Silence,
}

struct Connection {
    socket: Socket,
    began: Duration,
}

/// One node.
struct Watch {
    endpoint: Arc<MonitoredEndpoint>,
    sentinel: Sentinel,
    connection: Option<Connection>,
    attempts: Vec<Connection>,
    /// The workers were asked once more for a sign of a suspected node.
    has_called: bool,
}

impl Watch {
    fn new(endpoint: Arc<MonitoredEndpoint>, now: Duration) -> Self {
        let sentinel = Sentinel::new(Limits::default(), now);
        Self { endpoint, sentinel, connection: None, attempts: Vec::new(), has_called: false }
    }

    fn observe(&mut self, now: Duration) {
        if let Some(at) = self.endpoint.take_heard() {
            self.sentinel.heard(at);
        }
        self.read(now);
        self.look_at_attempts(now);
        if self.sentinel.needs_attempt(self.connection.is_some(), now) {
            self.connect(now);
        }
        let changed = self.sentinel.observe(now);
        if let Some(state) = changed {
            self.tell(state);
            self.endpoint.set(state);
            self.has_called = false;
        } else if self.sentinel.is_last_call(now) && !self.has_called {
            self.has_called = true;
            reachability::ask_workers();
        }
        if self.endpoint.is(State::Unreachable) {
            for here in hosts::at(&self.endpoint.address, &self.endpoint.node) {
                ejection::eject(&here, EjectReason::Vanished, EJECTION);
            }
        }
    }

    fn tell(&self, state: State) {
        let MonitoredEndpoint { address, node, .. } = &*self.endpoint;
        match state {
            State::Suspected => abi::log!(Debug, "{node} ({address}) has not answered for 2 s"),
            State::Unreachable => abi::log!(
                Warn,
                "{node} ({address}) does not answer any more, neither on a connection nor to new ones: it gets no new \
                 sessions, and those that it has end or go on elsewhere"
            ),
            State::Reachable => {
                abi::log!(Info, "{node} ({address}) answers");
                for here in hosts::at(address, node) {
                    if here.node.ejected().is_some_and(|ejected| ejected.reason == EjectReason::Vanished) {
                        here.node.restore();
                    }
                }
            }
        }
    }

    /// Takes what has come of the connection, and throws it away.
    fn read(&mut self, now: Duration) {
        let Some(connection) = &self.connection else { return };
        if let Some(quiet) = abi::tcp::since_heard(connection.socket.as_fd()) {
            self.sentinel.heard(now.saturating_sub(quiet));
        }
        match received(&connection.socket) {
            Came::Nothing => {}
            Came::End => {
                self.sentinel.ended(now.saturating_sub(connection.began), now);
                self.connection = None;
            }
            Came::Silence => self.connection = None,
        }
    }

    /// One connection at most is replaced at a time: by the next observation the greeting of the other has been read, which
    /// left unread would make its end a reset, and that a line in TiDB's log.
    fn look_at_attempts(&mut self, now: Duration) {
        let mut is_replaced = false;
        for attempt in std::mem::take(&mut self.attempts) {
            match attempt.socket.take_error() {
                Ok(None) if is_replaced => self.attempts.push(attempt),
                Ok(None) if attempt.socket.peer_addr().is_ok() => {
                    is_replaced = true;
                    self.sentinel.heard(now);
                    let _ = (&attempt.socket).write(&header());
                    self.connection = Some(attempt);
                }
                Ok(None) if now < attempt.began + ATTEMPT_TIMEOUT => self.attempts.push(attempt),
                Ok(Some(error)) | Err(error) if is_answer(error.kind()) => self.sentinel.ended(Duration::ZERO, now),
                _ => {}
            }
        }
    }

    fn connect(&mut self, now: Duration) {
        match connecting(self.endpoint.address) {
            Ok(socket) => {
                self.sentinel.attempt_began(now);
                self.attempts.push(Connection { socket, began: now });
            }
            Err(error) if is_answer(error.kind()) => self.sentinel.ended(Duration::ZERO, now),
            // The way there is gone, as far as this machine knows.
            Err(error) if matches!(error.kind(), ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable) => {
                self.sentinel.attempt_began(now);
            }
            // For want of descriptors or ports: that says nothing of the node.
            Err(error) => abi::log!(Debug, "no connection to {} can be tried: {error}", self.endpoint.address),
        }
    }
}

/// Whether an error is an answer of the node's machine.
fn is_answer(error: ErrorKind) -> bool {
    matches!(error, ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset)
}

/// Begins to connect.
fn connecting(address: SocketAddr) -> std::io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    let probes = TcpKeepalive::new().with_time(PROBE_INTERVAL).with_interval(PROBE_INTERVAL).with_retries(PROBES);
    socket.set_tcp_keepalive(&probes)?;
    match socket.connect(&address.into()) {
        Err(error) if error.raw_os_error() != Some(IN_PROGRESS) && error.kind() != ErrorKind::WouldBlock => Err(error),
        _ => Ok(socket),
    }
}

fn received(mut socket: &Socket) -> Came {
    let mut buffer = [0; 4096];
    loop {
        match socket.read(&mut buffer) {
            Ok(0) => return Came::End,
            Ok(_) => {}
            Err(error) => match error.kind() {
                ErrorKind::Interrupted => {}
                ErrorKind::WouldBlock => return Came::Nothing,
                kind if is_answer(kind) => return Came::End,
                _ => return Came::Silence,
            },
        }
    }
}
