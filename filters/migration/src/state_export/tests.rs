use std::time::Duration;

use mysql_proto::lenenc;

use super::*;
use crate::budget::Budget;
use crate::messages::packets;
use crate::restore::tests::{framed_bytes, statement};
use crate::state_machine::Effect;
use crate::state_snapshot::StateSnapshot;
use crate::target_login::LoginAction;

const EOF: &[u8] = &[0xfe, 0, 0, 2, 0];
const OK_END: &[u8] = &[0xfe, 0, 0, 2, 0, 0, 0];
const DEFINITION: &[u8] = b"\x03def\0\0\0\x0eSession_states\0\x0c\x2e\0\0\0\0\0\xf5\0\0\0\0\0";

fn answer(payloads: &[&[u8]]) -> Vec<u8> {
    payloads.iter().zip(1..).flat_map(|(payload, sequence)| packets(payload, sequence)).collect()
}

fn row_of(json: &[u8], token: Option<&[u8]>) -> Vec<u8> {
    let mut payload = Vec::new();
    lenenc::write(&mut payload, json.len() as u64);
    payload.extend(json);
    match token {
        Some(token) => {
            lenenc::write(&mut payload, token.len() as u64);
            payload.extend(token);
        }
        None => payload.push(0xfb),
    }
    payload
}

fn result(deprecate_eof: bool, row: &[u8]) -> Vec<u8> {
    if deprecate_eof {
        answer(&[&[2], DEFINITION, DEFINITION, row, OK_END])
    } else {
        answer(&[&[2], DEFINITION, DEFINITION, EOF, row, EOF])
    }
}

fn taken(deprecate_eof: bool, bytes: &[u8], size: usize) -> Option<ExportOutcome> {
    within(&MemoryLimits::default(), deprecate_eof, bytes, size)
}

fn within(limits: &MemoryLimits, deprecate_eof: bool, bytes: &[u8], size: usize) -> Option<ExportOutcome> {
    let mut export = StateExport::new(deprecate_eof, limits.clone());
    let mut pieces = bytes.chunks(size);
    let ended = pieces.find_map(|piece| export.receive(piece));
    assert!(ended.is_none() || pieces.next().is_none(), "the export ended early");
    ended
}

fn states(outcome: Option<ExportOutcome>) -> ExportedStates {
    let Some(ExportOutcome::States(states)) = outcome else { panic!("{outcome:?}") };
    states
}

/// JSON of `size` bytes, which begins and ends with results of the last statement.
fn large(size: usize) -> Vec<u8> {
    let (begin, end) =
        (r#"{"affected-rows": 2, "current-db": "d", "user-var-values": {"a": ""#, r#""}, "warnings": []}"#);
    format!("{begin}{}{end}", "x".repeat(size - begin.len() - end.len())).into_bytes()
}

/// The statement that undoes its export.
const UNDO: &[u8] = br#"SET SESSION_STATES '{"affected-rows":2,"current-db":"d","warnings":[]}'"#;

#[test]
fn export_query_is_one_packet() {
    assert_eq!(export_query(), b"\x14\0\0\0\x03SHOW SESSION_STATES");
}

#[test]
fn states_and_token_are_read_however_bytes_are_split() {
    let (json, token) = (large(5000), vec![b't'; 500]);
    for deprecate_eof in [false, true] {
        let bytes = result(deprecate_eof, &row_of(&json, Some(&token)));
        for size in [1, 3, 100, bytes.len()] {
            let states = states(taken(deprecate_eof, &bytes, size));
            assert!(framed_bytes(&states.statement) == framed_bytes(&statement(&json)));
            assert_eq!((states.token.len(), &*states.summary.database), (500, "d"));
            assert_eq!(&states.summary.undo.expect("the undo is known")[5..], UNDO);
        }
    }
}

#[test]
fn row_may_be_longer_than_a_packet() {
    let limits = MemoryLimits { per_session: 64 << 20, ..MemoryLimits::default() };
    for length in [MAX_PAYLOAD - 11, MAX_PAYLOAD + 10] {
        let json = large(length);
        let bytes = result(true, &row_of(&json, Some(b"t")));
        let states = states(within(&limits, true, &bytes, 1 << 20));
        assert!(framed_bytes(&states.statement) == framed_bytes(&statement(&json)));
    }
}

#[test]
fn too_large_states_are_scanned_but_not_stored() {
    let limits = MemoryLimits { per_session: 1 << 20, budget: Budget::new(2 << 20) };
    let json = large(3 * MAX_PAYLOAD);
    for token in [Some(&b"t"[..]), None] {
        let bytes = result(false, &row_of(&json, token));
        let mut export = StateExport::new(false, limits.clone());
        let mut ended = None;
        for piece in bytes.chunks(1 << 16) {
            assert_eq!(ended, None);
            ended = export.receive(piece);
            assert!(limits.budget.used() < 100, "{} bytes", limits.budget.used());
        }
        let Some(ExportOutcome::Unusable(UnusableStates::TooLarge, summary)) = ended else { panic!("{ended:?}") };
        assert_eq!(&summary.undo.expect("the undo is known")[5..], UNDO);
    }
    assert_eq!(limits.budget.used(), 0);
    let fits = result(false, &row_of(&large(1 << 20), Some(b"t")));
    let states = states(within(&limits, false, &fits, 1 << 16));
    assert!((1 << 20..(1 << 20) + (1 << 17)).contains(&limits.budget.used()));
    drop(states);
    assert_eq!(limits.budget.used(), 0);
}

#[test]
fn states_over_the_budget_are_not_stored() {
    let json = large(100_000);
    let quotes = String::from_utf8(json.clone()).expect("text").replace('x', "'").into_bytes();
    for (json, budget) in [(&json, 50_000), (&quotes, 150_000)] {
        let limits = MemoryLimits { per_session: 1 << 20, budget: Budget::new(budget) };
        let ended = within(&limits, false, &result(false, &row_of(json, Some(b"t"))), 1 << 12);
        let Some(ExportOutcome::Unusable(UnusableStates::OverBudget, summary)) = ended else { panic!("{ended:?}") };
        assert_eq!(&summary.undo.expect("the undo is known")[5..], UNDO);
        assert_eq!(limits.budget.used(), 0);
    }
}

/// Without these values the session could not continue as before.
#[test]
fn undo_values_up_to_64_kib_are_kept_without_budget() {
    let limits = MemoryLimits { per_session: 1 << 20, budget: Budget::new(0) };
    let warnings = |size: usize| format!(r#"{{"warnings":["{}"]}}"#, "w".repeat(size)).into_bytes();
    for (size, is_known) in [(60_000, true), (70_000, false)] {
        let ended = within(&limits, true, &result(true, &row_of(&warnings(size), Some(b"t"))), 1 << 12);
        let Some(ExportOutcome::Unusable(UnusableStates::OverBudget, summary)) = ended else { panic!("{ended:?}") };
        assert_eq!(summary.undo.is_some(), is_known, "{size}");
    }
}

#[test]
fn too_large_token_makes_the_states_unusable() {
    let bytes = result(true, &row_of(b"{}", Some(&[b't'; 70_000])));
    assert!(matches!(taken(true, &bytes, 1 << 12), Some(ExportOutcome::Unusable(UnusableStates::TooLarge, _))));
}

#[test]
fn states_without_a_token_are_reported() {
    for token in [None, Some(&b""[..])] {
        let ended = taken(true, &result(true, &row_of(br#"{"current-db":"d"}"#, token)), 7);
        let Some(ExportOutcome::NoToken(summary)) = ended else { panic!("{ended:?}") };
        assert_eq!(summary.database, "d");
    }
}

#[test]
fn states_that_are_no_object_are_unusable() {
    let ended = taken(true, &result(true, &row_of(b"[]", Some(b"t"))), 7);
    assert_eq!(ended, Some(ExportOutcome::Unusable(UnusableStates::InvalidJson, StateSummary::default())));
}

#[test]
fn rejected_export_has_the_error_code() {
    let rejection = answer(&[b"\xff\xd2\x1f#HY000cannot migrate the current session: session has active transaction"]);
    assert_eq!(taken(false, &rejection, 4), Some(ExportOutcome::Rejected(8146)));
    let late = answer(&[&[2], DEFINITION, b"\xff\x25\x05#70100interrupted"]);
    assert_eq!(taken(false, &late, 4), Some(ExportOutcome::Rejected(1317)));
}

#[test]
fn result_may_have_no_definitions() {
    let row = row_of(b"{}", Some(b"t"));
    assert!(matches!(taken(true, &answer(&[&[2, 0], &row, OK_END]), 5), Some(ExportOutcome::States(_))));
    assert!(matches!(taken(false, &answer(&[&[2, 0], EOF, &row, EOF]), 5), Some(ExportOutcome::States(_))));
}

#[test]
fn invalid_answers_are_protocol_errors() {
    let row = row_of(b"{}", Some(b"t"));
    for payloads in [
        &[&[3_u8][..]][..],
        &[b"\0\0\0\x02\0\0\0"],
        &[&[2], DEFINITION, EOF],
        &[&[2], DEFINITION, DEFINITION, &row],
        &[&[2], DEFINITION, DEFINITION, EOF, EOF],
        &[&[2], DEFINITION, DEFINITION, EOF, &row, &row],
        &[&[2], DEFINITION, DEFINITION, EOF, b"\x05{}"],
        &[&[2], DEFINITION, DEFINITION, EOF, b"\x02{}\x01tt"],
        &[&[2], DEFINITION, DEFINITION, EOF, b"\x02{}"],
        &[&[2], DEFINITION, DEFINITION, EOF, b"\x02{}\xff"],
        &[&[2], DEFINITION, DEFINITION, EOF, b"\0\x01t"],
        &[&[2], DEFINITION, DEFINITION, EOF, b"\xfb\x01t"],
        &[&[2], DEFINITION, DEFINITION, EOF, b""],
        &[&[2], &[b'x'; 70_000]],
    ] {
        assert_eq!(taken(false, &answer(payloads), 1 << 17), Some(ExportOutcome::ProtocolError), "{payloads:?}");
    }
}

#[test]
fn bytes_after_the_answer_are_detected() {
    let alone = result(false, &row_of(b"{}", Some(b"t")));
    let behind = [&alone[..], b"\xff"].concat();
    for (bytes, more) in [(alone, false), (behind, true)] {
        let mut export = StateExport::new(false, MemoryLimits::default());
        assert!(matches!(export.receive(&bytes), Some(ExportOutcome::States(_))));
        assert_eq!(export.has_trailing_bytes(), more);
    }
}

/// Checks both text and numbers.
fn assert_hidden(value: &impl std::fmt::Debug) {
    for shown in [format!("{value:?}"), format!("{value:#?}").replace([' ', '\n'], "")] {
        assert!(
            !shown.contains("secret") && !shown.contains("115,101,99") && !shown.contains("115, 101, 99"),
            "{shown}"
        );
    }
}

#[test]
fn debug_output_hides_states() {
    let statement = Rc::new(statement(b"secret"));
    let summary = StateSummary {
        database: "secret".to_owned(),
        undo: Some(b"secret".to_vec().into()),
        ..StateSummary::default()
    };
    let states = ExportedStates { statement, token: b"secret".to_vec().into(), summary };
    assert_hidden(&StateSnapshot { states: states.clone(), requested_at: Duration::ZERO });
    assert_hidden(&Effect::RestoreStates(Rc::clone(&states.statement)));
    assert_hidden(&Effect::SendToTarget(states.token.clone()));
    assert_hidden(&Effect::SendToOldNode(b"secret".to_vec().into()));
    assert_hidden(&LoginAction::Send(states.token.clone()));
    assert_hidden(&states.summary);
    assert_hidden(&ExportOutcome::States(states));
}

#[test]
fn debug_output_hides_states_while_they_arrive() {
    let json = br#"{"current-db":"secret","user-var-values":{"a":"secret"}}"#;
    let answer = result(false, &row_of(json, Some(b"secret")));
    for length in 0..answer.len() {
        let mut export = StateExport::new(false, MemoryLimits::default());
        assert!(export.receive(&answer[..length]).is_none());
        assert_hidden(&export);
    }
}
