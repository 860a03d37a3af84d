//! Quoted texts, as Go's `strconv.Quote` writes them and `strconv.Unquote` reads them.

use crate::text::{hexadecimal_digit, push_hexadecimal};

/// Whether a byte stands for itself within quotes.
const IS_PLAIN: [bool; 256] = {
    let mut is_plain = [false; 256];
    let mut byte = 0x20;
    while byte < 0x7f {
        is_plain[byte] = byte != b'"' as usize && byte != b'\\' as usize;
        byte += 1;
    }
    is_plain
};

/// Appends `text` in quotes. `Quote` also escapes characters that cannot be printed, which `Unquote` reads either way;
/// of those outside ASCII, this escapes the control characters only.
pub(super) fn push_quoted(out: &mut Vec<u8>, text: &[u8]) {
    out.push(b'"');
    let plain = text.iter().position(|byte| !IS_PLAIN[usize::from(*byte)]).unwrap_or(text.len());
    out.extend_from_slice(&text[..plain]);
    if plain < text.len() {
        for chunk in text[plain..].utf8_chunks() {
            push_escaped(out, chunk.valid());
            for byte in chunk.invalid() {
                push_hexadecimal_escape(out, *byte);
            }
        }
    }
    out.push(b'"');
}

fn push_escaped(out: &mut Vec<u8>, text: &str) {
    let mut plain = 0;
    for (index, character) in text.char_indices() {
        if !(matches!(character, '"' | '\\') || character.is_control()) {
            continue;
        }
        out.extend_from_slice(&text.as_bytes()[plain..index]);
        plain = index + character.len_utf8();
        match character {
            '"' => out.extend_from_slice(b"\\\""),
            '\\' => out.extend_from_slice(b"\\\\"),
            '\x07' => out.extend_from_slice(b"\\a"),
            '\x08' => out.extend_from_slice(b"\\b"),
            '\x0c' => out.extend_from_slice(b"\\f"),
            '\n' => out.extend_from_slice(b"\\n"),
            '\r' => out.extend_from_slice(b"\\r"),
            '\t' => out.extend_from_slice(b"\\t"),
            '\x0b' => out.extend_from_slice(b"\\v"),
            '\u{80}'..='\u{9f}' => {
                out.extend_from_slice(b"\\u00");
                push_hexadecimal(out, &[character as u8]);
            }
            _ => push_hexadecimal_escape(out, character as u8),
        }
    }
    out.extend_from_slice(&text.as_bytes()[plain..]);
}

fn push_hexadecimal_escape(out: &mut Vec<u8>, byte: u8) {
    out.extend_from_slice(b"\\x");
    push_hexadecimal(out, &[byte]);
}

/// The text within quotes. None: `quoted` is not such a text. Like `Unquote`, it replaces bytes that are no UTF-8.
pub(super) fn unquote(quoted: &[u8]) -> Option<Vec<u8>> {
    let mut rest = quoted.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    let mut out = Vec::with_capacity(rest.len());
    loop {
        let plain = memchr::memchr3(b'\\', b'"', b'\n', rest).unwrap_or(rest.len());
        push_utf8(&mut out, &rest[..plain]);
        rest = match &rest[plain..] {
            [] => return Some(out),
            [b'\\', escape @ ..] => push_unescaped(&mut out, escape)?,
            _ => return None,
        };
    }
}

fn push_utf8(out: &mut Vec<u8>, text: &[u8]) {
    for chunk in text.utf8_chunks() {
        out.extend_from_slice(chunk.valid().as_bytes());
        for _ in chunk.invalid() {
            push_character(out, char::REPLACEMENT_CHARACTER);
        }
    }
}

/// Appends what an escape means, which begins behind the backslash, and returns what follows it.
fn push_unescaped<'a>(out: &mut Vec<u8>, escape: &'a [u8]) -> Option<&'a [u8]> {
    let (kind, rest) = escape.split_first()?;
    match kind {
        b'a' => out.push(0x07),
        b'b' => out.push(0x08),
        b'f' => out.push(0x0c),
        b'n' => out.push(b'\n'),
        b'r' => out.push(b'\r'),
        b't' => out.push(b'\t'),
        b'v' => out.push(0x0b),
        b'\\' | b'"' => out.push(*kind),
        b'x' => {
            out.push(number(rest.get(..2)?, 16)? as u8);
            return Some(&rest[2..]);
        }
        b'u' | b'U' => {
            let length = if *kind == b'u' { 4 } else { 8 };
            push_character(out, char::from_u32(number(rest.get(..length)?, 16)?)?);
            return Some(&rest[length..]);
        }
        b'0'..=b'7' => {
            out.push(number(escape.get(..3)?, 8)?.try_into().ok()?);
            return Some(&escape[3..]);
        }
        _ => return None,
    }
    Some(rest)
}

fn push_character(out: &mut Vec<u8>, character: char) {
    out.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
}

/// At most 8 hexadecimal digits.
fn number(digits: &[u8], radix: u32) -> Option<u32> {
    digits.iter().try_fold(0, |number: u32, digit| {
        let digit = u32::from(hexadecimal_digit(*digit)?);
        (digit < radix).then(|| number.wrapping_mul(radix).wrapping_add(digit))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{Strategy, any, prop, prop_oneof, proptest};

    use super::*;

    fn quoted(text: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        push_quoted(&mut out, text);
        out
    }

    #[test]
    fn texts_are_quoted_as_go_quotes_them() {
        let cases: [(&[u8], &str); 8] = [
            (b"", r#""""#),
            (b"SELECT 'a' FROM `t`", r#""SELECT 'a' FROM `t`""#),
            (b"a\"b\\c", r#""a\"b\\c""#),
            (b"\x07\x08\x0c\n\r\t\x0b", r#""\a\b\f\n\r\t\v""#),
            (b"\0\x1b\x7f", r#""\x00\x1b\x7f""#),
            ("ä€😀\u{fffd}".as_bytes(), "\"ä€😀\u{fffd}\""),
            (b"\xff\xe2\x82x", r#""\xff\xe2\x82x""#),
            ("\u{85}".as_bytes(), r#""\u0085""#),
        ];
        for (text, expected) in cases {
            assert_eq!(quoted(text), expected.as_bytes(), "{expected}");
        }
    }

    #[test]
    fn escapes_that_quote_does_not_write_are_read() {
        let cases: [(&[u8], &[u8]); 6] = [
            (br#""\u00e4\U0001F600""#, "ä😀".as_bytes()),
            (br#""\101\377""#, b"A\xff"),
            (b"\"\xff\xe2\x82\"", "\u{fffd}\u{fffd}\u{fffd}".as_bytes()),
            ("\"\u{85}\u{2028}\"".as_bytes(), "\u{85}\u{2028}".as_bytes()),
            (b"\"\t\r\"", b"\t\r"),
            (br#""\xFf""#, b"\xff"),
        ];
        for (text, expected) in cases {
            assert_eq!(unquote(text).as_deref(), Some(expected), "{}", text.escape_ascii());
        }
    }

    #[test]
    fn other_texts_are_refused() {
        let cases: [&[u8]; 16] = [
            b"",
            b"\"",
            b"a",
            b"\"a",
            b"a\"",
            b"\"a\"b\"",
            b"\"a\nb\"",
            b"\"\\\"",
            b"\"\\q\"",
            b"\"\\'\"",
            b"\"\\x1\"",
            b"\"\\xgg\"",
            b"\"\\400\"",
            b"\"\\18\"",
            b"\"\\ud800\"",
            b"\"\\U00110000\"",
        ];
        for text in cases {
            assert_eq!(unquote(text), None, "{}", text.escape_ascii());
        }
    }

    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let text = any::<String>().prop_map(String::into_bytes);
        prop_oneof![prop::collection::vec(any::<u8>(), 0..200), text]
    }

    proptest! {
        #[test]
        fn texts_are_read_back(text in bytes()) {
            let quoted = quoted(&text);
            assert!(!quoted.contains(&b'\n'));
            assert_eq!(unquote(&quoted), Some(text));
        }

        #[test]
        fn no_text_panics(text in bytes()) {
            unquote(&text);
            unquote(&[b"\"\\", text.as_slice(), b"\""].concat());
        }
    }
}
