//! The network filter: begins a session, and enforces the limits of clients and logins.

use std::rc::Rc;
use std::sync::Arc;

use envoy_abi::filter::{Filter, FilterFactory, NetworkFilter};
use mysql_proto::error::ProxyError;

use crate::config;
use crate::envoy_drain;
use crate::live_config;
use crate::live_settings;
use crate::login_limits::LoginLimits;
use crate::session::Session;
use crate::slot::{Slot, Slots};
use crate::worker::WorkerContext;

/// The key of the filter state whose hash Envoy passes to the load-balancing policy.
const HASHED: &str = "envoy.hashable_string";

/// How many clients this process serves. Not kept per listener, since a changed listener must count the clients of the
/// old listener.
static CLIENTS: Slots = Slots::new();

/// How many clients this process serves.
pub(crate) fn client_count() -> u64 {
    CLIENTS.taken()
}

pub(crate) struct SessionFilterFactory {
    /// The limits until the control plane has sent others ([`live_settings`]).
    max_clients: u64,
    login_limits: Arc<LoginLimits>,
    has_access_log: bool,
}

impl SessionFilterFactory {
    pub(crate) fn new(config: &config::SessionFilterConfig) -> Self {
        Self {
            max_clients: config::limit(config.max_connections),
            login_limits: Arc::new(LoginLimits::new(&config.login_limits)),
            has_access_log: config.access_log,
        }
    }
}

impl FilterFactory for SessionFilterFactory {
    fn filter(&self, filter: Filter) -> Option<Box<dyn NetworkFilter>> {
        let Some(session) = WorkerContext::current().sessions.get(filter.connection_id()) else {
            envoy_abi::log!(Error, "the listener has the filter of this module, but not its socket");
            return None;
        };
        let (max_clients, login_limits) = match live_settings::current() {
            Some(settings) => (settings.max_clients, Arc::clone(&settings.login_limits)),
            None => (self.max_clients, Arc::clone(&self.login_limits)),
        };
        let client_slot = CLIENTS.try_acquire(max_clients);
        Some(Box::new(SessionFilter {
            filter,
            session,
            client_slot,
            login_limits,
            has_access_log: self.has_access_log,
        }))
    }
}

struct SessionFilter {
    filter: Filter,
    session: Rc<Session>,
    /// None: the maximum number of clients is reached.
    client_slot: Option<Slot>,
    login_limits: Arc<LoginLimits>,
    has_access_log: bool,
}

impl NetworkFilter for SessionFilter {
    fn on_new_connection(&self) -> bool {
        self.session.attach_filter(self.filter.clone(), live_config::limits(), self.has_access_log);
        if envoy_drain::must_end_sessions() {
            self.session.close(ProxyError::EnvoyDraining);
            return false;
        }
        if self.client_slot.is_none() {
            self.session.close(ProxyError::TooManyConnections);
            return false;
        }
        if let Err(why) = self.session.start_login(&self.login_limits) {
            self.session.close(why);
            return false;
        }
        if !self.filter.set_state(HASHED, &self.session.id().to_string()) {
            envoy_abi::log!(Error, "this Envoy does not know the filter state {HASHED}");
            self.session.close(ProxyError::NoNode);
            return false;
        }
        !self.session.try_wait_for_node()
    }

    fn on_wake(&self) {
        self.session.worker.on_wake();
    }
}
