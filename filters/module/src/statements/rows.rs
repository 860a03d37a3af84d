//! The rows of a report, and their sums.

use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use sql_text::Digest;

use crate::node;

const MAX_TEXT_BYTES: usize = 2048;

/// How many statements of one kind ran, and what they cost. Latency is what the client sees: from the request to the
/// last byte of the response.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct StatementStats {
    pub(crate) count: u64,
    pub(crate) errors: u64,
    pub(crate) rows: u64,
    pub(crate) request_bytes: u64,
    pub(crate) response_bytes: u64,
    pub(crate) microseconds: u64,
    pub(crate) max_microseconds: u64,
    /// Counts per latency bucket (not cumulative), bounds: [`node::BUCKETS`].
    pub(crate) latency: [u64; node::BUCKET_NAMES.len()],
}

impl StatementStats {
    pub(crate) fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.errors += other.errors;
        self.rows += other.rows;
        self.request_bytes += other.request_bytes;
        self.response_bytes += other.response_bytes;
        self.microseconds += other.microseconds;
        self.max_microseconds = self.max_microseconds.max(other.max_microseconds);
        for (sum, count) in self.latency.iter_mut().zip(other.latency) {
            *sum += count;
        }
    }
}

/// A normalized statement.
#[derive(Debug, PartialEq)]
pub(crate) struct Statement {
    pub(crate) digest: Digest,
    /// The beginning of the normalized text, at most [`MAX_TEXT_BYTES`].
    pub(crate) text: String,
    /// Bytes of the whole normalized text.
    pub(crate) length: usize,
}

impl Statement {
    pub(crate) fn new(normalized: &[u8]) -> Self {
        // Normalized texts are valid UTF-8, so only the cut can be within a character.
        let start = &normalized[..normalized.len().min(MAX_TEXT_BYTES)];
        let valid = start.utf8_chunks().next().map_or("", |chunk| chunk.valid());
        let text = valid.to_owned();
        Self { digest: sql_text::digest(normalized), text, length: normalized.len() }
    }

    /// The digest as TiDB shows it.
    pub(crate) fn digest_text(&self) -> String {
        sql_text::hexadecimal(&self.digest)
    }
}

/// The statistics of one statement, user and node.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct StatementRow {
    /// None: all statements that have no row of their own, or whose text the module does not know.
    pub(crate) statement: Option<Arc<Statement>>,
    pub(crate) user: String,
    pub(crate) node: String,
    pub(crate) stats: StatementStats,
}

impl StatementRow {
    /// The bytes of the row in a report, without those of its statement, and not less than they are.
    fn encoded_bytes(&self) -> usize {
        const NUMBERS_BYTES: usize = 250;
        self.user.len() + self.node.len() + NUMBERS_BYTES
    }
}

/// What limits a report.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowLimits {
    /// The highest number of rows with a statement.
    pub(crate) rows: usize,
    /// About the size of the encoded report.
    pub(crate) bytes: usize,
}

/// Sums rows of the same statement, user and node. Of the rows with a statement, those with the highest total latency
/// stay; the other rows are summed per node in rows without a statement.
pub(crate) fn merge(rows: impl IntoIterator<Item = StatementRow>, limits: RowLimits) -> Vec<StatementRow> {
    let (mut kept, mut rest): (Vec<_>, Vec<_>) = sum(rows).partition(|row| row.statement.is_some());
    kept.sort_by_key(|row| Reverse(row.stats.microseconds));
    let fitting = count_fitting(&kept, limits);
    rest.extend(kept.drain(fitting..));
    kept.extend(sum(rest.into_iter().map(|row| StatementRow { statement: None, user: String::new(), ..row })));
    kept
}

fn sum(rows: impl IntoIterator<Item = StatementRow>) -> impl Iterator<Item = StatementRow> {
    let mut sums: HashMap<_, StatementRow> = HashMap::new();
    for row in rows {
        let digest = row.statement.as_ref().map(|statement| statement.digest);
        match sums.entry((digest, row.user.clone(), row.node.clone())) {
            Entry::Occupied(mut sum) => sum.get_mut().stats.add(&row.stats),
            Entry::Vacant(slot) => {
                slot.insert(row);
            }
        }
    }
    sums.into_values()
}

/// How many of the first rows are within the limits.
fn count_fitting(rows: &[StatementRow], limits: RowLimits) -> usize {
    let mut bytes = 0;
    let mut statements = HashSet::new();
    let is_within = |row: &&StatementRow| {
        let text = row.statement.as_ref().filter(|statement| statements.insert(statement.digest));
        bytes += row.encoded_bytes() + text.map_or(0, |statement| statement.text.len() + 64);
        bytes <= limits.bytes
    };
    rows.iter().take(limits.rows).take_while(is_within).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_LIMITS: RowLimits = RowLimits { rows: 100, bytes: 1 << 20 };

    fn row(digest: u8, user: &str, microseconds: u64) -> StatementRow {
        let statement = Arc::new(Statement { digest: [digest; 32], text: format!("select {digest}"), length: 0 });
        let stats = StatementStats {
            count: 1,
            microseconds,
            max_microseconds: microseconds,
            latency: [1; 14],
            ..StatementStats::default()
        };
        StatementRow {
            statement: (digest > 0).then_some(statement),
            user: user.to_owned(),
            node: "n".to_owned(),
            stats,
        }
    }

    fn sums(rows: &[StatementRow]) -> Vec<(u8, &str, u64, u64)> {
        let mut sums: Vec<_> = rows
            .iter()
            .map(|row| {
                let digest = row.statement.as_ref().map_or(0, |statement| statement.digest[0]);
                (digest, row.user.as_str(), row.stats.count, row.stats.microseconds)
            })
            .collect();
        sums.sort_unstable();
        sums
    }

    #[test]
    fn rows_of_one_statement_user_and_node_are_summed() {
        let merged = merge([row(1, "a", 5), row(1, "b", 7), row(1, "a", 3)], NO_LIMITS);
        assert_eq!(sums(&merged), [(1, "a", 2, 8), (1, "b", 1, 7)]);
        let of_a = merged.iter().find(|row| row.user == "a").expect("a row");
        assert_eq!((of_a.stats.max_microseconds, of_a.stats.latency), (5, [2; 14]));
    }

    #[test]
    fn rows_with_the_highest_latency_stay_and_the_others_lose_their_statement() {
        let rows = [row(1, "a", 5), row(2, "a", 9), row(3, "b", 7), row(0, "", 1)];
        let merged = merge(rows, RowLimits { rows: 2, ..NO_LIMITS });
        assert_eq!(sums(&merged), [(0, "", 2, 6), (2, "a", 1, 9), (3, "b", 1, 7)]);
    }

    #[test]
    fn the_encoded_size_is_limited_and_a_text_counts_once() {
        let rows = [row(1, "a", 9), row(1, "b", 8), row(2, "a", 7)];
        let merged = merge(rows, RowLimits { bytes: 700, ..NO_LIMITS });
        assert_eq!(sums(&merged), [(0, "", 1, 7), (1, "a", 1, 9), (1, "b", 1, 8)]);
    }

    #[test]
    fn long_text_is_cut_between_characters() {
        let normalized = "ä".repeat(MAX_TEXT_BYTES);
        let statement = Statement::new(normalized.as_bytes());
        assert_eq!(statement.text.len(), MAX_TEXT_BYTES);
        assert_eq!(statement.digest, sql_text::digest(normalized.as_bytes()));
        assert_eq!(Statement::new(format!("a{normalized}").as_bytes()).text.len(), MAX_TEXT_BYTES - 1);
    }
}
