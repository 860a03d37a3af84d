//! The network filter: begins a session, keeps to the limit of clients, ends it when its time is up.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use abi::filter::{Filter, FilterFactory, NetworkFilter};
use wire::error::Refusal;

use crate::session::Session;
use crate::{config, worker};

/// The key of filter state whose hash Envoy shows to the load-balancing policy.
const HASHED: &str = "envoy.hashable_string";

pub(crate) struct Factory {
    most: u64,
    login_timeout: Duration,
    idle_timeout: Duration,
    /// Clients, of all workers.
    clients: Arc<AtomicU64>,
}

impl Factory {
    pub(crate) fn new(config: &config::Session) -> Self {
        let most = if config.max_connections >= 1.0 { config.max_connections as u64 } else { u64::MAX };
        let seconds = |value: f64| Duration::try_from_secs_f64(value).unwrap_or(Duration::ZERO);
        Self {
            most,
            login_timeout: seconds(config.login_timeout),
            idle_timeout: seconds(config.idle_timeout),
            clients: Arc::default(),
        }
    }
}

impl FilterFactory for Factory {
    fn filter(&self, filter: Filter) -> Option<Box<dyn NetworkFilter>> {
        let Some(session) = worker::session(filter.connection_id()) else {
            abi::log!(Error, "the listener has the filter of this module, but not its socket");
            return None;
        };
        let number = self.clients.fetch_add(1, Ordering::Relaxed) + 1;
        Some(Box::new(SessionFilter {
            filter,
            session,
            login_timeout: self.login_timeout,
            idle_timeout: self.idle_timeout,
            too_many: Cell::new(number > self.most),
            clients: Arc::clone(&self.clients),
        }))
    }
}

struct SessionFilter {
    filter: Filter,
    session: Rc<Session>,
    login_timeout: Duration,
    idle_timeout: Duration,
    too_many: Cell<bool>,
    clients: Arc<AtomicU64>,
}

impl NetworkFilter for SessionFilter {
    fn begun(&self) -> bool {
        self.session.begun(self.filter.clone(), self.login_timeout, self.idle_timeout);
        if self.too_many.get() {
            self.session.close(Refusal::TooManyConnections);
            return false;
        }
        if !self.filter.set_state(HASHED, &self.session.id().to_string()) {
            abi::log!(Error, "this Envoy does not know the filter state {HASHED}");
            self.session.close(Refusal::NoNode);
            return false;
        }
        self.filter.own_pool((self.session.id() & 0x7fff_ffff) as i32);
        true
    }

    fn woken(&self) {
        self.session.woken();
    }
}

impl Drop for SessionFilter {
    fn drop(&mut self) {
        self.clients.fetch_sub(1, Ordering::Relaxed);
    }
}
