//! What statements do to the transaction of their session.

use crate::split::statements;
use crate::tokens::Tokens;

/// What a statement does to the transaction of its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransactionStep {
    /// It belongs to the open transaction, if there is one.
    Within,
    /// It commits the open transaction, and begins another one.
    Begin,
    /// It ends the open transaction.
    End,
    /// It commits the open transaction, and runs outside of it, as statements that change the schema do.
    CommitBefore,
}

/// What a statement does. Where that is not certain, it is [`TransactionStep::Within`].
#[must_use]
pub fn transaction_step(statement: &[u8]) -> TransactionStep {
    const SCHEMA_OBJECTS: [&[u8]; 8] =
        [b"table", b"database", b"schema", b"index", b"unique", b"view", b"sequence", b"or"];
    let begins_with = |keyword: &[u8]| {
        let mut tokens = Tokens::new(statement);
        tokens.skip_keyword(keyword).then_some(tokens)
    };
    if begins_with(b"begin").is_some() {
        return TransactionStep::Begin;
    }
    if let Some(mut tokens) = begins_with(b"start") {
        return if tokens.skip_keyword(b"transaction") { TransactionStep::Begin } else { TransactionStep::Within };
    }
    if let Some(mut tokens) = begins_with(b"commit") {
        return if has_chain(&mut tokens) { TransactionStep::Within } else { TransactionStep::End };
    }
    if let Some(mut tokens) = begins_with(b"rollback") {
        tokens.skip_keyword(b"work");
        let is_partial = tokens.skip_keyword(b"to") || has_chain(&mut tokens);
        return if is_partial { TransactionStep::Within } else { TransactionStep::End };
    }
    if begins_with(b"truncate").is_some() || begins_with(b"rename").is_some() {
        return TransactionStep::CommitBefore;
    }
    let changes_schema = [&b"create"[..], b"alter", b"drop"]
        .iter()
        .filter_map(|verb| begins_with(verb))
        .any(|mut tokens| SCHEMA_OBJECTS.iter().any(|object| tokens.skip_keyword(object)));
    if changes_schema { TransactionStep::CommitBefore } else { TransactionStep::Within }
}

/// Whether another transaction begins at once: `COMMIT AND CHAIN`.
fn has_chain(tokens: &mut Tokens<'_>) -> bool {
    tokens.skip_keyword(b"work");
    tokens.skip_keyword(b"and") && tokens.skip_keyword(b"chain")
}

/// Whether each statement of a text only controls its session and its transactions: `USE`, `SET`, `BEGIN`, `START`,
/// `COMMIT` and `ROLLBACK`.
#[must_use]
pub fn only_controls_session(text: &[u8]) -> bool {
    const WORDS: [&[u8]; 6] = [b"use", b"set", b"begin", b"start", b"commit", b"rollback"];
    let mut statements = statements(text).filter(|statement| !Tokens::new(statement).is_at_end()).peekable();
    statements.peek().is_some()
        && statements.all(|statement| WORDS.iter().any(|word| Tokens::new(&statement).skip_keyword(word)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transactions_begin_and_end() {
        for (statement, step) in [
            ("begin", TransactionStep::Begin),
            ("/* app */ BEGIN /* x */ PESSIMISTIC", TransactionStep::Begin),
            ("start transaction read only", TransactionStep::Begin),
            ("start slave", TransactionStep::Within),
            ("commit", TransactionStep::End),
            ("commit work and no chain", TransactionStep::End),
            ("commit and chain", TransactionStep::Within),
            ("rollback", TransactionStep::End),
            ("rollback /* customer */ work", TransactionStep::End),
            ("rollback to savepoint s", TransactionStep::Within),
            ("rollback work to s", TransactionStep::Within),
            ("rollback work and chain", TransactionStep::Within),
            ("-- to\nrollback", TransactionStep::End),
            ("truncate t", TransactionStep::CommitBefore),
            ("create unique index i on t (a)", TransactionStep::CommitBefore),
            ("/* a */ alter table t add b int", TransactionStep::CommitBefore),
            ("create temporary table t (a int)", TransactionStep::Within),
            ("drop prepare s", TransactionStep::Within),
            ("/* begin */ insert into t values ('commit')", TransactionStep::Within),
            ("beginning", TransactionStep::Within),
            ("`begin`", TransactionStep::Within),
            ("", TransactionStep::Within),
        ] {
            assert_eq!(transaction_step(statement.as_bytes()), step, "{statement}");
        }
    }

    #[test]
    fn texts_that_only_control_the_session_are_known() {
        for text in ["use shop", "/* a */ SET @a = 1;", "set autocommit = 0; begin;;", "ROLLBACK"] {
            assert!(only_controls_session(text.as_bytes()), "{text}");
        }
        for text in ["", "/* a */", "/* use */ delete from t", "use shop; delete from t", "users", "-- set\nselect 1"] {
            assert!(!only_controls_session(text.as_bytes()), "{text}");
        }
    }
}
