//! The configuration that changes while Envoy runs: limits of sessions, and the control plane's nodes.
//!
//! Envoy's main thread receives this configuration as that of the listener filter `live_config` (ECDS), and publishes
//! it as a whole. A published configuration never changes. A worker applies the latest one when it is woken or chooses
//! a node.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use envoy_abi::listener_filter::{Accept, ListenerFilter, Verdict};

use crate::config::{self, NodeInfo, seconds};
use crate::live_settings;
use crate::switches::{self, Switches};
use crate::{capture, connection_limits, held_memory, login_log, rules, statement_log, statements, wakers};

/// The listener filter that carries the configuration. It lets all connections pass.
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
    /// Zero: no timeout.
    pub(crate) idle_timeout: Duration,
    /// How long a login waits for a node. Zero: it does not wait.
    pub(crate) wait_for_node: Duration,
    pub(crate) max_waiting_logins: u64,
}

/// The times of a drain of this Envoy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DrainTimes {
    /// How long new clients are still served.
    pub(crate) wait: Duration,
    /// How long sessions may take to end after that.
    pub(crate) timeout: Duration,
}

/// What operators decide about this Envoy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct OperatorSwitches {
    is_ready: bool,
    is_drain_requested: bool,
}

struct CurrentConfig {
    limits: SessionLimits,
    drain_times: DrainTimes,
    switches: OperatorSwitches,
    /// By group.
    nodes: HashMap<String, Nodes>,
}

static CURRENT: LazyLock<RwLock<CurrentConfig>> = LazyLock::new(|| {
    // For sessions that begin before the first configuration arrives. They get no node.
    let limits = SessionLimits {
        login_timeout: Duration::from_secs(8),
        idle_timeout: Duration::ZERO,
        wait_for_node: Duration::ZERO,
        max_waiting_logins: 0,
    };
    RwLock::new(CurrentConfig {
        limits,
        drain_times: DrainTimes { wait: Duration::ZERO, timeout: Duration::from_secs(30) },
        switches: OperatorSwitches { is_ready: true, is_drain_requested: false },
        nodes: HashMap::new(),
    })
});

/// The number of publications.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// Publishes a configuration. Called on Envoy's main thread.
pub(crate) fn on_received(config: config::LiveConfig) {
    let Some(published) = config.published else { return };
    let limits = SessionLimits {
        login_timeout: seconds(published.login_timeout),
        idle_timeout: seconds(published.idle_timeout),
        wait_for_node: seconds(published.wait_for_node),
        max_waiting_logins: published.max_waiting_logins as u64,
    };
    login_log::configure(published.login_log);
    statement_log::configure(published.statement_log);
    statements::configure(published.statements);
    capture::configure(published.capture);
    connection_limits::publish(&published.limits);
    rules::configure(published.rules);
    if let Some(bytes) = published.max_held_bytes {
        held_memory::set_limit(bytes as usize);
    }
    // First, so that no session begins with the new nodes and the settings of the listener.
    if let Some(settings) = published.settings {
        live_settings::apply(settings);
    }
    switches::set_published(Switches { offload: published.offload, migration: published.migration });
    let drain_times = DrainTimes { wait: seconds(published.end_wait), timeout: seconds(published.end_timeout) };
    let operator = OperatorSwitches { is_ready: published.ready, is_drain_requested: published.drain };
    let nodes = published.nodes.into();
    // The old nodes are dropped after the lock is released.
    let _before = {
        let mut current = CURRENT.write().unwrap_or_else(PoisonError::into_inner);
        current.limits = limits;
        current.drain_times = drain_times;
        current.switches = operator;
        current.nodes.insert(published.group, nodes)
    };
    COUNT.fetch_add(1, Ordering::Release);
    wakers::wake_all();
}

/// The number of publications. Values that are read after this call belong to the last of them, or to a later one.
pub(crate) fn count() -> u64 {
    COUNT.load(Ordering::Acquire)
}

fn current() -> RwLockReadGuard<'static, CurrentConfig> {
    CURRENT.read().unwrap_or_else(PoisonError::into_inner)
}

/// The limits for sessions that begin now.
pub(crate) fn limits() -> SessionLimits {
    current().limits
}

/// Whether this Envoy is ready for new clients, as far as operators decide.
pub(crate) fn is_ready() -> bool {
    current().switches.is_ready
}

/// Whether the control plane has requested a drain of this Envoy.
pub(crate) fn is_drain_requested() -> bool {
    current().switches.is_drain_requested
}

pub(crate) fn drain_times() -> DrainTimes {
    current().drain_times
}

/// The nodes of a group; None: none were published yet.
pub(crate) fn nodes(group: &str) -> Option<Nodes> {
    current().nodes.get(group).cloned()
}
