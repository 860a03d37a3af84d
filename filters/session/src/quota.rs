//! How many sessions are to leave a node that stays in service, so that the load is spread evenly, and how many of those
//! another is to get: the control plane says both for each Envoy. An Envoy never infers that from what it sees, or all
//! would send their sessions to the same node.
//!
//! The text is `ROUND:INSTANCE=COUNT,INSTANCE=COUNT`. An instance is one Envoy process.

use std::time::Duration;

/// What one Envoy is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    /// Counts of another round take the place of these.
    pub round: u64,
    pub count: u64,
}

impl Quota {
    /// Of what the control plane says of a node; None when nothing is asked of this instance, or it cannot be read.
    #[must_use]
    pub fn of(text: &str, instance: &str) -> Option<Self> {
        let (round, counts) = text.split_once(':')?;
        let counts = counts.split(',').filter_map(|each| each.split_once('='));
        let (_, count) = counts.into_iter().find(|(name, _)| *name == instance)?;
        Some(Self { round: round.parse().ok()?, count: count.parse().ok()? })
    }
}

/// Workers hear of a round at slightly different times. One that hears late must not bring an older round back; a control
/// plane whose clock was set back may, after so long.
const LATE: Duration = Duration::from_secs(30);

/// What is left of it, for all workers.
#[derive(Debug, Default)]
pub struct Allowance {
    round: u64,
    since: Duration,
    left: u64,
    /// Nothing is asked for any more in that round.
    is_over: bool,
}

impl Allowance {
    /// What is asked for now, as one worker hears it; the others hear the same.
    pub fn set(&mut self, quota: Option<Quota>, now: Duration) {
        match quota {
            None => {
                self.left = 0;
                self.is_over = true;
            }
            Some(quota) if quota.round > self.round || quota.round < self.round && now >= self.since + LATE => {
                *self = Self { round: quota.round, since: now, left: quota.count, is_over: false };
            }
            Some(_) => {}
        }
    }

    /// How many sessions may still leave, or come.
    #[must_use]
    pub const fn left(&self) -> u64 {
        self.left
    }

    /// Whether that round goes on.
    #[must_use]
    pub const fn is_of(&self, round: u64) -> bool {
        self.round == round && !self.is_over
    }

    /// One more leaves, or comes, in the round that is returned. None: none may.
    pub fn take(&mut self) -> Option<u64> {
        self.left = self.left.checked_sub(1)?;
        Some(self.round)
    }

    /// One that was counted in that round stays where it is, so that another may go. Nothing is owed to a later round.
    pub fn give_back(&mut self, round: u64) {
        self.left += u64::from(self.is_of(round));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn each_instance_has_its_count() {
        let text = "7:00ff=3,0a0b=12";
        assert_eq!(Quota::of(text, "00ff"), Some(Quota { round: 7, count: 3 }));
        assert_eq!(Quota::of(text, "0a0b"), Some(Quota { round: 7, count: 12 }));
        assert_eq!(Quota::of(text, "0a"), None);
        for nonsense in ["", "7", "7:", "x:00ff=3", "7:00ff=x", "7:00ff", "-1:00ff=3"] {
            assert_eq!(Quota::of(nonsense, "00ff"), None, "{nonsense}");
        }
    }

    fn quota(round: u64, count: u64) -> Option<Quota> {
        Some(Quota { round, count })
    }

    #[test]
    fn a_count_is_used_up_once_a_round() {
        let mut allowance = Allowance::default();
        assert_eq!(allowance.take(), None);
        allowance.set(quota(1, 2), at(0));
        assert_eq!(allowance.take(), Some(1));
        allowance.set(quota(1, 2), at(0));
        assert_eq!((allowance.take(), allowance.take()), (Some(1), None));
        allowance.set(quota(2, 5), at(1));
        assert_eq!(allowance.left(), 5);
        allowance.set(quota(1, 2), at(1));
        assert_eq!(allowance.left(), 5, "another worker has heard of round 2 later");
        allowance.set(None, at(1));
        allowance.set(quota(2, 5), at(1));
        assert_eq!(allowance.take(), None, "it was withdrawn");
        allowance.set(quota(1, 3), at(40));
        assert_eq!(allowance.left(), 3, "rounds begin anew");
    }

    #[test]
    fn what_was_not_used_goes_back_to_its_own_round_alone() {
        let mut allowance = Allowance::default();
        allowance.set(quota(1, 1), at(0));
        let round = allowance.take().expect("there is one");
        allowance.give_back(round);
        assert_eq!((allowance.take(), allowance.left()), (Some(round), 0));
        assert!(allowance.is_of(round));
        allowance.set(None, at(1));
        allowance.give_back(round);
        assert_eq!(allowance.left(), 0, "it was withdrawn");
        assert!(!allowance.is_of(round));
        allowance.set(quota(2, 1), at(1));
        allowance.give_back(round);
        assert_eq!(allowance.left(), 1, "another round asks for so many of its own");
        assert!(allowance.is_of(2) && !allowance.is_of(round));
    }
}
