use proptest::prelude::{any, prop, proptest};

use super::*;
use crate::test_records::record;

fn prepare(id: u32, text: &str) -> Record {
    Record { prepared_id: Some(id), ..record(Command::Prepare, text.as_bytes()) }
}

fn execute(id: u32) -> Record {
    Record { prepared_id: Some(id), ..record(Command::Execute, &[&id.to_le_bytes()[..], b"\0\x01\0\0\0"].concat()) }
}

fn sends(plan: &Plan<'_>) -> Option<u32> {
    match plan {
        Plan::Send { payload, .. } => payload.first_chunk().map(|id| u32::from_le_bytes(*id)),
        _ => None,
    }
}

#[test]
fn ids_of_the_capture_become_those_of_the_target() {
    let mut state = SessionState::default();
    let prepared = prepare(7, "select ?");
    assert!(matches!(state.plan(&prepared, true), Plan::Send { command: Command::Prepare, .. }));
    state.learn(&prepared, Some(3), true);
    assert_eq!(sends(&state.plan(&execute(7), true)), Some(3));
    assert_eq!(state.statement(&execute(7)), Some(&b"select ?"[..]));
    let close = record(Command::CloseStatement, &7_u32.to_le_bytes());
    assert_eq!(sends(&state.plan(&close, true)), Some(3));
    state.learn(&close, None, true);
    assert_eq!(state.plan(&execute(7), true), Plan::Skip(SkipReason::UnknownStatement));
}

#[test]
fn closed_statement_is_forgotten_though_it_was_never_prepared() {
    let mut state = SessionState::default();
    for id in 0..100 {
        assert_eq!(state.plan(&prepare(id, "delete from t"), true), Plan::Skip(SkipReason::MayWrite));
        let close = record(Command::CloseStatement, &id.to_le_bytes());
        assert_eq!(state.plan(&close, true), Plan::Skip(SkipReason::MayWrite));
    }
    assert!(state.prepared.is_empty());
}

#[test]
fn statement_is_prepared_again_on_a_new_connection() {
    let mut state = SessionState::default();
    state.plan(&prepare(7, "select ?"), true);
    state.learn(&prepare(7, "select ?"), Some(3), true);
    state.on_disconnected();
    let fetch = record(Command::Fetch, &7_u32.to_le_bytes());
    assert_eq!(state.plan(&fetch, true), Plan::Skip(SkipReason::UnknownStatement));
    let expected = Plan::Prepare { captured_id: 7, text: b"select ?".to_vec() };
    assert_eq!(state.plan(&execute(7), true), expected);
    state.on_prepared(7, 1);
    assert_eq!(sends(&state.plan(&execute(7), true)), Some(1));
}

#[test]
fn statement_that_was_prepared_before_the_capture_is_known_by_the_record() {
    let mut state = SessionState::default();
    let execute = Record { prepared_text: Some(b"select 1".to_vec()), ..execute(5) };
    assert_eq!(state.plan(&execute, true), Plan::Prepare { captured_id: 5, text: b"select 1".to_vec() });
    let write = Record { prepared_text: Some(b"delete from t".to_vec()), prepared_id: Some(6), ..execute };
    assert_eq!(state.plan(&write, true), Plan::Skip(SkipReason::MayWrite));
    assert!(matches!(state.plan(&write, false), Plan::Prepare { captured_id: 6, .. }));
}

#[test]
fn restored_statements_keep_their_ids_and_are_checked() {
    let mut state = SessionState::default();
    let states = br#"SET SESSION_STATES '{"current-db":"shop","prepared-stmts":{"4":{"text":"select \'a\'"},
        "5":{"text":"delete from t"},"6":{"name":"S","text":"select 2"}}}'"#;
    let set = record(Command::Query, states);
    assert!(matches!(state.plan(&set, true), Plan::Send { .. }));
    state.learn(&set, None, true);
    assert_eq!(state.database, b"shop");
    assert_eq!(sends(&state.plan(&execute(4), true)), Some(4));
    assert_eq!(state.statement(&execute(4)), Some(&b"select 'a'"[..]));
    assert_eq!(state.plan(&execute(5), true), Plan::Skip(SkipReason::MayWrite));
    assert_eq!(sends(&state.plan(&execute(5), false)), Some(5));
    assert!(matches!(state.plan(&record(Command::Query, b"execute s"), true), Plan::Send { .. }));
    // Unknown ids are used as they are, unless they might write.
    assert_eq!(sends(&state.plan(&execute(9), false)), Some(9));
    assert_eq!(state.plan(&execute(9), true), Plan::Skip(SkipReason::UnknownStatement));
    state.on_disconnected();
    assert!(matches!(state.plan(&execute(4), true), Plan::Prepare { captured_id: 4, .. }));
    assert_eq!(state.plan(&execute(9), false), Plan::Skip(SkipReason::UnknownStatement));
}

#[test]
fn database_follows_use_and_init_db() {
    let mut state = SessionState::default();
    state.learn(&record(Command::InitDb, b"one"), None, true);
    assert_eq!(state.database, b"one");
    state.learn(&record(Command::Query, b"select 1; use `two`"), None, false);
    assert_eq!(state.database, b"two");
    state.learn(&record(Command::Query, b"select 1"), None, true);
    assert_eq!(state.database, b"two");
}

#[test]
fn commands_that_end_others_are_skipped() {
    let mut state = SessionState::default();
    for command in [Command::Shutdown, Command::ProcessKill, Command::BinlogDump, Command::Other] {
        assert_eq!(state.plan(&record(command, b""), false), Plan::Skip(SkipReason::NeverReplayed));
    }
    assert_eq!(state.plan(&record(Command::Query, b"kill 5"), false), Plan::Skip(SkipReason::NeverReplayed));
    assert_eq!(state.plan(&record(Command::Refresh, b"\x01"), true), Plan::Skip(SkipReason::MayWrite));
    assert_eq!(state.plan(&record(Command::Quit, b""), true), Plan::Quit);
    let reset = Plan::Send { command: Command::ResetConnection, payload: Cow::Borrowed(&[]) };
    assert_eq!(state.plan(&record(Command::ChangeUser, b"root\0"), true), reset);
}

#[test]
fn commands_of_skipped_parts_of_the_capture_are_only_remembered() {
    let mut state = SessionState::default();
    state.learn(&prepare(7, "select ?"), None, false);
    assert!(matches!(state.plan(&execute(7), true), Plan::Prepare { captured_id: 7, .. }));
    state.learn(&record(Command::ResetConnection, b""), None, false);
    assert_eq!(state.plan(&execute(7), true), Plan::Skip(SkipReason::UnknownStatement));
}

proptest! {
    #[test]
    fn no_record_panics(
        records in prop::collection::vec(
            (any::<u8>(), prop::option::of(0..3_u32), prop::collection::vec(any::<u8>(), 0..30)), 0..20
        ),
        text in "[?'a; ]{0,8}",
        reads_only: bool,
    ) {
        let mut state = SessionState::default();
        for (command, prepared_id, payload) in records {
            let payload = if command == Command::Prepare as u8 { text.clone().into_bytes() } else { payload };
            let record = Record { prepared_id, ..record(Command::from(command), &payload) };
            if let Plan::Prepare { captured_id, .. } = state.plan(&record, reads_only) {
                state.on_prepared(captured_id, 7);
                state.plan(&record, reads_only);
            }
            state.learn(&record, prepared_id, reads_only);
        }
    }
}
