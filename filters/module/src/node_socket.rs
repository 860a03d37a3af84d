//! The socket to a node. It counts as connected only when the node has greeted: a node that refuses, closes or
//! greets with an error is then to Envoy a failed connect, and the next one is tried.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use abi::socket::{Closed, Io, Outcome, Socket, SocketFactory, TransportSocket};
use tls::{NodeSide, Stream};
use wire::error::Refusal;
use wire::login::{FirstPacket, Login, NodeTls, Output, Progress, TOO_MANY_CONNECTIONS, first_packet};
use wire::packet::{HEADER, Header};

use crate::ejection;
use crate::events::{self, Member};
use crate::link::{Link, Step, Unread};
use crate::moving::Vehicle;
use crate::node::{ConnectFailure, Here};
use crate::refresh::{Refresher, given};
use crate::session::{Passing, Phase, Session};
use crate::unread::has_unread;
use crate::{config, hosts, port_probe, proxy_header, sentinels, states_memory, worker};

/// What all node sockets of a cluster share.
struct Shared {
    node_tls: NodeTls,
    tls: Option<Arc<NodeSide>>,
    proxy_protocol: config::ProxyProtocol,
    allow_cleartext_backend: bool,
    /// How long one ejection of a node lasts.
    ejection: Duration,
}

pub(crate) struct Factory {
    shared: Arc<Shared>,
    _refresher: Option<Refresher>,
}

impl Factory {
    pub(crate) fn new(config: config::Node) -> Result<Self, String> {
        let ejection = config.ejection();
        if !abi::module::validating() {
            sentinels::set(config.sentinels, config.proxy_protocol);
        }
        let tls = if config.tls == NodeTls::Disabled {
            None
        } else {
            let pair = given(&config.cert).zip(given(&config.key));
            let loaded = NodeSide::load(given(&config.ca), config.verify, pair);
            Some(Arc::new(loaded.map_err(|error| error.to_string())?))
        };
        let shared = Arc::new(Shared {
            node_tls: config.tls,
            tls: tls.clone(),
            proxy_protocol: config.proxy_protocol,
            allow_cleartext_backend: config.allow_cleartext_backend,
            ejection,
        });
        let _refresher = tls.map(|side| Refresher::new("new connections to nodes", move || side.refresh()));
        Ok(Self { shared, _refresher })
    }
}

impl SocketFactory for Factory {
    fn socket(&self, socket: Socket) -> Option<Box<dyn TransportSocket>> {
        let (session, here) = worker::take_connecting()?;
        let link = Link::new(socket);
        session.join(&link);
        let node = Rc::new(Node {
            link,
            shared: Arc::clone(&self.shared),
            session,
            here,
            stage: Cell::new(Stage::Connecting),
            greeting: RefCell::default(),
            failure: Cell::new(ConnectFailure::Connect),
        });
        let vehicle: Weak<dyn Vehicle> = Rc::downgrade(&(Rc::clone(&node) as Rc<dyn Vehicle>));
        node.session.travel.vehicle.replace(Some(vehicle));
        Some(Box::new(NodeSocket(node)))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// No TCP connection yet.
    Connecting,
    /// The greeting is awaited.
    Greeting,
    /// The greeting was passed on; the client's answer is awaited, and TLS begins with it, if at all.
    Greeted,
    /// What goes out must be encrypted, and cannot be: nothing goes out.
    Shut,
    /// Bytes go both ways.
    Open,
}

struct NodeSocket(Rc<Node>);

struct Node {
    link: Rc<Link>,
    shared: Arc<Shared>,
    session: Rc<Session>,
    here: Rc<Here>,
    stage: Cell<Stage>,
    /// What has come of the greeting.
    greeting: RefCell<Vec<u8>>,
    /// Why the node would be unusable, if the connection ended now.
    failure: Cell<ConnectFailure>,
}

impl Node {
    /// Collects the greeting; when it is one, the node is connected, and the greeting goes to the client.
    fn greet(&self, bytes: &[u8], passed: &mut usize) -> Step {
        let mut greeting = self.greeting.borrow_mut();
        greeting.extend_from_slice(bytes);
        match first_packet(&greeting) {
            FirstPacket::Incomplete => return Step::On,
            FirstPacket::Greeting => {}
            FirstPacket::Error(code) => {
                abi::log!(Debug, "{} greets with error {code}", self.here.node.name);
                self.failure.set(ConnectFailure::Error);
                if code == TOO_MANY_CONNECTIONS {
                    self.failure.set(ConnectFailure::Full);
                    let length = Header::parse(&greeting).map_or(0, |header| HEADER + header.length);
                    self.session.node_is_full(&self.here, &greeting[..length]);
                    self.here.node.restore();
                }
                return Step::Close;
            }
            FirstPacket::Invalid => {
                abi::log!(Warn, "{} does not greet as a MySQL server", self.here.node.name);
                self.failure.set(ConnectFailure::Invalid);
                return Step::Close;
            }
        }
        let whole = std::mem::take(&mut *greeting);
        drop(greeting);
        self.here.node.restore();
        self.stage.set(Stage::Greeted);
        self.link.socket.raise_connected();
        if self.session.phase() != Phase::Connecting {
            return Step::Close; // the client has gone meanwhile
        }
        if !self.session.owns(self.link.socket.connection_id()) {
            abi::log!(Error, "Envoy mixes up connections: the cluster needs connection_pool_per_downstream_connection");
            self.session.close(Refusal::NoNode);
            return Step::Close;
        }
        port_probe::has_greeted(|| self.link.peer());
        self.session.greeted();
        self.session.login(|login| {
            login.set_node_rules(self.shared.node_tls, self.shared.allow_cleartext_backend);
        });
        self.take(&whole, passed)
    }

    fn take_tls(&self, ciphertext: &[u8], passed: &mut usize) -> Step {
        worker::with_scratch(|plain| {
            let closed = match self.link.decrypt(ciphertext, plain) {
                Ok(closed) => closed,
                Err(Unread::Tls(error)) => return self.tls_failed(&error, passed),
                Err(Unread::Broken) => return self.gone(true, passed),
            };
            let step = if plain.is_empty() { Step::On } else { self.take(plain, passed) };
            match step {
                Step::On if closed => self.gone(false, passed),
                step => step,
            }
        })
    }

    fn tls_failed(&self, error: &tls::TlsError, passed: &mut usize) -> Step {
        abi::log!(Warn, "TLS with {} failed: {error}", self.here.node.name);
        if self.session.phase() == Phase::Login {
            self.failed(ConnectFailure::Tls);
            self.link.pass_on(&self.session.refuse(Refusal::NodeTlsFailed), passed);
        }
        Step::Close
    }

    fn failed(&self, failure: ConnectFailure) {
        self.cannot_use(&self.here, &self.session.endpoint(), failure);
    }

    fn take(&self, bytes: &[u8], passed: &mut usize) -> Step {
        if self.session.phase() == Phase::Login && self.session.keeps_from_client(bytes) {
            return Step::Again;
        }
        let mut rest = bytes;
        while self.session.phase() == Phase::Login && !rest.is_empty() {
            let mut output = Output::default();
            let (taken, progress) = self.session.login_from_node(rest, &mut output);
            self.link.forward(&output.onward, passed);
            rest = &rest[taken..];
            if let Progress::Refused(_) = progress {
                return Step::Close;
            }
        }
        if self.session.travel.holds() {
            if let Some(moving) = self.session.travel.moving() {
                moving.old(rest);
            }
            return Step::On;
        }
        while self.session.phase() == Phase::Established && !rest.is_empty() {
            let (taken, step) = if self.session.owes_pong() {
                let (taken, packet) = self.session.pong(rest);
                (taken, packet.map_or(Step::On, |packet| self.pass(&packet, passed).1))
            } else {
                self.pass(rest, passed)
            };
            rest = &rest[taken..];
            if let Step::Close = step {
                return Step::Close;
            }
        }
        Step::On
    }

    /// Passes on what the node says to an established session. Returns how many bytes that were.
    fn pass(&self, bytes: &[u8], passed: &mut usize) -> (usize, Step) {
        let (taken, passing) = self.session.node_sent(bytes);
        let bytes = &bytes[..taken];
        if passing == Passing::AsksForClearText {
            // A packet of our own can only take the place of a whole one.
            if let Some(header) = Header::parse(bytes).filter(|header| HEADER + header.length == bytes.len()) {
                let words = Refusal::ClearTextPassword.packet(header.sequence, true);
                self.link.pass_on(&words, passed);
            }
            return (taken, Step::Close);
        }
        self.link.forward(bytes, passed);
        (taken, if passing == Passing::Last { Step::Close } else { Step::On })
    }

    /// The node has closed or reset (`is_reset`) the connection. A session that cannot continue at another
    /// node ends at once, without waiting for more data from the client. A client whose login is not complete gets an error.
    fn gone(&self, is_reset: bool, passed: &mut usize) -> Step {
        if self.session.asks_about_node(is_reset) {
            return Step::Again; // whether the session ends or continues elsewhere is decided later
        }
        if self.session.phase() == Phase::Login {
            let why = if self.link.is_handshaking() {
                self.failed(ConnectFailure::Tls);
                abi::log!(Warn, "{} closed the connection during the TLS handshake", self.here.node.name);
                Refusal::NodeTlsFailed
            } else {
                self.session.lost_login()
            };
            self.link.pass_on(&self.session.refuse(why), passed);
        }
        Step::Close
    }

    /// The client's answer to the greeting lies in the write buffer: TLS begins now or never.
    fn begin_tls(&self) -> Result<(), tls::TlsError> {
        // Until TLS is there nothing may go out by any way.
        self.stage.set(Stage::Shut);
        if let Some(request) = self.session.login(|login| login.node_ssl_request()).flatten() {
            let Some(side) = &self.shared.tls else { return Ok(()) };
            // The login has checked the bytes that were read before. This finds those that the kernel still holds.
            if self.link.socket.with_descriptor(has_unread) == Some(true) {
                self.session.node_spoke_before_tls();
                self.session.close(Refusal::NodeTlsFailed);
                return Ok(());
            }
            let stream = connect(side, &self.here.node.name)?;
            let _ = self.link.say(&request);
            self.link.start_tls(stream);
            self.session.login(Login::node_tls_begins);
            let _ = self.link.flush();
        } else if self.session.client_has_tls() && !self.shared.allow_cleartext_backend {
            self.session.set_exposed();
        }
        self.stage.set(Stage::Open);
        self.link.open();
        Ok(())
    }
}

impl TransportSocket for NodeSocket {
    fn attached(&self) {}

    fn connected(&self) {
        self.0.stage.set(Stage::Greeting);
        self.0.failure.set(ConnectFailure::Closed);
        let header = self.0.proxy_header();
        if !header.is_empty() {
            let _ = self.0.link.say(&header);
        }
    }

    fn read(&self) -> Outcome {
        events::read(&self.0)
    }

    fn write(&self, end: bool) -> Outcome {
        if self.0.stage.get() == Stage::Greeted
            && self.0.link.socket.write_buffer_length() > 0
            && let Err(error) = self.0.begin_tls()
        {
            abi::log!(Warn, "no TLS with {}: {error}", self.0.here.node.name);
            self.0.session.close(Refusal::NodeTlsFailed);
            return Outcome::close(0);
        }
        if self.0.stage.get() == Stage::Shut {
            return Outcome::close(0);
        }
        let outcome = self.0.link.write(end);
        if outcome.bytes > 0 {
            self.0.session.rests();
        }
        outcome
    }

    /// Not for a session that is over: nobody would end the wait for a node that does not read.
    fn can_flush_close(&self) -> bool {
        self.0.stage.get() == Stage::Open
            && self.0.session.phase() == Phase::Established
            && !self.0.link.is_handshaking()
    }

    fn closed(&self, _: Closed) {
        events::give_back(&self.0.link, true);
        self.0.link.finish();
        if matches!(self.0.stage.get(), Stage::Connecting | Stage::Greeting)
            && self.0.session.phase() == Phase::Connecting
        {
            self.0.failed(self.0.failure.get());
            self.0.session.node_failed();
        } else if self.0.stage.get() == Stage::Open {
            self.0.session.node_closed();
        }
    }

    fn failure_reason(&self) -> &'static str {
        if self.0.stage.get() != Stage::Greeting {
            return "";
        }
        match self.0.failure.get() {
            ConnectFailure::Error => "the node greeted with an error",
            ConnectFailure::Full => "the node takes no more connections",
            ConnectFailure::Invalid => "the node did not greet as a MySQL server",
            _ => "the node closed before its greeting, or had none in time",
        }
    }
}

impl Member for Node {
    fn link(&self) -> &Link {
        &self.link
    }

    fn is_established(&self) -> bool {
        self.stage.get() == Stage::Open && self.session.phase() == Phase::Established
    }

    fn step(&self, buffer: &mut [u8], passed: &mut usize) -> Step {
        if self.session.is_asking_elsewhere() {
            return Step::Again; // the session gets another connection, or reads this one later
        }
        let holds = self.session.travel.holds();
        let size = if holds { buffer.len().min(states_memory::read_size()) } else { buffer.len() };
        let received = self.link.receive(&mut buffer[..size]);
        let length = match received.io {
            Io::Done(0) => return self.gone(false, passed),
            Io::Broken => return self.gone(true, passed),
            Io::Done(length) => length,
            Io::Again => return Step::Again,
        };
        let bytes = &buffer[..length];
        let step = match self.stage.get() {
            Stage::Connecting | Stage::Greeting => self.greet(bytes, passed),
            Stage::Shut => Step::Close,
            Stage::Greeted | Stage::Open if self.link.has_tls() => self.take_tls(bytes, passed),
            Stage::Greeted | Stage::Open => self.take(bytes, passed),
        };
        match step {
            // Session states may be long: between two reads the worker handles other events.
            Step::On if received.more && holds => Step::Later,
            // If the module reads past Envoy, the event says whether the connection ends after these bytes. Otherwise only
            // another read finds a reset that came with them: no further event reports it.
            Step::On if !received.more && self.link.is_past_envoy() => Step::Again,
            step => step,
        }
    }

    fn rests(&self) {
        self.session.asks_elsewhere();
        self.session.rests();
    }
}

impl Vehicle for Node {
    fn receive_login(&self, bytes: &[u8]) {
        let mut output = Output::default();
        let (taken, progress) = self.session.login_from_node(bytes, &mut output);
        self.link.resume(&output.onward);
        let is_more = matches!(progress, Progress::Established(_)) && taken < bytes.len();
        if is_more || matches!(progress, Progress::Refused(_)) {
            self.link.doom();
        }
        self.link.give_back();
        self.link.socket.set_readable();
    }

    fn cannot_use(&self, node: &Here, endpoint: &str, failure: ConnectFailure) {
        node.counts.connect_failures[failure as usize].add(1);
        let was_ejected = node.node.ejected().is_some();
        if let Some(reason) = failure.ejects()
            && hosts::is_at(node, endpoint)
            && ejection::eject(node, reason, self.shared.ejection)
            && !was_ejected
        {
            let (name, why) = (&node.node.name, reason.name());
            abi::log!(Warn, "{name} cannot be used ({why}) and gets no new sessions for a while");
        }
    }

    fn proxy_header(&self) -> Vec<u8> {
        match (self.shared.proxy_protocol, self.session.addresses()) {
            (config::ProxyProtocol::V1, Some((client, listener))) => proxy_header::v1(client, listener),
            (config::ProxyProtocol::V2, Some((client, listener))) => proxy_header::v2(client, listener),
            (config::ProxyProtocol::V1, None) => proxy_header::v1_unknown(),
            (config::ProxyProtocol::V2, None) => proxy_header::v2_local(),
            (config::ProxyProtocol::Off, _) => Vec::new(),
        }
    }

    fn target_tls(&self) -> NodeTls {
        // The session's token and states must not travel with less protection than its data so far. Also, its account may
        // require TLS.
        if self.link.has_tls() { NodeTls::Required } else { self.shared.node_tls }
    }

    fn tls_with(&self, name: &str) -> Option<Result<Stream, tls::TlsError>> {
        self.shared.tls.as_ref().map(|side| connect(side, name))
    }
}

/// TLS with the node of that name, `host:port`.
fn connect(side: &NodeSide, name: &str) -> Result<Stream, tls::TlsError> {
    let host = name.rsplit_once(':').map_or(name, |(host, _)| host);
    side.connect(host.trim_start_matches('[').trim_end_matches(']'))
}

impl Drop for NodeSocket {
    fn drop(&mut self) {
        events::give_back(&self.0.link, true);
    }
}
