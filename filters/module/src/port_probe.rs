//! Probes the SQL port of a node that has closed a connection, to find out whether the node is still there.
//!
//! TiDB closes an idle connection without an error packet for `KILL`, for `wait_timeout` and when it stops. When it
//! stops, it closes its port first (pingcap/tidb `pkg/server/server.go`, `Server.Close` and `KillAllConnections`).
//!
//! A successful connect proves nothing: when a process is killed, the kernel closes its sockets one by one, the newest
//! first, and accepts connections until it reaches the listener. So a probe waits for the greeting.
//!
//! Requests for the same port share one probe. If the probe finds the node there, this answers only the requests that
//! were made before the probe began.

mod requests;

pub(crate) use requests::ProbeClient;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::rc::{Rc, Weak};
use std::time::Duration;

use socket2::Socket;

use self::requests::ProbeRequests;
use crate::offload::{AuxFd, EventKey, WorkerEvents};
use crate::panics::CloseAfterPanic;
use crate::{clock, nonblocking};

/// How long the port may take to answer. Then a waiting client calls [`PortProbes::time_out`].
pub(crate) const TIMEOUT: Duration = Duration::from_secs(1);
/// How long a port that was found closed counts as closed: less time than a server takes to start.
const CLOSED_FOR: Duration = Duration::from_millis(500);
/// After several idle connections were reset together, further resets within this time have the same cause.
const SAME_CAUSE_WINDOW: Duration = Duration::from_millis(100);
/// How often a probe connects to a port that accepts a connection and closes it without a greeting.
const MAX_ATTEMPTS: u8 = 3;

/// One port that is probed, or was a moment ago.
#[derive(Default)]
struct Port {
    probe: Option<Rc<PortProbe>>,
    /// The requests that were made after `probe` began.
    next_requests: ProbeRequests,
    /// When the port was last found closed.
    closed_at: Option<Duration>,
    /// When several idle connections were last reset together.
    reset_at: Option<Duration>,
}

/// The ports that one worker probes.
pub(crate) struct PortProbes {
    events: Rc<WorkerEvents>,
    ports: RefCell<HashMap<SocketAddr, Port>>,
}

fn is_recent(at: Option<Duration>, within: Duration, now: Duration) -> bool {
    at.is_some_and(|at| now < at + within)
}

impl PortProbes {
    pub(crate) fn new(events: Rc<WorkerEvents>) -> Rc<Self> {
        Rc::new(Self { events, ports: RefCell::default() })
    }

    fn with_port<T>(&self, address: SocketAddr, run: impl FnOnce(&mut Port) -> T) -> T {
        run(self.ports.borrow_mut().entry(address).or_default())
    }

    /// Asks whether the node at that port is there. `header`: the PROXY header that the node expects, if any.
    /// `is_reset`: an idle connection was reset. If several are reset at a time, the node is gone, since a KILL resets
    /// only one.
    ///
    /// None: `client` gets the answer later.
    pub(crate) fn probe(
        self: &Rc<Self>,
        address: SocketAddr,
        client: &Rc<impl ProbeClient + 'static>,
        is_reset: bool,
        header: &dyn Fn() -> Vec<u8>,
    ) -> Option<bool> {
        let client: Weak<dyn ProbeClient> = Rc::downgrade(&(Rc::clone(client) as Rc<dyn ProbeClient>));
        let now = clock::now();
        self.remove_unneeded(now);
        let (closed, together) = self.with_port(address, |port| {
            if is_reset && !is_recent(port.reset_at, SAME_CAUSE_WINDOW, now) && port.has_resets() {
                port.reset_at = Some(now);
            }
            (is_recent(port.closed_at, CLOSED_FOR, now), is_reset && is_recent(port.reset_at, SAME_CAUSE_WINDOW, now))
        });
        if together {
            self.with_port(address, Port::take_resets).answer(false);
        }
        if closed || together {
            return Some(false);
        }
        if self.with_port(address, |port| port.probe.is_some()) {
            self.with_port(address, |port| port.next_requests.add(client, is_reset));
            return None;
        }
        let mut requests = ProbeRequests::default();
        requests.add(client, is_reset);
        self.start_probe(address, requests, header()).err().map(|(is_there, _)| is_there)
    }

    /// Must be called when a client has waited for [`TIMEOUT`].
    pub(crate) fn time_out(&self, address: SocketAddr) {
        if let Some(probe) = self.with_port(address, |port| port.probe.clone()) {
            // The node has accepted the connection, so it is slow, but not down.
            let is_there = probe.connection.borrow().as_ref().is_some_and(|connection| connection.peer_addr().is_ok());
            probe.finish(is_there || probe.has_just_begun(clock::now()));
        }
    }

    /// Must be called when a session ends that has requested a probe: removes the probe if no session waits for it any
    /// more. If the node accepts the connection and then sends nothing, the probe does not end by itself, since only a
    /// waiting session calls [`Self::time_out`].
    pub(crate) fn remove_abandoned(&self, address: SocketAddr) {
        let now = clock::now();
        let mut ports = self.ports.borrow_mut();
        let is_unneeded = ports.get_mut(&address).is_some_and(|port| !port.is_needed(now));
        let removed = if is_unneeded { ports.remove(&address) } else { None };
        drop(ports);
        drop(removed);
    }

    fn remove_unneeded(&self, now: Duration) {
        let mut removed = Vec::new();
        self.ports.borrow_mut().retain(|_, port| {
            let is_needed = port.is_needed(now);
            if !is_needed {
                removed.push(std::mem::take(port));
            }
            is_needed
        });
    }

    /// Must be called when a node has greeted: its port is not closed any more. `address` makes a system call, so it is
    /// called only if needed.
    pub(crate) fn record_greeting(&self, address: impl FnOnce() -> Option<SocketAddr>) {
        if self.ports.borrow().is_empty() {
            return;
        }
        self.remove_unneeded(clock::now());
        let mut ports = self.ports.borrow_mut();
        if ports.values().any(|port| port.closed_at.is_some())
            && let Some(port) = address().and_then(|address| ports.get_mut(&address))
        {
            port.closed_at = None;
        }
    }

    /// Begins a probe for `requests`. Err: the result is known at once, and the caller has to answer the returned
    /// requests.
    fn start_probe(
        self: &Rc<Self>,
        address: SocketAddr,
        requests: ProbeRequests,
        header: Vec<u8>,
    ) -> Result<(), (bool, ProbeRequests)> {
        let probe = Rc::new(PortProbe {
            ports: Rc::clone(self),
            address,
            header,
            begun_at: clock::now(),
            connection: RefCell::default(),
            key: Cell::new(None),
            attempts: Cell::new(0),
            has_sent_header: Cell::new(false),
            requests: RefCell::new(requests),
        });
        let Some(is_there) = probe.connect() else {
            self.with_port(address, |port| port.probe = Some(probe));
            return Ok(());
        };
        if !is_there {
            self.with_port(address, |port| port.closed_at = Some(clock::now()));
        }
        Err((is_there, probe.requests.take()))
    }
}

impl Port {
    fn is_needed(&mut self, now: Duration) -> bool {
        !self.next_requests.is_abandoned()
            || self.probe.as_ref().is_some_and(|probe| !probe.requests.borrow_mut().is_abandoned())
            || is_recent(self.closed_at, CLOSED_FOR, now)
            || is_recent(self.reset_at, SAME_CAUSE_WINDOW, now)
    }

    fn has_resets(&self) -> bool {
        self.next_requests.has_resets() || self.probe.as_ref().is_some_and(|probe| probe.requests.borrow().has_resets())
    }

    fn take_resets(&mut self) -> ProbeRequests {
        let mut resets = self.next_requests.take_resets();
        if let Some(probe) = &self.probe {
            resets.append(probe.requests.borrow_mut().take_resets());
        }
        resets
    }
}

struct PortProbe {
    ports: Rc<PortProbes>,
    address: SocketAddr,
    header: Vec<u8>,
    begun_at: Duration,
    connection: RefCell<Option<Socket>>,
    key: Cell<Option<EventKey>>,
    attempts: Cell<u8>,
    has_sent_header: Cell<bool>,
    requests: RefCell<ProbeRequests>,
}

impl PortProbe {
    /// Begins to connect. Some: the result is known at once.
    fn connect(self: &Rc<Self>) -> Option<bool> {
        self.attempts.set(self.attempts.get() + 1);
        self.has_sent_header.set(self.header.is_empty());
        let Ok(connection) = nonblocking::socket(self.address) else { return self.cannot_probe() };
        if let Err(error) = nonblocking::connect(&connection, self.address) {
            return match error.kind() {
                ErrorKind::AddrNotAvailable | ErrorKind::PermissionDenied => self.cannot_probe(),
                _ => Some(false),
            };
        }
        let aux_fd: Weak<dyn AuxFd> = Rc::downgrade(&(Rc::clone(self) as Rc<dyn AuxFd>));
        let Some(key) = self.ports.events.watch(connection.as_fd(), aux_fd) else { return self.cannot_probe() };
        self.key.set(Some(key));
        self.connection.replace(Some(connection));
        None
    }

    /// Whether the probe has run for too short a time to show that the node is gone. This happens if a client made its
    /// request during the previous probe, and times out just after this probe has begun.
    fn has_just_begun(&self, now: Duration) -> bool {
        now < self.begun_at + TIMEOUT / 2
    }

    /// The result if no descriptor or local port is free: true, since nothing shows that the node is gone.
    fn cannot_probe(&self) -> Option<bool> {
        envoy_abi::log!(Warn, "cannot probe {}: no connection can be made", self.address);
        Some(true)
    }

    fn close(&self) {
        if let Some(connection) = self.connection.take()
            && let Some(key) = self.key.take()
        {
            self.ports.events.unwatch(connection.as_fd(), key);
        }
    }

    /// Reads the answer of the port. None: there is no result yet.
    fn check(self: &Rc<Self>) -> Option<bool> {
        match self.read() {
            Ok(1..) => Some(true),
            // The connection was accepted, at least by the kernel, and closed. A node that is gone refuses the next
            // connection.
            Ok(0) => self.retry(),
            Err(error) => match error.kind() {
                // There is nothing to read, or the connection is not established yet.
                ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::NotConnected => None,
                ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => self.retry(),
                _ => Some(false),
            },
        }
    }

    /// Sends the PROXY header if it was not sent yet, and reads. The kernel reports an error only once, to
    /// whichever of the two calls comes first.
    fn read(&self) -> io::Result<usize> {
        let connection = self.connection.borrow();
        let Some(mut connection) = connection.as_ref() else { return Err(ErrorKind::WouldBlock.into()) };
        if !self.has_sent_header.get() {
            connection.write_all(&self.header)?;
            self.has_sent_header.set(true);
        }
        connection.read(&mut [0; 1024])
    }

    fn retry(self: &Rc<Self>) -> Option<bool> {
        self.close();
        if self.attempts.get() < MAX_ATTEMPTS { self.connect() } else { Some(true) }
    }

    fn finish(self: &Rc<Self>, is_there: bool) {
        self.close();
        let mut requests = self.requests.take();
        let mut next = self.ports.with_port(self.address, |port| {
            port.probe = None;
            if !is_there {
                port.closed_at = Some(clock::now());
            }
            std::mem::take(&mut port.next_requests)
        });
        if !is_there {
            requests.append(next);
        } else if !next.is_abandoned() {
            // These requests were made after this probe began: the node may have gone since then.
            if let Err((next_is_there, next)) = self.ports.start_probe(self.address, next, self.header.clone()) {
                next.answer(next_is_there);
            }
        }
        requests.answer(is_there);
    }
}

impl CloseAfterPanic for PortProbe {
    /// The sessions that wait for the result have deadlines.
    fn close_after_panic(&self) {}
}

impl AuxFd for PortProbe {
    fn on_event(self: Rc<Self>) {
        if let Some(is_there) = self.check() {
            self.finish(is_there);
        }
    }
}

impl Drop for PortProbe {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 1);

    struct TestClient;

    impl ProbeClient for TestClient {
        fn on_probe_result(self: Rc<Self>, _: bool) {}
    }

    impl CloseAfterPanic for TestClient {
        fn close_after_panic(&self) {}
    }

    fn request(client: &Rc<TestClient>) -> ProbeRequests {
        let mut requests = ProbeRequests::default();
        requests.add(Rc::downgrade(&(Rc::clone(client) as Rc<dyn ProbeClient>)), false);
        requests
    }

    fn probe(requests: ProbeRequests, begun_at: Duration) -> Rc<PortProbe> {
        Rc::new(PortProbe {
            ports: PortProbes::new(Rc::default()),
            address: ADDRESS,
            header: Vec::new(),
            begun_at,
            connection: RefCell::default(),
            key: Cell::new(None),
            attempts: Cell::new(1),
            has_sent_header: Cell::new(true),
            requests: RefCell::new(requests),
        })
    }

    #[test]
    fn probe_ends_when_its_last_client_is_gone() {
        let (one, other) = (Rc::new(TestClient), Rc::new(TestClient));
        let current = probe(request(&one), Duration::ZERO);
        let ports = Rc::clone(&current.ports);
        let running = Rc::downgrade(&current);
        ports.with_port(ADDRESS, |port| (port.probe, port.next_requests) = (Some(current), request(&other)));
        drop(one);
        ports.remove_abandoned(ADDRESS);
        assert_eq!(running.strong_count(), 1, "the other client waits for the next probe");
        drop(other);
        ports.remove_abandoned(ADDRESS);
        assert_eq!((running.strong_count(), ports.ports.borrow().len()), (0, 0));
    }

    #[test]
    fn probe_that_has_just_begun_does_not_show_that_the_node_is_gone() {
        let begun_at = Duration::from_secs(9);
        let current = probe(ProbeRequests::default(), begun_at);
        assert!(current.has_just_begun(begun_at) && current.has_just_begun(begun_at + TIMEOUT / 4));
        assert!(!current.has_just_begun(begun_at + TIMEOUT / 2) && !current.has_just_begun(begun_at + TIMEOUT));
    }

    #[test]
    fn port_is_not_needed_when_its_results_are_too_old() {
        let now = Duration::from_secs(9);
        let closed = |before| Port { closed_at: Some(now - before), ..Port::default() };
        let reset = |before| Port { reset_at: Some(now - before), ..Port::default() };
        assert!(closed(CLOSED_FOR / 2).is_needed(now) && reset(SAME_CAUSE_WINDOW / 2).is_needed(now));
        assert!(!closed(CLOSED_FOR).is_needed(now) && !reset(SAME_CAUSE_WINDOW).is_needed(now));
        assert!(!Port::default().is_needed(now));
    }
}
