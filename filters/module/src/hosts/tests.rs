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
