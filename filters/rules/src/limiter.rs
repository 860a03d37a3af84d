//! How much of their limits statements use, in one process.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::answer::Answer;
use crate::limit::{Limit, LimitKey};
use crate::rule_set::RuleSet;

/// The highest number of users, digests and clients with limits of their own. Those above it share one for each rule.
const MAX_BUCKETS: usize = 65_536;
/// Time between two searches for what is no longer in use.
const CLEANUP_INTERVAL: Duration = Duration::from_secs(1);

/// Counts statements towards limits. All workers of a process share it; clones are the same limiter.
#[derive(Debug, Clone, Default)]
pub struct Limiter(Arc<Mutex<Usage>>);

#[derive(Debug, Default)]
struct Usage {
    buckets: HashMap<u64, Bucket>,
    cleaned_up_at: Option<Duration>,
}

/// What is used of one limit.
#[derive(Debug, Default)]
struct Bucket {
    running: u32,
    /// Until when the rate is used up by the statements so far (generic cell rate algorithm).
    used_until: Duration,
}

/// Why statements must not run now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exceeded {
    /// The index of the rule.
    pub rule: usize,
    pub answer: Answer,
    /// When it is worth to try again. None: as soon as a permit is dropped.
    pub retry_after: Option<Duration>,
    /// For how long the rule lets statements wait.
    pub wait: Duration,
}

/// The statements of one request run. They no longer do when this is dropped.
#[derive(Debug)]
pub struct Permit {
    limiter: Limiter,
    buckets: HashSet<u64>,
}

impl Limiter {
    /// Counts the statements of a request, or none of them. `now`: the time since any start.
    ///
    /// The statements of a request run one after the other. So they need one place under a limit of concurrency, and
    /// the rate must allow the first of them.
    pub fn acquire(&self, rules: &RuleSet, keys: &[LimitKey], now: Duration) -> Result<Permit, Exceeded> {
        let mut permit = Permit { limiter: self.clone(), buckets: HashSet::new() };
        if keys.is_empty() {
            return Ok(permit);
        }
        let mut usage = self.lock();
        let mut resolved = Vec::with_capacity(keys.len());
        for key in keys {
            let Some(limit) = rules.limit(key.rule) else { continue };
            let bucket = usage.find_or_share(key.bucket, limit.base, now);
            usage.check(bucket, limit, now).map_err(|(answer, retry_after)| Exceeded {
                rule: key.rule,
                answer: answer.clone(),
                retry_after,
                wait: limit.wait,
            })?;
            resolved.push((bucket, limit));
        }
        for (id, limit) in resolved {
            let bucket = usage.buckets.entry(id).or_default();
            if let Some(interval) = limit.interval {
                bucket.used_until = bucket.used_until.max(now) + interval;
            }
            if limit.concurrent < u32::MAX && permit.buckets.insert(id) {
                bucket.running += 1;
            }
        }
        drop(usage);
        Ok(permit)
    }

    fn lock(&self) -> MutexGuard<'_, Usage> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Usage {
    /// The bucket to use: a known one, a new one, or the rule's own one if there are too many.
    fn find_or_share(&mut self, bucket: u64, of_rule: u64, now: Duration) -> u64 {
        if self.buckets.contains_key(&bucket) || self.buckets.len() < MAX_BUCKETS {
            return bucket;
        }
        if self.cleaned_up_at.is_none_or(|at| now >= at + CLEANUP_INTERVAL) {
            self.cleaned_up_at = Some(now);
            self.buckets.retain(|_, bucket| bucket.running > 0 || bucket.used_until > now);
        }
        if self.buckets.len() < MAX_BUCKETS { bucket } else { of_rule }
    }

    /// Whether a statement may run. The error has the time until the rate allows it.
    fn check<'a>(&self, bucket: u64, limit: &'a Limit, now: Duration) -> Result<(), (&'a Answer, Option<Duration>)> {
        let Some(bucket) = self.buckets.get(&bucket) else { return Ok(()) };
        if bucket.running >= limit.concurrent {
            return Err((&limit.concurrency_answer, None));
        }
        let Some(interval) = limit.interval else { return Ok(()) };
        let free_at = bucket.used_until.saturating_sub(interval.mul_f64(limit.burst - 1.0));
        if free_at > now {
            return Err((&limit.rate_answer, Some(free_at - now)));
        }
        Ok(())
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.buckets.is_empty() {
            return;
        }
        let mut usage = self.limiter.lock();
        for id in &self.buckets {
            if let Some(bucket) = usage.buckets.get_mut(id) {
                bucket.running = bucket.running.saturating_sub(1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{LimitConfig, RuleConfig};

    const START: Duration = Duration::from_secs(1000);

    fn rules(per_second: Option<f64>, concurrent: Option<u32>) -> RuleSet {
        let limit = LimitConfig { per_second, concurrent, wait: 2.0, ..LimitConfig::default() };
        let config = RuleConfig { name: "r".into(), enabled: true, limit: Some(limit), ..RuleConfig::default() };
        RuleSet::new(vec![config]).expect("rules")
    }

    fn key(bucket: u64) -> LimitKey {
        LimitKey { rule: 0, bucket }
    }

    #[test]
    fn rate_allows_a_burst_of_one_second() {
        let (limiter, rules) = (Limiter::default(), rules(Some(4.0), None));
        let try_at =
            |milliseconds| limiter.acquire(&rules, &[key(1)], START + Duration::from_millis(milliseconds)).map(drop);
        assert_eq!((0..6).filter(|_| try_at(0).is_ok()).count(), 4);
        let exceeded = try_at(100).expect_err("the rate is reached");
        assert_eq!(exceeded.retry_after, Some(Duration::from_millis(150)));
        assert_eq!((exceeded.answer.code, exceeded.wait), (1226, Duration::from_secs(2)));
        assert!(exceeded.answer.message.contains("'r' allows 4 statements per second on"), "{:?}", exceeded.answer);
        assert!(try_at(250).is_ok() && try_at(250).is_err());
        assert_eq!((0..9).filter(|_| try_at(9000).is_ok()).count(), 4);
    }

    #[test]
    fn slow_rate_allows_one_statement_at_a_time() {
        let (limiter, rules) = (Limiter::default(), rules(Some(0.5), None));
        assert!(limiter.acquire(&rules, &[key(1), key(1)], START).is_ok(), "one request may have two statements");
        let exceeded = limiter.acquire(&rules, &[key(1)], START).expect_err("the rate is reached");
        assert_eq!(exceeded.retry_after, Some(Duration::from_secs(4)));
    }

    #[test]
    fn concurrent_statements_are_counted_until_the_permit_is_dropped() {
        let (limiter, rules) = (Limiter::default(), rules(None, Some(2)));
        let first = limiter.acquire(&rules, &[key(1), key(1)], START).expect("a permit");
        let second = limiter.acquire(&rules, &[key(1)], START).expect("a permit");
        let exceeded = limiter.acquire(&rules, &[key(1)], START).expect_err("two run");
        assert_eq!(exceeded.retry_after, None);
        let other = limiter.acquire(&rules, &[key(2)], START).expect("another bucket");
        drop(first);
        let third = limiter.acquire(&rules, &[key(1)], START).expect("a permit");
        drop((second, third, other));
        assert!(limiter.lock().buckets.values().all(|bucket| bucket.running == 0));
    }

    #[test]
    fn refused_request_counts_nothing() {
        let (limiter, rules) = (Limiter::default(), rules(None, Some(1)));
        let _one = limiter.acquire(&rules, &[key(1)], START).expect("a permit");
        assert!(limiter.acquire(&rules, &[key(2), key(1)], START).is_err());
        assert!(limiter.acquire(&rules, &[key(2)], START).is_ok());
    }

    #[test]
    fn memory_is_bounded() {
        let (limiter, rules) = (Limiter::default(), rules(Some(1.0), None));
        for bucket in 0..2 * MAX_BUCKETS as u64 {
            // All are in use, so those above the limit share one.
            drop(limiter.acquire(&rules, &[key(bucket)], START));
        }
        assert_eq!(limiter.lock().buckets.len(), MAX_BUCKETS + 1);
        let later = START + Duration::from_secs(10);
        assert!(limiter.acquire(&rules, &[key(1 << 40)], later).is_ok());
        assert_eq!(limiter.lock().buckets.len(), 1);
    }
}
