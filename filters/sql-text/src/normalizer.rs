//! Replaces the literals of a statement (pingcap/tidb v8.5.3, `pkg/parser/digester.go`, `normalize`).

use crate::keywords::is_keyword;
use crate::scanner::{Scanner, TokenKind};
use crate::text::make_lowercase;

/// The character sets of TiDB (`pkg/parser/charset/charset.go`).
const CHARACTER_SETS: [&[u8]; 7] = [b"utf8", b"utf8mb3", b"utf8mb4", b"ascii", b"latin1", b"binary", b"gbk"];

#[derive(Debug, Clone, Copy)]
struct Token {
    kind: TokenKind,
    /// Where the token's text, in lower case, begins and ends in [`Normalizer::texts`].
    start: usize,
    end: usize,
}

/// Normalizes statements. It keeps its memory for the next statement.
#[derive(Debug, Default)]
pub struct Normalizer {
    tokens: Vec<Token>,
    texts: Vec<u8>,
    normalized: Vec<u8>,
    /// How many tokens there were when [`Self::is_in_sort_list`] was called last, and what it returned.
    sort_list: Option<(usize, bool)>,
}

impl Normalizer {
    /// Normalizes a statement, or several that are separated by semicolons.
    pub fn normalize(&mut self, sql: &[u8]) -> &[u8] {
        self.tokens.clear();
        self.texts.clear();
        self.sort_list = None;
        let mut scanner = Scanner::new(sql);
        while let Some((kind, offset)) = scanner.next(&mut self.texts) {
            let start = self.tokens.last().map_or(0, |token| token.end);
            if offset + 1 == sql.len() && sql[offset] == b';' {
                break;
            }
            make_lowercase(&mut self.texts, start);
            let token = Token { kind, start, end: self.texts.len() };
            if !self.skip_index_hint(token, &mut scanner) {
                self.push(token, offset, &scanner);
            }
        }
        self.join()
    }

    fn text(&self, token: Token) -> &[u8] {
        &self.texts[token.start..token.end]
    }

    /// The text of the token `from_end` tokens before the last one. None: there are fewer tokens.
    fn text_before(&self, from_end: usize) -> Option<&[u8]> {
        let index = self.tokens.len().checked_sub(from_end + 1)?;
        Some(self.text(self.tokens[index]))
    }

    fn kind_before(&self, from_end: usize) -> Option<TokenKind> {
        Some(self.tokens[self.tokens.len().checked_sub(from_end + 1)?].kind)
    }

    fn is_text_before(&self, from_end: usize, text: &[u8]) -> bool {
        self.text_before(from_end) == Some(text)
    }

    fn is_literal_before(&self, from_end: usize) -> bool {
        matches!(self.kind_before(from_end), Some(TokenKind::Placeholder | TokenKind::PlaceholderList))
    }

    /// Removes the last tokens.
    fn pop(&mut self, count: usize) {
        self.tokens.truncate(self.tokens.len() - count);
        self.sort_list = None;
    }

    /// Skips `USE INDEX (...)` and the like. `token` may be the `INDEX`.
    fn skip_index_hint(&mut self, token: Token, scanner: &mut Scanner<'_>) -> bool {
        let is_hint =
            self.text(token) == b"index" && matches!(self.text_before(0), Some(b"force" | b"use" | b"ignore"));
        if !is_hint {
            return false;
        }
        loop {
            let start = self.texts.len();
            let is_over = scanner.next(&mut self.texts).is_none();
            let is_closed = &self.texts[start..] == b")";
            self.texts.truncate(start);
            if is_over {
                return false; // the statement ends within the hint
            }
            if is_closed {
                self.pop(1);
                self.texts.truncate(self.tokens.last().map_or(0, |token| token.end));
                return true;
            }
        }
    }

    fn push(&mut self, mut token: Token, offset: usize, scanner: &Scanner<'_>) {
        if self.text(token) == b"straight_join" {
            self.texts.truncate(token.start);
            self.texts.extend_from_slice(b"join");
            token.end = self.texts.len();
        }
        let token = if self.is_literal(token) { self.replace_literal(token) } else { token };
        let kind = match token.kind {
            TokenKind::Identifier if is_character_set(self.text(token)) => TokenKind::Charset,
            TokenKind::Identifier if self.is_keyword(token, offset, scanner) => TokenKind::Other,
            kind => kind,
        };
        self.tokens.push(Token { kind, ..token });
    }

    fn is_literal(&self, token: Token) -> bool {
        match token.kind {
            TokenKind::Integer | TokenKind::Number | TokenKind::String | TokenKind::Parameter | TokenKind::Null => true,
            TokenKind::Identifier if self.text(token) == b"null" => true,
            _ => self.text(token) == b"*",
        }
    }

    /// Returns what stands for the literal, after removing the tokens that it stands for, too.
    fn replace_literal(&mut self, token: Token) -> Token {
        if self.text(token) == b"*" {
            // `count(*)` becomes `count ( ? )`.
            return if self.is_text_before(0, b"(") { self.placeholder(TokenKind::Placeholder) } else { token };
        }
        if matches!(token.kind, TokenKind::Integer | TokenKind::Number) && self.is_after_sign() {
            self.pop(1);
        }
        if let Some(count) = self.list_before() {
            self.pop(count);
            return self.placeholder(TokenKind::PlaceholderList);
        }
        if token.kind == TokenKind::Integer && self.is_in_sort_list() {
            // A sign may have been removed before the text.
            let start = self.tokens.last().map_or(0, |token| token.end);
            self.texts.drain(start..token.start);
            return Token { start, end: self.texts.len(), ..token };
        }
        self.placeholder(TokenKind::Placeholder)
    }

    fn placeholder(&mut self, kind: TokenKind) -> Token {
        let start = self.tokens.last().map_or(0, |token| token.end);
        self.texts.truncate(start);
        self.texts.extend_from_slice(if kind == TokenKind::Placeholder { b"?" } else { b"..." });
        Token { kind, start, end: self.texts.len() }
    }

    /// Whether the last token is the sign of a number.
    fn is_after_sign(&self) -> bool {
        matches!(self.text_before(0), Some(b"-" | b"+"))
            && self.text_before(1).is_none_or(|text| {
                matches!(text, b"(" | b"," | b"+" | b"-" | b">=" | b"is" | b"<=" | b"=" | b"<" | b">" | b"select")
            })
    }

    /// How many of the last tokens form one list with the literal that follows. None: it begins no list.
    fn list_before(&self) -> Option<usize> {
        if self.is_text_before(0, b",") && self.is_literal_before(1) {
            return Some(2); // `?, ?`
        }
        if self.tokens.len() < 4 {
            return None;
        }
        let is_charset = |from_end| self.kind_before(from_end) == Some(TokenKind::Charset);
        if is_charset(0) && self.is_text_before(1, b",") && self.is_literal_before(2) {
            return Some(if is_charset(3) { 4 } else { 3 }); // `_utf8 ?, _utf8 ?`
        }
        let is_list_of_lists = self.is_text_before(0, b"(")
            && self.is_text_before(1, b",")
            && self.is_text_before(2, b")")
            && self.is_literal_before(3);
        is_list_of_lists.then_some(4) // `(?), (?)`
    }

    /// Whether a number that follows is the number of a column in ORDER BY or GROUP BY. Such numbers stay.
    fn is_in_sort_list(&mut self) -> bool {
        let mut from_end = 0;
        let is_sort_list = loop {
            let known = self.sort_list.filter(|(count, _)| *count + from_end == self.tokens.len());
            if let Some((_, is_sort_list)) = known {
                break is_sort_list;
            }
            if self.text_before(from_end + 1).is_none() {
                break false;
            }
            if !self.is_text_before(from_end, b",") {
                let by = from_end + usize::from(self.is_text_before(from_end, b"("));
                break self.is_text_before(by, b"by") && matches!(self.text_before(by + 1), Some(b"order" | b"group"));
            }
            from_end += 2;
        };
        self.sort_list = Some((self.tokens.len(), is_sort_list));
        is_sort_list
    }

    /// Whether an identifier is a keyword. A name before or behind a dot is none.
    fn is_keyword(&self, token: Token, offset: usize, scanner: &Scanner<'_>) -> bool {
        let before = scanner.sql[..offset].iter().rev().find(|byte| **byte != b' ');
        scanner.peek() != b'.' && before != Some(&b'.') && is_keyword(self.text(token), scanner.peek() == b'(')
    }

    fn join(&mut self) -> &[u8] {
        self.normalized.clear();
        for (index, token) in self.tokens.iter().enumerate() {
            if index > 0 {
                self.normalized.push(b' ');
            }
            let text = &self.texts[token.start..token.end];
            let (before, text, after): (&[u8], _, &[u8]) = match token.kind {
                TokenKind::UserVariable => (b"@", text, b""),
                TokenKind::Charset => (b"", b"(_charset)".as_slice(), b""),
                TokenKind::Identifier | TokenKind::QuotedIdentifier => (b"`", text, b"`"),
                _ => (b"", text, b""),
            };
            self.normalized.extend_from_slice(before);
            self.normalized.extend_from_slice(text);
            self.normalized.extend_from_slice(after);
        }
        &self.normalized
    }
}

/// Whether the name is that of a character set, with an underscore before it.
fn is_character_set(name: &[u8]) -> bool {
    name.strip_prefix(b"_").is_some_and(|name| CHARACTER_SETS.contains(&name))
}
