//! The tokens of a statement, one after the other.

use std::ops::Range;

use crate::scanner::{Scanner, TokenKind};

/// Reads the tokens of a statement.
pub(crate) struct Tokens<'a> {
    scanner: Scanner<'a>,
    /// The text of the last token.
    pub(crate) literal: Vec<u8>,
}

impl<'a> Tokens<'a> {
    pub(crate) fn new(statement: &'a [u8]) -> Self {
        Self { scanner: Scanner::new(statement), literal: Vec::new() }
    }

    /// What the next token is, and where it is.
    pub(crate) fn next(&mut self) -> Option<(TokenKind, Range<usize>)> {
        self.literal.clear();
        let (kind, start) = self.scanner.next(&mut self.literal)?;
        Some((kind, start..self.scanner.at))
    }

    /// Skips this keyword, if it is the next token. False: it is not.
    pub(crate) fn skip_keyword(&mut self, keyword: &[u8]) -> bool {
        let before = self.scanner.clone();
        let is_identifier = self.next().is_some_and(|(kind, _)| kind == TokenKind::Identifier);
        let is_keyword = is_identifier && self.literal.eq_ignore_ascii_case(keyword);
        if !is_keyword {
            self.scanner = before;
        }
        is_keyword
    }

    /// Reads a token, into `literal`. False: it is no name.
    pub(crate) fn read_name(&mut self) -> bool {
        let is_name = |kind| matches!(kind, TokenKind::Identifier | TokenKind::QuotedIdentifier);
        self.next().is_some_and(|(kind, _)| is_name(kind))
    }

    /// Reads the rest. Whether it is nothing but semicolons.
    pub(crate) fn is_at_end(&mut self) -> bool {
        while self.next().is_some() {
            if self.literal != b";" {
                return false;
            }
        }
        self.scanner.is_at_end()
    }
}
