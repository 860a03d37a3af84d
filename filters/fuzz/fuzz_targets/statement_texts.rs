//! The text of statements, in any bytes.

#![no_main]

use fuzz::tokens::{Token, tokens, tokens_at};
use libfuzzer_sys::fuzz_target;
use sql_text::{
    Normalizer, PreparedText, TableNames, kill, may_begin_with, prepared_text, quoted_string, rename_tables,
    statements, used_database, without_comments,
};

/// Each statement has one semicolon at most, at its end, and together they have all tokens.
fn check_statements(text: &[u8], all: &[Token]) {
    let pieces = statements(text).collect::<Vec<_>>();
    let mut found = Vec::new();
    for (index, piece) in pieces.iter().enumerate() {
        let of_piece = tokens(piece);
        let semicolon = of_piece.iter().position(Token::is_semicolon);
        assert!(semicolon.is_none_or(|at| at + 1 == of_piece.len()), "a semicolon within {piece:?}");
        assert!(semicolon.is_some() || index + 1 == pieces.len(), "{piece:?} does not end");
        assert!(semicolon != Some(0), "an empty statement");
        found.extend(of_piece.into_iter().filter(|token| !token.is_semicolon()).map(Token::trimmed));
    }
    let expected = all.iter().filter(|token| !token.is_semicolon()).cloned().map(Token::trimmed).collect::<Vec<_>>();
    assert_eq!(found, expected);
    // What follows an invalid byte is not lost.
    let (places, is_whole) = tokens_at(text);
    let rest = &text[places.last().map_or(0, |(range, _)| range.end)..];
    let is_kept = pieces.last().is_some_and(|piece| piece.trim_ascii_end().ends_with(rest.trim_ascii()));
    assert!(is_whole || is_kept, "{pieces:?}");
}

/// Only white space, comments, and semicolons at the end are missing.
fn check_without_comments(text: &[u8], clean: &[u8], all: &[Token]) {
    let end = all.iter().rposition(|token| !token.is_semicolon()).map_or(0, |last| last + 1);
    if all.iter().any(Token::is_half_number) {
        return; // apart from what follows, it is an integer
    }
    let found = tokens(clean);
    assert!(found == all[..end] || found == all, "{found:?} instead of {all:?}");
    let mut normalizer = Normalizer::default();
    let normalized = normalizer.normalize(clean).to_vec();
    assert_eq!(normalizer.normalize(clean), normalized, "what the normalizer keeps matters");
    // Behind an invalid byte, comments stay, and the normalizer goes on if that byte is within an index hint.
    if tokens_at(text).1 && !has_gap_after_dot(text) {
        let of_text = normalizer.normalize(text);
        assert_eq!(show(without_end(&normalized)), show(without_end(of_text)));
    }
}

/// Whether something but spaces stands between a dot and the next token. TiDB's digests then take a keyword for one.
fn has_gap_after_dot(text: &[u8]) -> bool {
    let (tokens, _) = tokens_at(text);
    tokens.windows(2).any(|pair| {
        let gap = &text[pair[0].0.end..pair[1].0.start];
        pair[0].1.text.ends_with(b".") && gap.iter().any(|byte| *byte != b' ')
    })
}

/// A normalized text without semicolons at its end.
fn without_end(mut normalized: &[u8]) -> &[u8] {
    while let Some(rest) = normalized.strip_suffix(b";") {
        normalized = rest.strip_suffix(b" ").unwrap_or(rest);
    }
    normalized
}

fn show(text: &[u8]) -> String {
    String::from_utf8_lossy(text).into_owned()
}

/// What commands contain does not depend on comments, and can be replaced.
fn check_commands(text: &[u8], clean: &[u8]) {
    let begins = |keyword: &[u8]| assert!((0..text.len()).all(|end| may_begin_with(&text[..end], keyword)));
    let found = kill(text);
    assert_eq!(found.as_ref().map(|it| (it.is_query, it.id)), kill(clean).map(|it| (it.is_query, it.id)));
    if let Some(found) = found {
        begins(b"kill");
        let mut other = text.to_vec();
        other.splice(found.id_range, *b"77");
        assert_eq!(kill(&other).map(|it| (it.is_query, it.id)), Some((found.is_query, 77)));
    }
    let database = used_database(text);
    assert_eq!(database, used_database(clean));
    if database.is_some() {
        begins(b"use");
    }
    match (prepared_text(text), prepared_text(clean)) {
        (None, None) => {}
        (Some(PreparedText::Variable), Some(PreparedText::Variable)) => begins(b"prepare"),
        (Some(PreparedText::Literal { content, range }), Some(PreparedText::Literal { content: same, .. })) => {
            begins(b"prepare");
            assert_eq!(content, same);
            let mut other = text.to_vec();
            other.splice(range, quoted_string(&content));
            let Some(PreparedText::Literal { content: same, .. }) = prepared_text(&other) else {
                panic!("{}", show(&other))
            };
            assert_eq!(content, same);
        }
        found => panic!("{found:?}"),
    }
    let sql = [b"prepare s from", &*quoted_string(text)].concat();
    let range = "prepare s from".len()..sql.len();
    assert_eq!(prepared_text(&sql), Some(PreparedText::Literal { content: text.to_vec(), range }));
}

/// New names in place of old ones, and then the old names, give the same tokens.
fn check_names(text: &[u8], all: &[Token]) {
    let has_new_name = text.windows(2).any(|pair| pair.eq_ignore_ascii_case(b"zz"));
    if has_new_name || all.iter().any(Token::is_half_number) {
        return;
    }
    let fold = |tokens: &[Token]| {
        let end = tokens.iter().rposition(|token| !token.is_semicolon()).map_or(0, |last| last + 1);
        tokens[..end].iter().map(Token::folded).collect::<Vec<_>>()
    };
    for (old, new) in [("t", "zz"), ("s.t", "zz.zzz"), ("T", "`zz z`")] {
        let names = |old, new| TableNames::new([(old, new)]).expect("names");
        let Some(renamed) = rename_tables(text, &names(old, new)) else { continue };
        assert_eq!(fold(&tokens(&renamed)).len(), fold(all).len(), "{}", show(&renamed));
        let back = rename_tables(&renamed, &names(new, old)).expect("the new name");
        assert_eq!(fold(&tokens(&back)), fold(all), "{}", show(&renamed));
    }
}

fuzz_target!(|text: &[u8]| {
    let all = tokens(text);
    check_statements(text, &all);
    let clean = without_comments(text);
    check_without_comments(text, &clean, &all);
    check_commands(text, &clean);
    check_names(text, &all);
});
