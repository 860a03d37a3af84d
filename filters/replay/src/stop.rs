//! The request to end the replay, because of a signal or a failure. Threads that sleep wake up at once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long statements that are running may take to end, once the replay is to end.
const GRACE: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(crate) struct Stop {
    /// Also in `since`; this costs less to read.
    is_requested: AtomicBool,
    since: Mutex<Option<Instant>>,
    changed: Condvar,
}

impl Stop {
    pub(crate) fn request(&self) {
        self.lock().get_or_insert_with(Instant::now);
        self.is_requested.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    pub(crate) fn is_requested(&self) -> bool {
        self.is_requested.load(Ordering::Acquire)
    }

    /// Whether running statements must not be waited for any longer.
    pub(crate) fn is_overdue(&self) -> bool {
        self.lock().is_some_and(|since| since.elapsed() >= GRACE)
    }

    /// Waits until that time. Returns false if the replay is to end.
    pub(crate) fn sleep_until(&self, due: Instant) -> bool {
        let mut since = self.lock();
        loop {
            if since.is_some() {
                return false;
            }
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            since = self.changed.wait_timeout(since, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    #[test]
    fn sleep_ends_at_its_time_or_with_the_request() {
        let stop = Arc::new(Stop::default());
        assert!(stop.sleep_until(Instant::now()));
        let sleeper = thread::spawn({
            let stop = Arc::clone(&stop);
            move || stop.sleep_until(Instant::now() + Duration::from_secs(600))
        });
        stop.request();
        assert!(!sleeper.join().expect("no panic"));
        assert!(stop.is_requested() && !stop.is_overdue());
        assert!(!stop.sleep_until(Instant::now()));
    }
}
