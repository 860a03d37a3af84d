use std::time::Duration;

use super::*;
use crate::ejection::{self, EjectReason};

fn worker_hosts() -> WorkerHosts {
    WorkerHosts::new(WorkerNodes::new())
}

fn host(hosts: &WorkerHosts, group: &str, name: &str) -> Host {
    Host {
        node: hosts.nodes.get(group, name),
        endpoint: format!("127.0.0.1:{}", 4000 + u16::from(name.as_bytes()[name.len() - 1])),
        state: "active".to_owned(),
        is_force_closed: false,
        version: None,
        weight: 1,
        priority: 0,
        outgoing_quota: None,
        incoming_quota: None,
        base_sessions: 0,
        turn_offset: 1.0,
    }
}

fn asked(count: u64) -> Option<String> {
    Some(format!("1:{}={count}", telemetry::instance()))
}

fn name_of(destination: Option<TargetNode>) -> Option<String> {
    destination.map(|to| to.node.shared.name.clone())
}

fn goes_to(hosts: &WorkerHosts, node: &Host) -> Option<String> {
    name_of(hosts.find_target(&node.node, &MigrationBackoff::default(), false))
}

#[test]
fn a_node_gets_as_many_as_it_wants_and_what_does_not_arrive_is_wanted_still() {
    let hosts = worker_hosts();
    let from = Host { outgoing_quota: asked(5), ..host(&hosts, "wants", "wants-a") };
    let (to, other) =
        (Host { incoming_quota: asked(1), ..host(&hosts, "wants", "wants-b") }, host(&hosts, "wants", "wants-c"));
    hosts.set_hosts("wants", vec![from.clone(), to.clone(), other]);
    let next = || hosts.find_target(&from.node, &MigrationBackoff::default(), true);
    let (one, another) = (next().expect("it is wanted"), next());
    assert_eq!(one.node.shared.name, "wants-b");
    assert!(another.is_none() && !hosts.rebalance_sources().iter().any(|giver| Rc::ptr_eq(giver, &from.node)));
    drop(one);
    assert!(hosts.rebalance_sources().iter().any(|giver| Rc::ptr_eq(giver, &from.node)));
    next().and_then(|to| to.reservation.take()).expect("it is wanted again").consume();
    assert!(next().is_none());
    let mut patience = MigrationBackoff::default();
    patience.record_failure(Some(&to.endpoint), Duration::ZERO);
    hosts.set_hosts(
        "wants",
        vec![from.clone(), Host { incoming_quota: asked(9).map(|text| text.replacen('1', "2", 1)), ..to }],
    );
    assert!(hosts.find_target(&from.node, &patience, true).is_none(), "it has just failed");
    assert_eq!(name_of(next()).as_deref(), Some("wants-b"), "another round");
}

#[test]
fn who_wants_sessions_but_is_older_or_gets_none_is_not_for_others() {
    let hosts = worker_hosts();
    let from = Host { outgoing_quota: asked(1), version: Release::parse("8.5.3"), ..host(&hosts, "unfit", "unfit-a") };
    let wants =
        |name| Host { incoming_quota: asked(1), version: Release::parse("8.5.3"), ..host(&hosts, "unfit", name) };
    let unfit = [
        Host { version: Release::parse("8.5.2"), ..wants("unfit-b") },
        Host { weight: 0, ..wants("unfit-c") },
        Host { state: STATE_DRAINING.to_owned(), ..wants("unfit-d") },
        Host { incoming_quota: Some("1:0=1".to_owned()), ..wants("unfit-e") },
    ];
    for other in unfit {
        let name = other.node.shared.name.clone();
        hosts.set_hosts("unfit", vec![from.clone(), other]);
        assert!(hosts.find_target(&from.node, &MigrationBackoff::default(), true).is_none(), "{name}");
        assert!(!hosts.rebalance_sources().iter().any(|giver| Rc::ptr_eq(giver, &from.node)), "{name}");
    }
}

#[test]
fn sessions_stay_within_their_group() {
    let hosts = worker_hosts();
    let (a, b) = (host(&hosts, "small", "group-a"), host(&hosts, "small", "group-b"));
    hosts.set_hosts("small", vec![a.clone(), b.clone()]);
    hosts.set_hosts("large", vec![host(&hosts, "large", "group-c")]);
    assert_eq!(goes_to(&hosts, &a).as_deref(), Some("group-b"));
    // A node changes its group.
    let moved = host(&hosts, "large", "group-b");
    assert!(hosts.set_hosts("small", vec![a.clone()]), "sessions are to leave it");
    assert!(!hosts.set_hosts("large", vec![moved.clone(), host(&hosts, "large", "group-c")]));
    assert!(b.node.is_draining() && !moved.node.is_draining());
    assert_eq!((goes_to(&hosts, &a), goes_to(&hosts, &b).as_deref()), (None, Some("group-a")));
    assert_eq!(goes_to(&hosts, &moved).as_deref(), Some("group-c"));
    assert!(Arc::ptr_eq(&b.node.shared, &moved.node.shared), "it is counted once");
    assert!(hosts.find_target(&hosts.nodes.get("none", "group-a"), &MigrationBackoff::default(), false).is_none());
}

#[test]
fn the_last_usable_node_is_never_ejected_and_ejected_ones_come_last() {
    let hosts = worker_hosts();
    let [from, a, b] = ["eject-a", "eject-b", "eject-c"].map(|name| host(&hosts, "eject", name));
    let from = Host { state: STATE_DRAINING.to_owned(), ..from };
    hosts.set_hosts("eject", vec![from.clone(), a.clone(), b.clone()]);
    let eject = |host: &Host| ejection::eject(&hosts, &host.node, EjectReason::Connect, Duration::from_secs(60));
    assert!(eject(&a) && a.node.shared.ejection_details().is_some());
    assert_eq!(goes_to(&hosts, &from).as_deref(), Some("eject-c"));
    assert!(!eject(&b) && b.node.shared.ejection_details().is_none(), "no other is left");
    a.node.shared.end_ejection();
    assert!(eject(&b));
    assert_eq!(goes_to(&hosts, &from).as_deref(), Some("eject-b"));
    // All others leave the service: what is left is used although it is ejected.
    hosts.set_hosts("eject", vec![from.clone(), Host { weight: 0, ..a }, b]);
    assert_eq!(goes_to(&hosts, &from).as_deref(), Some("eject-c"));
}

#[test]
fn an_ejection_does_not_outlive_the_endpoint() {
    let hosts = worker_hosts();
    let [a, b] = ["place-a", "place-b"].map(|name| host(&hosts, "place", name));
    hosts.set_hosts("place", vec![a.clone(), b.clone()]);
    assert!(ejection::eject(&hosts, &a.node, EjectReason::Connect, Duration::from_secs(60)));
    hosts.set_hosts("place", vec![a.clone(), Host { weight: 2, ..b.clone() }]);
    assert!(a.node.shared.ejection_details().is_some());
    let elsewhere = Host { endpoint: "127.0.0.9:4000".to_owned(), ..a.clone() };
    hosts.set_hosts("place", vec![elsewhere, b]);
    assert!(a.node.shared.ejection_details().is_none());
    assert!(hosts.is_at(&a.node, "127.0.0.9:4000") && !hosts.is_at(&a.node, &a.endpoint));
}

#[test]
fn a_session_that_has_to_leave_goes_to_the_nearest() {
    let hosts = worker_hosts();
    let [from, near, far, backup] = ["near-a", "near-b", "near-c", "near-d"].map(|name| host(&hosts, "near", name));
    let (far, backup) = (Host { priority: 1, ..far }, Host { priority: 2, ..backup });
    let from = Host { state: STATE_DRAINING.to_owned(), ..from };
    hosts.set_hosts("near", vec![backup.clone(), far.clone(), near, from.clone()]);
    assert_eq!(goes_to(&hosts, &from).as_deref(), Some("near-b"));
    hosts.set_hosts("near", vec![backup.clone(), far, from.clone()]);
    assert_eq!(goes_to(&hosts, &from).as_deref(), Some("near-c"));
    hosts.set_hosts("near", vec![backup, from.clone()]);
    assert_eq!(goes_to(&hosts, &from).as_deref(), Some("near-d"));
}
