//! Limits how many statements run at the same time, whatever the number of connections.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::stop::Stop;

const STOP_INTERVAL: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub(crate) struct Running {
    max: usize,
    count: Mutex<usize>,
    ended: Condvar,
}

impl Running {
    /// `max`: None is no limit.
    pub(crate) fn new(max: Option<u32>) -> Self {
        let max = max.map_or(usize::MAX, |max| max as usize);
        Self { max, count: Mutex::default(), ended: Condvar::new() }
    }

    /// Waits until another statement may run, which it does until the permit is dropped. None: the replay is to end.
    pub(crate) fn begin(&self, stop: &Stop) -> Option<Permit<'_>> {
        let mut count = self.lock();
        while *count >= self.max {
            if stop.is_requested() {
                return None;
            }
            count = self.ended.wait_timeout(count, STOP_INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
        }
        *count += 1;
        Some(Permit(self))
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) struct Permit<'a>(&'a Running);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        *self.0.lock() -= 1;
        self.0.ended.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn no_more_run_than_allowed_and_all_have_their_turn() {
        let (running, stop) = (Running::new(Some(2)), Stop::default());
        let (now, most, done) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let permit = running.begin(&stop);
                        most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        std::thread::yield_now();
                        now.fetch_sub(1, Ordering::SeqCst);
                        done.fetch_add(usize::from(permit.is_some()), Ordering::SeqCst);
                    }
                });
            }
        });
        assert!(most.into_inner() <= 2);
        assert_eq!(done.into_inner(), 800);
    }

    #[test]
    fn end_of_the_replay_ends_the_wait() {
        let (running, stop) = (Running::new(Some(1)), Stop::default());
        let permit = running.begin(&stop);
        stop.request();
        assert!(permit.is_some() && running.begin(&stop).is_none());
        assert!(Running::new(None).begin(&stop).is_some());
    }
}
