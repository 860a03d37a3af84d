//! A session: one client connection, from accept to close. Its sockets, its filter and the policy share this state.

mod assigned_node;
mod close_probe;
mod ending;
mod identity;
mod kept_states;
mod kill;
mod lifecycle;
mod limits;
mod listing;
mod login;
mod login_record;
mod migration;
mod node_loss;
mod requests;
mod state_export;
mod statement_rules;
mod token_plugin_scan;
mod traffic;
mod unreachable;

pub(crate) use self::migration::{MigrationBlocker, StartResult};
pub(crate) use close_probe::CloseProbe;
pub(crate) use kept_states::KeptStates;
pub(crate) use lifecycle::{Event, REJECTION_TIMEOUT, SessionPhase};
pub(crate) use requests::Decision;
pub(crate) use traffic::PassDecision;

use std::cell::{Cell, OnceCell, RefCell};
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use envoy_abi::filter::Filter;
use mysql_proto::login::Rules;

use crate::conn::Conn;
use crate::deadlines::Deadline;
use crate::live_config::SessionLimits;
use crate::migration_driver::UpstreamSocket;
use crate::migration_state::MigrationState;
use crate::node::{Counts, WorkerNode};
use crate::offload::OffloadedConn;
use crate::reachability::MonitoredEndpoint;
use crate::worker::WorkerContext;
use assigned_node::{AssignedNode, CountedState};
use identity::SessionIdentity;
use lifecycle::Effect;
use limits::SessionSlots;
use listing::ConnectionIds;
use login::SessionLogin;
use node_loss::LossEvent;
use requests::SessionRequests;
use state_export::SessionExport;
use statement_rules::SessionRules;
use traffic::Traffic;

/// The namespace of the metadata that access logs can show.
const METADATA: &str = "tidevoy";

/// One session. All of its hooks run on one worker. A hook may run inside another one, so no cell may be borrowed while
/// Envoy or another session is called.
pub(crate) struct Session {
    pub(crate) worker: Rc<WorkerContext>,
    id: u64,
    /// Envoy's hash of the filter state that the filter sets. The policy finds the session by this hash.
    hash: u64,
    phase: Cell<SessionPhase>,
    client: Rc<Conn>,
    client_socket: OnceCell<Weak<dyn OffloadedConn>>,
    /// None: Envoy has created no socket to a node yet.
    upstream: RefCell<Option<Weak<dyn UpstreamSocket>>>,
    filter: OnceCell<AttachedFilter>,
    /// None: the session has no node.
    node: RefCell<Option<AssignedNode>>,
    /// None: the login is over.
    login: RefCell<Option<Box<SessionLogin>>>,
    /// None: the session is not established yet.
    traffic: RefCell<Option<Traffic>>,
    requests: SessionRequests,
    rules: SessionRules,
    identity: SessionIdentity,
    ids: ConnectionIds,
    slots: SessionSlots,
    pub(crate) kept_states: KeptStates,
    export: SessionExport,
    pub(crate) migration: MigrationState,
    deadline: RefCell<Option<Deadline>>,
    /// The keepalive time that Envoy has set on the node's connection. None: the module has not changed it.
    keepalive_time_before: Cell<Option<Duration>>,
    /// The error packet that the client gets before its connection closes. Empty: none.
    final_error: RefCell<Vec<u8>>,
    /// The drain of this Envoy has ended the session.
    is_ended_by_drain: Cell<bool>,
}

/// The session's network filter.
struct AttachedFilter {
    filter: Filter,
    /// The address of the client, and the address that the client has connected to.
    addresses: Option<(SocketAddr, SocketAddr)>,
    /// How long an established session may be idle. Zero: as long as its node allows.
    idle_timeout: Duration,
    /// Whether an access log shows the metadata of the session.
    has_access_log: bool,
}

impl Session {
    /// Creates the session of the client connection `id`.
    pub(crate) fn new(id: u64, client: Rc<Conn>, rules: Rules) -> Rc<Self> {
        Rc::new(Self {
            worker: Rc::clone(&client.worker),
            id,
            hash: xxhash_rust::xxh64::xxh64(id.to_string().as_bytes(), 0),
            phase: Cell::new(SessionPhase::Connecting),
            client,
            client_socket: OnceCell::new(),
            upstream: RefCell::default(),
            filter: OnceCell::new(),
            node: RefCell::default(),
            login: RefCell::new(Some(Box::new(SessionLogin::new(rules)))),
            traffic: RefCell::default(),
            requests: SessionRequests::default(),
            rules: SessionRules::default(),
            identity: SessionIdentity::default(),
            ids: ConnectionIds::default(),
            slots: SessionSlots::default(),
            kept_states: KeptStates::default(),
            export: SessionExport::default(),
            migration: MigrationState::default(),
            deadline: RefCell::default(),
            keepalive_time_before: Cell::new(None),
            final_error: RefCell::default(),
            is_ended_by_drain: Cell::new(false),
        })
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    pub(crate) fn phase(&self) -> SessionPhase {
        self.phase.get()
    }

    pub(crate) fn addresses(&self) -> Option<(SocketAddr, SocketAddr)> {
        self.filter.get()?.addresses
    }

    /// Sets the next state and applies the effects, both as [`lifecycle::next`] decides.
    pub(crate) fn handle(self: &Rc<Self>, event: Event) {
        let (phase, effects) = lifecycle::next(self.phase.get(), event);
        self.phase.set(phase);
        for effect in effects {
            debug_assert!(self.is_unborrowed(), "{effect:?} while a part of the session is borrowed");
            self.apply(effect);
            if self.phase.get() != phase {
                return; // the effect has made Envoy close the session
            }
        }
    }

    /// Whether Envoy may call hooks of the session now. An effect may make Envoy do so.
    fn is_unborrowed(&self) -> bool {
        self.node.try_borrow_mut().is_ok()
            && self.login.try_borrow_mut().is_ok()
            && self.traffic.try_borrow_mut().is_ok()
            && self.deadline.try_borrow_mut().is_ok()
            && self.final_error.try_borrow_mut().is_ok()
    }

    fn apply(self: &Rc<Self>, effect: Effect) {
        match effect {
            Effect::ReleaseNode => self.release_node(),
            Effect::StartTraffic => self.start_traffic(),
            Effect::RecordLoginFailure(failure) => self.record_login_failure(failure),
            Effect::RejectLogin(rejection) => self.reject_login(rejection),
            Effect::LeaveNode => self.leave_node(),
            Effect::LeaveUnreachableNode => self.on_node_loss(LossEvent::NodeUnreachable),
            Effect::ContinueConnection => self.continue_connection(),
            Effect::CheckWait => self.check_wait(),
            Effect::CheckIdleTimeout => self.check_idle_timeout(),
            Effect::StartDeadline(after) => self.start_deadline(after),
            Effect::ExtendDeadline(after) => self.extend_deadline(after),
            Effect::CloseClient(reason) => self.close_now(reason),
            Effect::ReleaseAll => self.release_all(),
        }
    }

    /// Envoy has created the filter. From now on the session can be closed, and has a deadline.
    pub(crate) fn attach_filter(self: &Rc<Self>, filter: Filter, limits: SessionLimits, has_access_log: bool) {
        self.start_deadline(limits.login_timeout);
        self.worker.waker.add(self.id, &filter);
        let addresses = filter.remote_address().zip(filter.local_address());
        let _ =
            self.filter.set(AttachedFilter { filter, addresses, idle_timeout: limits.idle_timeout, has_access_log });
    }

    pub(crate) fn set_client_socket(&self, socket: Weak<dyn OffloadedConn>) {
        let _ = self.client_socket.set(socket);
    }

    /// None: Envoy has destroyed the socket.
    pub(crate) fn client_socket(&self) -> Option<Rc<dyn OffloadedConn>> {
        self.client_socket.get().and_then(Weak::upgrade)
    }

    /// Sets the socket that Envoy has created to a node, in place of the socket of a failed connection attempt.
    pub(crate) fn set_upstream(&self, socket: Weak<dyn UpstreamSocket>) {
        self.upstream.replace(Some(socket));
    }

    /// The socket to the node. None: Envoy has not created one, or has destroyed it.
    pub(crate) fn upstream(&self) -> Option<Rc<dyn UpstreamSocket>> {
        self.upstream.borrow().as_ref().and_then(Weak::upgrade)
    }

    /// The filter whose metadata an access log shows. None: there is no access log.
    fn logged_filter(&self) -> Option<&Filter> {
        self.filter.get().filter(|attached| attached.has_access_log).map(|attached| &attached.filter)
    }

    /// Pairs the client's connection with the connection to a node.
    pub(crate) fn pair_with(&self, node: &Rc<Conn>) {
        self.client.pair(node);
    }

    /// Whether Envoy uses this connection for this session. False: Envoy's connection pool shares connections, against
    /// its required configuration.
    pub(crate) fn is_owner_of(&self, connection: Option<u64>) -> bool {
        let upstream = || self.filter.get().and_then(|attached| attached.filter.upstream_connection_id());
        connection.is_some() && upstream() == connection
    }

    /// The node that the session uses or connects to.
    pub(crate) fn node(&self) -> Option<Rc<WorkerNode>> {
        self.node.borrow().as_ref().map(|assigned| Rc::clone(&assigned.node))
    }

    /// The endpoint of the session's node. None: there is no node, or it has no IP address.
    pub(crate) fn monitored_endpoint(&self) -> Option<Arc<MonitoredEndpoint>> {
        self.node.borrow().as_ref()?.endpoint.clone()
    }

    fn is_node(&self, condition: impl FnOnce(&Rc<WorkerNode>) -> bool) -> bool {
        self.node.borrow().as_ref().is_some_and(|assigned| condition(&assigned.node))
    }

    fn node_name(&self) -> String {
        self.node.borrow().as_ref().map(|assigned| assigned.node.shared.name.clone()).unwrap_or_default()
    }

    /// Counts the session at this node, and no longer at the node before.
    fn assign_node(&self, node: &Rc<WorkerNode>, endpoint: Option<Arc<MonitoredEndpoint>>, state: CountedState) {
        self.release_node();
        self.node.replace(Some(AssignedNode::new(node, endpoint, state)));
    }

    fn release_node(&self) {
        self.node.replace(None);
    }

    /// Calls `add` with the counters of the session's node, or with those for sessions without a node.
    fn with_counts<T>(&self, add: impl FnOnce(&Counts) -> T) -> T {
        match &*self.node.borrow() {
            Some(assigned) => add(&assigned.node.counts),
            None => add(self.worker.nodes.no_node()),
        }
    }

    /// None: the session has no node.
    fn counted_state(&self) -> Option<CountedState> {
        self.node.borrow().as_ref().map(AssignedNode::counted)
    }
}
