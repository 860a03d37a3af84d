//! Tokens of statements.

use std::ops::Range;

use crate::scanner::{Scanner, TokenKind};

/// A token, with its text as it is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token<'a> {
    kind: TokenKind,
    pub text: &'a [u8],
}

impl Token<'_> {
    /// The token without white space at its end, as a comment that does not end may have it.
    #[must_use]
    pub fn trimmed(self) -> Self {
        Self { text: self.text.trim_ascii_end(), ..self }
    }

    #[must_use]
    pub fn is_semicolon(&self) -> bool {
        self.text == b";"
    }

    /// Whether it is no string, name or comment that contains more than a word.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        let is_quote = |byte: &u8| matches!(byte, b'\'' | b'"' | b'`');
        let is_quoted = self.text.iter().any(is_quote);
        let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'@') || is_quote(byte);
        !self.text.starts_with(b"/*") && (!is_quoted || self.text.iter().all(is_word))
    }

    /// Whether it is the `0` of `0x1.`: TiDB reads it as a number with a fraction, and another token.
    #[must_use]
    pub fn is_half_number(&self) -> bool {
        self.kind == TokenKind::Number && self.text.iter().all(u8::is_ascii_digit)
    }

    /// The token in lower case. A name is without its backticks.
    #[must_use]
    pub fn folded(&self) -> (bool, Vec<u8>) {
        let is_name = matches!(self.kind, TokenKind::Identifier | TokenKind::QuotedIdentifier);
        let text = self.text.strip_prefix(b"`").and_then(|text| text.strip_suffix(b"`")).unwrap_or(self.text);
        (is_name, text.to_ascii_lowercase())
    }
}

/// The tokens of a statement, each with its place, and whether they are all: the scanner stops at an invalid byte.
#[must_use]
pub fn tokens_at(sql: &[u8]) -> (Vec<(Range<usize>, Token<'_>)>, bool) {
    let mut scanner = Scanner::new(sql);
    let mut tokens = Vec::new();
    let mut literal = Vec::new();
    let mut end = 0;
    while let Some((kind, start)) = scanner.next(&mut literal) {
        literal.clear();
        assert!(end <= start && start < scanner.at && scanner.at <= sql.len(), "a token at {start}..{}", scanner.at);
        end = scanner.at;
        tokens.push((start..end, Token { kind, text: &sql[start..end] }));
    }
    (tokens, scanner.is_at_end())
}

/// The tokens of a statement.
#[must_use]
pub fn tokens(sql: &[u8]) -> Vec<Token<'_>> {
    tokens_at(sql).0.into_iter().map(|(_, token)| token).collect()
}
