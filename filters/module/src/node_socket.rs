//! The socket to a node. Envoy regards it as connected only when the node has greeted. So if a node refuses or closes
//! the connection, or greets with an error, Envoy sees a failed connection attempt and tries the next node.

use std::cell::{Cell, RefCell};
use std::net::Shutdown;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use envoy_abi::socket::{Closed, Io, IoOutcome, Socket, SocketFactory, TransportSocket};
use mysql_proto::error::ProxyError;
use mysql_proto::greeting::Greeting;
use mysql_proto::login::{FirstPacket, Login, NodeTls, Output, Progress, TOO_MANY_CONNECTIONS, first_packet};
use mysql_proto::packet::{HEADER, Header};
use mysql_proto::secret;
use socket2::SockRef;
use tls::{Stream, TlsConnector};

use crate::conn::{Conn, ReadError, ReadStep};
use crate::deadlines::{Deadline, DeadlineOwner};
use crate::ejection;
use crate::migration_driver::UpstreamSocket;
use crate::node::{ConnectFailure, LoginFailure, WorkerNode};
use crate::offload::{self, OffloadedConn};
use crate::panics::CloseAfterPanic;
use crate::session::{Event, PassDecision, Session, SessionPhase};
use crate::slot::Slot;
use crate::tls_options::NodeTlsOptions;
use crate::unread::has_unread_bytes;
use crate::worker::{Connecting, WorkerContext};
use crate::{config, live_settings, proxy_header, sentinels};

/// The options of a cluster until the control plane has sent others ([`live_settings`]).
struct NodeSocketOptions {
    tls: Arc<NodeTlsOptions>,
    proxy_protocol: config::ProxyProtocol,
    /// How long one ejection of a node lasts.
    ejection: Duration,
}

impl NodeSocketOptions {
    /// The TLS options of connections that begin now.
    fn current_tls(&self) -> Arc<NodeTlsOptions> {
        let live = live_settings::current().and_then(|live| live.node_tls.clone());
        live.unwrap_or_else(|| Arc::clone(&self.tls))
    }
}

pub(crate) struct NodeSocketFactory {
    options: Arc<NodeSocketOptions>,
}

impl NodeSocketFactory {
    pub(crate) fn new(config: &config::NodeSocketConfig) -> Result<Self, String> {
        let live = live_settings::current();
        let tls = live.as_ref().and_then(|live| live.node_tls.clone());
        let tls = tls.map_or_else(|| NodeTlsOptions::load(config), Ok)?;
        // Only now, since Envoy keeps the old cluster if the files cannot be loaded.
        if !envoy_abi::module::validating() && live.is_none() {
            sentinels::configure(config.sentinels, config.proxy_protocol);
        }
        let ejection = config::seconds(config.eject_seconds);
        let options = Arc::new(NodeSocketOptions { tls, proxy_protocol: config.proxy_protocol, ejection });
        Ok(Self { options })
    }
}

impl SocketFactory for NodeSocketFactory {
    fn create(&self, socket: Socket) -> Option<Box<dyn TransportSocket>> {
        let Connecting { session, node, slot } = WorkerContext::current().sessions.take_connecting()?;
        let live = live_settings::current();
        let conn = Conn::new(Rc::clone(&session.worker), socket);
        session.pair_with(&conn);
        let node_conn = Rc::new_cyclic(|node_conn| NodeConn {
            connect_deadline: RefCell::new(
                live.as_ref().map(|live| Deadline::new(&conn.worker.deadlines, live.connect_timeout, node_conn)),
            ),
            conn,
            tls: self.options.current_tls(),
            options: Arc::clone(&self.options),
            session,
            node,
            _slot: slot,
            stage: Cell::new(NodeStage::Connecting),
            greeting: RefCell::default(),
            failure_on_close: Cell::new(ConnectFailure::Connect),
        });
        let upstream: Weak<dyn UpstreamSocket> = Rc::downgrade(&(Rc::clone(&node_conn) as Rc<dyn UpstreamSocket>));
        node_conn.session.set_upstream(upstream);
        Some(Box::new(NodeSocket(node_conn)))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NodeStage {
    /// There is no TCP connection yet.
    Connecting,
    /// The module waits for the greeting.
    Greeting,
    /// The greeting has gone to the client. If TLS is used, it begins when the client answers.
    AwaitingClient,
    /// TLS could not begin, so nothing may be sent.
    Blocked,
    /// Bytes are relayed in both directions.
    Open,
}

struct NodeSocket(Rc<NodeConn>);

struct NodeConn {
    conn: Rc<Conn>,
    options: Arc<NodeSocketOptions>,
    /// The TLS options of this connection. A connection to another node uses the current ones.
    tls: Arc<NodeTlsOptions>,
    /// Passes when the node has not greeted in time. None: it has greeted, or only Envoy's own timeout applies.
    connect_deadline: RefCell<Option<Deadline>>,
    session: Rc<Session>,
    /// The node that Envoy connects to.
    node: Rc<WorkerNode>,
    /// Counts the connection.
    _slot: Slot,
    stage: Cell<NodeStage>,
    /// The received part of the greeting.
    greeting: RefCell<Vec<u8>>,
    /// The failure to report if the connection ended now.
    failure_on_close: Cell<ConnectFailure>,
}

impl NodeConn {
    /// Collects the greeting. When a valid greeting is complete, the node counts as connected, and the client gets the
    /// greeting.
    fn receive_greeting(&self, bytes: &[u8], passed: &mut usize) -> ReadStep {
        let mut greeting = self.greeting.borrow_mut();
        greeting.extend_from_slice(bytes);
        match first_packet(&greeting) {
            FirstPacket::Incomplete => return ReadStep::Continue,
            FirstPacket::Greeting => {}
            FirstPacket::Error(code) => {
                envoy_abi::log!(Debug, "{} greets with error {code}", self.node.shared.name);
                self.failure_on_close.set(ConnectFailure::Error);
                if code == TOO_MANY_CONNECTIONS {
                    self.failure_on_close.set(ConnectFailure::Full);
                    let length = Header::parse(&greeting).map_or(0, |header| HEADER + header.length);
                    self.session.on_node_full(&self.node, &greeting[..length]);
                    self.node.shared.end_ejection();
                }
                return ReadStep::Close;
            }
            FirstPacket::Invalid => {
                envoy_abi::log!(Warn, "{} does not greet as a MySQL server", self.node.shared.name);
                self.failure_on_close.set(ConnectFailure::Invalid);
                return ReadStep::Close;
            }
        }
        let packet = std::mem::take(&mut *greeting);
        drop(greeting);
        self.node.shared.end_ejection();
        self.connect_deadline.replace(None);
        self.stage.set(NodeStage::AwaitingClient);
        self.conn.socket.raise_connected();
        if self.session.phase() != SessionPhase::Connecting {
            return ReadStep::Close; // the session has ended in the meantime
        }
        if !self.session.is_owner_of(self.conn.socket.connection_id()) {
            envoy_abi::log!(
                Error,
                "Envoy shares connections between sessions: the cluster needs connection_pool_per_downstream_connection"
            );
            self.session.close(ProxyError::NoNode);
            return ReadStep::Close;
        }
        self.conn.worker.ports.record_greeting(|| self.conn.peer_address());
        self.session.set_first_id(Greeting::parse(&packet[HEADER..]).map(|greeting| greeting.connection_id));
        self.session.handle(Event::NodeGreeted);
        self.session.release_connecting_slots();
        self.session.with_login(|login| {
            login.set_node_rules(self.tls.mode, self.tls.allow_cleartext_backend);
        });
        self.receive_plain(&packet, passed)
    }

    fn receive_tls(&self, ciphertext: &[u8], passed: &mut usize) -> ReadStep {
        let may_hold_states = self.session.may_receive_states();
        self.conn.worker.buffers.with_scratch(|plain| {
            let result = self.conn.decrypt(ciphertext, |piece| plain.extend_from_slice(piece));
            let step = if let Err(ReadError::Tls(error)) = &result {
                self.on_tls_error(error, passed)
            } else if plain.is_empty() {
                ReadStep::Continue
            } else {
                self.receive_plain(plain, passed)
            };
            if may_hold_states {
                secret::wipe(plain); // the shared buffer may contain states
            }
            match (step, result) {
                (ReadStep::Continue, Ok(true)) => self.on_node_closed(false, passed),
                (ReadStep::Continue, Err(ReadError::Broken)) => self.on_node_closed(true, passed),
                (step, _) => step,
            }
        })
    }

    fn on_tls_error(&self, error: &tls::TlsError, passed: &mut usize) -> ReadStep {
        envoy_abi::log!(Warn, "TLS with {} failed: {error}", self.current_node().shared.name);
        if self.session.phase() == SessionPhase::Login {
            self.report_failure(ConnectFailure::Tls);
            self.reject_login(ProxyError::NodeTlsFailed, passed);
        }
        ReadStep::Close
    }

    /// Ends the login with this error, which the client gets.
    fn reject_login(&self, why: ProxyError, passed: &mut usize) {
        self.conn.pass_on(&self.session.error_packet(why), passed);
        self.session.handle(Event::LoginFailed(LoginFailure::Error(why)));
    }

    fn report_failure(&self, failure: ConnectFailure) {
        self.report_connect_failure(&self.current_node(), &self.session.last_tried_endpoint(), failure);
    }

    /// The node at the other end. After a migration or a login failover it differs from the node that Envoy has
    /// connected to.
    fn current_node(&self) -> Rc<WorkerNode> {
        let is_connected = !matches!(self.stage.get(), NodeStage::Connecting | NodeStage::Greeting);
        self.session.node().filter(|_| is_connected).unwrap_or_else(|| Rc::clone(&self.node))
    }

    fn receive_plain(&self, bytes: &[u8], passed: &mut usize) -> ReadStep {
        if self.session.hold_full_error(bytes) {
            return ReadStep::Wait;
        }
        let mut rest = bytes;
        while self.session.phase() == SessionPhase::Login && !rest.is_empty() {
            let mut output = Output::default();
            let (taken, progress) = self.session.login_from_node(rest, &mut output);
            self.conn.forward(&output.onward, passed);
            rest = &rest[taken..];
            if let Progress::Rejected(_) = progress {
                return ReadStep::Close;
            }
        }
        if self.session.migration.is_client_held() {
            if let Some(driver) = self.session.migration.driver() {
                driver.on_old_node_bytes(rest);
            }
            return ReadStep::Continue;
        }
        if self.session.is_exporting_states() {
            self.session.on_exported_bytes(rest);
            return ReadStep::Continue;
        }
        while self.session.phase() == SessionPhase::Established && !rest.is_empty() {
            let (taken, step) = if self.session.owes_ping_reply() {
                let (taken, packet) = self.session.on_ping_reply(rest);
                (taken, packet.map_or(ReadStep::Continue, |packet| self.pass_to_client(&packet, passed).1))
            } else {
                self.pass_to_client(rest, passed)
            };
            rest = &rest[taken..];
            if let ReadStep::Close = step {
                return ReadStep::Close;
            }
        }
        ReadStep::Continue
    }

    /// Forwards bytes of the node in an established session. Returns how many bytes were taken.
    fn pass_to_client(&self, bytes: &[u8], passed: &mut usize) -> (usize, ReadStep) {
        let (taken, passing) = self.session.on_node_bytes(bytes);
        let bytes = &bytes[..taken];
        if let PassDecision::Reject(why) = passing {
            // The error can only replace a whole packet.
            if let Some(header) = Header::parse(bytes).filter(|header| HEADER + header.length == bytes.len()) {
                self.conn.pass_on(&why.packet(header.sequence, true), passed);
            }
            return (taken, ReadStep::Close);
        }
        self.conn.forward(bytes, passed);
        (taken, if passing == PassDecision::PassAndClose { ReadStep::Close } else { ReadStep::Continue })
    }

    /// The node has closed or reset (`is_reset`) the connection. A session that cannot continue at another node ends at
    /// once, without waiting for more bytes of the client. A client whose login is not complete gets an error.
    fn on_node_closed(&self, is_reset: bool, passed: &mut usize) -> ReadStep {
        // Everything is read, and a session that fails over needs no more writes to this node.
        self.conn.forget_failed_write();
        if self.session.probe_node(is_reset) {
            return ReadStep::Wait; // a probe or a migration decides whether the session continues at another node
        }
        if self.session.phase() == SessionPhase::Login {
            let why = if self.conn.is_handshaking() {
                self.report_failure(ConnectFailure::Tls);
                let name = &self.current_node().shared.name;
                envoy_abi::log!(Warn, "{name} closed the connection during the TLS handshake");
                ProxyError::NodeTlsFailed
            } else {
                self.session.login_loss_error()
            };
            self.reject_login(why, passed);
        }
        ReadStep::Close
    }

    /// Begins TLS if the login requires it. The client's answer to the greeting is in Envoy's write buffer.
    fn begin_tls(&self) -> Result<(), tls::TlsError> {
        // If TLS cannot begin, nothing may be sent.
        self.stage.set(NodeStage::Blocked);
        if let Some(request) = self.session.with_login(|login| login.node_ssl_request()).flatten() {
            let Some(connector) = &self.tls.connector else { return Ok(()) };
            // The login has checked the bytes that were read so far. This checks for bytes that the kernel still holds.
            if self.conn.socket.with_descriptor(has_unread_bytes) == Some(true) {
                self.session.report_data_before_tls();
                self.session.close(ProxyError::NodeTlsFailed);
                return Ok(());
            }
            let stream = create_tls_stream(connector, &self.node.shared.name)?;
            let _ = self.conn.write_or_queue(&request);
            self.conn.start_tls(stream);
            self.session.with_login(Login::on_node_tls_started);
            let _ = self.conn.flush();
        } else if self.session.client_has_tls() && !self.tls.allow_cleartext_backend {
            self.session.set_plain_node_side();
        }
        self.stage.set(NodeStage::Open);
        self.conn.allow_direct();
        Ok(())
    }
}

/// Handles [`NodeConn::connect_deadline`].
impl DeadlineOwner for NodeConn {
    fn on_deadline(self: Rc<Self>) {
        if matches!(self.stage.get(), NodeStage::Connecting | NodeStage::Greeting) {
            // The kernel then reports the end of the connection to Envoy, also that of an attempt to connect, and Envoy
            // tries the next node.
            self.conn.socket.with_descriptor(|socket| {
                let _ = SockRef::from(&socket).shutdown(Shutdown::Both);
            });
        }
    }
}

impl CloseAfterPanic for NodeConn {
    fn close_after_panic(&self) {
        self.session.close_after_panic();
    }
}

impl TransportSocket for NodeSocket {
    fn on_attached(&self) {}

    fn on_connected(&self) {
        self.0.stage.set(NodeStage::Greeting);
        self.0.failure_on_close.set(ConnectFailure::Closed);
        if let Some(live) = live_settings::current() {
            self.0.conn.set_keepalive(&live.node_keepalive);
        }
        let header = self.0.proxy_header();
        if !header.is_empty() {
            let _ = self.0.conn.write_or_queue(&header);
        }
    }

    fn read(&self) -> IoOutcome {
        offload::read(&self.0)
    }

    fn write(&self, end: bool) -> IoOutcome {
        if self.0.stage.get() == NodeStage::AwaitingClient
            && self.0.conn.socket.write_buffer_length() > 0
            && let Err(error) = self.0.begin_tls()
        {
            envoy_abi::log!(Warn, "no TLS with {}: {error}", self.0.node.shared.name);
            self.0.session.close(ProxyError::NodeTlsFailed);
            return IoOutcome::close(0);
        }
        if self.0.stage.get() == NodeStage::Blocked {
            return IoOutcome::close(0);
        }
        let outcome = self.0.conn.write(end);
        if outcome.close && self.0.is_established() {
            // The node may have sent an error before the connection broke. The read hook closes the connection.
            self.0.conn.close_after_reading();
            return IoOutcome::open(outcome.bytes);
        }
        if outcome.bytes > 0 {
            self.0.session.on_quiescent();
        }
        outcome
    }

    /// Only in an established session. In a session that is over, no deadline would end the wait for a node that does
    /// not read.
    fn can_flush_close(&self) -> bool {
        self.0.stage.get() == NodeStage::Open
            && self.0.session.phase() == SessionPhase::Established
            && !self.0.conn.is_handshaking()
    }

    fn on_closed(&self, _: Closed) {
        offload::onload(&self.0.conn, true);
        self.0.conn.finish();
        if matches!(self.0.stage.get(), NodeStage::Connecting | NodeStage::Greeting)
            && self.0.session.phase() == SessionPhase::Connecting
        {
            self.0.report_failure(self.0.failure_on_close.get());
            self.0.session.handle(Event::NodeFailed);
        } else if self.0.stage.get() == NodeStage::Open {
            self.0.session.handle(Event::NodeClosed);
        }
    }

    fn failure_reason(&self) -> &'static str {
        if self.0.stage.get() != NodeStage::Greeting {
            return "";
        }
        match self.0.failure_on_close.get() {
            ConnectFailure::Error => "the node greeted with an error",
            ConnectFailure::Full => "the node takes no more connections",
            ConnectFailure::Invalid => "the node did not greet as a MySQL server",
            _ => "the node closed before its greeting, or did not greet in time",
        }
    }
}

impl OffloadedConn for NodeConn {
    fn conn(&self) -> &Conn {
        &self.conn
    }

    fn is_established(&self) -> bool {
        self.stage.get() == NodeStage::Open && self.session.phase() == SessionPhase::Established
    }

    fn step(&self, buffer: &mut [u8], passed: &mut usize) -> ReadStep {
        if self.session.phase() == SessionPhase::LoginFailover {
            return ReadStep::Wait; // the failover replaces this connection, or returns to it
        }
        let may_hold_states = self.session.may_receive_states();
        let size = if may_hold_states { buffer.len().min(self.conn.worker.states.read_size()) } else { buffer.len() };
        let received = self.conn.receive(&mut buffer[..size]);
        let length = match received.io {
            Io::Done(0) => return self.on_node_closed(false, passed),
            Io::Broken => return self.on_node_closed(true, passed),
            Io::Done(length) => length,
            Io::WouldBlock => return ReadStep::Wait,
        };
        let bytes = &buffer[..length];
        let step = match self.stage.get() {
            NodeStage::Connecting | NodeStage::Greeting => self.receive_greeting(bytes, passed),
            NodeStage::Blocked => ReadStep::Close,
            NodeStage::AwaitingClient | NodeStage::Open if self.conn.has_tls() => self.receive_tls(bytes, passed),
            NodeStage::AwaitingClient | NodeStage::Open => self.receive_plain(bytes, passed),
        };
        if may_hold_states {
            secret::wipe(&mut buffer[..length]); // it may contain states and their token
        }
        match step {
            // Session states may be long, so the worker handles other events between two reads.
            ReadStep::Continue if received.more && may_hold_states => ReadStep::Yield,
            // The event of an offloaded connection reports whether the connection ends after these bytes. Otherwise
            // only another read finds a reset that has followed these bytes: no further event reports the reset.
            ReadStep::Continue if !received.more && self.conn.is_offloaded() => ReadStep::Wait,
            step => step,
        }
    }

    fn on_quiescent(&self) {
        self.session.fail_over_login();
        self.session.on_quiescent();
    }
}

impl UpstreamSocket for NodeConn {
    fn receive_login(&self, bytes: &[u8]) {
        let mut output = Output::default();
        let (taken, progress) = self.session.login_from_node(bytes, &mut output);
        self.conn.forward_received(&output.onward);
        let is_more = matches!(progress, Progress::Established(_)) && taken < bytes.len();
        if is_more || matches!(progress, Progress::Rejected(_)) {
            self.conn.abort();
        }
        self.conn.onload();
        self.conn.socket.set_readable();
    }

    fn report_connect_failure(&self, node: &WorkerNode, endpoint: &str, failure: ConnectFailure) {
        // A login that tries nodes again and again must not look like many logins that fail.
        if !self.session.is_retrying() {
            node.counts.connect_failures[failure as usize].add(1);
        }
        self.session.record_refusal(failure == ConnectFailure::Connect);
        let duration = live_settings::current().map_or(self.options.ejection, |live| live.ejection);
        let was_ejected = node.shared.ejection_details().is_some();
        if let Some(reason) = failure.eject_reason()
            && self.conn.worker.hosts.is_at(node, endpoint)
            && ejection::eject(&self.conn.worker.hosts, node, reason, duration)
            && !was_ejected
        {
            let (name, why) = (&node.shared.name, reason.name());
            envoy_abi::log!(Warn, "{name} cannot be used ({why}) and gets no new sessions for a while");
        }
    }

    fn proxy_header(&self) -> Vec<u8> {
        let kind = live_settings::current().map_or(self.options.proxy_protocol, |live| live.proxy_protocol);
        match (kind, self.session.addresses()) {
            (config::ProxyProtocol::V1, Some((client, listener))) => proxy_header::v1(client, listener),
            (config::ProxyProtocol::V2, Some((client, listener))) => proxy_header::v2(client, listener),
            (config::ProxyProtocol::V1, None) => proxy_header::v1_unknown(),
            (config::ProxyProtocol::V2, None) => proxy_header::v2_local(),
            (config::ProxyProtocol::Off, _) => Vec::new(),
        }
    }

    fn target_tls(&self) -> NodeTls {
        // The session's token and states need at least the same protection as its data so far. The account may also
        // require TLS.
        if self.conn.has_tls() { NodeTls::Required } else { self.options.current_tls().mode }
    }

    fn create_tls(&self, name: &str) -> Option<Result<Stream, tls::TlsError>> {
        // If TLS was disabled since the session began, the session still needs it.
        let current = self.options.current_tls();
        let connector = current.connector.as_ref().or(self.tls.connector.as_ref());
        connector.map(|connector| create_tls_stream(connector, name))
    }
}

/// Creates a TLS stream to the node of that name, `host:port`.
fn create_tls_stream(connector: &TlsConnector, name: &str) -> Result<Stream, tls::TlsError> {
    let host = name.rsplit_once(':').map_or(name, |(host, _)| host);
    connector.connect(host.trim_start_matches('[').trim_end_matches(']'))
}

impl Drop for NodeSocket {
    fn drop(&mut self) {
        offload::onload(&self.0.conn, true);
    }
}
