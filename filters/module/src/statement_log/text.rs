//! The text of a statement in the log.

use std::borrow::Cow;

use mysql_proto::secret::SecretBytes;

use crate::secrets;
use crate::statements::Statement;

/// Bytes of a text that are kept.
const MAX_SENT_BYTES: usize = 4096;

/// The text of a statement as the client has sent it. Of a long one, only the beginning is kept.
#[derive(Debug, Clone)]
pub(crate) struct SentText {
    bytes: SecretBytes,
    /// The length of the whole text.
    length: usize,
}

impl SentText {
    pub(crate) fn new(text: &[u8]) -> Self {
        // A character of UTF-8 is not split.
        let is_boundary = |at: &usize| text.get(*at).is_none_or(|byte| byte & 0xc0 != 0x80);
        let end = text.len().min(MAX_SENT_BYTES);
        let end = (end.saturating_sub(3)..=end).rev().find(is_boundary).unwrap_or(end);
        Self { bytes: text[..end].into(), length: text.len() }
    }
}

/// The text that an entry of the log shows.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ShownText<'a> {
    pub(super) text: Cow<'a, str>,
    /// Bytes of the whole text.
    pub(super) length: usize,
    /// Only the beginning of the text is shown.
    pub(super) is_cut: bool,
    /// Literals are replaced.
    pub(super) is_redacted: bool,
}

/// The text to show. None: the statement is unknown. `sent`: what the client has sent, if it was kept.
pub(super) fn shown_text<'a>(
    statement: Option<&'a Statement>,
    sent: Option<&'a SentText>,
    redacts: bool,
) -> Option<ShownText<'a>> {
    let statement = statement?;
    Some(match sent {
        Some(sent) if !redacts && !secrets::may_have_secret(&statement.text, &sent.bytes) => ShownText {
            text: String::from_utf8_lossy(&sent.bytes),
            length: sent.length,
            is_cut: sent.bytes.len() < sent.length,
            is_redacted: false,
        },
        _ => ShownText {
            text: Cow::Borrowed(&statement.text),
            length: statement.length,
            is_cut: statement.text.len() < statement.length,
            is_redacted: true,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(sent: &str, redacts: bool) -> (String, usize, bool, bool) {
        let normalized = sql_text::Normalizer::default().normalize(sent.as_bytes()).to_vec();
        let (statement, sent) = (Statement::new(&normalized), SentText::new(sent.as_bytes()));
        let shown = shown_text(Some(&statement), Some(&sent), redacts).expect("a known statement");
        (shown.text.into_owned(), shown.length, shown.is_cut, shown.is_redacted)
    }

    #[test]
    fn literals_are_shown_only_without_redaction() {
        let text = "select 'ab' from t";
        assert_eq!(shown(text, true), ("select ? from `t`".to_owned(), 17, false, true));
        assert_eq!(shown(text, false), (text.to_owned(), 18, false, false));
    }

    #[test]
    fn text_with_a_secret_is_always_redacted() {
        let (text, .., is_redacted) = shown("create user u identified by 'hidden'", false);
        assert_eq!((&*text, is_redacted), ("create user `u` identified by ?", true));
        let (text, ..) = shown("prepare s from 'alter user u identified by ''hidden'''", false);
        assert_eq!(text, "prepare `s` from ?");
    }

    #[test]
    fn text_that_was_not_kept_is_redacted() {
        let statement = Statement::new(b"select ?");
        assert!(shown_text(Some(&statement), None, false).expect("a known statement").is_redacted);
        assert_eq!(shown_text(None, None, false), None);
    }

    #[test]
    fn long_text_is_cut_between_characters() {
        let head = "select '".len();
        for (before, expected) in [(0, MAX_SENT_BYTES), (1, MAX_SENT_BYTES - 1), (2, MAX_SENT_BYTES)] {
            let long = format!("select '{}{}'", "a".repeat(before), "ä".repeat(MAX_SENT_BYTES));
            let (text, length, is_cut, _) = shown(&long, false);
            assert_eq!((text.len(), length, is_cut), (expected, long.len(), true), "{before}");
            assert!(long.starts_with(&text) && text.len() > head);
        }
        let names = (0..400).map(|number| format!("column{number}")).collect::<Vec<_>>().join(",");
        let (text, length, is_cut, is_redacted) = shown(&format!("select {names} from t"), true);
        assert!(text.len() < length && is_cut && is_redacted);
        assert_eq!(SentText::new(&[0x80; 5000]).bytes.len(), MAX_SENT_BYTES, "no UTF-8");
    }
}
