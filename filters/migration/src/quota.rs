//! Quotas of rebalancing: how many sessions migrate away from a node that stays in service, and how many sessions
//! another node receives. The control plane sets both for each Envoy. If each Envoy inferred them from its own view,
//! all would migrate their sessions to the same node.
//!
//! The text is `ROUND:INSTANCE=COUNT,INSTANCE=COUNT`. An instance is one Envoy process.

use std::time::Duration;

/// The quota of one Envoy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    /// The rebalancing round. A quota of another round replaces this one.
    pub round: u64,
    pub count: u64,
}

impl Quota {
    /// Parses the text that the control plane publishes for a node. None: the text has no quota for this instance, or
    /// is invalid.
    #[must_use]
    pub fn parse(text: &str, instance: &str) -> Option<Self> {
        let (round, counts) = text.split_once(':')?;
        let counts = counts.split(',').filter_map(|each| each.split_once('='));
        let (_, count) = counts.into_iter().find(|(name, _)| *name == instance)?;
        Some(Self { round: round.parse().ok()?, count: count.parse().ok()? })
    }
}

/// Workers learn of a round at slightly different times, so a late worker must not restore an older round. After this
/// delay an older round is accepted: the control plane's clock was set back.
const MAX_ROUND_DELAY: Duration = Duration::from_secs(30);

/// The unused part of a quota, shared by all workers.
#[derive(Debug, Default)]
pub struct QuotaRemaining {
    round: u64,
    since: Duration,
    remaining: u64,
    /// The control plane has ended the round.
    is_over: bool,
}

impl QuotaRemaining {
    /// Sets the current quota. Each worker reports it.
    pub fn update(&mut self, quota: Option<Quota>, now: Duration) {
        match quota {
            None => {
                self.remaining = 0;
                self.is_over = true;
            }
            Some(quota)
                if quota.round > self.round || quota.round < self.round && now >= self.since + MAX_ROUND_DELAY =>
            {
                *self = Self { round: quota.round, since: now, remaining: quota.count, is_over: false };
            }
            Some(_) => {}
        }
    }

    /// How many more sessions may migrate.
    #[must_use]
    pub const fn remaining(&self) -> u64 {
        self.remaining
    }

    /// Whether `round` is the current round and has not ended.
    #[must_use]
    pub const fn is_in_round(&self, round: u64) -> bool {
        self.round == round && !self.is_over
    }

    /// Reserves one session. Returns the round of the reservation; None if the quota is used up.
    pub fn reserve(&mut self) -> Option<u64> {
        self.remaining = self.remaining.checked_sub(1)?;
        Some(self.round)
    }

    /// Releases a reservation of `round` whose session does not migrate. Does nothing if the round is over.
    pub fn release(&mut self, round: u64) {
        self.remaining += u64::from(self.is_in_round(round));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn parse_finds_the_count_of_an_instance() {
        let text = "7:00ff=3,0a0b=12";
        assert_eq!(Quota::parse(text, "00ff"), Some(Quota { round: 7, count: 3 }));
        assert_eq!(Quota::parse(text, "0a0b"), Some(Quota { round: 7, count: 12 }));
        assert_eq!(Quota::parse(text, "0a"), None);
        for nonsense in ["", "7", "7:", "x:00ff=3", "7:00ff=x", "7:00ff", "-1:00ff=3"] {
            assert_eq!(Quota::parse(nonsense, "00ff"), None, "{nonsense}");
        }
    }

    fn quota(round: u64, count: u64) -> Option<Quota> {
        Some(Quota { round, count })
    }

    #[test]
    fn quota_is_used_up_once_per_round() {
        let mut quota_remaining = QuotaRemaining::default();
        assert_eq!(quota_remaining.reserve(), None);
        quota_remaining.update(quota(1, 2), at(0));
        assert_eq!(quota_remaining.reserve(), Some(1));
        quota_remaining.update(quota(1, 2), at(0));
        assert_eq!((quota_remaining.reserve(), quota_remaining.reserve()), (Some(1), None));
        quota_remaining.update(quota(2, 5), at(1));
        assert_eq!(quota_remaining.remaining(), 5);
        quota_remaining.update(quota(1, 2), at(1));
        assert_eq!(quota_remaining.remaining(), 5, "a worker that is late does not restore round 1");
        quota_remaining.update(None, at(1));
        quota_remaining.update(quota(2, 5), at(1));
        assert_eq!(quota_remaining.reserve(), None, "the control plane has ended the round");
        quota_remaining.update(quota(1, 3), at(40));
        assert_eq!(quota_remaining.remaining(), 3, "a new round has begun");
    }

    #[test]
    fn released_session_returns_only_to_its_own_round() {
        let mut quota_remaining = QuotaRemaining::default();
        quota_remaining.update(quota(1, 1), at(0));
        let round = quota_remaining.reserve().expect("the quota is not used up");
        quota_remaining.release(round);
        assert_eq!((quota_remaining.reserve(), quota_remaining.remaining()), (Some(round), 0));
        assert!(quota_remaining.is_in_round(round));
        quota_remaining.update(None, at(1));
        quota_remaining.release(round);
        assert_eq!(quota_remaining.remaining(), 0, "the control plane has ended the round");
        assert!(!quota_remaining.is_in_round(round));
        quota_remaining.update(quota(2, 1), at(1));
        quota_remaining.release(round);
        assert_eq!(quota_remaining.remaining(), 1, "a release does not change another round");
        assert!(quota_remaining.is_in_round(2) && !quota_remaining.is_in_round(round));
    }
}
