//! The configuration that changes while Envoy runs: limits of sessions, and the control plane's nodes.
//!
//! Envoy's main thread receives it as the configuration of the listener filter `live_config` (ECDS), and publishes it as a
//! whole. What was published never changes: a worker keeps what it has until it is woken, or until it chooses a node, and
//! applies the latest then.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, PoisonError, RwLock};
use std::time::Duration;

use envoy_abi::listener_filter::{Accept, ListenerFilter, Verdict};

use crate::config::{self, NodeInfo};
use crate::switches::{self, Switches};
use crate::wakers;

/// The listener filter that carries the configuration; it does nothing with connections.
pub(crate) struct LiveConfigFilter;

impl ListenerFilter for LiveConfigFilter {
    fn accept(&self, _: &dyn Fn() -> Option<SocketAddr>) -> Accept {
        Accept::Continue
    }

    fn inspect(&self, _: &[u8]) -> Verdict {
        Verdict::Continue { length: 0, addresses: None }
    }
}

/// All nodes of a group.
pub(crate) type Nodes = Arc<[NodeInfo]>;

/// Limits of sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SessionLimits {
    pub(crate) login_timeout: Duration,
    /// Zero: none.
    pub(crate) idle_timeout: Duration,
}

struct CurrentConfig {
    limits: SessionLimits,
    /// By group.
    nodes: HashMap<String, Nodes>,
}

static CURRENT: LazyLock<RwLock<CurrentConfig>> = LazyLock::new(|| {
    // These limits are for sessions that begin before, which get no node.
    let limits = SessionLimits { login_timeout: Duration::from_secs(8), idle_timeout: Duration::ZERO };
    RwLock::new(CurrentConfig { limits, nodes: HashMap::new() })
});

/// How often something was published.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// The main thread has received a configuration.
pub(crate) fn on_received(config: config::LiveConfig) {
    let Some(published) = config.published else { return };
    let seconds = |value: f64| Duration::try_from_secs_f64(value).unwrap_or(Duration::ZERO);
    let limits = SessionLimits {
        login_timeout: seconds(published.login_timeout),
        idle_timeout: seconds(published.idle_timeout),
    };
    switches::set_published(Switches { offload: published.offload, migration: published.migration });
    publish(limits, published.group, published.nodes.into());
}

fn publish(limits: SessionLimits, group: String, nodes: Nodes) {
    // What it replaces is dropped after the lock is released.
    let _before = {
        let mut current = CURRENT.write().unwrap_or_else(PoisonError::into_inner);
        current.limits = limits;
        current.nodes.insert(group, nodes)
    };
    COUNT.fetch_add(1, Ordering::Release);
    wakers::wake_all();
}

/// Changes with each publication. What is read after this is of that publication, or of a later one.
pub(crate) fn count() -> u64 {
    COUNT.load(Ordering::Acquire)
}

/// The limits for sessions that begin now.
pub(crate) fn limits() -> SessionLimits {
    CURRENT.read().unwrap_or_else(PoisonError::into_inner).limits
}

/// The nodes of a group; None: none were published yet.
pub(crate) fn nodes(group: &str) -> Option<Nodes> {
    CURRENT.read().unwrap_or_else(PoisonError::into_inner).nodes.get(group).cloned()
}
