use mysql_proto::capability::Capabilities;
use mysql_proto::login::NodeTls;
use proptest::prelude::*;

use super::*;
use crate::budget::Budget;
use crate::messages::packets;
use crate::target_login::{self, tests::error};

const OK: &[u8] = &[0, 0, 0, 2, 0, 0, 0];
/// The answers to all statements of a restore.
const RESTORED: [&[u8]; 3] = [b"\x07\0\0\x01\0\0\0\x02\0\0\0"; 3];
const EOF: &[u8] = &[0xfe, 0, 0, 2, 0];
const DEFINITION: &[u8] = b"\x03def\0\0\0\x0eSession_states\0\x0c\x2e\0\0\0\0\0\xf5\0\0\0\0\0";

fn identity() -> Identity {
    let agreed = Capabilities::PROTOCOL_41.with(Capabilities::PLUGIN_AUTH);
    let mut login = agreed.0.to_le_bytes().to_vec();
    login.extend([0; 28]);
    login.extend(b"root\0\0");
    Identity::from_handshake_response(&login, agreed).expect("a login")
}

fn greeting() -> Vec<u8> {
    target_login::tests::greeting(target_login::tests::OFFERED)
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

fn started() -> Migration {
    Migration::start(identity(), NodeTls::Disabled, MigrationTimeouts::default(), at(0))
}

fn ready() -> Migration {
    let mut migration = started();
    assert_eq!(migration.on_target_bytes(&greeting(), at(0)), [Effect::TargetReady]);
    migration
}

fn exporting() -> Migration {
    let mut migration = ready();
    assert!(matches!(migration.start_export(identity(), at(0))[..], [Effect::HoldClient(_)]));
    assert!(migration.is_client_held());
    migration
}

fn restoring() -> Migration {
    let mut migration = exporting();
    assert!(matches!(
        migration.on_old_node_bytes(&exported(r#"{"found-rows":7}"#), at(0))[..],
        [Effect::SendToTarget(_)]
    ));
    migration
}

#[test]
fn session_migrates_after_login_and_restore() {
    let mut migration = restoring();
    assert!(matches!(migration.on_target_bytes(&packets(OK, 2), at(0))[..], [Effect::RestoreStates(_)]));
    assert_eq!(migration.on_target_bytes(&RESTORED.concat(), at(0)), [Effect::Switch]);
    assert!(migration.is_client_held());
    migration.on_switched();
    assert!(!migration.is_client_held() && migration.deadline().is_none());
}

/// Passes the answers of the target to the login and the restore.
const COMPLETE_LOGIN: fn(&mut Migration) -> Vec<Effect> = |migration| {
    assert!(matches!(migration.on_target_bytes(&packets(OK, 2), at(0))[..], [Effect::RestoreStates(_)]));
    migration.on_target_bytes(&RESTORED.concat(), at(0))
};

#[test]
fn session_does_not_switch_while_the_old_node_is_in_doubt() {
    let mut migration = restoring();
    assert!(!migration.is_logged_in());
    migration.on_old_conn_closed();
    assert_eq!(COMPLETE_LOGIN(&mut migration), []);
    assert!(migration.is_logged_in() && migration.is_client_held());
    assert_eq!(migration.retry_switch(), []);
    assert_eq!(migration.on_old_node_lost(), [Effect::Switch], "the old node is gone");

    let mut migration = restoring();
    assert_eq!(COMPLETE_LOGIN(&mut migration), [Effect::Switch]);
    assert_eq!(migration.retry_switch(), [Effect::Switch], "there were unread bytes");
    migration.on_old_conn_closed();
    assert_eq!(migration.retry_switch(), []);
    // The target fails as well, before the cause of the old node's close is known.
    assert!(matches!(migration.on_target_lost(at(0))[..], [Effect::SendToOldNode(_)]));
    assert_eq!(migration.on_old_node_lost(), [Effect::Lost]);
    assert!(migration.take_snapshot().is_some(), "another node may restore the session");

    let mut migration = exporting();
    migration.on_old_conn_closed();
    assert_eq!(migration.on_old_node_lost(), [Effect::Lost]);
}

#[test]
fn unrequested_bytes_of_the_old_node_make_the_undo_impossible() {
    let mut migration = restoring();
    assert_eq!(migration.on_old_node_bytes(&error(1053, 0), at(0)), []);
    assert_eq!(migration.on_target_lost(at(0)), [Effect::Lost]);
}

#[test]
fn failure_before_the_client_is_held_aborts_at_once() {
    for (mut migration, effects) in [
        (started(), AbortReason::Unreachable(MigrationStep::Connecting)),
        (ready(), AbortReason::Unreachable(MigrationStep::WaitingForIdle)),
    ]
    .map(|(migration, reason)| (migration, vec![Effect::Abort(reason)]))
    {
        assert_eq!(migration.on_target_lost(at(0)), effects);
        assert_eq!(migration.on_target_lost(at(0)), []);
    }
    assert_eq!(
        started().on_target_bytes(&error(1040, 0), at(0)),
        [Effect::Abort(AbortReason::TargetFailed(LoginFailure::GreetedWithError(1040)))]
    );
    assert_eq!(ready().cancel(at(0)), [Effect::Abort(AbortReason::Cancelled)]);
}

#[test]
fn session_stays_if_the_old_node_exports_no_usable_states() {
    assert_eq!(
        exporting().on_old_node_bytes(&error(8146, 1), at(0)),
        [Effect::Abort(AbortReason::ExportRejected(8146))]
    );
    let without = answer(&[&[2], DEFINITION, DEFINITION, EOF, b"\x02{}\xfb", EOF]);
    let mut migration = exporting();
    assert!(
        matches!(migration.on_old_node_bytes(&without, at(0))[..], [Effect::SendToOldNode(_)]),
        "the export is undone"
    );
    assert_eq!(migration.on_old_node_bytes(&packets(OK, 1), at(0)), [Effect::Abort(AbortReason::NoToken)]);
    assert_eq!(migration.take_snapshot(), None);
    assert_eq!(
        exporting().on_old_node_bytes(&exported("[]"), at(0)),
        [Effect::Abort(AbortReason::UnusableStates(UnusableStates::InvalidJson))]
    );
    assert_eq!(exporting().on_old_node_bytes(b"\x01\0\0\x01x", at(0)), [Effect::Lost]);
}

/// An exported answer with `size` bytes of text in its JSON, and a `FOUND_ROWS()` of 7.
fn large(size: usize) -> Vec<u8> {
    let json = format!(r#"{{"found-rows":7,"sys-vars":{{"wait_timeout":"60"}},"x":"{}"}}"#, "x".repeat(size));
    let mut row = Vec::new();
    mysql_proto::lenenc::write(&mut row, json.len() as u64);
    row.extend(json.bytes());
    row.extend(b"\x05token");
    answer(&[&[2], DEFINITION, DEFINITION, EOF, &row, EOF])
}

#[test]
fn session_with_too_large_states_stays_and_its_export_is_undone() {
    let memory = MemoryLimits { per_session: 1000, ..MemoryLimits::default() };
    let begun = || {
        let mut migration = started().with_memory_limits(memory.clone());
        migration.on_target_bytes(&greeting(), at(0));
        migration.start_export(identity(), at(0));
        migration
    };
    let (too_large, undo) =
        (AbortReason::UnusableStates(UnusableStates::TooLarge), br#"SET SESSION_STATES '{"found-rows":7}'"#);
    assert!(too_large.is_session_fault() && !too_large.is_target_fault());
    let mut migration = begun();
    let effects = migration.on_old_node_bytes(&large(1000), at(0));
    let [Effect::SendToOldNode(sent)] = &effects[..] else { panic!("{effects:?}") };
    assert_eq!(&sent[5..], undo);
    assert!(migration.is_client_held());
    assert_eq!(migration.on_old_node_bytes(&packets(OK, 1), at(0)), [Effect::Abort(too_large)]);
    assert_eq!((migration.take_snapshot(), migration.wait_timeout()), (None, Some(at(60))));

    // Late states are too large as well. The migration reports that reason, because another export would be as slow.
    let mut migration = begun();
    assert_eq!(migration.on_deadline(at(2)), [Effect::ReleaseSlots]);
    assert!(matches!(migration.on_old_node_bytes(&large(1000), at(9))[..], [Effect::SendToOldNode(_)]));
    assert_eq!(migration.on_old_node_bytes(&packets(OK, 1), at(9)), [Effect::Abort(too_large)]);

    // After the states, the node announces that it closes.
    assert_eq!(begun().on_old_node_bytes(&[large(1000), error(1053, 0)].concat(), at(0)), [Effect::Lost]);
}

#[test]
fn session_over_the_memory_budget_stays_and_its_export_is_undone() {
    let memory = MemoryLimits { per_session: 1 << 20, budget: Budget::new(100_000) };
    let mut migration = started().with_memory_limits(memory.clone());
    migration.on_target_bytes(&greeting(), at(0));
    migration.start_export(identity(), at(0));
    assert!(matches!(migration.on_old_node_bytes(&large(200_000), at(0))[..], [Effect::SendToOldNode(_)]));
    assert_eq!(memory.budget.used(), 0);
    assert_eq!(
        migration.on_old_node_bytes(&packets(OK, 1), at(0)),
        [Effect::Abort(AbortReason::UnusableStates(UnusableStates::OverBudget))]
    );
}

#[test]
fn memory_is_reserved_as_long_as_the_states_exist() {
    let memory = MemoryLimits { per_session: 1 << 20, budget: Budget::new(1 << 20) };
    let mut migration = started().with_memory_limits(memory.clone());
    migration.on_target_bytes(&greeting(), at(0));
    migration.start_export(identity(), at(0));
    assert!(matches!(migration.on_old_node_bytes(&large(200_000), at(0))[..], [Effect::SendToTarget(_)]));
    let used = memory.budget.used();
    assert!((200_000..220_000).contains(&used), "{used}");
    let effects = migration.on_target_bytes(&packets(OK, 2), at(0));
    assert_eq!(memory.budget.used(), used, "there is only one copy");
    migration.on_target_bytes(&RESTORED.concat(), at(0));
    let snapshot = migration.take_snapshot();
    drop((migration, effects));
    assert_eq!(memory.budget.used(), used);
    drop(snapshot);
    assert_eq!(memory.budget.used(), 0);
}

#[test]
fn export_is_undone_if_the_target_fails() {
    for (failed, reason) in [
        (error(1045, 2), AbortReason::TargetFailed(LoginFailure::Denied(1045))),
        (packets(b"x", 2), AbortReason::TargetFailed(LoginFailure::ProtocolError)),
    ] {
        let mut migration = restoring();
        let effects = migration.on_target_bytes(&failed, at(0));
        let [Effect::SendToOldNode(undo)] = &effects[..] else { panic!("{effects:?}") };
        assert_eq!(&undo[5..], br#"SET SESSION_STATES '{"found-rows":7}'"#);
        assert!(migration.is_client_held());
        // Also if the old node rejects the undo, or the target is lost meanwhile.
        assert_eq!(migration.on_target_lost(at(0)), []);
        assert_eq!(migration.on_old_node_bytes(&error(1064, 1), at(0)), [Effect::Abort(reason)]);
    }
}

#[test]
fn late_export_does_not_reach_the_client() {
    let mut migration = exporting();
    assert_eq!(migration.on_deadline(at(1)), []);
    assert_eq!(migration.deadline(), Some(at(2)));
    assert_eq!(migration.on_deadline(at(2)), [Effect::ReleaseSlots]);
    assert!(migration.is_client_held() && migration.deadline().is_none());
    let effects = migration.on_old_node_bytes(&exported(r#"{"found-rows":7}"#), at(9));
    assert!(matches!(effects[..], [Effect::SendToOldNode(_)]));
    assert_eq!(
        migration.on_old_node_bytes(&packets(OK, 1), at(9)),
        [Effect::Abort(AbortReason::TimedOut(MigrationStep::Exporting))]
    );
}

#[test]
fn each_step_and_the_whole_migration_have_timeouts() {
    assert_eq!(started().on_deadline(at(2)), [Effect::Abort(AbortReason::TimedOut(MigrationStep::Connecting))]);
    assert_eq!(ready().on_deadline(at(5)), [Effect::Abort(AbortReason::TimedOut(MigrationStep::WaitingForIdle))]);
    let mut migration = restoring();
    assert!(matches!(migration.on_deadline(at(3))[..], [Effect::SendToOldNode(_)]));
    let mut migration = started();
    migration.on_target_bytes(&greeting(), at(1));
    migration.start_export(identity(), at(5));
    assert_eq!(migration.deadline(), Some(at(7)));
    let mut slow = Migration::start(
        identity(),
        NodeTls::Disabled,
        MigrationTimeouts { idle_wait: at(60), ..MigrationTimeouts::default() },
        at(0),
    );
    slow.on_target_bytes(&greeting(), at(0));
    assert_eq!(slow.deadline(), Some(at(10)));
}

#[test]
fn export_starts_once_and_only_if_the_target_is_ready() {
    assert_eq!(started().start_export(identity(), at(0)), []);
    assert_eq!(exporting().start_export(identity(), at(0)), []);
}

#[test]
fn shutdown_error_after_the_states_does_not_stop_the_migration() {
    let mut migration = exporting();
    let both = [exported("{}"), error(1053, 0)].concat();
    assert!(matches!(migration.on_old_node_bytes(&both, at(0))[..], [Effect::SendToTarget(_)]));
    assert!(matches!(migration.on_target_bytes(&packets(OK, 2), at(0))[..], [Effect::RestoreStates(_)]));
    assert_eq!(migration.on_target_bytes(&RESTORED.concat(), at(0)), [Effect::Switch]);

    let mut migration = exporting();
    assert!(matches!(migration.on_old_node_bytes(&both, at(0))[..], [Effect::SendToTarget(_)]));
    assert_eq!(migration.on_target_lost(at(0)), [Effect::Lost]);
    assert_eq!(exporting().on_old_node_bytes(&[error(8146, 1), error(1053, 0)].concat(), at(0)), [Effect::Lost]);
}

#[test]
fn late_states_of_a_node_that_closes_can_still_be_restored_elsewhere() {
    let mut migration = exporting();
    assert_eq!(migration.on_deadline(at(2)), [Effect::ReleaseSlots]);
    let both = [exported("{}"), error(1053, 0)].concat();
    assert_eq!(migration.on_old_node_bytes(&both, at(3)), [Effect::Lost]);
    assert!(migration.take_snapshot().is_some());
}

/// States that were exported at `since`, after which the session stayed.
fn snapshot(since: u64) -> StateSnapshot {
    let mut migration = ready();
    migration.start_export(identity(), at(since));
    migration.on_old_node_bytes(&exported("{}"), at(since));
    migration.on_target_lost(at(since));
    assert_eq!(
        migration.on_old_node_bytes(&packets(OK, 1), at(since)),
        [Effect::Abort(AbortReason::Unreachable(MigrationStep::Restoring))]
    );
    migration.take_snapshot().expect("states")
}

#[test]
fn session_fails_over_with_its_snapshot() {
    let snapshot = snapshot(3);
    let mut migration =
        Migration::start_failover(identity(), NodeTls::Disabled, MigrationTimeouts::default(), snapshot.clone(), at(4));
    assert!(migration.is_client_held());
    assert!(matches!(migration.on_target_bytes(&greeting(), at(4))[..], [Effect::SendToTarget(_)]));
    assert!(matches!(migration.on_target_bytes(&packets(OK, 2), at(4))[..], [Effect::RestoreStates(_)]));
    assert_eq!(migration.on_target_bytes(&RESTORED.concat(), at(4)), [Effect::Switch]);

    let lost: [fn(&mut Migration) -> Vec<Effect>; 3] = [
        |migration| migration.on_target_lost(at(4)),
        |migration| migration.on_deadline(at(6)),
        |migration| {
            migration.on_target_bytes(&greeting(), at(4));
            migration.on_target_bytes(&error(1045, 2), at(4))
        },
    ];
    for end in lost {
        let mut migration = Migration::start_failover(
            identity(),
            NodeTls::Disabled,
            MigrationTimeouts::default(),
            snapshot.clone(),
            at(4),
        );
        assert_eq!(end(&mut migration), [Effect::Lost]);
        assert_eq!(migration.take_snapshot(), Some(snapshot.clone()), "another node may restore the session");
    }
}

#[test]
fn failover_deadline_is_the_expiry_of_the_token() {
    let migration =
        Migration::start_failover(identity(), NodeTls::Disabled, MigrationTimeouts::default(), snapshot(0), at(49));
    assert_eq!(migration.deadline(), Some(at(50)));
}

#[derive(Debug, Clone)]
enum ScriptEvent {
    Target(Vec<u8>),
    Old(Vec<u8>),
    Lost,
    StartExport,
    Cancel,
    Wait(u64),
}

fn events() -> impl Strategy<Value = ScriptEvent> {
    let target = prop_oneof![
        3 => Just(greeting()),
        6 => (1_u8..3).prop_map(|sequence| packets(OK, sequence)),
        1 => Just(error(1045, 2)),
    ];
    let old = prop_oneof![3 => Just(exported("{}")), 3 => Just(packets(OK, 1)), 1 => Just(error(8146, 1))];
    prop_oneof![
        6 => target.prop_map(ScriptEvent::Target),
        3 => old.prop_map(ScriptEvent::Old),
        4 => Just(ScriptEvent::StartExport),
        1 => Just(ScriptEvent::Lost),
        1 => Just(ScriptEvent::Cancel),
        1 => (0_u64..4).prop_map(ScriptEvent::Wait),
    ]
}

proptest! {
    /// Whatever happens, the migration finishes once, holds the client until then, and sends the old node one request
    /// at a time.
    #[test]
    fn migration_finishes_once_and_holds_the_client_until_then(events in prop::collection::vec(events(), 0..40)) {
        let (mut migration, mut now) = (started(), at(0));
        let (mut held, mut finished, mut asked) = (false, false, false);
        for event in events {
            let effects = match event {
                ScriptEvent::Target(bytes) => migration.on_target_bytes(&bytes, now),
                // The old node sends nothing without a request.
                ScriptEvent::Old(bytes) if asked => {
                    asked = false;
                    migration.on_old_node_bytes(&bytes, now)
                }
                ScriptEvent::Old(_) => continue,
                ScriptEvent::Lost => migration.on_target_lost(now),
                ScriptEvent::StartExport => migration.start_export(identity(), now),
                ScriptEvent::Cancel => migration.cancel(now),
                ScriptEvent::Wait(seconds) => {
                    now += at(seconds);
                    migration.on_deadline(now)
                }
            };
            for effect in effects {
                prop_assert!(!finished, "{effect:?} when it was finished");
                match effect {
                    Effect::HoldClient(_) => {
                        prop_assert!(!held && !asked);
                        (held, asked) = (true, true);
                    }
                    Effect::SendToOldNode(_) => {
                        prop_assert!(held && !asked);
                        asked = true;
                    }
                    Effect::Switch => {
                        prop_assert!(held && !asked);
                        finished = true;
                        migration.on_switched();
                    }
                    Effect::Abort(_) | Effect::Lost => {
                        prop_assert!(!asked);
                        finished = true;
                    }
                    Effect::SendToTarget(_) | Effect::RestoreStates(_) | Effect::StartTargetTls(_) | Effect::TargetReady | Effect::ReleaseSlots => {}
                }
            }
            prop_assert_eq!(migration.is_client_held(), held && !finished);
        }
    }
}

#[test]
fn invalid_bytes_of_the_target_abort_the_migration() {
    let mut migration = started();
    let aborted = [Effect::Abort(AbortReason::TargetFailed(LoginFailure::ProtocolError))];
    assert_eq!(migration.on_target_invalid(at(0)), aborted);
    assert!(!migration.is_client_held());
}
