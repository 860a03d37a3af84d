//! How many sessions are to leave a node that stays in service, so that the load is spread evenly: the control plane says
//! so for each Envoy. An Envoy never infers that from what it sees, or all would send their sessions to the same node.
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
}

impl Allowance {
    /// What is asked for now, as one worker hears it; the others hear the same.
    pub fn set(&mut self, quota: Option<Quota>, now: Duration) {
        match quota {
            None => self.left = 0,
            Some(quota) if quota.round > self.round || quota.round < self.round && now >= self.since + LATE => {
                *self = Self { round: quota.round, since: now, left: quota.count };
            }
            Some(_) => {}
        }
    }

    /// How many sessions may still leave.
    #[must_use]
    pub const fn left(&self) -> u64 {
        self.left
    }

    /// One more leaves. False: none may.
    pub fn take(&mut self) -> bool {
        let any = self.left > 0;
        self.left -= u64::from(any);
        any
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

    #[test]
    fn a_count_is_used_up_once_a_round() {
        let mut allowance = Allowance::default();
        assert!(!allowance.take());
        let quota = |round, count| Some(Quota { round, count });
        allowance.set(quota(1, 2), at(0));
        assert!(allowance.take());
        allowance.set(quota(1, 2), at(0));
        assert!(allowance.take() && !allowance.take());
        allowance.set(quota(2, 5), at(1));
        assert_eq!(allowance.left(), 5);
        allowance.set(quota(1, 2), at(1));
        assert_eq!(allowance.left(), 5, "another worker has heard of round 2 later");
        allowance.set(None, at(1));
        allowance.set(quota(2, 5), at(1));
        assert!(!allowance.take(), "it was withdrawn");
        allowance.set(quota(1, 3), at(40));
        assert_eq!(allowance.left(), 3, "rounds begin anew");
    }
}
