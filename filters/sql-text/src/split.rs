//! Splits a text into statements.

use crate::scanner::Scanner;

/// The statements of a text, each with the semicolon that ends it. A text without a semicolon is one statement.
pub fn statements(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    let is_single = !text.contains(&b';');
    let several = (!is_single).then(|| Separated { scanner: Scanner::new(text), literal: Vec::new() });
    is_single.then_some(text).into_iter().chain(several.into_iter().flatten())
}

struct Separated<'a> {
    scanner: Scanner<'a>,
    literal: Vec<u8>,
}

impl<'a> Iterator for Separated<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<Self::Item> {
        let mut first = None;
        loop {
            self.literal.clear();
            let Some((_, offset)) = self.scanner.next(&mut self.literal) else {
                self.scanner.at = self.scanner.sql.len(); // also after an invalid byte
                return first.map(|first| &self.scanner.sql[first..]);
            };
            if self.scanner.sql[offset] != b';' {
                first.get_or_insert(offset);
            } else if let Some(first) = first {
                return Some(&self.scanner.sql[first..=offset]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_end_at_semicolons_outside_of_strings_names_and_comments() {
        let cases: [(&str, &[&str]); 9] = [
            ("", &[""]),
            ("select 1", &["select 1"]),
            ("select 1;", &["select 1;"]),
            (" select 1; ", &["select 1;"]),
            ("select 1;;-- c\n select ';' ; /* ; */ select `;`", &["select 1;", "select ';' ;", "select `;`"]),
            ("select 1; select '", &["select 1;", "select '"]),
            ("select \x01 ; select 1", &["select \x01 ; select 1"]),
            (";;", &[]),
            ("select /*! 1; select */ 2", &["select /*! 1;", "select */ 2"]),
        ];
        for (text, expected) in cases {
            let found = statements(text.as_bytes()).map(|one| std::str::from_utf8(one).unwrap_or("?"));
            assert_eq!(found.collect::<Vec<_>>(), expected, "{text:?}");
        }
    }
}
