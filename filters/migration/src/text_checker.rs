//! Detects whether an export has lost characters, while its bytes arrive in any pieces.

use memchr::{memchr, memmem};
use mysql_proto::secret::SecretBytes;

/// U+FFFD. Go's `encoding/json`, with which TiDB writes the states, puts it in place of bytes that are not UTF-8.
const REPLACEMENT_CHARACTER: &[u8] = "\u{fffd}".as_bytes();

/// The properties of a text.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TextCheck {
    pub(crate) is_ascii: bool,
    pub(crate) is_utf8: bool,
    /// TiDB replaces characters that a character set lacks by question marks.
    pub(crate) has_question_mark: bool,
    pub(crate) has_replacement_character: bool,
}

#[derive(Debug)]
pub(crate) struct TextChecker {
    utf8: Utf8Checker,
    has_question_mark: bool,
    has_replacement_character: bool,
    /// The last bytes of the text, which may be the start of a replacement character.
    tail: SecretBytes,
}

impl TextChecker {
    pub(crate) fn new() -> Self {
        Self {
            utf8: Utf8Checker::new(),
            has_question_mark: false,
            has_replacement_character: false,
            tail: SecretBytes::default(),
        }
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.utf8.push(bytes);
        self.has_question_mark |= memchr(b'?', bytes).is_some();
        self.has_replacement_character |= self.push_tail(bytes) || memmem::find(bytes, REPLACEMENT_CHARACTER).is_some();
    }

    /// Whether a replacement character begins in an earlier piece and ends in `bytes`. Keeps the tail for the next
    /// piece.
    fn push_tail(&mut self, bytes: &[u8]) -> bool {
        const MAX_TAIL: usize = REPLACEMENT_CHARACTER.len() - 1;
        self.tail.extend_from_slice(&bytes[..bytes.len().min(MAX_TAIL)]);
        let is_found = memmem::find(&self.tail, REPLACEMENT_CHARACTER).is_some();
        self.tail.extend_from_slice(&bytes[bytes.len().min(MAX_TAIL).max(bytes.len().saturating_sub(MAX_TAIL))..]);
        self.tail.consume(self.tail.len().saturating_sub(MAX_TAIL));
        is_found
    }

    pub(crate) const fn finish(&self) -> TextCheck {
        TextCheck {
            is_ascii: self.utf8.is_ascii,
            is_utf8: self.utf8.is_valid(),
            has_question_mark: self.has_question_mark,
            has_replacement_character: self.has_replacement_character,
        }
    }
}

#[derive(Debug)]
struct Utf8Checker {
    is_ascii: bool,
    is_invalid: bool,
    /// The first bytes of an incomplete character.
    partial: [u8; 4],
    length: usize,
}

impl Utf8Checker {
    const fn new() -> Self {
        Self { is_ascii: true, is_invalid: false, partial: [0; 4], length: 0 }
    }

    const fn is_valid(&self) -> bool {
        !self.is_invalid && self.length == 0
    }

    fn push(&mut self, bytes: &[u8]) {
        if self.is_invalid || self.length == 0 && bytes.is_ascii() {
            return;
        }
        self.is_ascii = false;
        let mut rest = bytes;
        while self.length > 0 {
            let Some((&byte, behind)) = rest.split_first() else { return };
            rest = behind;
            self.partial[self.length] = byte;
            self.length += 1;
            match std::str::from_utf8(&self.partial[..self.length]) {
                Ok(_) => self.length = 0,
                Err(error) if error.error_len().is_none() => {}
                Err(_) => {
                    self.is_invalid = true;
                    return;
                }
            }
        }
        if let Err(error) = std::str::from_utf8(rest) {
            let begun = &rest[error.valid_up_to()..];
            if error.error_len().is_some() {
                self.is_invalid = true;
            } else {
                self.partial[..begun.len()].copy_from_slice(begun);
                self.length = begun.len();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks a text in pieces of all sizes.
    fn check(text: &[u8]) -> TextCheck {
        let of = |size| {
            let mut checker = TextChecker::new();
            for piece in text.chunks(size) {
                checker.push(piece);
            }
            checker.finish()
        };
        let whole = of(usize::MAX);
        for size in 1..12 {
            assert_eq!(of(size), whole, "{} in pieces of {size}", text.escape_ascii());
        }
        whole
    }

    #[test]
    fn ascii_and_utf8_are_recognized() {
        let of = |text: &[u8]| (check(text).is_ascii, check(text).is_utf8);
        assert_eq!(of(br#"{"a":"u"}"#), (true, true));
        assert_eq!(of("{\"a\":\"ü𝄞中\"}".as_bytes()), (false, true));
        assert_eq!(of(b"{\"a\":\"\xfc\"}"), (false, false));
        assert_eq!(of(b"{\"a\":\"\xe4\xb8\"}"), (false, false));
        assert_eq!(of(b"{\"a\":1}\xe4\xb8"), (false, false), "the last character is incomplete");
    }

    #[test]
    fn signs_of_lost_characters_are_found() {
        let of = |text: &str| {
            let text = check(text.as_bytes());
            (text.has_question_mark, text.has_replacement_character)
        };
        assert_eq!(of(r#"{"text":"select 'ü'"}"#), (false, false));
        assert_eq!(of(r#"{"text":"select ?"}"#), (true, false));
        assert_eq!(of("{\"text\":\"s\u{fffd}\u{fffd}\"}"), (false, true));
        assert_eq!(of("\u{fffc}\u{fffe}\u{ffbd}\u{fefd}"), (false, false), "similar characters");
    }
}
