//! The text of a statement without comments.

use std::borrow::Cow;

use crate::scanner::{Scanner, is_identifier_byte, is_line_comment, is_space};

/// The statement with one space for each sequence of white space and comments between tokens, without white space and
/// semicolons at its ends. Optimizer hints stay. So does the content of comments that TiDB runs, without their marks.
/// Words get a space between them if they have none, as in `1e5FROM`, and so do minus signs, so that they begin no comment.
///
/// ```
/// let text = sql_text::without_comments(b"DELETE/**/FROM  t /*! WHERE a = '/*b  */' */; -- all");
/// assert_eq!(&*text, b"DELETE FROM t WHERE a = '/*b  */'");
/// ```
#[must_use]
pub fn without_comments(sql: &[u8]) -> Cow<'_, [u8]> {
    let trimmed = sql.trim_ascii_start();
    let trimmed = trim_end(trimmed);
    if is_without_comments(trimmed) {
        return Cow::Borrowed(trimmed);
    }
    let mut text = Vec::with_capacity(sql.len());
    let mut scanner = Scanner::new(sql);
    let mut literal = Vec::new();
    // Where the last token ends in `sql`, and where the last one but semicolons ends in `text`.
    let (mut end, mut kept) = (0, 0);
    while let Some((_, start)) = scanner.next(&mut literal) {
        literal.clear();
        push_gap(&sql[end..start], &mut text);
        let token = &sql[start..scanner.at];
        if text.last().is_some_and(|last| must_be_apart(*last, token[0])) {
            text.push(b' ');
        }
        text.extend_from_slice(token);
        end = scanner.at;
        if token != b";" {
            kept = text.len();
        }
    }
    let rest = &sql[end..];
    if gap_length(rest) < rest.len() {
        // TiDB's scanner stops here because of an invalid byte, or a string that does not end.
        push_gap(rest, &mut text);
        text.extend_from_slice(trim_end(&rest[gap_length(rest)..]));
    } else {
        text.truncate(kept);
    }
    Cow::Owned(text)
}

fn trim_end(sql: &[u8]) -> &[u8] {
    let end = sql.iter().rposition(|byte| *byte != b';' && !byte.is_ascii_whitespace());
    &sql[..end.map_or(0, |end| end + 1)]
}

/// Whether a space belongs between two tokens that end and begin with these bytes.
fn must_be_apart(last: u8, first: u8) -> bool {
    is_identifier_byte(last) && is_identifier_byte(first) || last == b'-' && first == b'-'
}

/// Whether a statement has no comment, no white space but single spaces, also within strings, and no tokens that get a
/// space between them. False only costs a copy, so it may be wrong.
fn is_without_comments(sql: &[u8]) -> bool {
    let mut before = 0;
    let mut is_number = false;
    for byte in sql {
        match (byte, before) {
            (0x09..=0x0d | b'#' | 0x85 | 0xa0, _) | (b' ', b' ') | (b'-', b'-') | (b'*', b'/') | (b'/', b'*') => {
                return false;
            }
            (b'N', b'\\') => return false, // NULL
            _ => {}
        }
        if !is_identifier_byte(before) {
            is_number = byte.is_ascii_digit();
        } else if is_number && !byte.is_ascii_digit() && is_identifier_byte(*byte) {
            return false;
        }
        before = *byte;
    }
    // A semicolon that is left may stand before another one, or within a string.
    true
}

/// How many bytes at the beginning are white space and comments.
pub(crate) fn gap_length(sql: &[u8]) -> usize {
    let mut scanner = Scanner::new(sql);
    while skip_part_of_gap(&mut scanner) {}
    scanner.at.min(sql.len())
}

/// Appends what stays of the white space and the comments at the beginning: hints, and spaces around them.
fn push_gap(sql: &[u8], text: &mut Vec<u8>) {
    let mut scanner = Scanner::new(sql);
    loop {
        let start = scanner.at;
        let is_hint = sql[start..].starts_with(b"/*+");
        if !skip_part_of_gap(&mut scanner) {
            break;
        }
        if is_hint {
            push_space(text);
            text.extend(collapsed(&sql[start..scanner.at]));
        }
    }
    if scanner.at > 0 {
        push_space(text);
    }
}

fn push_space(text: &mut Vec<u8>) {
    if text.last().is_some_and(|last| *last != b' ') {
        text.push(b' ');
    }
}

/// Skips white space, one comment, or one end of a comment that TiDB runs. Returns false if there is none.
fn skip_part_of_gap(scanner: &mut Scanner<'_>) -> bool {
    let rest = scanner.rest();
    if rest.starts_with(b"/*") {
        let start = scanner.at;
        if !scanner.skip_comment() {
            scanner.at = start; // it does not end: a token for TiDB
            return false;
        }
    } else if rest.starts_with(b"*/") {
        scanner.at += 2;
    } else if scanner.peek() == b'#' || is_line_comment(rest) {
        scanner.skip_line();
    } else if !rest.is_empty() && is_space(scanner.peek()) {
        scanner.skip_while(is_space);
    } else {
        return false;
    }
    true
}

/// The bytes with one space for each sequence of white space.
fn collapsed(bytes: &[u8]) -> impl Iterator<Item = u8> {
    let words = bytes.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    words.enumerate().flat_map(|(index, word)| (index > 0).then_some(b' ').into_iter().chain(word.iter().copied()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn comments_and_white_space_become_one_space() {
        let cases = [
            ("", ""),
            (" ; ", ""),
            ("select 1", "select 1"),
            (" select 1 ; ; ", "select 1"),
            ("select\t1\r\n;", "select 1"),
            ("select/**/1", "select 1"),
            ("/* a */ select /* b */ 1 -- c", "select 1"),
            ("select 1 # c\n+ 2", "select 1 + 2"),
            ("select 1--2", "select 1- -2"),
            ("select 1 ----\n2", "select 1 - - 2"),
            ("select 1----", "select 1- -"),
            ("select 1 --;", "select 1 - -"),
            ("select 1--/* a */2", "select 1- - 2"),
            ("select 1e5from t", "select 1e5 from t"),
            ("select\\Nfrom t where 'a'in('b')", "select\\N from t where 'a'in('b')"),
            ("select 1 -- /*+ no hint */\n from t", "select 1 from t"),
            ("select '  /* a */ -- ' , `a  b`  , \"#\"", "select '  /* a */ -- ' , `a  b` , \"#\""),
            ("/*!50001 select */1", "select 1"),
            ("select /*!1*/,/*T![ttl] 2 */,/*T![no_such] 3 */ 4", "select 1 , 2 , 4"),
            ("select/*+  HASH_JOIN(a,\n b) */*  from t", "select /*+ HASH_JOIN(a, b) */ * from t"),
            ("select 1; /*+ hint */", "select 1"),
            ("delete from t; -- c\n;", "delete from t"),
            ("select 1 /* never ends", "select 1 /* never ends"),
            ("select 1  'never  ends", "select 1 'never  ends"),
            ("select 1  \u{1}  2", "select 1 \u{1}  2"),
            ("select  a->>'$.x'", "select a->>'$.x'"),
            ("sel/**/ect", "sel ect"),
            ("select count/**/(*)  from  t", "select count (*) from t"),
            ("/*", "/*"),
            ("select 'à'  from t", "select 'à' from t"),
        ];
        for (sql, expected) in cases {
            assert_eq!(String::from_utf8_lossy(&without_comments(sql.as_bytes())), expected, "{sql:?}");
        }
    }

    #[test]
    fn text_of_a_usual_statement_is_not_copied() {
        for sql in ["select * from t where id = 1 - 2", "insert into t values (1, 'a;b');  "] {
            assert!(matches!(without_comments(sql.as_bytes()), Cow::Borrowed(_)), "{sql}");
        }
    }

    proptest! {
        #[test]
        fn comments_change_neither_the_text_nor_the_digest(
            words in prop::collection::vec("[a-z]{1,3}|[0-9]|'[a-z ]*'|`[a-z ]*`|[(),.=<+]", 1..20),
            gaps in prop::collection::vec(
                prop_oneof![Just(" "), Just("/**/"), Just(" -- c\n"), Just("\t# c\n"), Just("/* ' */"), Just("/*!*/ ")],
                20,
            ),
        ) {
            let plain = words.join(" ");
            let mixed = words.iter().zip(&gaps).map(|(word, gap)| format!("{word}{gap}")).collect::<String>();
            prop_assert_eq!(&*without_comments(mixed.as_bytes()), plain.as_bytes());
            let mut normalizer = crate::Normalizer::default();
            let expected = normalizer.normalize(plain.as_bytes()).to_vec();
            prop_assert_eq!(normalizer.normalize(&without_comments(mixed.as_bytes())), expected);
        }

        #[test]
        fn text_without_comments_stays_the_same(sql in "[a-c'\"`/*!+# \n;-]{0,30}") {
            let once = without_comments(sql.as_bytes()).into_owned();
            // A mark that begins a comment only without its neighbours is no usual statement.
            prop_assume!(["*/", "/*", "--"].iter().all(|mark| !sql.contains(mark)));
            let twice = without_comments(&once).into_owned();
            prop_assert_eq!(once, twice);
        }
    }
}
