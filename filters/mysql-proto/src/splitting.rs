//! Splits bytes for tests, as a network may.

/// The parts of `bytes`, with these lengths over and over again, which must not be 0.
pub(crate) fn split<'a>(bytes: &'a [u8], lengths: &[usize]) -> Vec<&'a [u8]> {
    let mut parts = Vec::new();
    let mut rest = bytes;
    let mut lengths = lengths.iter().cycle();
    while !rest.is_empty() {
        let length = lengths.next().map_or(rest.len(), |length| rest.len().min(*length));
        let (part, after) = rest.split_at(length);
        parts.push(part);
        rest = after;
    }
    parts
}
