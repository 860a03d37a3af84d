//! The nodes of each group as one worker knows them: the control plane's nodes, joined with Envoy's endpoints.
//!
//! The two arrive separately ([`crate::live_config`], and the hooks of the load-balancing policy). The control plane decides
//! which nodes there are and in which state; an endpoint that it does not name gets no session. Envoy's endpoints add weight
//! and priority; a node that is not among them, or not healthy, gets no new session.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use session::choice::{Candidate, Version, target};
use session::pace::Patience;
use session::quota::Quota;

use crate::config::NodeInfo;
use crate::live_config::{self, Nodes};
use crate::node::{self, Here, Place};
use crate::{clock, departures, telemetry};

/// The state of nodes whose sessions are to go elsewhere.
const LEFT: &str = "draining";
/// The states of nodes that get no session. Envoy's endpoints say the same; whichever arrives first counts.
const CLOSED: [&str; 3] = [LEFT, "drained", "gone"];

/// A node.
#[derive(Debug, Clone)]
pub(crate) struct Host {
    pub(crate) here: Rc<Here>,
    /// `ip:port`
    pub(crate) endpoint: String,
    pub(crate) state: String,
    /// Sessions that are still there are to be ended.
    pub(crate) is_closed: bool,
    /// None: the control plane does not know it.
    pub(crate) version: Option<Version>,
    /// Its share of new sessions; 0: it gets none.
    pub(crate) weight: u32,
    /// Nodes of a lower priority are preferred.
    pub(crate) priority: u32,
    /// How many sessions are to leave it although it stays in service, as a [`Quota`] is written.
    pub(crate) moves: Option<String>,
    /// How many of these, from other nodes, it is to get.
    pub(crate) wants: Option<String>,
    /// Sessions that it had when its weight arrived.
    pub(crate) base: u64,
    /// That of its [`Candidate`].
    pub(crate) phase: f64,
}

/// A host as Envoy has it.
#[derive(Debug, Clone)]
pub(crate) struct Endpoint {
    /// `ip:port`
    pub(crate) address: String,
    /// 0: it is not healthy.
    pub(crate) weight: u32,
    pub(crate) priority: u32,
}

/// A node that a session is to go to.
pub(crate) struct Destination {
    pub(crate) here: Rc<Here>,
    /// `ip:port`
    pub(crate) endpoint: String,
    pub(crate) address: SocketAddr,
    /// Reserved for a session that moves although its node stays in service.
    pub(crate) place: Cell<Option<Place>>,
}

/// What the hosts of a group are made from.
#[derive(Default)]
struct Sources {
    endpoints: Vec<Endpoint>,
    /// None: the control plane has not published any yet.
    nodes: Option<Nodes>,
}

thread_local! {
    /// By group.
    static HOSTS: RefCell<HashMap<String, Vec<Host>>> = RefCell::default();
    /// By group.
    static SOURCES: RefCell<HashMap<String, Sources>> = RefCell::default();
    /// The [`live_config::count`] that this worker has applied.
    static SEEN: Cell<u64> = const { Cell::new(0) };
}

/// Sets all hosts of a group as Envoy has them.
pub(crate) fn set_endpoints(group: &str, endpoints: Vec<Endpoint>) {
    SOURCES.with_borrow_mut(|all| all.entry(group.to_owned()).or_default().endpoints = endpoints);
    join(group);
}

/// Applies what the control plane has published since the last call.
pub(crate) fn look() {
    let count = live_config::count();
    if SEEN.replace(count) == count {
        return;
    }
    let is_old = |group: &str, sources: &Sources| match (live_config::nodes(group), &sources.nodes) {
        (Some(now), Some(before)) => !Arc::ptr_eq(&now, before),
        (now, before) => now.is_some() != before.is_some(),
    };
    let old: Vec<String> = SOURCES.with_borrow(|all| {
        all.iter().filter(|(group, sources)| is_old(group, sources)).map(|(group, _)| group.clone()).collect()
    });
    old.iter().for_each(|group| join(group));
}

/// Makes the hosts of a group from its sources, and has sessions leave those that they are to leave.
fn join(group: &str) {
    let hosts = SOURCES.with_borrow_mut(|all| {
        let sources = all.entry(group.to_owned()).or_default();
        sources.nodes = live_config::nodes(group);
        let endpoints: HashMap<&str, &Endpoint> =
            sources.endpoints.iter().map(|endpoint| (endpoint.address.as_str(), endpoint)).collect();
        let nodes = sources.nodes.as_deref().unwrap_or_default();
        nodes.iter().map(|node| Host::of(group, node, endpoints.get(node.endpoint.as_str()).copied())).collect()
    });
    if set(group, hosts) {
        departures::nodes_changed();
    }
}

/// The nodes of a group that may get new sessions, by endpoint: those that are in service both for the control plane and
/// among Envoy's endpoints. The two arrive one after the other. If one node replaces another, there may be no such node for a
/// moment: then the endpoints alone decide.
pub(crate) fn open(group: &str) -> HashMap<String, Rc<Here>> {
    HOSTS.with_borrow(|all| {
        let hosts = all.get(group).map_or(&[][..], Vec::as_slice);
        let any_open = hosts.iter().any(Host::is_open);
        let is_usable = |host: &&Host| if any_open { host.is_open() } else { host.weight > 0 };
        let by_endpoint = |host: &Host| (host.endpoint.clone(), Rc::clone(&host.here));
        hosts.iter().filter(is_usable).map(by_endpoint).collect()
    })
}

/// Sets the nodes of a group. True: sessions are, or were, to leave one of them. A removed node is one of those.
pub(crate) fn set(group: &str, mut hosts: Vec<Host>) -> bool {
    let before = HOSTS.with_borrow_mut(|all| all.remove(group)).unwrap_or_default();
    keep_bases(&mut hosts, &before);
    let concerned = |host: &Host| host.here.is_to_be_left() || host.moves.is_some();
    let concerned_before = before.iter().any(concerned);
    let now: HashSet<&str> = hosts.iter().map(|host| host.here.node.name.as_str()).collect();
    for host in before.iter().filter(|host| !now.contains(host.here.node.name.as_str())) {
        host.here.set_left(true);
        host.here.gives.set(false);
    }
    for host in &hosts {
        host.here.node.set_endpoint(&host.endpoint);
        host.here.set_left(host.state == LEFT);
        host.here.is_closed.set(host.is_closed);
        if host.version.is_some() {
            host.here.version.set(host.version);
        }
        let gives = quota(host.moves.as_deref());
        host.here.gives.set(gives.is_some());
        host.here.node.allowance().set(gives, clock::now());
        host.here.node.wanted().set(quota(host.wants.as_deref()), clock::now());
    }
    let concerns = concerned_before || before.iter().chain(&hosts).any(concerned);
    HOSTS.with_borrow_mut(|all| all.insert(group.to_owned(), hosts));
    concerns
}

/// When a node has its first turn: at random, above 0 and within one turn. Otherwise all Envoys and workers would begin with
/// the same node after each change of weights.
pub(crate) fn first_turn(weight: u32) -> f64 {
    (1.0 - fastrand::f64()) / f64::from(weight.max(1))
}

/// The quota of this Envoy.
fn quota(text: Option<&str>) -> Option<Quota> {
    Quota::of(text?, telemetry::instance())
}

/// Keeps the counts of the hosts. Weights belong together: when one changes, or a priority, the counts of all are reset.
fn keep_bases(hosts: &mut [Host], before: &[Host]) {
    let before: HashMap<&str, &Host> = before.iter().map(|host| (host.endpoint.as_str(), host)).collect();
    let old = |host: &Host| before.get(host.endpoint.as_str()).copied();
    let is_as_before = |host: &Host, old: &Host| (host.weight, host.priority) == (old.weight, old.priority);
    if hosts.iter().all(|host| old(host).is_none_or(|old| is_as_before(host, old))) {
        for host in hosts {
            (host.base, host.phase) = old(host).map_or((host.base, host.phase), |old| (old.base, old.phase));
        }
    }
}

impl Host {
    fn of(group: &str, node: &NodeInfo, endpoint: Option<&Endpoint>) -> Self {
        let here = node::here(group, &node.address);
        let said = |text: &String| (!text.is_empty()).then(|| text.clone());
        Self {
            base: here.node.sessions.load(Ordering::Relaxed),
            here,
            endpoint: node.endpoint.clone(),
            state: node.state.clone(),
            is_closed: node.close,
            version: Version::of(&node.version),
            weight: endpoint.map_or(0, |endpoint| endpoint.weight),
            priority: endpoint.map_or(u32::MAX, |endpoint| endpoint.priority),
            moves: said(&node.moves),
            wants: said(&node.wants),
            phase: first_turn(1),
        }
    }

    fn version(&self) -> Version {
        self.version.unwrap_or_default()
    }

    /// Whether it gets sessions.
    fn is_open(&self) -> bool {
        self.weight > 0 && !CLOSED.contains(&self.state.as_str())
    }

    fn is_at(&self, node: &Here, endpoint: &str) -> bool {
        Arc::ptr_eq(&self.here.node, &node.node) && self.endpoint == endpoint
    }

    /// Whether sessions of `node` may move there at all.
    fn takes_from(&self, node: &Here) -> bool {
        self.is_open() && !Arc::ptr_eq(&self.here.node, &node.node) && !self.here.is_to_be_left()
    }

    /// Whether it wants more of the sessions that leave `node`, which stays in service.
    fn wants_from(&self, node: &Here) -> bool {
        self.wants.is_some()
            && self.version() >= node.version.get().unwrap_or_default()
            && self.takes_from(node)
            && self.here.node.wanted().left() > 0
    }

    fn candidate(&self) -> Candidate {
        Candidate {
            endpoint: self.endpoint.clone(),
            version: self.version(),
            weight: self.weight,
            sessions: self.here.node.sessions.load(Ordering::Relaxed).saturating_sub(self.base),
            phase: self.phase,
            gives: self.moves.is_some(),
            priority: self.priority,
        }
    }

    fn destination(&self, place: Option<Place>) -> Option<Destination> {
        let address: SocketAddr = self.endpoint.parse().ok()?;
        let (here, endpoint) = (Rc::clone(&self.here), self.endpoint.clone());
        Some(Destination { here, endpoint, address, place: Cell::new(place) })
    }
}

/// Where a login goes on that `node` does not take, within its group. None: all other nodes were tried, or are ejected.
pub(crate) fn for_login(node: &Here, is_tried: impl Fn(&str) -> bool) -> Option<Destination> {
    HOSTS.with_borrow(|all| {
        let fits = |host: &&Host| host.takes_from(node) && !is_tried(&host.endpoint) && !is_ejected(host);
        let others: Vec<&Host> = all.get(&node.group)?.iter().filter(fits).collect();
        let candidates: Vec<Candidate> = others.iter().map(|host| host.candidate()).collect();
        others[target(&candidates, Version::default(), &Patience::default())?].destination(None)
    })
}

fn is_ejected(host: &Host) -> bool {
    host.here.node.ejected_until().is_some()
}

/// Whether the node is still at that endpoint. An attempt that has failed may have been at an earlier one.
pub(crate) fn is_at(node: &Here, endpoint: &str) -> bool {
    HOSTS.with_borrow(|all| {
        all.get(&node.group).is_some_and(|hosts| hosts.iter().any(|host| host.is_at(node, endpoint)))
    })
}

/// Whether new sessions can go to another node of its group.
pub(crate) fn has_another_usable(node: &Here) -> bool {
    let is_usable = |host: &Host| host.takes_from(node) && !is_ejected(host);
    HOSTS.with_borrow(|all| all.get(&node.group).is_some_and(|hosts| hosts.iter().any(is_usable)))
}

/// The node of that name at that address, in each group that has it.
pub(crate) fn at(address: &SocketAddr, name: &str) -> Vec<Rc<Here>> {
    let is_there = |host: &&Host| {
        host.here.node.name == name && host.endpoint.parse().is_ok_and(|parsed: SocketAddr| parsed == *address)
    };
    HOSTS.with_borrow(|all| all.values().flatten().filter(is_there).map(|host| Rc::clone(&host.here)).collect())
}

/// Nodes in service that have sessions to give away, while other nodes still want some.
pub(crate) fn givers() -> Vec<Rc<Here>> {
    let gives = |host: &Host, group: &[Host]| {
        host.here.gives.get()
            && !host.here.is_to_be_left()
            && host.here.node.allowance().left() > 0
            && group.iter().any(|other| other.wants_from(&host.here))
    };
    HOSTS.with_borrow(|all| {
        let of_group = |group: &Vec<Host>| -> Vec<Rc<Here>> {
            group.iter().filter(|host| gives(host, group)).map(|host| Rc::clone(&host.here)).collect()
        };
        all.values().flat_map(of_group).collect()
    })
}

/// Where a session moves to from `node`, within its group. `for_others`: the node stays in service, so the session may stay as
/// well. None: there is no such node.
pub(crate) fn destination(node: &Here, patience: &Patience, for_others: bool) -> Option<Destination> {
    HOSTS.with_borrow(|all| {
        let hosts = all.get(&node.group)?;
        loop {
            let fits = |host: &&Host| match for_others {
                true => host.wants_from(node) && !patience.avoids(&host.endpoint),
                false => host.takes_from(node),
            };
            let (ejected, usable): (Vec<&Host>, Vec<&Host>) =
                hosts.iter().filter(fits).partition(|host| is_ejected(host));
            let others = if usable.is_empty() && !for_others { ejected } else { usable };
            let candidates: Vec<Candidate> = others.iter().map(|host| host.candidate()).collect();
            let chosen = others[target(&candidates, node.version.get().unwrap_or_default(), patience)?];
            if !for_others {
                return chosen.destination(None);
            }
            // Another worker may have taken the last place meanwhile.
            if let Some(place) = Place::at(&chosen.here.node) {
                return chosen.destination(Some(place));
            }
        }
    })
}

#[cfg(test)]
mod tests;
