//! The text of tokens.

/// Appends the content of a string, between its quotes, without escapes (`pkg/parser/lexer.go`, `scanString`).
pub(crate) fn unescape(content: &[u8], quote: u8, to: &mut Vec<u8>) {
    let mut bytes = content.iter().copied();
    while let Some(byte) = bytes.next() {
        if byte == quote {
            bytes.next(); // a quote within the string is doubled
        } else if byte == b'\\' {
            match bytes.next() {
                Some(b'n') => to.push(b'\n'),
                Some(b'0') => to.push(0),
                Some(b'b') => to.push(8),
                Some(b'Z') => to.push(26),
                Some(b'r') => to.push(b'\r'),
                Some(b't') => to.push(b'\t'),
                Some(escaped @ (b'%' | b'_')) => to.extend_from_slice(&[b'\\', escaped]),
                Some(escaped) => to.push(escaped),
                None => {}
            }
            continue;
        }
        to.push(byte);
    }
}

/// Appends the content in quotes; bytes of `doubled` are written twice.
pub(crate) fn push_quoted(content: &[u8], quote: u8, doubled: &[u8], to: &mut Vec<u8>) {
    to.push(quote);
    for byte in content {
        if doubled.contains(byte) {
            to.push(*byte);
        }
        to.push(*byte);
    }
    to.push(quote);
}

/// Converts `literal` from `start` on to lower case, as Go's `strings.ToLower` does.
pub(crate) fn make_lowercase(literal: &mut Vec<u8>, start: usize) {
    if literal[start..].is_ascii() {
        return literal[start..].make_ascii_lowercase();
    }
    let original = literal.split_off(start);
    for chunk in original.utf8_chunks() {
        // Go maps a character to one character.
        let lower = chunk.valid().chars().map(|c| c.to_lowercase().next().unwrap_or(c));
        lower.for_each(|c| literal.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()));
        // Go replaces each invalid byte, not each sequence of them.
        chunk.invalid().iter().for_each(|_| literal.extend_from_slice("\u{fffd}".as_bytes()));
    }
}

/// The text in lower case, as TiDB compares names.
#[must_use]
pub fn lowercase(text: &[u8]) -> Vec<u8> {
    let mut lower = text.to_vec();
    make_lowercase(&mut lower, 0);
    lower
}
