//! Recognizes the usual statements that begin a transaction in TiDB. Such a statement also commits a transaction that
//! is open.
//!
//! The result only explains why a session cannot migrate. The client's statements are forwarded unchanged.

/// Not all forms of `BeginTransactionStmt` in pkg/parser/parser.y of pingcap/tidb v8.5.3: for example, READ ONLY is
/// missing.
const TEXTS: [&[&str]; 5] = [
    &["BEGIN"],
    &["BEGIN", "OPTIMISTIC"],
    &["BEGIN", "PESSIMISTIC"],
    &["START", "TRANSACTION"],
    &["START", "TRANSACTION", "WITH", "CONSISTENT", "SNAPSHOT"],
];

/// Whether the payload of a client's packet is one of these statements, in any case and with any white space, followed
/// by at most one `;`. Other statements, such as those with a comment, may begin a transaction as well.
#[must_use]
pub fn begins_transaction(payload: &[u8]) -> bool {
    const QUERY: u8 = 0x03;
    let Some((&QUERY, text)) = payload.split_first() else { return false };
    let text = text.trim_ascii();
    let text = text.strip_suffix(b";").unwrap_or(text);
    let words = || text.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    TEXTS.iter().any(|expected| {
        words().count() == expected.len()
            && words().zip(*expected).all(|(word, expected)| word.eq_ignore_ascii_case(expected.as_bytes()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_that_begin_a_transaction_are_recognized() {
        for text in [
            "BEGIN",
            "begin;",
            "Begin ; ",
            " \n begin\tpessimistic",
            "begin optimistic",
            "start \r\n transaction;",
            "START TRANSACTION WITH CONSISTENT SNAPSHOT",
        ] {
            assert!(begins_transaction(format!("\x03{text}").as_bytes()), "{text}");
        }
    }

    #[test]
    fn other_statements_are_not_recognized() {
        for text in [
            "",
            ";",
            "beginning",
            "begin_",
            "begin foo",
            "begin;;",
            "begin; select 1",
            "begin -- a",
            "/* a */ begin",
            "/*! begin */",
            "start",
            "start transaction read only",
            "start transaction with consistent",
            "begin work",
            "select 'begin'",
        ] {
            assert!(!begins_transaction(format!("\x03{text}").as_bytes()), "{text}");
        }
        assert!(!begins_transaction(b"\x16begin") && !begins_transaction(b""));
    }
}
