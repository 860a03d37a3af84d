//! Normalizes SQL statements and computes their digests as TiDB does, so that an operator finds a digest of Tidevoy in
//! `information_schema.statements_summary`.
//!
//! A normalized statement has placeholders instead of literals, keywords in lower case, and one space between tokens:
//! ```
//! let mut normalizer = sql_text::Normalizer::default();
//! let normalized = normalizer.normalize(b"SELECT * FROM t WHERE id IN (1, 2)");
//! assert_eq!(normalized, b"select * from `t` where `id` in ( ... )");
//! ```
//!
//! The source is pingcap/tidb v8.5.3, `pkg/parser/digester.go`, for the default SQL mode and the character set utf8mb4.
//! TiDB tests no grammar for digests, only tokens, and neither does this crate.

mod comments;
mod keywords;
mod kill;
mod normalizer;
mod parts;
mod scanner;
mod split;
mod tables;
mod text;
mod tokens;
mod transactions;

pub use comments::without_comments;
pub use kill::{Kill, kill, may_begin_with};
pub use normalizer::Normalizer;
pub use parts::{PreparedText, parameters, prepared_text, quoted_string, session_states, used_database};
pub use split::statements;
pub use tables::{TableNames, rename_tables};
pub use text::lowercase;
pub use transactions::{TransactionStep, only_controls_session, transaction_step};

/// The digest of a normalized statement. TiDB shows it in hexadecimal ([`hexadecimal`]).
pub type Digest = [u8; 32];

/// The digest of a statement that [`Normalizer::normalize`] has returned.
#[must_use]
pub fn digest(normalized: &[u8]) -> Digest {
    let hash = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, normalized);
    let mut digest = [0; 32];
    digest.copy_from_slice(hash.as_ref());
    digest
}

/// The bytes as lowercase hexadecimal digits.
#[must_use]
pub fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
