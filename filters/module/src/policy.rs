//! The load-balancing policy: chooses the node for a new session. A session tries no node twice, unless
//! nodes refuse connections and it may wait for one.
//!
//! Ejected nodes come last: a session tries them only if there is no other node.
//!
//! The control plane's weights are shares of future sessions. They already account for all existing sessions of all
//! Envoys. So the load of a node is the number of sessions that it has gained since its weight arrived. If a node loses
//! older sessions, the policy does not replace them; the next weights do. Nodes of equal load take turns in proportion
//! to their weights. This matters if sessions are short.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use envoy_abi::policy::{Context, Hosts, Policy, PolicyFactory, Position};

use crate::hosts::{Endpoint, first_turn};
use crate::node::WorkerNode;
use crate::reachability::{self, MonitoredEndpoint};
use crate::worker::{Connecting, NODE_CONNECTIONS, WorkerContext};
use crate::{config, live_config, live_settings, migration_scheduler};

pub(crate) struct LeastSessionsFactory {
    group: Arc<str>,
    attempts: usize,
}

impl LeastSessionsFactory {
    /// Creates the policy for the cluster of one group of nodes.
    pub(crate) fn new(config: config::PolicyConfig) -> Self {
        Self { attempts: config.connect_attempts as usize, group: config.group.into() }
    }
}

impl PolicyFactory for LeastSessionsFactory {
    fn policy(&self) -> Box<dyn Policy> {
        Box::new(LeastSessions {
            group: Arc::clone(&self.group),
            attempts: self.attempts,
            seen: Cell::new(0),
            candidates: RefCell::default(),
        })
    }
}

/// A host that may be chosen.
struct HostCandidate {
    /// The position among Envoy's healthy hosts.
    at: Position,
    /// `ip:port`
    endpoint: String,
    node: Rc<WorkerNode>,
    /// The endpoint is monitored as long as this value exists.
    monitored_endpoint: Option<Arc<MonitoredEndpoint>>,
    weight: u32,
    /// How many sessions the node had when its weight arrived.
    base_sessions: u64,
    /// When the node's next turn is due, in virtual time: each choice of the node adds 1 / weight.
    next_turn: Cell<f64>,
}

impl HostCandidate {
    fn sessions(&self) -> u64 {
        self.node.shared.sessions.load(Ordering::Relaxed)
    }

    fn load(&self) -> Load {
        Load {
            priority: self.at.priority,
            added: self.sessions().saturating_sub(self.base_sessions),
            weight: self.weight,
            due: self.next_turn.get(),
        }
    }
}

/// A node that was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Choice {
    /// The index among the candidates.
    index: usize,
    /// The node is ejected, and was chosen because all other nodes are ejected or tried, too.
    is_ejected: bool,
}

struct LeastSessions {
    group: Arc<str>,
    /// How many nodes may fail before the session gets no other node, until the control plane has sent another number
    /// ([`live_settings`]).
    attempts: usize,
    /// [`live_config::count`] when the candidates were built.
    seen: Cell<u64>,
    candidates: RefCell<Vec<HostCandidate>>,
}

impl Policy for LeastSessions {
    fn hosts_changed(&self, hosts: &Hosts<'_>) {
        self.seen.set(live_config::count());
        let worker = WorkerContext::current();
        if worker.hosts.set_endpoints(&self.group, endpoints(hosts)) {
            migration_scheduler::on_nodes_changed(&worker);
        }
        if !worker.waiting_logins.is_empty() {
            worker.waker.wake();
        }
        let open = worker.hosts.open_nodes(&self.group);
        let before = self.candidates.take();
        let before: HashMap<&str, &HostCandidate> =
            before.iter().map(|candidate| (candidate.endpoint.as_str(), candidate)).collect();
        let now: Vec<(Position, &str, u32, &Rc<WorkerNode>)> = hosts
            .healthy()
            .filter_map(|at| {
                let endpoint = hosts.healthy_address(at)?;
                Some((at, endpoint, hosts.healthy_weight(at), open.get(endpoint)?))
            })
            .collect();
        // Weights are relative to each other: when a weight or a priority changes, the counts of all nodes start again.
        let is_as_before =
            |old: &HostCandidate, at: Position, weight| (old.weight, old.at.priority) == (weight, at.priority);
        let is_unchanged = now
            .iter()
            .all(|&(at, endpoint, weight, _)| before.get(endpoint).is_none_or(|old| is_as_before(old, at, weight)));
        // Turns are counted from the earliest one, since a new node begins with a first turn that is counted from 0.
        let start = if is_unchanged {
            before.values().map(|old| old.next_turn.get()).fold(f64::INFINITY, f64::min)
        } else {
            0.0
        };
        let start = if start.is_finite() { start } else { 0.0 };
        let candidates = now
            .iter()
            .map(|&(at, endpoint, weight, node)| {
                let node = Rc::clone(node);
                let (base, due) = match before.get(endpoint) {
                    Some(old) if is_unchanged => (old.base_sessions, old.next_turn.get() - start),
                    _ => (node.shared.sessions.load(Ordering::Relaxed), first_turn(weight)),
                };
                let monitored_endpoint = reachability::monitor(endpoint, &node.shared.name);
                HostCandidate {
                    at,
                    endpoint: endpoint.to_owned(),
                    node,
                    monitored_endpoint,
                    weight,
                    base_sessions: base,
                    next_turn: Cell::new(due),
                }
            })
            .collect();
        self.candidates.replace(candidates);
    }

    fn choose(&self, hosts: &Hosts<'_>, context: Context<'_>) -> Option<Position> {
        let session = WorkerContext::current().sessions.get_by_hash(context.hash()?)?;
        let (attempts, max_connections) = live_settings::current()
            .map_or((self.attempts, u64::MAX), |live| (live.connect_attempts, live.max_node_connections));
        let slot = NODE_CONNECTIONS.try_acquire(max_connections)?;
        let is_tried = |endpoint: &str| session.has_tried(endpoint);
        let index = if session.failed_node_count() < attempts { self.choose_index(hosts, is_tried) } else { None };
        let index = index.or_else(|| {
            let may_retry = self.has_usable_node(hosts) && session.try_nodes_again();
            may_retry.then(|| self.choose_index(hosts, |_| false)).flatten()
        })?;
        let candidate = &self.candidates.borrow()[index];
        candidate.next_turn.set(candidate.next_turn.get() + 1.0 / f64::from(candidate.weight));
        session.try_node(&candidate.endpoint, &candidate.node, candidate.monitored_endpoint.clone());
        let (worker, node) = (Rc::clone(&session.worker), Rc::clone(&candidate.node));
        worker.sessions.set_connecting(Connecting { session, node, slot });
        Some(candidate.at)
    }
}

impl LeastSessions {
    /// The index of the chosen candidate.
    fn choose_index(&self, hosts: &Hosts<'_>, is_tried: impl Fn(&str) -> bool + Copy) -> Option<usize> {
        let is_there = |at: usize| {
            let candidate = &self.candidates.borrow()[at];
            hosts.healthy_address(candidate.at) == Some(&candidate.endpoint)
        };
        let mut choice = self.best_choice(is_tried).filter(|choice| !self.is_outdated() && is_there(choice.index));
        if choice.is_none() {
            // When hosts change, Envoy may choose a host before it calls the hook `hosts_changed`.
            self.hosts_changed(hosts);
            choice = self.best_choice(is_tried);
        }
        while !self.try_admit(choice?) {
            choice = self.best_choice(is_tried);
        }
        Some(choice?.index)
    }

    /// Whether a node is in service, tried or not.
    fn has_usable_node(&self, hosts: &Hosts<'_>) -> bool {
        if self.is_outdated() {
            self.hosts_changed(hosts);
        }
        self.candidates.borrow().iter().any(|candidate| candidate.weight > 0)
    }

    /// The best node that is not ejected. If all nodes are ejected, the node whose ejection ends first.
    fn best_choice(&self, is_tried: impl Fn(&str) -> bool) -> Option<Choice> {
        let candidates = self.candidates.borrow();
        let usable = |candidate: &HostCandidate| candidate.weight > 0 && !is_tried(&candidate.endpoint);
        let load = |candidate: &HostCandidate| {
            (usable(candidate) && candidate.node.shared.ejected_until().is_none()).then(|| candidate.load())
        };
        if let Some(index) = least_loaded(candidates.iter().map(load)) {
            return Some(Choice { index, is_ejected: false });
        }
        let ejected = candidates.iter().enumerate().filter(|(_, candidate)| usable(candidate));
        let first = ejected.min_by_key(|(_, candidate)| candidate.node.shared.ejected_until())?;
        Some(Choice { index: first.0, is_ejected: true })
    }

    /// Whether the session may use the chosen node. False: the node's ejection has just ended, another session tries
    /// the node first, and the node counts as ejected until then.
    fn try_admit(&self, choice: Choice) -> bool {
        choice.is_ejected || self.candidates.borrow()[choice.index].node.shared.try_admit()
    }

    /// Whether the control plane has published something since the candidates were built.
    fn is_outdated(&self) -> bool {
        self.seen.get() != live_config::count()
    }
}

/// Envoy's hosts. Hosts that are not healthy have the weight 0.
fn endpoints(hosts: &Hosts<'_>) -> Vec<Endpoint> {
    let weights: HashMap<&str, u32> =
        hosts.healthy().filter_map(|at| Some((hosts.healthy_address(at)?, hosts.healthy_weight(at)))).collect();
    let endpoint = |at: Position| {
        let address = hosts.address(at)?;
        let weight = weights.get(address).copied().unwrap_or(0);
        Some(Endpoint { address: address.to_owned(), weight, priority: at.priority })
    };
    hosts.all().filter_map(endpoint).collect()
}

/// The values by which nodes are compared. `weight` is at least 1.
#[derive(Debug, Clone, Copy)]
struct Load {
    priority: u32,
    /// The sessions that the node has gained since its weight arrived.
    added: u64,
    weight: u32,
    /// See [`HostCandidate::next_turn`].
    due: f64,
}

/// The index of the best node. None in `loads` stands for a node that must not be chosen.
///
/// Only nodes of the lowest priority value count. A node is skipped if another node, even with one more session, would
/// not have more sessions per weight than it. Of the remaining nodes, the node with the earliest turn is the best.
fn least_loaded(loads: impl Iterator<Item = Option<Load>> + Clone) -> Option<usize> {
    let priority = loads.clone().flatten().map(|load| load.priority).min()?;
    let usable = loads.enumerate().filter_map(|(index, load)| Some((index, load?)));
    let usable = usable.filter(|(_, load)| load.priority == priority);
    let product = |sessions: u64, weight: u32| u128::from(sessions) * u128::from(weight);
    let fewest = usable.clone().map(|(_, load)| load).min_by(|a, b| {
        product(a.added.saturating_add(1), b.weight).cmp(&product(b.added.saturating_add(1), a.weight))
    })?;
    let not_ahead =
        |load: &Load| product(load.added, fewest.weight) < product(fewest.added.saturating_add(1), load.weight);
    let first = usable.filter(|(_, load)| not_ahead(load)).min_by(|(_, a), (_, b)| a.due.total_cmp(&b.due));
    first.map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ejection::EjectReason;
    use crate::node::WorkerNodes;

    /// Chooses `choices` times among nodes of (added, weight). `is_lasting`: the sessions do not end. Returns how many
    /// sessions each node got.
    fn share(nodes: &[(u64, u32)], choices: usize, is_lasting: bool) -> Vec<u64> {
        let mut loads: Vec<Load> = nodes
            .iter()
            .map(|&(added, weight)| Load { priority: 0, added, weight, due: 1.0 / f64::from(weight) })
            .collect();
        let mut got = vec![0; nodes.len()];
        for _ in 0..choices {
            let chosen = least_loaded(loads.iter().copied().map(Some)).expect("a usable node");
            loads[chosen].due += 1.0 / f64::from(loads[chosen].weight);
            loads[chosen].added += u64::from(is_lasting);
            got[chosen] += 1;
        }
        got
    }

    #[test]
    fn lasting_sessions_are_distributed_by_weight() {
        assert_eq!(share(&[(0, 100), (0, 100), (0, 100)], 60, true), [20, 20, 20]);
        assert_eq!(share(&[(0, 200), (0, 100), (0, 100)], 60, true), [30, 15, 15]);
        assert_eq!(share(&[(0, 3), (0, 1)], 8, true), [6, 2]);
    }

    #[test]
    fn nodes_take_turns_by_weight_when_sessions_end_at_once() {
        assert_eq!(share(&[(0, 160), (0, 1600), (0, 1600)], 21, false), [1, 10, 10]);
        assert_eq!(share(&[(0, 1), (0, 1), (0, 1)], 9, false), [3, 3, 3]);
    }

    #[test]
    fn node_of_small_weight_is_not_preferred_because_another_node_has_one_session_more() {
        let load = |added, weight| Some(Load { priority: 0, added, weight, due: 0.5 / f64::from(weight) });
        assert_eq!(least_loaded([load(1, 100), load(0, 1)].into_iter()), Some(0));
        assert_eq!(least_loaded([load(2, 100), load(0, 1)].into_iter()), Some(0));
    }

    #[test]
    fn node_with_fewer_added_sessions_gets_all_sessions_until_it_has_caught_up() {
        assert_eq!(share(&[(20, 1), (5, 1), (20, 1)], 15, true), [0, 15, 0]);
    }

    #[test]
    fn unusable_node_is_never_chosen() {
        let busy = Load { priority: 0, added: 9, weight: 1, due: 9.0 };
        assert_eq!(least_loaded([None, Some(busy), None].into_iter()), Some(1));
        assert_eq!(least_loaded([None, None].into_iter()), None);
        assert_eq!(least_loaded(std::iter::empty()), None);
    }

    #[test]
    fn node_of_higher_priority_value_is_chosen_only_if_there_is_no_other() {
        let load = |priority, added| Some(Load { priority, added, weight: 1, due: 0.5 });
        assert_eq!(least_loaded([load(2, 0), load(1, 5), load(1, 4)].into_iter()), Some(2));
        assert_eq!(least_loaded([load(2, 0), load(0, 99), load(1, 0)].into_iter()), Some(1));
        assert_eq!(least_loaded([load(2, 0), None, None].into_iter()), Some(0));
    }

    #[test]
    fn largest_counts_and_weights_do_not_overflow() {
        let load = |added| Load { priority: 0, added, weight: u32::MAX, due: 0.0 };
        assert_eq!(least_loaded([Some(load(u64::MAX - 1)), Some(load(u64::MAX - 9))].into_iter()), Some(1));
    }

    #[test]
    fn first_turns_are_random_within_one_turn() {
        let turns: Vec<f64> = (0..100).map(|_| first_turn(4)).collect();
        assert!(turns.iter().all(|turn| *turn > 0.0 && *turn <= 0.25), "{turns:?}");
        assert!(turns.iter().any(|turn| *turn != turns[0]));
    }

    fn candidate(nodes: &WorkerNodes, name: &str) -> HostCandidate {
        let (at, node) = (Position { priority: 0, index: 0 }, nodes.get("policy", name));
        HostCandidate {
            at,
            endpoint: name.to_owned(),
            node,
            monitored_endpoint: None,
            weight: 1,
            base_sessions: 0,
            next_turn: Cell::new(1.0),
        }
    }

    #[test]
    fn admission_not_choice_consumes_the_first_try_after_an_ejection() {
        let nodes = WorkerNodes::new();
        let candidates = ["policy-a", "policy-b"].map(|name| candidate(&nodes, name));
        let [a, b] = candidates.each_ref().map(|candidate| Arc::clone(&candidate.node.shared));
        let (group, candidates) = ("policy".into(), RefCell::new(Vec::from(candidates)));
        let policy = LeastSessions { group, attempts: 3, seen: Cell::new(0), candidates };
        let best = || policy.best_choice(|_| false).expect("a usable node");
        let choice = |index, is_ejected| Choice { index, is_ejected };
        a.eject(EjectReason::Connect, Duration::ZERO);
        b.eject(EjectReason::Connect, Duration::from_secs(60));
        assert_eq!(best(), choice(0, false));
        assert_eq!(best(), choice(0, false), "a choice alone admits no session");
        a.eject(EjectReason::Connect, Duration::from_secs(30));
        assert_eq!(best(), choice(0, true), "its ejection ends first");
        assert!(policy.try_admit(best()));
        b.end_ejection();
        assert_eq!(best(), choice(1, false));
        assert!(policy.try_admit(best()));
    }
}
