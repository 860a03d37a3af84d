//! Splits a text into statements.

use std::borrow::Cow;

use crate::comments::gap_length;
use crate::scanner::Scanner;

/// The statements of a text, each with the semicolon that ends it. A text without a semicolon is one statement.
///
/// If a semicolon is within a comment that TiDB runs, the statement behind it begins with another such comment, so that
/// it means the same on its own.
pub fn statements(text: &[u8]) -> impl Iterator<Item = Cow<'_, [u8]>> {
    let is_single = !text.contains(&b';');
    let several = (!is_single).then(|| Separated { scanner: Scanner::new(text), literal: Vec::new() });
    is_single.then_some(Cow::Borrowed(text)).into_iter().chain(several.into_iter().flatten())
}

struct Separated<'a> {
    scanner: Scanner<'a>,
    literal: Vec<u8>,
}

impl<'a> Iterator for Separated<'a> {
    type Item = Cow<'a, [u8]>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut start = self.scanner.at;
        let mut is_within_comment = self.scanner.is_in_executed_comment;
        let mut has_tokens = false;
        let sql = self.scanner.sql;
        let end = loop {
            self.literal.clear();
            let rest = self.scanner.rest();
            let Some((_, offset)) = self.scanner.next(&mut self.literal) else {
                self.scanner.at = sql.len(); // also after an invalid byte
                has_tokens |= gap_length(rest) < rest.len(); // that byte, or what does not end
                break sql.len();
            };
            if sql[offset] != b';' {
                has_tokens = true;
            } else if has_tokens {
                break offset + 1;
            } else {
                (start, is_within_comment) = (offset + 1, self.scanner.is_in_executed_comment);
            }
        };
        let statement = sql[start..end].trim_ascii();
        has_tokens.then(
            || {
                if is_within_comment { [b"/*! ", statement].concat().into() } else { Cow::Borrowed(statement) }
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_end_at_semicolons_outside_of_strings_names_and_comments() {
        let cases: [(&str, &[&str]); 13] = [
            ("", &[""]),
            ("select 1", &["select 1"]),
            ("select 1;", &["select 1;"]),
            (" select 1; ", &["select 1;"]),
            (
                "select 1;;-- c\n select ';' ; /* ; */ select `;`",
                &["select 1;", "-- c\n select ';' ;", "/* ; */ select `;`"],
            ),
            ("select 1; select '", &["select 1;", "select '"]),
            ("select \x01 ; select 1", &["select \x01 ; select 1"]),
            ("select 1; \x01 /* ; */", &["select 1;", "\x01 /* ; */"]),
            ("select 1; 'select 2;", &["select 1;", "'select 2;"]),
            ("select 1; x'g'", &["select 1;", "x'g'"]),
            (";;", &[]),
            ("/*! select */ 1; /* c */", &["/*! select */ 1;"]),
            ("select /*! 1; delete */ from t", &["select /*! 1;", "/*! delete */ from t"]),
        ];
        for (text, expected) in cases {
            let found = statements(text.as_bytes()).map(|one| String::from_utf8_lossy(&one).into_owned());
            assert_eq!(found.collect::<Vec<_>>(), expected, "{text:?}");
        }
    }
}
