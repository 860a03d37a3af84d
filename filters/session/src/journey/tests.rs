use proptest::prelude::*;
use wire::capability::Capabilities;
use wire::login::NodeTls;

use super::*;
use crate::arrival::{self, tests::error};
use crate::budget::Budget;
use crate::messages::packets;

const OK: &[u8] = &[0, 0, 0, 2, 0, 0, 0];
const EOF: &[u8] = &[0xfe, 0, 0, 2, 0];
const DEFINITION: &[u8] = b"\x03def\0\0\0\x0eSession_states\0\x0c\x2e\0\0\0\0\0\xf5\0\0\0\0\0";

fn identity() -> Identity {
    let agreed = Capabilities::PROTOCOL_41.with(Capabilities::PLUGIN_AUTH);
    let mut login = agreed.0.to_le_bytes().to_vec();
    login.extend([0; 28]);
    login.extend(b"root\0\0");
    Identity::of(&login, agreed).expect("a login")
}

fn greeting() -> Vec<u8> {
    arrival::tests::greeting(arrival::tests::OFFERED)
}

fn answer(payloads: &[&[u8]]) -> Vec<u8> {
    payloads.iter().zip(1..).flat_map(|(payload, sequence)| packets(payload, sequence)).collect()
}

fn exported(json: &str) -> Vec<u8> {
    let mut row = vec![u8::try_from(json.len()).expect("short")];
    row.extend(json.bytes());
    row.extend(b"\x05token");
    answer(&[&[2], DEFINITION, DEFINITION, EOF, &row, EOF])
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn begun() -> Journey {
    Journey::begin(identity(), NodeTls::Disabled, Limits::default(), at(0))
}

fn ready() -> Journey {
    let mut journey = begun();
    assert_eq!(journey.target(&greeting(), at(0)), [Order::Ready]);
    journey
}

fn held() -> Journey {
    let mut journey = ready();
    assert!(matches!(journey.depart(identity(), at(0))[..], [Order::Hold(_)]));
    assert!(journey.holds());
    journey
}

fn entering() -> Journey {
    let mut journey = held();
    assert!(matches!(journey.old(&exported(r#"{"found-rows":7}"#), at(0))[..], [Order::Target(_)]));
    journey
}

#[test]
fn a_session_moves() {
    let mut journey = entering();
    assert!(matches!(journey.target(&packets(OK, 2), at(0))[..], [Order::Restore(_)]));
    assert_eq!(journey.target(&[packets(OK, 1), packets(OK, 1)].concat(), at(0)), [Order::Switch]);
    assert!(journey.holds());
    journey.switched();
    assert!(!journey.holds() && journey.deadline().is_none());
}

/// The target has all of it.
const ARRIVES: fn(&mut Journey) -> Vec<Order> = |journey| {
    assert!(matches!(journey.target(&packets(OK, 2), at(0))[..], [Order::Restore(_)]));
    journey.target(&[packets(OK, 1), packets(OK, 1)].concat(), at(0))
};

#[test]
fn a_session_goes_nowhere_while_the_end_of_its_old_connection_is_in_doubt() {
    let mut journey = entering();
    assert!(!journey.is_let_in());
    journey.old_closed();
    assert_eq!(ARRIVES(&mut journey), []);
    assert!(journey.is_let_in() && journey.holds());
    assert_eq!(journey.retry(), []);
    assert_eq!(journey.old_lost(), [Order::Switch], "its node is gone");

    let mut journey = entering();
    assert_eq!(ARRIVES(&mut journey), [Order::Switch]);
    assert_eq!(journey.retry(), [Order::Switch], "there was something to read first");
    journey.old_closed();
    assert_eq!(journey.retry(), []);
    // The target ends, too, before it is known why the old node has closed.
    assert!(matches!(journey.target_lost(at(0))[..], [Order::Old(_)]));
    assert_eq!(journey.old_lost(), [Order::Lost]);
    assert!(journey.take_fresh().is_some(), "another node may take it");

    let mut journey = held();
    journey.old_closed();
    assert_eq!(journey.old_lost(), [Order::Lost]);
}

#[test]
fn what_the_old_node_says_unasked_leaves_no_way_back() {
    let mut journey = entering();
    assert_eq!(journey.old(&error(1053, 0), at(0)), []);
    assert_eq!(journey.target_lost(at(0)), [Order::Lost]);
}

#[test]
fn before_it_is_held_it_just_stays() {
    for (mut journey, orders) in
        [(begun(), Stay::Unreachable(Step::Connecting)), (ready(), Stay::Unreachable(Step::Waiting))]
            .map(|(journey, stay)| (journey, vec![Order::Release(stay)]))
    {
        assert_eq!(journey.target_lost(at(0)), orders);
        assert_eq!(journey.target_lost(at(0)), []);
    }
    assert_eq!(begun().target(&error(1040, 0), at(0)), [Order::Release(Stay::Target(Failure::Unwelcome(1040)))]);
    assert_eq!(ready().cancel(at(0)), [Order::Release(Stay::Cancelled)]);
}

#[test]
fn a_node_that_does_not_let_it_go_keeps_it() {
    assert_eq!(held().old(&error(8146, 1), at(0)), [Order::Release(Stay::Refused(8146))]);
    let without = answer(&[&[2], DEFINITION, DEFINITION, EOF, b"\x02{}\xfb", EOF]);
    let mut journey = held();
    assert!(matches!(journey.old(&without, at(0))[..], [Order::Old(_)]), "what the export has changed is put back");
    assert_eq!(journey.old(&packets(OK, 1), at(0)), [Order::Release(Stay::NoToken)]);
    assert_eq!(journey.take_fresh(), None);
    assert_eq!(held().old(&exported("[]"), at(0)), [Order::Release(Stay::States(Unusable::NoJson))]);
    assert_eq!(held().old(b"\x01\0\0\x01x", at(0)), [Order::Lost]);
}

/// An answer with so many bytes of JSON, and `FOUND_ROWS()` of 7.
fn large(size: usize) -> Vec<u8> {
    let json = format!(r#"{{"found-rows":7,"sys-vars":{{"wait_timeout":"60"}},"x":"{}"}}"#, "x".repeat(size));
    let mut row = Vec::new();
    wire::lenenc::write(&mut row, json.len() as u64);
    row.extend(json.bytes());
    row.extend(b"\x05token");
    answer(&[&[2], DEFINITION, DEFINITION, EOF, &row, EOF])
}

#[test]
fn a_session_whose_states_are_too_large_stays_as_it_was() {
    let memory = MemoryLimits { per_session: 1000, ..MemoryLimits::default() };
    let begun = || {
        let mut journey = begun().within(memory.clone());
        journey.target(&greeting(), at(0));
        journey.depart(identity(), at(0));
        journey
    };
    let (too_large, undo) = (Stay::States(Unusable::TooLarge), br#"SET SESSION_STATES '{"found-rows":7}'"#);
    assert!(too_large.blames_session() && !too_large.blames_target());
    let mut journey = begun();
    let orders = journey.old(&large(1000), at(0));
    let [Order::Old(sent)] = &orders[..] else { panic!("{orders:?}") };
    assert_eq!(&sent[5..], undo);
    assert!(journey.holds());
    assert_eq!(journey.old(&packets(OK, 1), at(0)), [Order::Release(too_large)]);
    assert_eq!((journey.take_fresh(), journey.wait_timeout()), (None, Some(at(60))));

    // What came too late was too large as well: to ask again would be as slow.
    let mut journey = begun();
    assert_eq!(journey.late(at(2)), [Order::Overdue]);
    assert!(matches!(journey.old(&large(1000), at(9))[..], [Order::Old(_)]));
    assert_eq!(journey.old(&packets(OK, 1), at(9)), [Order::Release(too_large)]);

    // The node says behind them that it closes.
    assert_eq!(begun().old(&[large(1000), error(1053, 0)].concat(), at(0)), [Order::Lost]);
}

#[test]
fn where_there_is_no_room_for_its_states_it_stays_as_it_was() {
    let memory = MemoryLimits { per_session: 1 << 20, budget: Budget::new(100_000) };
    let mut journey = begun().within(memory.clone());
    journey.target(&greeting(), at(0));
    journey.depart(identity(), at(0));
    assert!(matches!(journey.old(&large(200_000), at(0))[..], [Order::Old(_)]));
    assert_eq!(memory.budget.used(), 0);
    assert_eq!(journey.old(&packets(OK, 1), at(0)), [Order::Release(Stay::States(Unusable::OverBudget))]);
}

#[test]
fn states_are_reserved_as_long_as_somebody_has_them() {
    let memory = MemoryLimits { per_session: 1 << 20, budget: Budget::new(1 << 20) };
    let mut journey = begun().within(memory.clone());
    journey.target(&greeting(), at(0));
    journey.depart(identity(), at(0));
    assert!(matches!(journey.old(&large(200_000), at(0))[..], [Order::Target(_)]));
    let used = memory.budget.used();
    assert!((200_000..220_000).contains(&used), "{used}");
    let orders = journey.target(&packets(OK, 2), at(0));
    assert_eq!(memory.budget.used(), used, "there is only one copy");
    journey.target(&[packets(OK, 1), packets(OK, 1)].concat(), at(0));
    let fresh = journey.take_fresh();
    drop((journey, orders));
    assert_eq!(memory.budget.used(), used);
    drop(fresh);
    assert_eq!(memory.budget.used(), 0);
}

#[test]
fn what_the_export_has_changed_is_put_back() {
    for (failed, stay) in
        [(error(1045, 2), Stay::Target(Failure::Denied(1045))), (packets(b"x", 2), Stay::Target(Failure::Nonsense))]
    {
        let mut journey = entering();
        let orders = journey.target(&failed, at(0));
        let [Order::Old(undo)] = &orders[..] else { panic!("{orders:?}") };
        assert_eq!(&undo[5..], br#"SET SESSION_STATES '{"found-rows":7}'"#);
        assert!(journey.holds());
        // Even where it is refused, or the target is lost meanwhile.
        assert_eq!(journey.target_lost(at(0)), []);
        assert_eq!(journey.old(&error(1064, 1), at(0)), [Order::Release(stay)]);
    }
}

#[test]
fn an_answer_that_comes_too_late_does_not_reach_the_client() {
    let mut journey = held();
    assert_eq!(journey.late(at(1)), []);
    assert_eq!(journey.deadline(), Some(at(2)));
    assert_eq!(journey.late(at(2)), [Order::Overdue]);
    assert!(journey.holds() && journey.deadline().is_none());
    let orders = journey.old(&exported(r#"{"found-rows":7}"#), at(9));
    assert!(matches!(orders[..], [Order::Old(_)]));
    assert_eq!(journey.old(&packets(OK, 1), at(9)), [Order::Release(Stay::TooSlow(Step::Exporting))]);
}

#[test]
fn each_step_has_its_time_and_all_together_theirs() {
    assert_eq!(begun().late(at(2)), [Order::Release(Stay::TooSlow(Step::Connecting))]);
    assert_eq!(ready().late(at(5)), [Order::Release(Stay::TooSlow(Step::Waiting))]);
    let mut journey = entering();
    assert!(matches!(journey.late(at(3))[..], [Order::Old(_)]));
    let mut journey = begun();
    journey.target(&greeting(), at(1));
    journey.depart(identity(), at(5));
    assert_eq!(journey.deadline(), Some(at(7)));
    let mut slow = Journey::begin(identity(), NodeTls::Disabled, Limits { wait: at(60), ..Limits::default() }, at(0));
    slow.target(&greeting(), at(0));
    assert_eq!(slow.deadline(), Some(at(10)));
}

#[test]
fn nothing_departs_before_the_target_is_ready() {
    assert_eq!(begun().depart(identity(), at(0)), []);
    assert_eq!(held().depart(identity(), at(0)), []);
}

#[test]
fn a_node_that_says_its_end_behind_the_states_is_not_needed_any_more() {
    let mut journey = held();
    let both = [exported("{}"), error(1053, 0)].concat();
    assert!(matches!(journey.old(&both, at(0))[..], [Order::Target(_)]));
    assert!(matches!(journey.target(&packets(OK, 2), at(0))[..], [Order::Restore(_)]));
    assert_eq!(journey.target(&[packets(OK, 1), packets(OK, 1)].concat(), at(0)), [Order::Switch]);

    let mut journey = held();
    assert!(matches!(journey.old(&both, at(0))[..], [Order::Target(_)]));
    assert_eq!(journey.target_lost(at(0)), [Order::Lost]);
    assert_eq!(held().old(&[error(8146, 1), error(1053, 0)].concat(), at(0)), [Order::Lost]);
}

/// States that were exported at `since`, after which the session stayed.
fn fresh(since: u64) -> Fresh {
    let mut journey = ready();
    journey.depart(identity(), at(since));
    journey.old(&exported("{}"), at(since));
    journey.target_lost(at(since));
    assert_eq!(journey.old(&packets(OK, 1), at(since)), [Order::Release(Stay::Unreachable(Step::Entering))]);
    journey.take_fresh().expect("states")
}

#[test]
fn a_session_whose_node_is_gone_goes_on_with_fresh_states() {
    let fresh = fresh(3);
    let mut journey = Journey::resume(identity(), NodeTls::Disabled, Limits::default(), fresh.clone(), at(4));
    assert!(journey.holds());
    assert!(matches!(journey.target(&greeting(), at(4))[..], [Order::Target(_)]));
    assert!(matches!(journey.target(&packets(OK, 2), at(4))[..], [Order::Restore(_)]));
    assert_eq!(journey.target(&[packets(OK, 1), packets(OK, 1)].concat(), at(4)), [Order::Switch]);

    let lost: [fn(&mut Journey) -> Vec<Order>; 3] = [
        |journey| journey.target_lost(at(4)),
        |journey| journey.late(at(6)),
        |journey| {
            journey.target(&greeting(), at(4));
            journey.target(&error(1045, 2), at(4))
        },
    ];
    for end in lost {
        let mut journey = Journey::resume(identity(), NodeTls::Disabled, Limits::default(), fresh.clone(), at(4));
        assert_eq!(end(&mut journey), [Order::Lost]);
        assert_eq!(journey.take_fresh(), Some(fresh.clone()), "another node may take it");
    }
}

#[test]
fn a_token_does_not_grow_younger() {
    let journey = Journey::resume(identity(), NodeTls::Disabled, Limits::default(), fresh(0), at(49));
    assert_eq!(journey.deadline(), Some(at(50)));
}

#[derive(Debug, Clone)]
enum Event {
    Target(Vec<u8>),
    Old(Vec<u8>),
    Lost,
    Depart,
    Cancel,
    Wait(u64),
}

fn events() -> impl Strategy<Value = Event> {
    let target = prop_oneof![
        3 => Just(greeting()),
        6 => (1_u8..3).prop_map(|sequence| packets(OK, sequence)),
        1 => Just(error(1045, 2)),
    ];
    let old = prop_oneof![3 => Just(exported("{}")), 3 => Just(packets(OK, 1)), 1 => Just(error(8146, 1))];
    prop_oneof![
        6 => target.prop_map(Event::Target),
        3 => old.prop_map(Event::Old),
        4 => Just(Event::Depart),
        1 => Just(Event::Lost),
        1 => Just(Event::Cancel),
        1 => (0_u64..4).prop_map(Event::Wait),
    ]
}

proptest! {
    /// Whatever happens: it ends once, the client is held from one order to another, and the old node is asked
    /// nothing but one thing at a time.
    #[test]
    fn a_client_that_is_held_is_let_go_once(events in prop::collection::vec(events(), 0..40)) {
        let (mut journey, mut now) = (begun(), at(0));
        let (mut held, mut over, mut asked) = (false, false, false);
        for event in events {
            let orders = match event {
                Event::Target(bytes) => journey.target(&bytes, now),
                // A node that was asked nothing says nothing.
                Event::Old(bytes) if asked => {
                    asked = false;
                    journey.old(&bytes, now)
                }
                Event::Old(_) => continue,
                Event::Lost => journey.target_lost(now),
                Event::Depart => journey.depart(identity(), now),
                Event::Cancel => journey.cancel(now),
                Event::Wait(seconds) => {
                    now += at(seconds);
                    journey.late(now)
                }
            };
            for order in orders {
                prop_assert!(!over, "{order:?} when it was over");
                match order {
                    Order::Hold(_) => {
                        prop_assert!(!held && !asked);
                        (held, asked) = (true, true);
                    }
                    Order::Old(_) => {
                        prop_assert!(held && !asked);
                        asked = true;
                    }
                    Order::Switch => {
                        prop_assert!(held && !asked);
                        over = true;
                        journey.switched();
                    }
                    Order::Release(_) | Order::Lost => {
                        prop_assert!(!asked);
                        over = true;
                    }
                    Order::Target(_) | Order::Restore(_) | Order::Secure(_) | Order::Ready | Order::Overdue => {}
                }
            }
            prop_assert_eq!(journey.holds(), held && !over);
        }
    }
}

#[test]
fn a_target_that_speaks_before_tls_is_given_up() {
    let mut journey = begun();
    let given_up = [Order::Release(Stay::Target(Failure::Nonsense))];
    assert_eq!(journey.target_invalid(at(0)), given_up);
    assert!(!journey.holds());
}
