//! Scans a JSON object while it arrives, in any pieces, and keeps the values of a few keys. The rest is not stored, so
//! the object may have any size.
//!
//! The scanner only follows strings and brackets, to find the end of each value. It does not check that values are
//! valid.

use std::collections::BTreeMap;

use memchr::memchr2;
use mysql_proto::secret::SecretBytes;

use crate::text_checker::{TextCheck, TextChecker};

/// Bytes of a key that are compared. All wanted keys are shorter.
const MAX_KEY_BYTES: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ScanState {
    /// Before the object.
    Start,
    /// Before the first key, or the end of an empty object.
    FirstKey,
    /// After a comma.
    NextKey,
    Key,
    KeyEscape,
    Colon,
    /// In a value, at this depth of brackets.
    Value(usize),
    /// In a string of a value.
    Text(usize),
    TextEscape(usize),
    End,
    Invalid,
}

/// The result of a scan.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ScannedJson {
    /// The values of the wanted keys, verbatim.
    pub(crate) values: BTreeMap<&'static str, SecretBytes>,
    /// The input is exactly one object.
    pub(crate) is_object: bool,
    /// Some wanted values are missing or incomplete, because `may_keep` refused them.
    pub(crate) is_truncated: bool,
    /// The text of the whole input.
    pub(crate) text: TextCheck,
}

#[derive(Debug)]
pub(crate) struct JsonScanner {
    wanted: &'static [&'static str],
    state: ScanState,
    key: Vec<u8>,
    /// The key of the current value, if it is wanted.
    current_key: Option<&'static str>,
    result: ScannedJson,
    text: TextChecker,
}

impl JsonScanner {
    pub(crate) fn new(wanted: &'static [&'static str]) -> Self {
        Self {
            wanted,
            state: ScanState::Start,
            key: Vec::new(),
            current_key: None,
            result: ScannedJson::default(),
            text: TextChecker::new(),
        }
    }

    /// Scans the next bytes. `may_keep` is called with the number of bytes before bytes of a value are kept.
    pub(crate) fn push(&mut self, bytes: &[u8], mut may_keep: impl FnMut(usize) -> bool) {
        self.text.push(bytes);
        let mut rest = bytes;
        while let Some(&byte) = rest.first() {
            let taken = match self.state {
                ScanState::Value(depth) => self.scan_value(rest, depth, false, &mut may_keep),
                ScanState::Text(depth) => self.scan_value(rest, depth, true, &mut may_keep),
                ScanState::TextEscape(depth) => {
                    self.keep(&rest[..1], &mut may_keep);
                    self.state = ScanState::Text(depth);
                    1
                }
                _ => {
                    self.scan_outside_value(byte);
                    1
                }
            };
            rest = &rest[taken..];
        }
    }

    pub(crate) fn finish(mut self) -> ScannedJson {
        self.result.is_object = self.state == ScanState::End;
        self.result.text = self.text.finish();
        self.result
    }

    /// Scans a byte outside of values.
    fn scan_outside_value(&mut self, byte: u8) {
        self.state = match (self.state, byte) {
            (ScanState::Key, b'"') => ScanState::Colon,
            (ScanState::Key | ScanState::KeyEscape, _) => {
                if self.key.len() < MAX_KEY_BYTES {
                    self.key.push(byte);
                }
                if self.state == ScanState::Key && byte == b'\\' { ScanState::KeyEscape } else { ScanState::Key }
            }
            (state, b' ' | b'\t' | b'\n' | b'\r') => state,
            (ScanState::Start, b'{') => ScanState::FirstKey,
            (ScanState::FirstKey | ScanState::NextKey, b'"') => {
                self.key.clear();
                ScanState::Key
            }
            (ScanState::FirstKey, b'}') => ScanState::End,
            (ScanState::Colon, b':') => {
                self.current_key = self.wanted.iter().copied().find(|wanted| wanted.as_bytes() == self.key);
                if let Some(key) = self.current_key {
                    self.result.values.insert(key, SecretBytes::default());
                }
                ScanState::Value(0)
            }
            _ => ScanState::Invalid,
        };
    }

    /// Scans bytes of a value, up to its end. `in_text`: whether they begin within a string. Returns how many were
    /// taken.
    fn scan_value(
        &mut self,
        rest: &[u8],
        mut depth: usize,
        mut in_text: bool,
        may_keep: &mut impl FnMut(usize) -> bool,
    ) -> usize {
        let mut at = 0;
        while at < rest.len() {
            if in_text {
                at = find_quote_or_backslash(&rest[at..]).map_or(rest.len() + 1, |found| at + found + 1);
                in_text = rest.get(at - 1) != Some(&b'"');
                if at == rest.len() && in_text {
                    self.keep(rest, may_keep);
                    self.state = ScanState::TextEscape(depth);
                    return at;
                }
                // An escaped quote does not end the string.
                at += usize::from(in_text);
                continue;
            }
            let byte = rest[at];
            at += 1;
            match byte {
                b'"' => in_text = true,
                b'{' | b'[' => depth += 1,
                b'}' | b']' | b',' if depth == 0 => {
                    self.keep(&rest[..at - 1], may_keep);
                    self.state = match byte {
                        b',' => ScanState::NextKey,
                        b'}' => ScanState::End,
                        _ => ScanState::Invalid,
                    };
                    return at;
                }
                b'}' | b']' => depth -= 1,
                _ => {}
            }
        }
        self.keep(rest, may_keep);
        self.state = if in_text { ScanState::Text(depth) } else { ScanState::Value(depth) };
        rest.len()
    }

    fn keep(&mut self, bytes: &[u8], may_keep: &mut impl FnMut(usize) -> bool) {
        let Some(value) = self.current_key.and_then(|key| self.result.values.get_mut(key)) else { return };
        if self.result.is_truncated || !may_keep(bytes.len()) {
            self.result.is_truncated = true;
            self.current_key = None;
            return;
        }
        value.extend_from_slice(bytes);
    }
}

/// The position of the first quote or backslash. For short strings a loop is faster than `memchr`.
fn find_quote_or_backslash(text: &[u8]) -> Option<usize> {
    const NEAR: usize = 16;
    let (near, rest) = text.split_at(text.len().min(NEAR));
    let found = near.iter().position(|byte| matches!(byte, b'"' | b'\\'));
    found.or_else(|| memchr2(b'"', b'\\', rest).map(|at| NEAR + at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WANTED: &[&str] = &["a", "found-rows"];

    fn scanned(json: &[u8], size: usize) -> ScannedJson {
        let mut scanner = JsonScanner::new(WANTED);
        for piece in json.chunks(size) {
            scanner.push(piece, |_| true);
        }
        scanner.finish()
    }

    fn found(json: &str) -> Vec<(&'static str, String)> {
        let of = |size| {
            let scanned = scanned(json.as_bytes(), size);
            assert!(scanned.is_object && scanned.text.is_utf8 && !scanned.is_truncated, "{json}");
            let text = |value| String::from_utf8(value).expect("text");
            scanned.values.into_iter().map(|(key, value)| (key, text(value.to_vec()))).collect::<Vec<_>>()
        };
        let whole = of(usize::MAX);
        for size in 1..8 {
            assert_eq!(of(size), whole, "in pieces of {size}");
        }
        whole
    }

    #[test]
    fn wanted_values_are_kept_verbatim() {
        let json = r#" { "found-rows" : 18446744073709551615 ,"x":{"a":[1,{"a":2}]},"a":"q\"}, \\" } "#;
        assert_eq!(
            found(json),
            [("a", r#""q\"}, \\" "#.to_owned()), ("found-rows", " 18446744073709551615 ".to_owned())]
        );
        assert_eq!(found(r#"{"b":"\"a\":1","a":{"b":[[],{}]}}"#), [("a", r#"{"b":[[],{}]}"#.to_owned())]);
        assert_eq!(found("{}"), []);
        assert_eq!(found(r#"{"a\"":1,"aa":2,"":3}"#), [], "other keys");
    }

    #[test]
    fn input_other_than_one_object_is_reported() {
        for json in [
            "",
            "[]",
            "{",
            "1",
            r#"{"a":1"#,
            r#"{"a":"1}"#,
            r#"{"a":1}}"#,
            r#"{"a":1} x"#,
            r#"{"a":1]}"#,
            "{a:1}",
            r#"{"a":1,}"#,
        ] {
            for size in [1, 100] {
                assert!(!scanned(json.as_bytes(), size).is_object, "{json}");
            }
        }
    }

    #[test]
    fn values_are_truncated_if_there_is_no_room() {
        let mut scanner = JsonScanner::new(WANTED);
        let mut room = 10;
        let mut may_keep = |bytes: usize| {
            let fits = bytes <= room;
            room -= if fits { bytes } else { 0 };
            fits
        };
        scanner.push(br#"{"found-rows":12345,"#, &mut may_keep);
        scanner.push(br#""a":"too much","b":"#, &mut may_keep);
        scanner.push(br#"2}"#, &mut may_keep);
        let scanned = scanner.finish();
        assert!(scanned.is_truncated && scanned.is_object);
        assert_eq!(scanned.values["found-rows"], b"12345");
    }

    fn json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<i64>().prop_map(Into::into),
            ".{0,8}".prop_map(Into::into),
            r#"["\\{}\[\],:é ]{0,8}"#.prop_map(Into::into),
        ];
        leaf.prop_recursive(3, 20, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(serde_json::Value::from),
                prop::collection::btree_map("[a\"{}]{0,2}", inner, 0..4)
                    .prop_map(|map| serde_json::Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        /// Whatever the pieces and the white space are.
        #[test]
        fn scanner_agrees_with_a_json_parser(
            all in prop::collection::btree_map("a|b|found-rows|[\"\\\\ü]{1,3}", json(), 0..6),
            size in 1_usize..20,
            pretty: bool,
        ) {
            let text = if pretty { serde_json::to_string_pretty(&all) } else { serde_json::to_string(&all) }.expect("JSON");
            let scanned = scanned(text.as_bytes(), size);
            prop_assert!(scanned.is_object && scanned.text.is_utf8);
            prop_assert_eq!(scanned.text.is_ascii, text.is_ascii());
            for key in WANTED {
                let value = scanned.values.get(key).map(|raw| serde_json::from_slice(raw).expect("JSON"));
                prop_assert_eq!(value.as_ref(), all.get(*key));
            }
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..60), size in 1_usize..9) {
            scanned(&bytes, size);
        }
    }
}
