//! When events are due at a fixed rate, independent of the results of earlier events.

use std::time::{Duration, Instant};

#[derive(Debug)]
pub(crate) struct Schedule {
    start: Instant,
    /// Per second.
    rate: f64,
    taken: u64,
}

impl Schedule {
    pub(crate) fn new(start: Instant, rate: f64) -> Self {
        Self { start, rate, taken: 0 }
    }

    /// When the next event is due.
    pub(crate) fn next(&self) -> Instant {
        self.start + Duration::from_secs_f64(self.taken as f64 / self.rate)
    }

    /// Takes the next event if it is due by `now`, and returns when it was due.
    pub(crate) fn take(&mut self, now: Instant) -> Option<Instant> {
        let due = self.next();
        (due <= now).then(|| {
            self.taken += 1;
            due
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_caller_gets_all_events_that_were_due() {
        let start = Instant::now();
        let mut schedule = Schedule::new(start, 1000.0);
        let later = start + Duration::from_micros(2500);
        let taken: Vec<_> = std::iter::from_fn(|| schedule.take(later)).collect();
        assert_eq!(taken, [0, 1, 2].map(|ms| start + Duration::from_millis(ms)));
        assert_eq!(schedule.next(), start + Duration::from_millis(3));
    }

    #[test]
    fn rounding_errors_do_not_accumulate() {
        let start = Instant::now();
        let mut schedule = Schedule::new(start, 6000.0);
        let hour = start + Duration::from_secs(3600);
        let count = std::iter::from_fn(|| schedule.take(hour)).count();
        assert!((21_600_000..=21_600_001).contains(&count), "{count}");
    }
}
