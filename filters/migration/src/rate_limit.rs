//! Limits how many sessions migrate at a time, and how soon a failed migration is retried.

use std::time::Duration;

/// The migration rate of one Envoy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RateLimit {
    /// Maximum migrations that start per second.
    pub per_second: f64,
    /// Maximum migrations that run at the same time.
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
    /// Migrations that may start now. At most a tenth of those per second (but 1), so that no burst follows a pause.
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

    /// Returns true if another migration may start. Then [`Self::release`] must follow.
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

    /// Counts a migration that starts regardless of the limit. [`Self::release`] must follow.
    pub fn acquire_unconditionally(&mut self) {
        self.active += 1;
    }

    /// A migration has ended.
    pub fn release(&mut self) {
        self.active = self.active.saturating_sub(1);
    }

    /// The time until the rate allows another migration. Ignores the limit of concurrent migrations.
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

/// A backoff from `FIRST` to `LONGEST` seconds that doubles with each failure.
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

/// The backoff of a session that could not migrate.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MigrationBackoff {
    backoff: ExponentialBackoff<1, 30>,
    /// The endpoint of the last failure.
    failed_endpoint: Option<String>,
}

impl MigrationBackoff {
    /// An attempt has failed because of `target`; None: because of the session itself.
    pub fn record_failure(&mut self, target: Option<&str>, now: Duration) {
        self.failed_endpoint = target.map(str::to_owned);
        self.backoff.record_failure(now);
    }

    /// When the session may be retried.
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

/// The backoff of a session whose states were too large. An export costs its node as much as a migration. So it is not
/// repeated before the session has run another statement, which may have made the states smaller.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExportBackoff {
    backoff: ExponentialBackoff<30, 600>,
    /// The session has run no statement since the failure.
    is_unchanged: bool,
}

impl ExportBackoff {
    /// The states were too large.
    pub fn record_failure(&mut self, now: Duration) {
        self.backoff.record_failure(now);
        self.is_unchanged = true;
    }

    /// The session runs a statement.
    pub const fn on_statement(&mut self) {
        self.is_unchanged = false;
    }

    /// Whether the states may be exported now.
    #[must_use]
    pub fn may_retry(&self, now: Duration) -> bool {
        self.retry_at().is_some_and(|until| now >= until)
    }

    /// When the states may be exported; None: not before the session runs a statement.
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
    fn limiter_enforces_the_rate_without_bursts() {
        let mut limiter = Limiter::new(RateLimit { per_second: 100.0, max_concurrent: 1000 }, at(0));
        let mut started = 0;
        for now in 0..1000 {
            while limiter.try_acquire(at(now)) {
                started += 1;
            }
        }
        assert!((100..=110).contains(&started), "{started}");
        // A long pause gives no burst.
        let burst = std::iter::repeat_with(|| limiter.try_acquire(at(60_000))).take_while(|admitted| *admitted).count();
        assert_eq!(burst, 10);
        assert_eq!(limiter.time_until_token(), at(10));
    }

    #[test]
    fn limiter_enforces_max_concurrent() {
        let mut limiter = Limiter::new(RateLimit { per_second: 1e6, max_concurrent: 2 }, at(0));
        assert!(limiter.try_acquire(at(0)) && limiter.try_acquire(at(0)) && !limiter.try_acquire(at(1)));
        limiter.release();
        assert!(limiter.try_acquire(at(1)) && !limiter.try_acquire(at(1)));
    }

    #[test]
    fn clock_that_goes_back_gives_no_tokens() {
        let mut limiter = Limiter::new(RateLimit { per_second: 1.0, max_concurrent: 10 }, at(5000));
        assert!(limiter.try_acquire(at(5000)));
        assert!(!limiter.try_acquire(at(4000)) && !limiter.try_acquire(at(5500)));
        assert!(limiter.try_acquire(at(6000)));
        limiter.set_limit(RateLimit { per_second: 0.0, max_concurrent: 10 });
        assert!(!limiter.try_acquire(at(9000)), "a rate of 0 admits no migration");
        assert_eq!(limiter.time_until_token(), Duration::MAX);
    }

    #[test]
    fn backoff_doubles_with_each_failure_up_to_30_seconds() {
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
    fn export_backoff_doubles_and_needs_a_statement() {
        let mut backoff = ExportBackoff::default();
        assert!(backoff.may_retry(at(0)));
        let mut waits = Vec::new();
        for _ in 0..7 {
            backoff.record_failure(at(0));
            assert!(!backoff.may_retry(at(3_600_000)) && backoff.retry_at().is_none(), "no statement has run since");
            backoff.on_statement();
            waits.extend(backoff.retry_at().map(|until| until.as_secs()));
        }
        assert_eq!(waits, [30, 60, 120, 240, 480, 600, 600]);
        assert!(!backoff.may_retry(at(599_999)) && backoff.may_retry(at(600_000)));
    }
}
