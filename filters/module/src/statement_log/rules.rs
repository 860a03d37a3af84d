//! Which statements are logged.

use std::time::Duration;

use crate::config::{StatementLogConfig, StatementLogFormat, seconds};

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LogRules {
    threshold: Duration,
    /// The fraction of the slow statements that is logged.
    sample: f64,
    /// Whether failed statements are all logged.
    pub(super) logs_errors: bool,
    pub(super) redacts: bool,
    pub(super) format: StatementLogFormat,
}

impl LogRules {
    pub(super) fn new(config: &StatementLogConfig) -> Self {
        Self {
            threshold: seconds(config.threshold),
            sample: config.sample,
            logs_errors: config.errors,
            redacts: config.redact,
            format: config.format,
        }
    }

    pub(super) fn threshold_microseconds(&self) -> u64 {
        u64::try_from(self.threshold.as_micros()).unwrap_or(u64::MAX)
    }

    /// Whether a statement is logged. `random`: a random number from 0 to 1, exclusively.
    pub(super) fn accept(&self, duration: Duration, is_error: bool, random: f64) -> bool {
        is_error && self.logs_errors || duration >= self.threshold && random < self.sample
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(threshold: f64, sample: f64, errors: bool) -> LogRules {
        let format = StatementLogFormat::Json;
        let (path, redact) = ("/log/statements.log".into(), true);
        let config = StatementLogConfig { path, format, threshold, sample, errors, redact, max_bytes: 0.0, keep: 0.0 };
        LogRules::new(&config)
    }

    #[test]
    fn slow_statements_are_logged_and_others_are_not() {
        let rules = rules(0.3, 1.0, false);
        assert_eq!(rules.threshold_microseconds(), 300_000);
        for (milliseconds, is_error, expected) in
            [(299, false, false), (300, false, true), (301, false, true), (299, true, false), (300, true, true)]
        {
            let duration = Duration::from_millis(milliseconds);
            assert_eq!(rules.accept(duration, is_error, 0.999), expected, "{milliseconds} {is_error}");
        }
        assert!(self::rules(0.0, 1.0, false).accept(Duration::ZERO, false, 0.999));
    }

    #[test]
    fn failed_statements_are_all_logged_if_they_are_wanted() {
        let rules = rules(0.3, 0.0, true);
        assert!(rules.accept(Duration::ZERO, true, 0.999));
        assert!(!rules.accept(Duration::MAX, false, 0.0));
    }

    #[test]
    fn fraction_of_the_slow_statements_is_logged() {
        let mut generator = fastrand::Rng::with_seed(7);
        for (sample, expected) in [(0.0, 0..=0), (0.1, 900..=1_100), (0.5, 4_850..=5_150), (1.0, 10_000..=10_000)] {
            let rules = rules(0.3, sample, false);
            let logged = (0..10_000).filter(|_| rules.accept(Duration::MAX, false, generator.f64())).count();
            assert!(expected.contains(&logged), "{sample}: {logged}");
        }
    }
}
