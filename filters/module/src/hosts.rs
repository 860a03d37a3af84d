//! The nodes of each group as one worker knows them: the control plane's nodes, joined with Envoy's endpoints.
//!
//! Nodes and endpoints arrive separately ([`crate::live_config`], and the hooks of the load-balancing policy). The
//! control plane decides which nodes exist and which state each has; an endpoint of no known node gets no session.
//! Envoy's endpoints add weight and priority; a node without a healthy endpoint gets no new session.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use migration::quota::Quota;
use migration::rate_limit::MigrationBackoff;
use migration::target_choice::{Release, TargetCandidate, choose_target};

use crate::config::NodeInfo;
use crate::live_config::{self, Nodes};
use crate::node::{QuotaReservation, WorkerNode, WorkerNodes};
use crate::{clock, telemetry};

/// The state of nodes whose sessions are to migrate.
const STATE_DRAINING: &str = "draining";
/// The states of nodes that get no session. A weight of 0 in Envoy's endpoints has the same effect, and may arrive
/// earlier.
const CLOSED_STATES: [&str; 3] = [STATE_DRAINING, "drained", "gone"];

/// Maximum nodes in [`WorkerHosts::describe`].
const MAX_DESCRIBED: usize = 16;

/// A node of a group, with the weight and priority of its endpoint.
#[derive(Debug, Clone)]
pub(crate) struct Host {
    pub(crate) node: Rc<WorkerNode>,
    /// `ip:port`
    pub(crate) endpoint: String,
    pub(crate) state: String,
    /// The node's remaining sessions must be closed.
    pub(crate) must_close_sessions: bool,
    /// None: the control plane does not know the release.
    pub(crate) version: Option<Release>,
    /// The node's share of new sessions; 0: none.
    pub(crate) weight: u32,
    /// Nodes of a lower priority are preferred.
    pub(crate) priority: u32,
    /// How many sessions rebalancing migrates from the node, which stays in service: the text of a [`Quota`].
    pub(crate) outgoing_quota: Option<String>,
    /// How many sessions rebalancing migrates to the node: the text of a [`Quota`].
    pub(crate) incoming_quota: Option<String>,
    /// The sessions of the node when its weight arrived.
    pub(crate) base_sessions: u64,
    /// See [`TargetCandidate::turn_offset`].
    pub(crate) turn_offset: f64,
}

/// A host of Envoy's cluster.
#[derive(Debug, Clone)]
pub(crate) struct Endpoint {
    /// `ip:port`
    pub(crate) address: String,
    /// 0: the host is not healthy.
    pub(crate) weight: u32,
    pub(crate) priority: u32,
}

/// The node that a session migrates to, or a login fails over to.
pub(crate) struct TargetNode {
    pub(crate) node: Rc<WorkerNode>,
    /// `ip:port`
    pub(crate) endpoint: String,
    pub(crate) address: SocketAddr,
    /// The reserved part of the node's incoming quota, for a session that rebalancing has selected.
    pub(crate) reservation: Cell<Option<QuotaReservation>>,
}

/// The sources from which the hosts of a group are built.
#[derive(Default)]
struct HostSources {
    endpoints: Vec<Endpoint>,
    /// None: the control plane has not published the nodes yet.
    nodes: Option<Nodes>,
}

/// The hosts of all groups, as one worker knows them.
pub(crate) struct WorkerHosts {
    nodes: Rc<WorkerNodes>,
    /// By group.
    hosts: RefCell<HashMap<String, Vec<Host>>>,
    /// By group.
    sources: RefCell<HashMap<String, HostSources>>,
    /// The [`live_config::count`] that this worker has applied.
    seen: Cell<u64>,
}

impl WorkerHosts {
    pub(crate) fn new(nodes: Rc<WorkerNodes>) -> Self {
        Self { nodes, hosts: RefCell::default(), sources: RefCell::default(), seen: Cell::new(0) }
    }

    fn with_hosts<T>(&self, run: impl FnOnce(&HashMap<String, Vec<Host>>) -> T) -> T {
        run(&self.hosts.borrow())
    }

    /// Sets all endpoints of a group. True: migrations may have to start or to be cancelled.
    #[must_use]
    pub(crate) fn set_endpoints(&self, group: &str, endpoints: Vec<Endpoint>) -> bool {
        self.sources.borrow_mut().entry(group.to_owned()).or_default().endpoints = endpoints;
        self.rebuild(group)
    }

    /// Applies what the control plane has published since the last call. True: migrations may have to start or to be
    /// cancelled.
    #[must_use]
    pub(crate) fn apply_published(&self) -> bool {
        let count = live_config::count();
        if self.seen.replace(count) == count {
            return false;
        }
        let has_changed = |group: &str, sources: &HostSources| match (live_config::nodes(group), &sources.nodes) {
            (Some(now), Some(before)) => !Arc::ptr_eq(&now, before),
            (now, before) => now.is_some() != before.is_some(),
        };
        let changed: Vec<String> = {
            let all = self.sources.borrow();
            all.iter().filter(|(group, sources)| has_changed(group, sources)).map(|(group, _)| group.clone()).collect()
        };
        // Not `any`, which would stop before all groups are rebuilt.
        changed.iter().filter(|group| self.rebuild(group)).count() > 0
    }

    /// Builds the hosts of a group from its sources. Returns the result of [`Self::set_hosts`].
    fn rebuild(&self, group: &str) -> bool {
        let hosts = {
            let mut all = self.sources.borrow_mut();
            let sources = all.entry(group.to_owned()).or_default();
            sources.nodes = live_config::nodes(group);
            let endpoints: HashMap<&str, &Endpoint> =
                sources.endpoints.iter().map(|endpoint| (endpoint.address.as_str(), endpoint)).collect();
            let nodes = sources.nodes.as_deref().unwrap_or_default();
            let new = |node: &NodeInfo| {
                let endpoint = endpoints.get(node.endpoint.as_str()).copied();
                Host::new(self.nodes.get(group, &node.address), node, endpoint)
            };
            nodes.iter().map(new).collect()
        };
        self.set_hosts(group, hosts)
    }

    /// The nodes of a group that may get new sessions, by endpoint: those that are in service both in the control
    /// plane's nodes and in Envoy's endpoints. These two arrive one after the other, so while one node replaces
    /// another, it can happen that no node is in service in both. Then the endpoints alone decide.
    pub(crate) fn open_nodes(&self, group: &str) -> HashMap<String, Rc<WorkerNode>> {
        self.with_hosts(|all| {
            let hosts = all.get(group).map_or(&[][..], Vec::as_slice);
            let any_open = hosts.iter().any(Host::is_open);
            let is_usable = |host: &&Host| if any_open { host.is_open() } else { host.weight > 0 };
            let by_endpoint = |host: &Host| (host.endpoint.clone(), Rc::clone(&host.node));
            hosts.iter().filter(is_usable).map(by_endpoint).collect()
        })
    }

    /// Sets the nodes of a group. True: the group has or had a node that sessions must leave, such as a removed node.
    pub(crate) fn set_hosts(&self, group: &str, mut hosts: Vec<Host>) -> bool {
        let before = self.hosts.borrow_mut().remove(group).unwrap_or_default();
        copy_bases(&mut hosts, &before);
        let must_leave = |host: &Host| host.node.is_draining() || host.outgoing_quota.is_some();
        let had_to_leave = before.iter().any(must_leave);
        let now: HashSet<&str> = hosts.iter().map(|host| host.node.shared.name.as_str()).collect();
        for host in before.iter().filter(|host| !now.contains(host.node.shared.name.as_str())) {
            host.node.set_draining(true);
            host.node.has_surplus.set(false);
        }
        for host in &hosts {
            host.node.shared.set_endpoint(&host.endpoint);
            host.node.set_draining(host.state == STATE_DRAINING);
            host.node.must_close_sessions.set(host.must_close_sessions);
            if host.version.is_some() {
                host.node.version.set(host.version);
            }
            let outgoing = own_quota(host.outgoing_quota.as_deref());
            host.node.has_surplus.set(outgoing.is_some());
            host.node.shared.outgoing_quota().update(outgoing, clock::now());
            host.node.shared.incoming_quota().update(own_quota(host.incoming_quota.as_deref()), clock::now());
        }
        let must_migrate = had_to_leave || before.iter().chain(&hosts).any(must_leave);
        self.hosts.borrow_mut().insert(group.to_owned(), hosts);
        must_migrate
    }
}

/// The time of a node's first turn: random, above 0 and at most 1 / weight. Otherwise all Envoys and workers would
/// begin with the same node after each change of weights.
pub(crate) fn first_turn(weight: u32) -> f64 {
    (1.0 - fastrand::f64()) / f64::from(weight.max(1))
}

/// This Envoy's part of a published quota.
fn own_quota(text: Option<&str>) -> Option<Quota> {
    Quota::parse(text?, telemetry::instance())
}

/// Keeps the base counts and turn offsets of the hosts, unless a weight or a priority has changed. Weights are relative
/// to each other, so then the counts of all hosts start again.
fn copy_bases(hosts: &mut [Host], before: &[Host]) {
    let before: HashMap<&str, &Host> = before.iter().map(|host| (host.endpoint.as_str(), host)).collect();
    let old = |host: &Host| before.get(host.endpoint.as_str()).copied();
    let is_as_before = |host: &Host, old: &Host| (host.weight, host.priority) == (old.weight, old.priority);
    if hosts.iter().all(|host| old(host).is_none_or(|old| is_as_before(host, old))) {
        for host in hosts {
            (host.base_sessions, host.turn_offset) =
                old(host).map_or((host.base_sessions, host.turn_offset), |old| (old.base_sessions, old.turn_offset));
        }
    }
}

impl Host {
    fn new(worker_node: Rc<WorkerNode>, node: &NodeInfo, endpoint: Option<&Endpoint>) -> Self {
        let non_empty = |text: &String| (!text.is_empty()).then(|| text.clone());
        Self {
            base_sessions: worker_node.shared.sessions.load(Ordering::Relaxed),
            node: worker_node,
            endpoint: node.endpoint.clone(),
            state: node.state.clone(),
            must_close_sessions: node.close,
            version: Release::parse(&node.version),
            weight: endpoint.map_or(0, |endpoint| endpoint.weight),
            priority: endpoint.map_or(u32::MAX, |endpoint| endpoint.priority),
            outgoing_quota: non_empty(&node.moves),
            incoming_quota: non_empty(&node.wants),
            turn_offset: first_turn(1),
        }
    }

    fn version(&self) -> Release {
        self.version.unwrap_or_default()
    }

    /// Whether the host may get sessions.
    fn is_open(&self) -> bool {
        self.weight > 0 && !CLOSED_STATES.contains(&self.state.as_str())
    }

    fn is_at_endpoint(&self, node: &WorkerNode, endpoint: &str) -> bool {
        Arc::ptr_eq(&self.node.shared, &node.shared) && self.endpoint == endpoint
    }

    /// Whether sessions of `node` may migrate to this host at all.
    fn may_receive_from(&self, node: &WorkerNode) -> bool {
        self.is_open() && !Arc::ptr_eq(&self.node.shared, &node.shared) && !self.node.is_draining()
    }

    /// Whether rebalancing may migrate more sessions from `node` to this host.
    fn has_rebalance_quota_for(&self, node: &WorkerNode) -> bool {
        self.incoming_quota.is_some()
            && self.version() >= node.version.get().unwrap_or_default()
            && self.may_receive_from(node)
            && self.node.shared.incoming_quota().remaining() > 0
    }

    fn to_candidate(&self) -> TargetCandidate {
        TargetCandidate {
            endpoint: self.endpoint.clone(),
            version: self.version(),
            weight: self.weight,
            sessions: self.node.shared.sessions.load(Ordering::Relaxed).saturating_sub(self.base_sessions),
            turn_offset: self.turn_offset,
            has_surplus: self.outgoing_quota.is_some(),
            priority: self.priority,
        }
    }

    fn to_target(&self, reservation: Option<QuotaReservation>) -> Option<TargetNode> {
        let address: SocketAddr = self.endpoint.parse().ok()?;
        let (worker_node, endpoint) = (Rc::clone(&self.node), self.endpoint.clone());
        Some(TargetNode { node: worker_node, endpoint, address, reservation: Cell::new(reservation) })
    }
}

fn is_ejected(host: &Host) -> bool {
    host.node.shared.ejected_until().is_some()
}

impl WorkerHosts {
    /// The node to which a login fails over from `node`, within the same group. None: no other node is open, untried
    /// and not ejected.
    pub(crate) fn find_login_target(&self, node: &WorkerNode, is_tried: impl Fn(&str) -> bool) -> Option<TargetNode> {
        self.with_hosts(|all| {
            let fits = |host: &&Host| host.may_receive_from(node) && !is_tried(&host.endpoint) && !is_ejected(host);
            let others: Vec<&Host> = all.get(&node.group)?.iter().filter(fits).collect();
            let candidates: Vec<TargetCandidate> = others.iter().map(|host| host.to_candidate()).collect();
            others[choose_target(&candidates, Release::default(), &MigrationBackoff::default())?].to_target(None)
        })
    }

    /// Whether the node still has this endpoint. A failed connection attempt may have used an earlier endpoint.
    pub(crate) fn is_at(&self, node: &WorkerNode, endpoint: &str) -> bool {
        self.with_hosts(|all| {
            all.get(&node.group).is_some_and(|hosts| hosts.iter().any(|host| host.is_at_endpoint(node, endpoint)))
        })
    }

    /// Whether another node of the group can get new sessions.
    pub(crate) fn has_another_usable(&self, node: &WorkerNode) -> bool {
        let is_usable = |host: &Host| host.may_receive_from(node) && !is_ejected(host);
        self.with_hosts(|all| all.get(&node.group).is_some_and(|hosts| hosts.iter().any(is_usable)))
    }

    /// The nodes with this name and address, one for each group that has such a node.
    pub(crate) fn find_nodes(&self, address: &SocketAddr, name: &str) -> Vec<Rc<WorkerNode>> {
        let matches = |host: &&Host| {
            host.node.shared.name == name && host.endpoint.parse().is_ok_and(|parsed: SocketAddr| parsed == *address)
        };
        self.with_hosts(|all| all.values().flatten().filter(matches).map(|host| Rc::clone(&host.node)).collect())
    }

    /// Whether any node of any group may get new sessions.
    pub(crate) fn has_open_node(&self) -> bool {
        self.with_hosts(|all| all.values().flatten().any(|host| host.weight > 0))
    }

    /// Whether this is true of the endpoints of all nodes that may get new sessions.
    pub(crate) fn all_open_endpoints(&self, is_true: impl Fn(&str) -> bool) -> bool {
        self.with_hosts(|all| all.values().flatten().filter(|host| host.weight > 0).all(|host| is_true(&host.endpoint)))
    }

    /// The addresses of all nodes that may get new sessions.
    pub(crate) fn open_addresses(&self) -> Vec<SocketAddr> {
        let address = |host: &Host| host.endpoint.parse().ok().filter(|_| host.weight > 0);
        self.with_hosts(|all| all.values().flatten().filter_map(address).collect())
    }

    /// The first nodes, for the log: name, state, weight, and why a node is ejected.
    pub(crate) fn describe(&self) -> String {
        let describe = |host: &Host| {
            let ejected = host.node.shared.ejection_details();
            let ejected = ejected.map(|ejected| format!(", ejected: {}", ejected.reason.name())).unwrap_or_default();
            format!("{} ({}, weight {}{ejected})", host.node.shared.name, host.state, host.weight)
        };
        self.with_hosts(|all| {
            let nodes: Vec<String> = all.values().flatten().take(MAX_DESCRIBED).map(describe).collect();
            if nodes.is_empty() { "none".to_owned() } else { nodes.join(", ") }
        })
    }

    /// Nodes in service from which rebalancing may migrate sessions, since other nodes have incoming quota left.
    pub(crate) fn rebalance_sources(&self) -> Vec<Rc<WorkerNode>> {
        let is_source = |host: &Host, group: &[Host]| {
            host.node.has_surplus.get()
                && !host.node.is_draining()
                && host.node.shared.outgoing_quota().remaining() > 0
                && group.iter().any(|other| other.has_rebalance_quota_for(&host.node))
        };
        self.with_hosts(|all| {
            let of_group = |group: &Vec<Host>| -> Vec<Rc<WorkerNode>> {
                group.iter().filter(|host| is_source(host, group)).map(|host| Rc::clone(&host.node)).collect()
            };
            all.values().flat_map(of_group).collect()
        })
    }

    /// The node to which a session migrates from `node`, within the same group. `is_rebalancing`: `node` stays in
    /// service, so the session may also stay. None: no node is suitable.
    pub(crate) fn find_target(
        &self,
        node: &WorkerNode,
        backoff: &MigrationBackoff,
        is_rebalancing: bool,
    ) -> Option<TargetNode> {
        self.with_hosts(|all| {
            let hosts = all.get(&node.group)?;
            loop {
                let fits = |host: &&Host| match is_rebalancing {
                    true => host.has_rebalance_quota_for(node) && !backoff.has_failed_at(&host.endpoint),
                    false => host.may_receive_from(node),
                };
                let (ejected, usable): (Vec<&Host>, Vec<&Host>) =
                    hosts.iter().filter(fits).partition(|host| is_ejected(host));
                let others = if usable.is_empty() && !is_rebalancing { ejected } else { usable };
                let candidates: Vec<TargetCandidate> = others.iter().map(|host| host.to_candidate()).collect();
                let chosen = others[choose_target(&candidates, node.version.get().unwrap_or_default(), backoff)?];
                if !is_rebalancing {
                    return chosen.to_target(None);
                }
                // Another worker may have reserved the rest of the quota in the meantime.
                if let Some(reservation) = QuotaReservation::reserve(&chosen.node.shared) {
                    return chosen.to_target(Some(reservation));
                }
            }
        })
    }
}

#[cfg(test)]
mod tests;
