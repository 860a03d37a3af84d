//! Splits a statement into tokens, as TiDB's scanner does under its default SQL mode (pingcap/tidb v8.5.3,
//! `pkg/parser/lexer.go` and `misc.go`), with all its peculiarities.

use crate::text;

/// What a token is, as far as digests depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenKind {
    /// A name or a keyword.
    Identifier,
    /// A name in backticks.
    QuotedIdentifier,
    /// A keyword, an operator, a system variable, or a token without text.
    Other,
    /// `@name`; the text has no `@`.
    UserVariable,
    /// The name of a character set before a string.
    Charset,
    Integer,
    /// A number with a fraction or an exponent, or a hexadecimal number.
    Number,
    /// A string, or a number in binary.
    String,
    /// `?` in a prepared statement.
    Parameter,
    /// `\N`.
    Null,
    /// Stands for a literal.
    Placeholder,
    /// Stands for a list of literals.
    PlaceholderList,
}

/// Comments that TiDB runs as a part of the statement if it knows all their features: `/*T![ttl] ... */`
/// (`pkg/parser/tidb/features.go`).
const FEATURES: [&[u8]; 8] = [
    b"auto_rand",
    b"auto_id_cache",
    b"auto_rand_base",
    b"clustered_index",
    b"force_inc",
    b"placement",
    b"ttl",
    b"global_index",
];

const OPERATORS: [&[u8]; 12] = [b"<=>", b"||", b"&&", b"&^", b":=", b">=", b"<=", b"!=", b"<>", b"<<", b">>", b"\\N"];

/// The normalizer compares the content of strings only with a few short words. An escaped character takes two bytes.
const MAX_STRING_THAT_MATTERS: usize = 2 * "index".len();

#[derive(Clone)]
pub(crate) struct Scanner<'a> {
    pub(crate) sql: &'a [u8],
    /// The offset of the next byte.
    pub(crate) at: usize,
    /// Within `/*! ... */` or `/*T! ... */`.
    pub(crate) is_in_executed_comment: bool,
}

impl<'a> Scanner<'a> {
    pub(crate) fn new(sql: &'a [u8]) -> Self {
        Self { sql, at: 0, is_in_executed_comment: false }
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.at >= self.sql.len()
    }

    /// The next byte; 0 at the end.
    pub(crate) fn peek(&self) -> u8 {
        self.sql.get(self.at).copied().unwrap_or(0)
    }

    pub(crate) fn rest(&self) -> &'a [u8] {
        &self.sql[self.at..]
    }

    pub(crate) fn skip_while(&mut self, condition: impl Fn(u8) -> bool) {
        self.at += self.rest().iter().take_while(|byte| condition(**byte)).count();
    }

    /// Reads the next token and appends its text to `literal`. Returns what it is and its offset. None: the statement
    /// ends here, or TiDB's scanner stops here because of an invalid byte.
    pub(crate) fn next(&mut self, literal: &mut Vec<u8>) -> Option<(TokenKind, usize)> {
        loop {
            self.skip_while(is_space);
            let start = self.at;
            let kind = match self.peek() {
                _ if self.is_at_end() => return None,
                b'#' => {
                    self.skip_line();
                    continue;
                }
                b'-' if is_line_comment(self.rest()) => {
                    self.skip_line();
                    continue;
                }
                b'-' => {
                    self.minus_or_arrow(literal);
                    return Some((TokenKind::Other, start));
                }
                b'/' if self.sql.get(start + 1) == Some(&b'*') => {
                    if self.skip_comment() {
                        continue;
                    }
                    return Some((TokenKind::Other, start)); // the comment does not end: a token without text
                }
                b'*' if self.is_in_executed_comment && self.sql.get(start + 1) == Some(&b'/') => {
                    self.is_in_executed_comment = false;
                    self.at += 2;
                    continue;
                }
                b'\'' | b'"' => {
                    self.string(literal)?;
                    return Some((TokenKind::String, start));
                }
                b'`' => {
                    self.quoted(literal)?;
                    return Some((TokenKind::QuotedIdentifier, start));
                }
                b'@' => return Some((self.variable(literal)?, start)),
                b'n' | b'N' if self.sql.get(start + 1) == Some(&b'\'') => {
                    self.at += 1; // the national character set, N'text'
                    literal.extend_from_slice(b"utf8");
                    return Some((TokenKind::Charset, start));
                }
                b'x' | b'X' if self.sql.get(start + 1) == Some(&b'\'') => {
                    self.digits_in_quotes(|byte| byte.is_ascii_hexdigit())?;
                    TokenKind::Number
                }
                b'b' | b'B' if self.sql.get(start + 1) == Some(&b'\'') => {
                    self.digits_in_quotes(|byte| matches!(byte, b'0' | b'1'))?;
                    TokenKind::String
                }
                b'0'..=b'9' => self.number(),
                b'.' if self.sql.get(start + 1).is_some_and(u8::is_ascii_digit) => {
                    Some(self.fraction(start)).filter(|kind| *kind != TokenKind::Identifier)?
                }
                byte if is_identifier_byte(byte) => {
                    self.skip_while(is_identifier_byte);
                    TokenKind::Identifier
                }
                byte => self.operator(byte)?,
            };
            literal.extend_from_slice(&self.sql[start..self.at]);
            return Some((kind, start));
        }
    }

    pub(crate) fn skip_line(&mut self) {
        self.skip_while(|byte| byte != b'\n');
    }

    /// The arrows of JSON paths have no text in digests.
    fn minus_or_arrow(&mut self, literal: &mut Vec<u8>) {
        let rest = self.rest();
        if rest.starts_with(b"->") {
            self.at += if rest.starts_with(b"->>") { 3 } else { 2 };
        } else {
            self.at += 1;
            literal.push(b'-');
        }
    }

    fn operator(&mut self, first: u8) -> Option<TokenKind> {
        if let Some(operator) = OPERATORS.iter().find(|operator| self.rest().starts_with(operator)) {
            self.at += operator.len();
            return Some(if *operator == b"\\N" { TokenKind::Null } else { TokenKind::Other });
        }
        if !b"/+*><()[];,&%:|!^~\\?={}.".contains(&first) {
            return None;
        }
        self.at += 1;
        Some(if first == b'?' { TokenKind::Parameter } else { TokenKind::Other })
    }

    /// Skips a comment, or only its beginning if its content is executed. Returns false if the comment does not end.
    pub(crate) fn skip_comment(&mut self) -> bool {
        self.at += 2;
        let first = self.peek();
        self.at = self.sql.len().min(self.at + 1);
        match first {
            b'!' => {
                if self.rest().len() >= 5 && self.rest()[..5].iter().all(u8::is_ascii_digit) {
                    self.at += 5; // a version of MySQL, which TiDB ignores
                }
                self.is_in_executed_comment = true;
                return true;
            }
            b'T' if self.peek() == b'!' => {
                self.at += 1;
                if self.are_features_known() {
                    self.is_in_executed_comment = true;
                    return true;
                }
            }
            b'*' => self.at -= 1, // it may belong to the end of the comment
            _ => {}
        }
        let end = self.rest().windows(2).position(|pair| pair == b"*/");
        self.at = end.map_or(self.sql.len(), |end| self.at + end + 2);
        end.is_some()
    }

    /// Reads `[feature,feature]`. If there is no such list, nothing is read.
    fn are_features_known(&mut self) -> bool {
        let Some(list) = self.rest().strip_prefix(b"[") else { return true };
        let length = list.iter().take_while(|byte| is_identifier_byte(**byte) || **byte == b',').count();
        let mut features = list[..length].split(|byte| *byte == b',');
        if list.get(length) != Some(&b']') || features.clone().any(<[u8]>::is_empty) {
            return true;
        }
        self.at += length + 2;
        features.all(|feature| FEATURES.contains(&feature))
    }

    /// Reads a string, and appends its content if that is short. None: the string does not end.
    fn string(&mut self, literal: &mut Vec<u8>) -> Option<()> {
        let quote = self.peek();
        let content = self.at + 1;
        let mut end = content;
        self.at = self.sql.len(); // in case it does not end
        loop {
            match *self.sql.get(end)? {
                b'\\' => end += 2,
                byte if byte != quote => end += 1,
                _ if self.sql.get(end + 1) == Some(&quote) => end += 2,
                _ => break,
            }
        }
        self.at = end + 1;
        if end - content <= MAX_STRING_THAT_MATTERS {
            text::unescape(&self.sql[content..end], quote, literal);
        }
        Some(())
    }

    /// Reads a name in backticks, and appends it. None: the name does not end.
    fn quoted(&mut self, literal: &mut Vec<u8>) -> Option<()> {
        self.at += 1;
        loop {
            let byte = *self.sql.get(self.at)?;
            self.at += 1;
            if byte == b'`' {
                if self.peek() != b'`' {
                    return Some(());
                }
                self.at += 1;
            }
            literal.push(byte);
        }
    }

    /// Reads a string or a name after `@`, and appends its content. None: it does not end. Some(false): there is none.
    fn variable_name(&mut self, literal: &mut Vec<u8>) -> Option<bool> {
        match self.peek() {
            quote @ (b'\'' | b'"') => {
                let content = self.at + 1;
                self.string(&mut Vec::new())?;
                text::unescape(&self.sql[content..self.at - 1], quote, literal);
            }
            b'`' => self.quoted(literal)?,
            byte if is_variable_byte(byte) => {
                let start = self.at;
                self.skip_while(is_variable_byte);
                literal.extend_from_slice(&self.sql[start..self.at]);
            }
            _ => return Some(false),
        }
        Some(true)
    }

    fn variable(&mut self, literal: &mut Vec<u8>) -> Option<TokenKind> {
        self.at += 1;
        if self.peek() != b'@' {
            self.variable_name(literal)?;
            return Some(TokenKind::UserVariable);
        }
        self.at += 1;
        let start = literal.len();
        literal.extend_from_slice(b"@@");
        let scopes: [&[u8]; 3] = [b"global.", b"session.", b"local."];
        let has_scope =
            |scope: &&[u8]| self.rest().get(..scope.len()).is_some_and(|rest| rest.eq_ignore_ascii_case(scope));
        if let Some(scope) = scopes.into_iter().find(has_scope) {
            literal.extend_from_slice(scope);
            self.at += scope.len();
        }
        if !self.variable_name(literal)? {
            literal.truncate(start); // TiDB drops the whole text
        }
        Some(TokenKind::Other)
    }

    /// Reads `x'1f'` or `b'01'`. None: it does not end, or it has other bytes.
    fn digits_in_quotes(&mut self, is_digit: impl Fn(u8) -> bool) -> Option<()> {
        self.at += 2;
        self.skip_while(is_digit);
        let is_closed = self.peek() == b'\'';
        self.at += usize::from(is_closed);
        is_closed.then_some(())
    }

    /// Reads a number, or a name that begins with a digit.
    fn number(&mut self) -> TokenKind {
        let start = self.at;
        let mut kind = TokenKind::Integer;
        let is_zero = self.peek() == b'0';
        self.at += 1;
        match self.peek() {
            b'0'..=b'7' if is_zero => self.skip_while(|byte| (b'0'..=b'7').contains(&byte)),
            b'x' | b'X' if is_zero => {
                if !self.has_prefixed_digits(|byte| byte.is_ascii_hexdigit()) {
                    return TokenKind::Identifier;
                }
                kind = TokenKind::Number;
            }
            b'b' if is_zero => {
                if !self.has_prefixed_digits(|byte| matches!(byte, b'0' | b'1')) {
                    return TokenKind::Identifier;
                }
                kind = TokenKind::String;
            }
            b'B' if is_zero => {
                self.skip_while(is_identifier_byte);
                return TokenKind::Identifier;
            }
            _ => {}
        }
        self.skip_while(|byte| byte.is_ascii_digit());
        if matches!(self.peek(), b'.' | b'e' | b'E') {
            return self.fraction(start);
        }
        if !self.is_at_end() && is_identifier_byte(self.peek()) {
            self.skip_while(is_identifier_byte);
            return TokenKind::Identifier;
        }
        kind
    }

    /// Reads the digits after `0x` or `0b`. Without any, or with other digits behind them, it reads a whole name and
    /// returns false.
    fn has_prefixed_digits(&mut self, is_digit: impl Fn(u8) -> bool) -> bool {
        self.at += 1;
        let start = self.at;
        self.skip_while(is_digit);
        if self.at == start || self.peek().is_ascii_digit() {
            self.skip_while(is_identifier_byte);
            return false;
        }
        true
    }

    /// Reads a number with a fraction or an exponent from `start` on.
    fn fraction(&mut self, start: usize) -> TokenKind {
        self.at = start;
        self.skip_while(|byte| byte.is_ascii_digit());
        if self.peek() == b'.' {
            self.at += 1;
            self.skip_while(|byte| byte.is_ascii_digit());
        }
        if !matches!(self.peek(), b'e' | b'E') {
            return TokenKind::Number;
        }
        self.at += 1;
        if matches!(self.peek(), b'-' | b'+') {
            self.at += 1;
        }
        if self.peek().is_ascii_digit() {
            self.skip_while(|byte| byte.is_ascii_digit());
            return TokenKind::Number;
        }
        self.at = start;
        self.skip_while(is_identifier_byte);
        TokenKind::Identifier
    }
}

/// White space of Latin-1, byte by byte.
pub(crate) fn is_space(byte: u8) -> bool {
    matches!(byte, b'\t'..=b'\r' | b' ' | 0x85 | 0xa0)
}

pub(crate) fn is_identifier_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | 0x80..)
}

fn is_variable_byte(byte: u8) -> bool {
    is_identifier_byte(byte) || byte == b'.'
}

pub(crate) fn is_line_comment(rest: &[u8]) -> bool {
    rest.starts_with(b"--") && rest.get(2).is_none_or(|byte| is_space(*byte))
}
