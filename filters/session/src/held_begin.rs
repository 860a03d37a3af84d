//! A client that begins its next transaction without having ended the last one: the server commits that one first. At that
//! moment the session could move, were the commit done on its own: so it is, and the client's statement runs where the
//! session is then.

use crate::export::{Export, Exported};
use crate::messages::query;

/// Whether a packet of a client, header left out, begins a transaction, and so commits the one that is open.
///
/// Comments in front are skipped as pingcap/tidb's lexer does, but for those whose content is executed (`/*! */`).
#[must_use]
pub fn begins_transaction(payload: &[u8]) -> bool {
    const QUERY: u8 = 0x03;
    let Some((&QUERY, text)) = payload.split_first() else { return false };
    let mut text = text.trim_ascii_start();
    loop {
        let rest = if let Some(rest) = text.strip_prefix(b"/*") {
            if matches!(rest.first(), Some(b'!' | b'+' | b'T' | b'M')) {
                return false;
            }
            rest.windows(2).position(|two| two == b"*/").map(|end| &rest[end + 2..])
        } else if text.starts_with(b"#") || text.starts_with(b"-- ") {
            text.iter().position(|&byte| byte == b'\n').map(|end| &text[end + 1..])
        } else {
            break;
        };
        let Some(rest) = rest else { return false };
        text = rest.trim_ascii_start();
    }
    word(text, b"BEGIN").is_some()
        || word(text, b"START").is_some_and(|rest| word(rest.trim_ascii_start(), b"TRANSACTION").is_some())
}

/// What is behind that word, if it stands in front.
fn word<'a>(text: &'a [u8], word: &[u8]) -> Option<&'a [u8]> {
    let (first, rest) = text.split_at_checked(word.len())?;
    let ends = !rest.first().is_some_and(|&byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80);
    (ends && first.eq_ignore_ascii_case(word)).then_some(rest)
}

/// The statement that ends the transaction, as it goes to the node.
#[must_use]
pub fn commit() -> Vec<u8> {
    query(b"COMMIT")
}

/// The node's answer to [`commit`], as it comes.
#[derive(Debug)]
pub struct Commit {
    answer: Export,
    seen: Vec<u8>,
}

/// What a commit came to.
#[derive(Debug, PartialEq, Eq)]
pub enum Committed {
    /// The transaction is over.
    Yes,
    /// These bytes of the node say why not; they answer the client's statement, which must not run.
    No(Vec<u8>),
}

impl Default for Commit {
    fn default() -> Self {
        Self { answer: Export::of_ok(), seen: Vec::new() }
    }
}

impl Commit {
    /// Takes bytes of the node; None while its answer is not whole.
    pub fn take(&mut self, bytes: &[u8]) -> Option<Committed> {
        self.seen.extend_from_slice(bytes);
        match self.answer.take(bytes)? {
            Exported::Ok => Some(Committed::Yes),
            _ => Some(Committed::No(std::mem::take(&mut self.seen))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::packets;

    #[test]
    fn statements_that_begin_a_transaction_are_known() {
        for text in [
            "BEGIN",
            "begin;",
            " \n begin pessimistic",
            "START TRANSACTION",
            "start\ttransaction read only",
            "/* a */ -- b\n# c\nBegin",
            "begin; select 1",
        ] {
            assert!(begins_transaction(format!("\x03{text}").as_bytes()), "{text}");
        }
        for text in [
            "",
            "beginning",
            "begin_",
            "start",
            "start slave",
            "/*! begin */",
            "/* begin",
            "-- begin",
            "select 'begin'",
        ] {
            assert!(!begins_transaction(format!("\x03{text}").as_bytes()), "{text}");
        }
        assert!(!begins_transaction(b"\x16begin") && !begins_transaction(b""));
    }

    #[test]
    fn the_answer_is_taken_in_pieces() {
        let ok = packets(&[0, 0, 0, 2, 0, 0, 0], 1);
        let mut commit = Commit::default();
        let (last, first) = ok.split_last().expect("bytes");
        assert_eq!(commit.take(first), None);
        assert_eq!(commit.take(&[*last]), Some(Committed::Yes));
        let no = packets(b"\xff\x2b\x23#HY000Write conflict", 1);
        assert_eq!(Commit::default().take(&no), Some(Committed::No(no)));
    }
}
