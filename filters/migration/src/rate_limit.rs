//! How many sessions migrate at a time, and when a session that could not migrate is tried again.

use std::time::Duration;

/// How fast sessions may migrate, for one Envoy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RateLimit {
    /// Migrations that may start in a second.
    pub per_second: f64,
    /// Migrations that may run at the same time.
    pub max_concurrent: usize,
}

impl Default for RateLimit {
    fn default() -> Self {
        Self { per_second: 500.0, max_concurrent: 64 }
    }
}

/// Enforces a [`RateLimit`]. Shared by all workers, behind a lock.
#[derive(Debug)]
pub struct Limiter {
    limit: RateLimit,
    /// Migrations that may start now: a tenth of a second's worth at most, so that a pause gives no burst.
    tokens: f64,
    refilled_at: Duration,
    active: usize,
}

impl Limiter {
    #[must_use]
    pub fn new(limit: RateLimit, now: Duration) -> Self {
        Self { limit, tokens: Self::max_burst(limit), refilled_at: now, active: 0 }
    }

    fn max_burst(limit: RateLimit) -> f64 {
        (limit.per_second / 10.0).max(1.0)
    }

    /// Sets another limit. Running migrations continue.
    pub fn set_limit(&mut self, limit: RateLimit) {
        self.limit = limit;
        self.tokens = self.tokens.min(Self::max_burst(limit));
    }

    /// True: one more migration starts, and [`Self::release`] must follow.
    pub fn try_acquire(&mut self, now: Duration) -> bool {
        let passed = now.saturating_sub(self.refilled_at).as_secs_f64();
        self.refilled_at = self.refilled_at.max(now);
        self.tokens = (self.tokens + passed * self.limit.per_second).min(Self::max_burst(self.limit));
        if self.limit.per_second <= 0.0 || self.tokens < 1.0 || self.active >= self.limit.max_concurrent {
            return false;
        }
        self.tokens -= 1.0;
        self.active += 1;
        true
    }

    /// A migration starts that cannot wait; [`Self::release`] must follow.
    pub fn acquire_unconditionally(&mut self) {
        self.active += 1;
    }

    /// A migration has ended.
    pub fn release(&mut self) {
        self.active = self.active.saturating_sub(1);
    }

    /// The time until another one may start, unless too many are running.
    #[must_use]
    pub fn time_until_token(&self) -> Duration {
        let missing = (1.0 - self.tokens).max(0.0);
        if self.limit.per_second > 0.0 {
            Duration::try_from_secs_f64(missing / self.limit.per_second).unwrap_or(Duration::MAX)
        } else {
            Duration::MAX
        }
    }
}

/// A wait that doubles with each failure, between so many seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct ExponentialBackoff<const FIRST: u64, const LONGEST: u64> {
    failures: u32,
    retry_at: Duration,
}

impl<const FIRST: u64, const LONGEST: u64> ExponentialBackoff<FIRST, LONGEST> {
    fn record_failure(&mut self, now: Duration) {
        let wait = (FIRST << self.failures.min(5)).min(LONGEST);
        self.failures = self.failures.saturating_add(1);
        self.retry_at = now + Duration::from_secs(wait);
    }
}

/// When a session is tried again after it could not migrate.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MigrationBackoff {
    backoff: ExponentialBackoff<1, 30>,
    /// The endpoint that failed last.
    failed_endpoint: Option<String>,
}

impl MigrationBackoff {
    /// An attempt has failed because of `target`. None: the session itself could not migrate.
    pub fn record_failure(&mut self, target: Option<&str>, now: Duration) {
        self.failed_endpoint = target.map(str::to_owned);
        self.backoff.record_failure(now);
    }

    /// When the session may be tried again.
    #[must_use]
    pub const fn retry_at(&self) -> Duration {
        self.backoff.retry_at
    }

    /// Whether the last attempt failed at this endpoint, so that another one is preferred.
    #[must_use]
    pub fn has_failed_at(&self, endpoint: &str) -> bool {
        self.failed_endpoint.as_deref() == Some(endpoint)
    }
}

/// When a session whose states were too large is exported again. An export costs its node as much as a migration. So it is not
/// repeated before the session has run another statement, which may have made the states smaller, and less and less often.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExportBackoff {
    backoff: ExponentialBackoff<30, 600>,
    /// The session has run nothing since.
    is_unchanged: bool,
}

impl ExportBackoff {
    /// They were too large.
    pub fn record_failure(&mut self, now: Duration) {
        self.backoff.record_failure(now);
        self.is_unchanged = true;
    }

    /// The session runs a statement.
    pub const fn on_statement(&mut self) {
        self.is_unchanged = false;
    }

    /// Whether it may be exported now.
    #[must_use]
    pub fn may_retry(&self, now: Duration) -> bool {
        self.retry_at().is_some_and(|until| now >= until)
    }

    /// When it may be exported; None: not before it has run something.
    #[must_use]
    pub fn retry_at(&self) -> Option<Duration> {
        (!self.is_unchanged).then_some(self.backoff.retry_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn no_more_begin_than_the_limit_allows() {
        let mut limiter = Limiter::new(RateLimit { per_second: 100.0, max_concurrent: 1000 }, at(0));
        let mut begun = 0;
        for now in 0..1000 {
            while limiter.try_acquire(at(now)) {
                begun += 1;
            }
        }
        assert!((100..=110).contains(&begun), "{begun}");
        // A long pause gives no burst.
        let burst = std::iter::repeat_with(|| limiter.try_acquire(at(60_000))).take_while(|admitted| *admitted).count();
        assert_eq!(burst, 10);
        assert_eq!(limiter.time_until_token(), at(10));
    }

    #[test]
    fn no_more_migrate_at_once_than_may() {
        let mut limiter = Limiter::new(RateLimit { per_second: 1e6, max_concurrent: 2 }, at(0));
        assert!(limiter.try_acquire(at(0)) && limiter.try_acquire(at(0)) && !limiter.try_acquire(at(1)));
        limiter.release();
        assert!(limiter.try_acquire(at(1)) && !limiter.try_acquire(at(1)));
    }

    #[test]
    fn a_clock_that_stands_still_admits_nobody() {
        let mut limiter = Limiter::new(RateLimit { per_second: 1.0, max_concurrent: 10 }, at(5000));
        assert!(limiter.try_acquire(at(5000)));
        assert!(!limiter.try_acquire(at(4000)) && !limiter.try_acquire(at(5500)));
        assert!(limiter.try_acquire(at(6000)));
        limiter.set_limit(RateLimit { per_second: 0.0, max_concurrent: 10 });
        assert!(!limiter.try_acquire(at(9000)), "none ever moves");
        assert_eq!(limiter.time_until_token(), Duration::MAX);
    }

    #[test]
    fn the_more_failures_the_longer_the_wait() {
        let mut backoff = MigrationBackoff::default();
        assert_eq!(backoff.retry_at(), at(0));
        let mut waits = Vec::new();
        for _ in 0..7 {
            backoff.record_failure(Some("10.0.0.1:4000"), at(0));
            waits.push(backoff.retry_at().as_secs());
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 30, 30]);
        assert!(backoff.has_failed_at("10.0.0.1:4000") && !backoff.has_failed_at("10.0.0.2:4000"));
        backoff.record_failure(None, at(0));
        assert!(!backoff.has_failed_at("10.0.0.1:4000"));
    }

    #[test]
    fn too_large_states_are_exported_less_and_less_often() {
        let mut backoff = ExportBackoff::default();
        assert!(backoff.may_retry(at(0)));
        let mut waits = Vec::new();
        for _ in 0..7 {
            backoff.record_failure(at(0));
            assert!(!backoff.may_retry(at(3_600_000)) && backoff.retry_at().is_none(), "nothing has changed since");
            backoff.on_statement();
            waits.extend(backoff.retry_at().map(|until| until.as_secs()));
        }
        assert_eq!(waits, [30, 60, 120, 240, 480, 600, 600]);
        assert!(!backoff.may_retry(at(599_999)) && backoff.may_retry(at(600_000)));
    }
}
