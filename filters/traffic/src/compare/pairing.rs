//! Pairs results by connection and time, and collects what is compared, by digest.

use std::collections::HashMap;

use super::latency::LogRatios;
use crate::result::ResultLine;

/// Index of a digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct DigestId(pub(super) u32);

#[derive(Debug, Default)]
pub(super) struct Pairing {
    pub(super) digests: Vec<DigestPairs>,
    pub(super) totals: Counts,
    /// By digest and code.
    pub(super) errors: HashMap<(DigestId, u16), ErrorSides>,
    ids: HashMap<Option<[u8; 32]>, DigestId>,
    /// Old results, until the new one comes.
    unpaired: HashMap<(u64, i64), OldResult>,
}

#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) old: u64,
    pub(super) new: u64,
}

#[derive(Debug, Default)]
pub(super) struct DigestPairs {
    pub(super) digest: Option<[u8; 32]>,
    /// Old results.
    pub(super) statements: u64,
    pub(super) pairs: u64,
    /// New results without an old one.
    pub(super) extra: u64,
    pub(super) old_errors: u64,
    pub(super) new_errors: u64,
    /// Of the pairs in which both succeeded.
    pub(super) old_us: Vec<u64>,
    pub(super) new_us: Vec<u64>,
    pub(super) log_ratios: LogRatios,
    pub(super) differing_results: u64,
}

/// Pairs with an error, by the side that has it.
#[derive(Debug, Default)]
pub(super) struct ErrorSides {
    pub(super) old: u64,
    pub(super) new: u64,
    pub(super) only_old: u64,
    pub(super) only_new: u64,
}

/// What is compared of an old result.
#[derive(Debug)]
struct OldResult {
    latency_us: u64,
    rows: u64,
    checksum: Option<u64>,
    digest: DigestId,
    error: u16,
}

impl Pairing {
    pub(super) fn add_old(&mut self, result: &ResultLine) {
        let digest = self.id(result.digest);
        let old = OldResult {
            latency_us: result.latency_us,
            rows: result.rows,
            checksum: result.checksum,
            digest,
            error: result.error,
        };
        self.totals.old += 1;
        self.digest(digest).statements += 1;
        self.unpaired.insert((result.connection, result.time_ns), old);
    }

    pub(super) fn add_new(&mut self, new: &ResultLine) {
        self.totals.new += 1;
        let Some(old) = self.unpaired.remove(&(new.connection, new.time_ns)) else {
            let id = self.id(new.digest);
            self.digest(id).extra += 1;
            return;
        };
        // The old digest, as that of a statement is the same on both sides.
        let digest = self.digest(old.digest);
        digest.pairs += 1;
        digest.old_errors += u64::from(old.error != 0);
        digest.new_errors += u64::from(new.error != 0);
        if old.error == 0 && new.error == 0 {
            digest.old_us.push(old.latency_us);
            digest.new_us.push(new.latency_us);
            digest.log_ratios.add(old.latency_us, new.latency_us);
            digest.differing_results += u64::from((old.rows, old.checksum) != (new.rows, new.checksum));
        }
        if old.error != 0 {
            let sides = self.errors.entry((old.digest, old.error)).or_default();
            sides.old += 1;
            sides.only_old += u64::from(old.error != new.error);
        }
        if new.error != 0 {
            let sides = self.errors.entry((old.digest, new.error)).or_default();
            sides.new += 1;
            sides.only_new += u64::from(old.error != new.error);
        }
    }

    fn id(&mut self, digest: Option<[u8; 32]>) -> DigestId {
        let next = DigestId(self.digests.len() as u32);
        *self.ids.entry(digest).or_insert_with(|| {
            self.digests.push(DigestPairs { digest, ..DigestPairs::default() });
            next
        })
    }

    fn digest(&mut self, DigestId(index): DigestId) -> &mut DigestPairs {
        &mut self.digests[index as usize]
    }
}
