//! The nodes as the control plane tells them to Envoy, as one worker sees them.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use session::choice::{Candidate, Version, target};
use session::pace::Patience;
use session::quota::Quota;

use crate::moving::Destination;
use crate::node::Here;
use crate::{clock, telemetry};

/// What the control plane calls nodes whose sessions are to go elsewhere.
const LEFT: &str = "draining";

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
    /// What the control plane says of sessions that are to leave it although it stays in service.
    pub(crate) moves: Option<String>,
    /// It lacks sessions, and those that leave others for that go to it.
    pub(crate) wants: bool,
    /// Sessions that it had when its weight arrived.
    pub(crate) base: u64,
}

thread_local! {
    static HOSTS: RefCell<Vec<Host>> = RefCell::default();
}

/// What Envoy was told last. True: there is, or was, a node that sessions are to leave; a removed one is such a node.
pub(crate) fn set(mut hosts: Vec<Host>) -> bool {
    let before = HOSTS.take();
    keep_bases(&mut hosts, &before);
    let concerned = |host: &Host| host.here.is_to_be_left() || host.moves.is_some();
    let concerned_before = before.iter().any(concerned);
    let now: HashSet<&str> = hosts.iter().map(|host| host.here.node.name.as_str()).collect();
    for host in before.iter().filter(|host| !now.contains(host.here.node.name.as_str())) {
        host.here.set_left(true);
        host.here.gives.set(false);
    }
    for host in &hosts {
        host.here.set_left(host.state == LEFT);
        host.here.is_closed.set(host.is_closed);
        if host.version.is_some() {
            host.here.version.set(host.version);
        }
        let quota = host.moves.as_deref().and_then(|text| Quota::of(text, telemetry::instance()));
        host.here.gives.set(quota.is_some());
        host.here.node.allowance().set(quota, clock::now());
    }
    let concerns = concerned_before || before.iter().chain(&hosts).any(concerned);
    HOSTS.set(hosts);
    concerns
}

/// Weights belong together: when one is new, the count of who got what begins anew for all.
fn keep_bases(hosts: &mut [Host], before: &[Host]) {
    let before: HashMap<&str, &Host> = before.iter().map(|host| (host.endpoint.as_str(), host)).collect();
    let old = |host: &Host| before.get(host.endpoint.as_str()).copied();
    if hosts.iter().all(|host| old(host).is_none_or(|old| old.weight == host.weight)) {
        for host in hosts {
            host.base = old(host).map_or(host.base, |old| old.base);
        }
    }
}

/// Where a session moves to from `node`. `spared`: the node stays in service, so that it may just as well stay. None:
/// there is no (fit) node.
pub(crate) fn destination(node: &Here, patience: &Patience, spared: bool) -> Option<Destination> {
    HOSTS.with_borrow(|hosts| {
        let version = |host: &Host| host.version.unwrap_or_default();
        let from = node.version.get().unwrap_or_default();
        let fit = |host: &&Host| {
            !Arc::ptr_eq(&host.here.node, &node.node)
                && !host.here.is_to_be_left()
                && !(spared && (!host.wants || version(host) < from || patience.avoids(&host.endpoint)))
        };
        let others: Vec<&Host> = hosts.iter().filter(fit).collect();
        let candidates: Vec<Candidate> = others
            .iter()
            .map(|host| Candidate {
                endpoint: host.endpoint.clone(),
                version: version(host),
                weight: host.weight,
                sessions: host.here.node.sessions.load(Ordering::Relaxed).saturating_sub(host.base),
                gives: host.moves.is_some(),
            })
            .collect();
        let chosen = others[target(&candidates, from, patience)?];
        let address: SocketAddr = chosen.endpoint.parse().ok()?;
        Some(Destination { here: Rc::clone(&chosen.here), endpoint: chosen.endpoint.clone(), address })
    })
}
