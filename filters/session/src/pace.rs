//! How many sessions move at a time, and when one that could not move is tried again.

use std::time::Duration;

/// How fast sessions may leave, for one Envoy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// Sessions that begin to move in a second.
    pub per_second: f64,
    /// Sessions that are moving at the same time.
    pub at_once: usize,
}

impl Default for Pace {
    fn default() -> Self {
        Self { per_second: 500.0, at_once: 64 }
    }
}

/// Keeps to a pace. Shared by all workers, behind a lock.
#[derive(Debug)]
pub struct Gate {
    pace: Pace,
    /// Sessions that may begin now; a tenth of a second's worth at most, so that a pause gives no burst.
    tokens: f64,
    filled: Duration,
    moving: usize,
}

impl Gate {
    #[must_use]
    pub fn new(pace: Pace, now: Duration) -> Self {
        Self { pace, tokens: Self::most(pace), filled: now, moving: 0 }
    }

    fn most(pace: Pace) -> f64 {
        (pace.per_second / 10.0).max(1.0)
    }

    /// Keeps to another pace from now on. Those that are moving go on.
    pub fn set_pace(&mut self, pace: Pace) {
        self.pace = pace;
        self.tokens = self.tokens.min(Self::most(pace));
    }

    /// Whether one more may begin now; [`Self::ended`] must follow then.
    pub fn admits(&mut self, now: Duration) -> bool {
        let passed = now.saturating_sub(self.filled).as_secs_f64();
        self.filled = self.filled.max(now);
        self.tokens = (self.tokens + passed * self.pace.per_second).min(Self::most(self.pace));
        if self.pace.per_second <= 0.0 || self.tokens < 1.0 || self.moving >= self.pace.at_once {
            return false;
        }
        self.tokens -= 1.0;
        self.moving += 1;
        true
    }

    /// One begins that cannot wait; [`Self::ended`] must follow.
    pub fn forced(&mut self) {
        self.moving += 1;
    }

    /// One that had begun has moved, or stays.
    pub fn ended(&mut self) {
        self.moving = self.moving.saturating_sub(1);
    }

    /// How long until another may begin, if nothing but time is missing.
    #[must_use]
    pub fn wait(&self) -> Duration {
        let missing = (1.0 - self.tokens).max(0.0);
        if self.pace.per_second > 0.0 {
            Duration::try_from_secs_f64(missing / self.pace.per_second).unwrap_or(Duration::MAX)
        } else {
            Duration::MAX
        }
    }
}

/// A wait that doubles with each failure, between so many seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Backoff<const FIRST: u64, const LONGEST: u64> {
    failures: u32,
    until: Duration,
}

impl<const FIRST: u64, const LONGEST: u64> Backoff<FIRST, LONGEST> {
    fn failed(&mut self, now: Duration) {
        let wait = (FIRST << self.failures.min(5)).min(LONGEST);
        self.failures = self.failures.saturating_add(1);
        self.until = now + Duration::from_secs(wait);
    }
}

/// When a session is tried again after it could not move.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Patience {
    backoff: Backoff<1, 30>,
    /// The endpoint that failed last.
    failed: Option<String>,
}

impl Patience {
    /// An attempt has failed because of the target, or `None` when the session itself could not go.
    pub fn failed(&mut self, target: Option<&str>, now: Duration) {
        self.failed = target.map(str::to_owned);
        self.backoff.failed(now);
    }

    /// When it may be tried.
    #[must_use]
    pub const fn until(&self) -> Duration {
        self.backoff.until
    }

    /// Whether another endpoint should be preferred to this one.
    #[must_use]
    pub fn avoids(&self, endpoint: &str) -> bool {
        self.failed.as_deref() == Some(endpoint)
    }
}

/// When a session whose states were too large is exported again. An export costs its node as much as a move. So it is not
/// repeated before the session has run another statement, which may have made the states smaller, and less and less often.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExportBackoff {
    backoff: Backoff<30, 600>,
    /// The session has run nothing since.
    is_unchanged: bool,
}

impl ExportBackoff {
    /// They were too large.
    pub fn failed(&mut self, now: Duration) {
        self.backoff.failed(now);
        self.is_unchanged = true;
    }

    /// The session runs a statement.
    pub const fn statement_sent(&mut self) {
        self.is_unchanged = false;
    }

    /// Whether it may be exported now.
    #[must_use]
    pub fn is_over(&self, now: Duration) -> bool {
        self.until().is_some_and(|until| now >= until)
    }

    /// When it may be exported; None: not before it has run something.
    #[must_use]
    pub fn until(&self) -> Option<Duration> {
        (!self.is_unchanged).then_some(self.backoff.until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn no_more_begin_than_the_pace_allows() {
        let mut gate = Gate::new(Pace { per_second: 100.0, at_once: 1000 }, at(0));
        let mut begun = 0;
        for now in 0..1000 {
            while gate.admits(at(now)) {
                begun += 1;
            }
        }
        assert!((100..=110).contains(&begun), "{begun}");
        // A long pause gives no burst.
        let burst = std::iter::repeat_with(|| gate.admits(at(60_000))).take_while(|admitted| *admitted).count();
        assert_eq!(burst, 10);
        assert_eq!(gate.wait(), at(10));
    }

    #[test]
    fn no_more_move_at_once_than_may() {
        let mut gate = Gate::new(Pace { per_second: 1e6, at_once: 2 }, at(0));
        assert!(gate.admits(at(0)) && gate.admits(at(0)) && !gate.admits(at(1)));
        gate.ended();
        assert!(gate.admits(at(1)) && !gate.admits(at(1)));
    }

    #[test]
    fn a_clock_that_stands_still_admits_nobody_for_ever() {
        let mut gate = Gate::new(Pace { per_second: 1.0, at_once: 10 }, at(5000));
        assert!(gate.admits(at(5000)));
        assert!(!gate.admits(at(4000)) && !gate.admits(at(5500)));
        assert!(gate.admits(at(6000)));
        gate.set_pace(Pace { per_second: 0.0, at_once: 10 });
        assert!(!gate.admits(at(9000)), "none ever moves");
        assert_eq!(gate.wait(), Duration::MAX);
    }

    #[test]
    fn the_more_failures_the_longer_the_wait() {
        let mut patience = Patience::default();
        assert_eq!(patience.until(), at(0));
        let mut waits = Vec::new();
        for _ in 0..7 {
            patience.failed(Some("10.0.0.1:4000"), at(0));
            waits.push(patience.until().as_secs());
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 30, 30]);
        assert!(patience.avoids("10.0.0.1:4000") && !patience.avoids("10.0.0.2:4000"));
        patience.failed(None, at(0));
        assert!(!patience.avoids("10.0.0.1:4000"));
    }

    #[test]
    fn too_large_states_are_exported_less_and_less_often() {
        let mut backoff = ExportBackoff::default();
        assert!(backoff.is_over(at(0)));
        let mut waits = Vec::new();
        for _ in 0..7 {
            backoff.failed(at(0));
            assert!(!backoff.is_over(at(3_600_000)) && backoff.until().is_none(), "nothing has changed since");
            backoff.statement_sent();
            waits.extend(backoff.until().map(|until| until.as_secs()));
        }
        assert_eq!(waits, [30, 60, 120, 240, 480, 600, 600]);
        assert!(!backoff.is_over(at(599_999)) && backoff.is_over(at(600_000)));
    }
}
