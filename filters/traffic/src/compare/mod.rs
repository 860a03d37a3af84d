//! Compares what two servers, or one server at two times, answered to the same statements.
//!
//! Statements are paired by connection and time. Latencies are of pairs in which both succeeded. The ratio of latencies
//! is the geometric mean over these pairs, with a 95 % confidence interval from Student's t distribution of the
//! logarithms. It takes pairs to be independent of each other, and so is too narrow when a server was slow for a while.

mod latency;
mod pairing;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

pub use latency::Latency;

use crate::TrafficError;
use crate::directory::{ResultsReader, find_results};
use crate::result::ResultLine;
use crate::text::{parse_hexadecimal, push_hexadecimal};
use latency::{LogRatios, Ratio};
use pairing::{DigestId, Pairing};

/// The texts of statements, which a replay writes into its directory.
pub const TEXTS_FILE: &str = "statements.json";

/// The normalized texts of digests.
pub type Texts = HashMap<[u8; 32], String>;

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    pub totals: Totals,
    /// With the most statements first.
    pub digests: Vec<DigestComparison>,
    /// Statements that failed in `new` with an error that they did not have in `old`.
    pub new_errors: Vec<ErrorCount>,
    /// Statements that failed in `old` with an error that they did not have in `new`.
    pub gone_errors: Vec<ErrorCount>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Totals {
    pub old_statements: u64,
    pub new_statements: u64,
    /// Statements in both.
    pub pairs: u64,
    /// Statements that are only in `old`.
    pub missing: u64,
    /// Statements that are only in `new`.
    pub extra: u64,
    /// Statements of which the files say that they were not written.
    pub old_dropped: u64,
    pub new_dropped: u64,
    pub new_errors: u64,
    pub gone_errors: u64,
    pub differing_results: u64,
    pub old: Latency,
    pub new: Latency,
    #[serde(flatten)]
    pub ratio: Ratio,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DigestComparison {
    /// 64 hexadecimal digits. None: commands without a statement.
    pub digest: Option<String>,
    /// The normalized text. None: it is not known.
    pub text: Option<String>,
    /// Statements in `old`.
    pub statements: u64,
    pub pairs: u64,
    /// Statements that are only in `old`.
    pub missing: u64,
    /// Statements that are only in `new`.
    pub extra: u64,
    pub old: Latency,
    pub new: Latency,
    #[serde(flatten)]
    pub ratio: Ratio,
    /// Pairs that both succeeded, and whose rows or checksums differ.
    pub differing_results: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ErrorCount {
    pub digest: Option<String>,
    pub code: u16,
    /// Pairs in which the error is on this side only.
    pub count: u64,
    /// Pairs that have this error on the other side, which may be other statements of the digest.
    pub other_count: u64,
}

/// Compares the results files in and below the directories `old` and `new`.
pub fn compare_directories(old: &[PathBuf], new: &[PathBuf]) -> Result<Comparison, TrafficError> {
    let mut texts = Texts::new();
    let mut old = Results::open(old, &mut texts)?;
    let mut new = Results::open(new, &mut texts)?;
    let mut comparison = compare(&mut old, &mut new, &texts)?;
    comparison.totals.old_dropped = old.dropped();
    comparison.totals.new_dropped = new.dropped();
    Ok(comparison)
}

/// Compares results, and adds the texts of digests as far as they are known. Needs about 100 bytes for each of `old`.
pub fn compare<E>(
    old: impl IntoIterator<Item = Result<ResultLine, E>>,
    new: impl IntoIterator<Item = Result<ResultLine, E>>,
    texts: &Texts,
) -> Result<Comparison, E> {
    let mut pairing = Pairing::default();
    for result in old {
        pairing.add_old(&result?);
    }
    for result in new {
        pairing.add_new(&result?);
    }
    Ok(Comparison::from_pairing(pairing, texts))
}

impl Comparison {
    fn from_pairing(pairing: Pairing, texts: &Texts) -> Self {
        let Pairing { digests, totals: counts, errors, .. } = pairing;
        let hexadecimal: Vec<Option<String>> = digests.iter().map(|digest| digest.digest.map(hexadecimal)).collect();
        let (mut new_errors, mut gone_errors) = (Vec::new(), Vec::new());
        for ((DigestId(id), code), sides) in errors {
            let digest = || hexadecimal[id as usize].clone();
            let (old_count, new_count) = (sides.old, sides.new);
            if sides.only_new > 0 {
                new_errors.push(ErrorCount { digest: digest(), code, count: sides.only_new, other_count: old_count });
            }
            if sides.only_old > 0 {
                gone_errors.push(ErrorCount { digest: digest(), code, count: sides.only_old, other_count: new_count });
            }
        }
        for errors in [&mut new_errors, &mut gone_errors] {
            errors.sort_by(|a, b| (b.count, &a.digest, a.code).cmp(&(a.count, &b.digest, b.code)));
        }
        let (mut old_us, mut new_us, mut all_ratios) = (Vec::new(), Vec::new(), LogRatios::default());
        let mut totals = Totals {
            old_statements: counts.old,
            new_statements: counts.new,
            new_errors: new_errors.iter().map(|error| error.count).sum(),
            gone_errors: gone_errors.iter().map(|error| error.count).sum(),
            ..Totals::default()
        };
        let mut compared = Vec::with_capacity(digests.len());
        for (digest, hexadecimal) in digests.into_iter().zip(hexadecimal) {
            old_us.extend_from_slice(&digest.old_us);
            new_us.extend_from_slice(&digest.new_us);
            all_ratios.add_all(&digest.log_ratios);
            let missing = digest.statements - digest.pairs;
            totals.pairs += digest.pairs;
            totals.missing += missing;
            totals.extra += digest.extra;
            totals.differing_results += digest.differing_results;
            totals.old.errors += digest.old_errors;
            totals.new.errors += digest.new_errors;
            compared.push(DigestComparison {
                text: digest.digest.and_then(|digest| texts.get(&digest).cloned()),
                digest: hexadecimal,
                statements: digest.statements,
                pairs: digest.pairs,
                missing,
                extra: digest.extra,
                old: Latency::of(digest.old_us, digest.old_errors),
                new: Latency::of(digest.new_us, digest.new_errors),
                ratio: digest.log_ratios.ratio(),
                differing_results: digest.differing_results,
            });
        }
        totals.old = Latency::of(old_us, totals.old.errors);
        totals.new = Latency::of(new_us, totals.new.errors);
        totals.ratio = all_ratios.ratio();
        compared.sort_by(|a, b| (b.statements, b.extra, &a.digest).cmp(&(a.statements, a.extra, &b.digest)));
        Self { totals, digests: compared, new_errors, gone_errors }
    }
}

/// The results of several directories.
struct Results {
    readers: Vec<ResultsReader>,
    next: usize,
}

impl Results {
    fn open(paths: &[PathBuf], texts: &mut Texts) -> Result<Self, TrafficError> {
        let mut readers = Vec::new();
        for directory in find_results(paths)? {
            read_texts(&directory, texts)?;
            readers.push(ResultsReader::open(&directory)?);
        }
        Ok(Self { readers, next: 0 })
    }

    fn dropped(&self) -> u64 {
        self.readers.iter().map(ResultsReader::dropped).sum()
    }
}

impl Iterator for Results {
    type Item = Result<ResultLine, TrafficError>;

    fn next(&mut self) -> Option<Self::Item> {
        while let Some(reader) = self.readers.get_mut(self.next) {
            if let Some(result) = reader.next() {
                return Some(result);
            }
            self.next += 1;
        }
        None
    }
}

/// Reads the texts that a replay has written into its directory. Adds none if there are none.
pub fn read_texts(directory: &Path, texts: &mut Texts) -> Result<(), TrafficError> {
    let file = directory.join(TEXTS_FILE);
    let json = match fs::read(&file) {
        Ok(json) => json,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(TrafficError::Io { file, source }),
    };
    match serde_json::from_slice::<HashMap<String, String>>(&json) {
        Ok(read) => {
            let read = read.into_iter().filter_map(|(digest, text)| Some((parse_hexadecimal(&digest)?, text)));
            texts.extend(read);
            Ok(())
        }
        Err(error) => Err(TrafficError::Texts { file, reason: error.to_string() }),
    }
}

fn hexadecimal(digest: [u8; 32]) -> String {
    let mut out = Vec::with_capacity(64);
    push_hexadecimal(&mut out, &digest);
    String::from_utf8(out).unwrap_or_default()
}

#[cfg(test)]
mod tests;
