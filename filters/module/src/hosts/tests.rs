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
        must_close_sessions: false,
        version: None,
        weight: 1,
        priority: 0,
        outgoing_quota: None,
        incoming_quota: None,
        base_sessions: 0,
        turn_offset: 1.0,
    }
}

fn quota(count: u64) -> Option<String> {
    Some(format!("1:{}={count}", telemetry::instance()))
}

fn name_of(target: Option<TargetNode>) -> Option<String> {
    target.map(|target| target.node.shared.name.clone())
}

fn target_of(hosts: &WorkerHosts, node: &Host) -> Option<String> {
    name_of(hosts.find_target(&node.node, &MigrationBackoff::default(), false))
}

#[test]
fn rebalancing_keeps_to_the_incoming_quota_and_a_dropped_reservation_is_released() {
    let hosts = worker_hosts();
    let from = Host { outgoing_quota: quota(5), ..host(&hosts, "wants", "wants-a") };
    let (to, other) =
        (Host { incoming_quota: quota(1), ..host(&hosts, "wants", "wants-b") }, host(&hosts, "wants", "wants-c"));
    hosts.set_hosts("wants", vec![from.clone(), to.clone(), other]);
    let next = || hosts.find_target(&from.node, &MigrationBackoff::default(), true);
    let (one, another) = (next().expect("a target"), next());
    assert_eq!(one.node.shared.name, "wants-b");
    assert!(another.is_none() && !hosts.rebalance_sources().iter().any(|source| Rc::ptr_eq(source, &from.node)));
    drop(one);
    assert!(hosts.rebalance_sources().iter().any(|source| Rc::ptr_eq(source, &from.node)));
    next().and_then(|target| target.reservation.take()).expect("the released quota").consume();
    assert!(next().is_none());
    let mut backoff = MigrationBackoff::default();
    backoff.record_failure(Some(&to.endpoint), Duration::ZERO);
    hosts.set_hosts(
        "wants",
        vec![from.clone(), Host { incoming_quota: quota(9).map(|text| text.replacen('1', "2", 1)), ..to }],
    );
    assert!(hosts.find_target(&from.node, &backoff, true).is_none(), "the target has just failed");
    assert_eq!(name_of(next()).as_deref(), Some("wants-b"), "a new round has its own quota");
}

#[test]
fn rebalancing_skips_targets_that_are_older_or_closed_or_without_quota() {
    let hosts = worker_hosts();
    let from = Host { outgoing_quota: quota(1), version: Release::parse("8.5.3"), ..host(&hosts, "unfit", "unfit-a") };
    let wants =
        |name| Host { incoming_quota: quota(1), version: Release::parse("8.5.3"), ..host(&hosts, "unfit", name) };
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
        assert!(!hosts.rebalance_sources().iter().any(|source| Rc::ptr_eq(source, &from.node)), "{name}");
    }
}

#[test]
fn sessions_migrate_only_within_their_group() {
    let hosts = worker_hosts();
    let (a, b) = (host(&hosts, "small", "group-a"), host(&hosts, "small", "group-b"));
    hosts.set_hosts("small", vec![a.clone(), b.clone()]);
    hosts.set_hosts("large", vec![host(&hosts, "large", "group-c")]);
    assert_eq!(target_of(&hosts, &a).as_deref(), Some("group-b"));
    // A node moves to another group.
    let moved = host(&hosts, "large", "group-b");
    assert!(hosts.set_hosts("small", vec![a.clone()]), "sessions must leave the removed node");
    assert!(!hosts.set_hosts("large", vec![moved.clone(), host(&hosts, "large", "group-c")]));
    assert!(b.node.is_draining() && !moved.node.is_draining());
    assert_eq!((target_of(&hosts, &a), target_of(&hosts, &b).as_deref()), (None, Some("group-a")));
    assert_eq!(target_of(&hosts, &moved).as_deref(), Some("group-c"));
    assert!(Arc::ptr_eq(&b.node.shared, &moved.node.shared), "sessions are counted once for both groups");
    assert!(hosts.find_target(&hosts.nodes.get("none", "group-a"), &MigrationBackoff::default(), false).is_none());
}

#[test]
fn last_usable_node_is_not_ejected_and_ejected_nodes_are_chosen_last() {
    let hosts = worker_hosts();
    let [from, a, b] = ["eject-a", "eject-b", "eject-c"].map(|name| host(&hosts, "eject", name));
    let from = Host { state: STATE_DRAINING.to_owned(), ..from };
    hosts.set_hosts("eject", vec![from.clone(), a.clone(), b.clone()]);
    let eject = |host: &Host| ejection::eject(&hosts, &host.node, EjectReason::Connect, Duration::from_secs(60));
    assert!(eject(&a) && a.node.shared.ejection_details().is_some());
    assert_eq!(target_of(&hosts, &from).as_deref(), Some("eject-c"));
    assert!(!eject(&b) && b.node.shared.ejection_details().is_none(), "no other node is usable");
    a.node.shared.end_ejection();
    assert!(eject(&b));
    assert_eq!(target_of(&hosts, &from).as_deref(), Some("eject-b"));
    // Only an ejected node is left.
    hosts.set_hosts("eject", vec![from.clone(), Host { weight: 0, ..a }, b]);
    assert_eq!(target_of(&hosts, &from).as_deref(), Some("eject-c"));
}

#[test]
fn ejection_ends_when_the_endpoint_of_the_node_changes() {
    let hosts = worker_hosts();
    let [a, b] = ["place-a", "place-b"].map(|name| host(&hosts, "place", name));
    hosts.set_hosts("place", vec![a.clone(), b.clone()]);
    assert!(ejection::eject(&hosts, &a.node, EjectReason::Connect, Duration::from_secs(60)));
    hosts.set_hosts("place", vec![a.clone(), Host { weight: 2, ..b.clone() }]);
    assert!(a.node.shared.ejection_details().is_some());
    let at_new_endpoint = Host { endpoint: "127.0.0.9:4000".to_owned(), ..a.clone() };
    hosts.set_hosts("place", vec![at_new_endpoint, b]);
    assert!(a.node.shared.ejection_details().is_none());
    assert!(hosts.is_at(&a.node, "127.0.0.9:4000") && !hosts.is_at(&a.node, &a.endpoint));
}

#[test]
fn session_of_a_draining_node_migrates_to_the_node_of_lowest_priority_number() {
    let hosts = worker_hosts();
    let [from, near, far, backup] = ["near-a", "near-b", "near-c", "near-d"].map(|name| host(&hosts, "near", name));
    let (far, backup) = (Host { priority: 1, ..far }, Host { priority: 2, ..backup });
    let from = Host { state: STATE_DRAINING.to_owned(), ..from };
    hosts.set_hosts("near", vec![backup.clone(), far.clone(), near, from.clone()]);
    assert_eq!(target_of(&hosts, &from).as_deref(), Some("near-b"));
    hosts.set_hosts("near", vec![backup.clone(), far, from.clone()]);
    assert_eq!(target_of(&hosts, &from).as_deref(), Some("near-c"));
    hosts.set_hosts("near", vec![backup, from.clone()]);
    assert_eq!(target_of(&hosts, &from).as_deref(), Some("near-d"));
}
