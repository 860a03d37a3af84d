//! The nodes of each group as one worker knows them: what the control plane says of them, joined with Envoy's endpoints.
//!
//! The two come separately ([`crate::live_config`], and the hooks of the load-balancing policy). The control plane's word
//! decides which nodes there are and what state they are in; an endpoint that it does not name gets no session. Envoy's
//! endpoints add weight and priority; a node that is not among them, or not healthy, gets no new session.

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
use crate::moving::Destination;
use crate::node::{self, Here, Place};
use crate::{clock, departures, telemetry};

/// What the control plane calls nodes whose sessions are to go elsewhere.
const LEFT: &str = "draining";
/// All its names for nodes that get no session. Envoy's endpoints say the same; whichever comes first counts.
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
    /// Nodes of a lower one are preferred.
    pub(crate) priority: u32,
    /// What the control plane says of sessions that are to leave it although it stays in service.
    pub(crate) moves: Option<String>,
    /// What it says of those of other nodes that are for it.
    pub(crate) wants: Option<String>,
    /// Sessions that it had when its weight arrived.
    pub(crate) base: u64,
    /// Where in its first turn it stands, as a [`Candidate`] has it.
    pub(crate) phase: f64,
}

/// What Envoy says of a host.
#[derive(Debug, Clone)]
pub(crate) struct Endpoint {
    /// `ip:port`
    pub(crate) address: String,
    /// 0: it is not healthy.
    pub(crate) weight: u32,
    pub(crate) priority: u32,
}

/// What the hosts of a group are made of.
#[derive(Default)]
struct Sources {
    endpoints: Vec<Endpoint>,
    /// None: the control plane has said nothing yet.
    nodes: Option<Nodes>,
}

thread_local! {
    /// By group.
    static HOSTS: RefCell<HashMap<String, Vec<Host>>> = RefCell::default();
    /// The same.
    static SOURCES: RefCell<HashMap<String, Sources>> = RefCell::default();
    /// [`live_config::count`] when it was taken over last.
    static SEEN: Cell<u64> = const { Cell::new(0) };
}

/// What Envoy says of all hosts of a group.
pub(crate) fn set_endpoints(group: &str, endpoints: Vec<Endpoint>) {
    SOURCES.with_borrow_mut(|all| all.entry(group.to_owned()).or_default().endpoints = endpoints);
    join(group);
}

/// Something may have been published: takes it over.
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

/// Makes the hosts of a group of what there is now, and has sessions leave those that they are to leave.
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

/// Where new sessions of a group may go, by endpoint: to the nodes that both Envoy's endpoints and the control plane's table
/// have in service. The two arrive one after the other. When one node comes into service with the change that takes another
/// out, no node is open by both for a moment: then the endpoints alone decide.
pub(crate) fn open(group: &str) -> HashMap<String, Rc<Here>> {
    HOSTS.with_borrow(|all| {
        let hosts = all.get(group).map_or(&[][..], Vec::as_slice);
        let any_open = hosts.iter().any(Host::is_open);
        let is_usable = |host: &&Host| if any_open { host.is_open() } else { host.weight > 0 };
        let by_endpoint = |host: &Host| (host.endpoint.clone(), Rc::clone(&host.here));
        hosts.iter().filter(is_usable).map(by_endpoint).collect()
    })
}

/// These are the nodes of a group now. True: there is, or was, one that sessions are to leave; a removed one
/// is such a node.
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

/// When a node has its first turn: at random within one and above 0, or all Envoys and workers would begin with the same
/// node after each change of weights.
pub(crate) fn first_turn(weight: u32) -> f64 {
    (1.0 - fastrand::f64()) / f64::from(weight.max(1))
}

/// What is asked of this Envoy.
fn quota(text: Option<&str>) -> Option<Quota> {
    Quota::of(text?, telemetry::instance())
}

/// Weights belong together: when one is new, or a priority, the count of who got what begins anew for all.
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

/// Where a login goes on that `node` does not take, within its group. None: there is no other node that was not tried, and
/// is not ejected.
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

/// Whether the node is at that endpoint still: an attempt that has failed may be of an earlier one.
pub(crate) fn is_at(node: &Here, endpoint: &str) -> bool {
    HOSTS.with_borrow(|all| {
        all.get(&node.group).is_some_and(|hosts| hosts.iter().any(|host| host.is_at(node, endpoint)))
    })
}

/// Whether another node of its group gets new sessions.
pub(crate) fn has_another_usable(node: &Here) -> bool {
    let is_usable = |host: &Host| host.takes_from(node) && !is_ejected(host);
    HOSTS.with_borrow(|all| all.get(&node.group).is_some_and(|hosts| hosts.iter().any(is_usable)))
}

/// The node of that name at that address, in all groups.
pub(crate) fn at(address: &SocketAddr, name: &str) -> Vec<Rc<Here>> {
    let is_there = |host: &&Host| {
        host.here.node.name == name && host.endpoint.parse().is_ok_and(|parsed: SocketAddr| parsed == *address)
    };
    HOSTS.with_borrow(|all| all.values().flatten().filter(is_there).map(|host| Rc::clone(&host.here)).collect())
}

/// Nodes that stay in service, and that sessions are still to leave for others which want them.
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

/// Where a session moves to from `node`, within its group. `for_others`: the node stays in service, so that it may just as
/// well stay. None: there is no (fit) node.
pub(crate) fn destination(node: &Here, patience: &Patience, for_others: bool) -> Option<Destination> {
    HOSTS.with_borrow(|all| {
        let hosts = all.get(&node.group)?;
        loop {
            let fits = |host: &&Host| match for_others {
                true => host.wants_from(node) && !patience.avoids(&host.endpoint) && !is_ejected(host),
                false => host.takes_from(node),
            };
            let mut others: Vec<&Host> = hosts.iter().filter(fits).collect();
            if others.iter().any(|host| !is_ejected(host)) {
                others.retain(|host| !is_ejected(host));
            }
            let candidates: Vec<Candidate> = others.iter().map(|host| host.candidate()).collect();
            let chosen = others[target(&candidates, node.version.get().unwrap_or_default(), patience)?];
            if !for_others {
                return chosen.destination(None);
            }
            // Another worker may have had the last one just now.
            if let Some(place) = Place::at(&chosen.here.node) {
                return chosen.destination(Some(place));
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ejection::{self, EjectReason};
    use crate::node::here;

    fn host(group: &str, name: &str) -> Host {
        Host {
            here: here(group, name),
            endpoint: format!("127.0.0.1:{}", 4000 + u16::from(name.as_bytes()[name.len() - 1])),
            state: "active".to_owned(),
            is_closed: false,
            version: None,
            weight: 1,
            priority: 0,
            moves: None,
            wants: None,
            base: 0,
            phase: 1.0,
        }
    }

    fn asked(count: u64) -> Option<String> {
        Some(format!("1:{}={count}", telemetry::instance()))
    }

    fn name_of(destination: Option<Destination>) -> Option<String> {
        destination.map(|to| to.here.node.name.clone())
    }

    fn goes_to(node: &Host) -> Option<String> {
        name_of(destination(&node.here, &Patience::default(), false))
    }

    #[test]
    fn a_node_gets_as_many_as_it_wants_and_what_does_not_arrive_is_wanted_still() {
        let from = Host { moves: asked(5), ..host("wants", "wants-a") };
        let (to, other) = (Host { wants: asked(1), ..host("wants", "wants-b") }, host("wants", "wants-c"));
        set("wants", vec![from.clone(), to.clone(), other]);
        let next = || destination(&from.here, &Patience::default(), true);
        let (one, another) = (next().expect("it is wanted"), next());
        assert_eq!(one.here.node.name, "wants-b");
        assert!(another.is_none() && !givers().iter().any(|giver| Rc::ptr_eq(giver, &from.here)));
        drop(one);
        assert!(givers().iter().any(|giver| Rc::ptr_eq(giver, &from.here)));
        next().and_then(|to| to.place.take()).expect("it is wanted again").reached();
        assert!(next().is_none());
        let mut patience = Patience::default();
        patience.failed(Some(&to.endpoint), Duration::ZERO);
        set("wants", vec![from.clone(), Host { wants: asked(9).map(|text| text.replacen('1', "2", 1)), ..to }]);
        assert!(destination(&from.here, &patience, true).is_none(), "it has just failed");
        assert_eq!(name_of(next()).as_deref(), Some("wants-b"), "another round");
    }

    #[test]
    fn who_wants_sessions_but_is_older_or_gets_none_is_not_for_others() {
        let from = Host { moves: asked(1), version: Version::of("8.5.3"), ..host("unfit", "unfit-a") };
        let wants = |name| Host { wants: asked(1), version: Version::of("8.5.3"), ..host("unfit", name) };
        let unfit = [
            Host { version: Version::of("8.5.2"), ..wants("unfit-b") },
            Host { weight: 0, ..wants("unfit-c") },
            Host { state: LEFT.to_owned(), ..wants("unfit-d") },
            Host { wants: Some("1:0=1".to_owned()), ..wants("unfit-e") },
        ];
        for other in unfit {
            let name = other.here.node.name.clone();
            set("unfit", vec![from.clone(), other]);
            assert!(destination(&from.here, &Patience::default(), true).is_none(), "{name}");
            assert!(!givers().iter().any(|giver| Rc::ptr_eq(giver, &from.here)), "{name}");
        }
    }

    #[test]
    fn sessions_stay_within_their_group() {
        let (a, b) = (host("small", "group-a"), host("small", "group-b"));
        set("small", vec![a.clone(), b.clone()]);
        set("large", vec![host("large", "group-c")]);
        assert_eq!(goes_to(&a).as_deref(), Some("group-b"));
        // A node changes its group.
        let moved = host("large", "group-b");
        assert!(set("small", vec![a.clone()]), "sessions are to leave it");
        assert!(!set("large", vec![moved.clone(), host("large", "group-c")]));
        assert!(b.here.is_to_be_left() && !moved.here.is_to_be_left());
        assert_eq!((goes_to(&a), goes_to(&b).as_deref()), (None, Some("group-a")));
        assert_eq!(goes_to(&moved).as_deref(), Some("group-c"));
        assert!(Arc::ptr_eq(&b.here.node, &moved.here.node), "it is counted once");
        assert!(destination(&here("none", "group-a"), &Patience::default(), false).is_none());
    }

    #[test]
    fn the_last_usable_node_is_never_ejected_and_ejected_ones_come_last() {
        let [from, a, b] = ["eject-a", "eject-b", "eject-c"].map(|name| host("eject", name));
        let from = Host { state: LEFT.to_owned(), ..from };
        set("eject", vec![from.clone(), a.clone(), b.clone()]);
        let eject = |host: &Host| ejection::eject(&host.here, EjectReason::Connect, Duration::from_secs(60));
        assert!(eject(&a) && a.here.node.ejected().is_some());
        assert_eq!(goes_to(&from).as_deref(), Some("eject-c"));
        assert!(!eject(&b) && b.here.node.ejected().is_none(), "no other is left");
        a.here.node.restore();
        assert!(eject(&b));
        assert_eq!(goes_to(&from).as_deref(), Some("eject-b"));
        // All others leave the service: what is left is used although it is ejected.
        set("eject", vec![from.clone(), Host { weight: 0, ..a }, b]);
        assert_eq!(goes_to(&from).as_deref(), Some("eject-c"));
    }

    #[test]
    fn an_ejection_does_not_outlive_the_endpoint() {
        let [a, b] = ["place-a", "place-b"].map(|name| host("place", name));
        set("place", vec![a.clone(), b.clone()]);
        assert!(ejection::eject(&a.here, EjectReason::Connect, Duration::from_secs(60)));
        set("place", vec![a.clone(), Host { weight: 2, ..b.clone() }]);
        assert!(a.here.node.ejected().is_some());
        let elsewhere = Host { endpoint: "127.0.0.9:4000".to_owned(), ..a.clone() };
        set("place", vec![elsewhere, b]);
        assert!(a.here.node.ejected().is_none());
        assert!(is_at(&a.here, "127.0.0.9:4000") && !is_at(&a.here, &a.endpoint));
    }

    #[test]
    fn a_session_that_has_to_leave_goes_to_the_nearest() {
        let [from, near, far, backup] = ["near-a", "near-b", "near-c", "near-d"].map(|name| host("near", name));
        let (far, backup) = (Host { priority: 1, ..far }, Host { priority: 2, ..backup });
        let from = Host { state: LEFT.to_owned(), ..from };
        set("near", vec![backup.clone(), far.clone(), near, from.clone()]);
        assert_eq!(goes_to(&from).as_deref(), Some("near-b"));
        set("near", vec![backup.clone(), far, from.clone()]);
        assert_eq!(goes_to(&from).as_deref(), Some("near-c"));
        set("near", vec![backup, from.clone()]);
        assert_eq!(goes_to(&from).as_deref(), Some("near-d"));
    }
}
