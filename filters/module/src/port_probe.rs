//! Whether a node is still there, asked at its SQL port when it has closed a connection.
//!
//! TiDB ends an idle connection by a bare FIN, be it for `KILL`, for `wait_timeout` or because it stops. In the last case it
//! has closed its port before (pingcap/tidb `pkg/server/server.go`, `Server.Close` and `KillAllConnections`).
//!
//! A connection alone proves nothing: the kernel of a machine makes it for a process that is being killed, and ends it
//! with its other sockets, of which it closes the newest ones first. So the greeting is awaited.
//!
//! One question is asked for all who wait, and an answer is only for those who had asked before it was sought.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::rc::{Rc, Weak};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

use crate::clock;
use crate::events::{self, Key, Visitor};

/// How long the port may take to answer. Who has waited so long calls [`give_up`].
pub(crate) const TIMEOUT: Duration = Duration::from_secs(1);
/// How long a port that refused counts as closed, for those who ask behind that. Less than a server takes to start.
const CLOSED_FOR: Duration = Duration::from_millis(500);
/// Resets of idle connections within this time came together.
const TOGETHER: Duration = Duration::from_millis(100);
/// Connections to a port that accepts them and then closes them without a greeting.
const ATTEMPTS: u8 = 3;

/// Who asks.
pub(crate) trait Asker {
    fn answered(self: Rc<Self>, is_there: bool);
}

struct Waiting {
    asker: Weak<dyn Asker>,
    /// Its connection was idle, and was reset.
    is_reset: bool,
}

/// What is known of one port.
#[derive(Default)]
struct Port {
    probe: Option<Rc<Probe>>,
    /// Those who asked when the probe had begun.
    next: Vec<Waiting>,
    /// When it was found closed last.
    closed_at: Option<Duration>,
    /// When connections were reset together last.
    reset_at: Option<Duration>,
}

thread_local! {
    /// Of one worker.
    static PORTS: RefCell<HashMap<SocketAddr, Port>> = RefCell::default();
}

fn with_port<T>(address: SocketAddr, run: impl FnOnce(&mut Port) -> T) -> T {
    PORTS.with_borrow_mut(|ports| run(ports.entry(address).or_default()))
}

/// Asks whether the node at that port is there. `header`: what it has to be told before it greets. `is_reset`: the
/// connection was idle, and was reset: where that happens to several together, no KILL has done it.
///
/// None: `asker` is answered later.
pub(crate) fn ask(
    address: SocketAddr,
    asker: &Rc<impl Asker + 'static>,
    is_reset: bool,
    header: &dyn Fn() -> Vec<u8>,
) -> Option<bool> {
    let asker: Weak<dyn Asker> = Rc::downgrade(&(Rc::clone(asker) as Rc<dyn Asker>));
    let now = clock::now();
    let is_recent = |at: Option<Duration>, within: Duration| at.is_some_and(|at| now < at + within);
    let (closed, together) = with_port(address, |port| {
        if is_reset && !is_recent(port.reset_at, TOGETHER) && port.has_resets() {
            port.reset_at = Some(now);
        }
        (is_recent(port.closed_at, CLOSED_FOR), is_reset && is_recent(port.reset_at, TOGETHER))
    });
    if together {
        for other in with_port(address, Port::take_resets) {
            other.answer(false);
        }
    }
    if closed || together {
        return Some(false);
    }
    let waiting = Waiting { asker, is_reset };
    if with_port(address, |port| port.probe.is_some()) {
        with_port(address, |port| port.next.push(waiting));
        return None;
    }
    begin(address, vec![waiting], header()).err().map(|(is_there, _)| is_there)
}

/// An asker has waited for [`TIMEOUT`].
pub(crate) fn give_up(address: SocketAddr) {
    if let Some(probe) = with_port(address, |port| port.probe.clone()) {
        // A node that has accepted a connection and is slow is there.
        let is_there = probe.connection.borrow().as_ref().is_some_and(|connection| connection.peer_addr().is_ok());
        probe.ends(is_there);
    }
}

/// The node has greeted there: it is not closed any more. `address`: asked for where it matters.
pub(crate) fn has_greeted(address: impl FnOnce() -> Option<SocketAddr>) {
    if PORTS.with_borrow(|ports| ports.values().all(|port| port.closed_at.is_none())) {
        return;
    }
    if let Some(address) = address() {
        with_port(address, |port| port.closed_at = None);
    }
}

/// Begins to ask for these. Err: it is known at once, and nobody was answered.
fn begin(address: SocketAddr, askers: Vec<Waiting>, header: Vec<u8>) -> Result<(), (bool, Vec<Waiting>)> {
    let probe = Rc::new(Probe {
        address,
        header,
        connection: RefCell::default(),
        key: Cell::new(None),
        attempts: Cell::new(0),
        is_told: Cell::new(false),
        askers: RefCell::new(askers),
    });
    let Some(is_there) = probe.connect() else {
        with_port(address, |port| port.probe = Some(probe));
        return Ok(());
    };
    if !is_there {
        with_port(address, |port| port.closed_at = Some(clock::now()));
    }
    Err((is_there, probe.askers.take()))
}

impl Port {
    fn has_resets(&self) -> bool {
        let of_probe = |probe: &Rc<Probe>| probe.askers.borrow().iter().any(|one| one.is_reset);
        self.next.iter().any(|one| one.is_reset) || self.probe.as_ref().is_some_and(of_probe)
    }

    fn take_resets(&mut self) -> Vec<Waiting> {
        let take = |all: &mut Vec<Waiting>| -> Vec<Waiting> {
            let (resets, others) = std::mem::take(all).into_iter().partition(|one| one.is_reset);
            *all = others;
            resets
        };
        let mut taken = take(&mut self.next);
        if let Some(probe) = &self.probe {
            taken.extend(take(&mut probe.askers.borrow_mut()));
        }
        taken
    }
}

impl Waiting {
    fn answer(self, is_there: bool) {
        if let Some(asker) = self.asker.upgrade() {
            asker.answered(is_there);
        }
    }
}

struct Probe {
    address: SocketAddr,
    header: Vec<u8>,
    connection: RefCell<Option<Socket>>,
    key: Cell<Option<Key>>,
    attempts: Cell<u8>,
    /// The header was sent.
    is_told: Cell<bool>,
    askers: RefCell<Vec<Waiting>>,
}

/// EINPROGRESS, which std has no stable name for.
const IN_PROGRESS: i32 = 115;

impl Probe {
    /// Begins to connect. Some: it is known at once.
    fn connect(self: &Rc<Self>) -> Option<bool> {
        self.attempts.set(self.attempts.get() + 1);
        self.is_told.set(self.header.is_empty());
        let made = Socket::new(Domain::for_address(self.address), Type::STREAM.nonblocking(), Some(Protocol::TCP));
        let Ok(connection) = made else { return self.cannot_ask() };
        match connection.connect(&self.address.into()) {
            Err(error) if error.raw_os_error() != Some(IN_PROGRESS) && error.kind() != ErrorKind::WouldBlock => {
                return match error.kind() {
                    ErrorKind::AddrNotAvailable | ErrorKind::PermissionDenied => self.cannot_ask(),
                    _ => Some(false),
                };
            }
            _ => {}
        }
        let visitor: Weak<dyn Visitor> = Rc::downgrade(&(Rc::clone(self) as Rc<dyn Visitor>));
        let Some(key) = events::watch(connection.as_fd(), visitor) else { return self.cannot_ask() };
        self.key.set(Some(key));
        self.connection.replace(Some(connection));
        None
    }

    /// For want of descriptors or ports of our own. What nobody knows to be a failure of the node may be a KILL.
    fn cannot_ask(&self) -> Option<bool> {
        abi::log!(Warn, "no connection to {} can be made, to ask whether it is there", self.address);
        Some(true)
    }

    fn close(&self) {
        if let Some(connection) = self.connection.take()
            && let Some(key) = self.key.take()
        {
            events::forget(connection.as_fd(), key);
        }
    }

    /// What has come of it; None: nothing yet.
    fn look(self: &Rc<Self>) -> Option<bool> {
        match self.read() {
            Ok(1..) => Some(true),
            // It was accepted, by the kernel at least. Behind its end the port is closed, if the node is gone.
            Ok(0) => self.try_again(),
            Err(error) => match error.kind() {
                // Also while it is not connected yet.
                ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::NotConnected => None,
                ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => self.try_again(),
                _ => Some(false),
            },
        }
    }

    /// Sends the header, if that is due, and reads. Each error is told once, by the first call that meets it.
    fn read(&self) -> io::Result<usize> {
        let connection = self.connection.borrow();
        let Some(mut connection) = connection.as_ref() else { return Err(ErrorKind::WouldBlock.into()) };
        if !self.is_told.get() {
            connection.write_all(&self.header)?;
            self.is_told.set(true);
        }
        connection.read(&mut [0; 1024])
    }

    fn try_again(self: &Rc<Self>) -> Option<bool> {
        self.close();
        if self.attempts.get() < ATTEMPTS { self.connect() } else { Some(true) }
    }

    fn ends(self: &Rc<Self>, is_there: bool) {
        self.close();
        let mut askers = self.askers.take();
        let next = with_port(self.address, |port| {
            port.probe = None;
            if !is_there {
                port.closed_at = Some(clock::now());
            }
            std::mem::take(&mut port.next)
        });
        if !is_there {
            askers.extend(next);
        } else if !next.is_empty() {
            // They asked when this was on its way: the node may have gone since.
            if let Err((known, next)) = begin(self.address, next, self.header.clone()) {
                next.into_iter().for_each(|one| one.answer(known));
            }
        }
        askers.into_iter().for_each(|one| one.answer(is_there));
    }
}

impl Visitor for Probe {
    fn happened(self: Rc<Self>) {
        if let Some(is_there) = self.look() {
            self.ends(is_there);
        }
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.close();
    }
}
