//! The network filter: begins a session, keeps to the limit of clients, ends it when its time is up.

use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use abi::filter::{Filter, FilterFactory, NetworkFilter};
use wire::error::Refusal;

use crate::live_config::{self, Limits};
use crate::session::Session;
use crate::{config, hosts, worker};

/// The key of filter state whose hash Envoy shows to the load-balancing policy.
const HASHED: &str = "envoy.hashable_string";

/// Clients of this process that are served; a changed listener must not forget those of the old one.
static CLIENTS: AtomicU64 = AtomicU64::new(0);

pub(crate) struct Factory {
    most: u64,
}

impl Factory {
    pub(crate) fn new(config: &config::Session) -> Self {
        let most = if config.max_connections >= 1.0 { config.max_connections as u64 } else { u64::MAX };
        Self { most }
    }
}

impl FilterFactory for Factory {
    fn filter(&self, filter: Filter) -> Option<Box<dyn NetworkFilter>> {
        let Some(session) = worker::session(filter.connection_id()) else {
            abi::log!(Error, "the listener has the filter of this module, but not its socket");
            return None;
        };
        Some(Box::new(SessionFilter { filter, session, counted: Counted::one_of(self.most) }))
    }
}

struct SessionFilter {
    filter: Filter,
    session: Rc<Session>,
    /// None: there are as many as there may be.
    counted: Option<Counted>,
}

/// A client that is served.
struct Counted;

impl Counted {
    /// One more, unless there are `most`.
    fn one_of(most: u64) -> Option<Self> {
        let more = |clients| (clients < most).then_some(clients + 1);
        CLIENTS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok().map(|_| Self)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        CLIENTS.fetch_sub(1, Ordering::Relaxed);
    }
}

impl NetworkFilter for SessionFilter {
    fn begun(&self) -> bool {
        let Limits { login_timeout, idle_timeout } = live_config::limits();
        self.session.begun(self.filter.clone(), login_timeout, idle_timeout);
        if self.counted.is_none() {
            self.session.close(Refusal::TooManyConnections);
            return false;
        }
        if !self.filter.set_state(HASHED, &self.session.id().to_string()) {
            abi::log!(Error, "this Envoy does not know the filter state {HASHED}");
            self.session.close(Refusal::NoNode);
            return false;
        }
        true
    }

    fn woken(&self) {
        hosts::look();
        self.session.woken();
    }
}
