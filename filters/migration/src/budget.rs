//! The memory that the states of all sessions may take up together.
//!
//! A [`Reservation`] for their bytes is made before states are allocated, and dropped with them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The memory that the states of one session, and of all sessions, may take up.
#[derive(Debug, Clone)]
pub struct MemoryLimits {
    /// Bytes of the JSON that a node exports for one session.
    pub per_session: usize,
    pub budget: Arc<Budget>,
}

impl Default for MemoryLimits {
    fn default() -> Self {
        Self { per_session: 4 << 20, budget: Budget::new(256 << 20) }
    }
}

/// The budget of one process, shared by its workers.
#[derive(Debug)]
pub struct Budget {
    limit: AtomicUsize,
    used: AtomicUsize,
    /// The part of `used` that no migration needs any more: it is retained in case a node fails.
    retained: AtomicUsize,
}

impl Budget {
    #[must_use]
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit: AtomicUsize::new(limit), used: AtomicUsize::new(0), retained: AtomicUsize::new(0) })
    }

    /// Sets another limit. What is reserved stays reserved.
    pub fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// Bytes that are reserved now.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// A reservation of no bytes, which can grow.
    #[must_use]
    pub fn reservation(self: &Arc<Self>) -> Reservation {
        Reservation { budget: Arc::clone(self), bytes: 0, is_retained: false }
    }

    fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }
}

/// Adds `bytes`, unless the sum would be more than `limit`.
fn add_within(sum: &AtomicUsize, bytes: usize, limit: usize) -> bool {
    sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |before| {
        before.checked_add(bytes).filter(|after| *after <= limit)
    })
    .is_ok()
}

/// A part of the budget. It is free again when this is dropped.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<Budget>,
    bytes: usize,
    is_retained: bool,
}

impl Reservation {
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Reserves more bytes. False: so many are not left, and nothing has changed.
    #[must_use]
    pub fn grow(&mut self, bytes: usize) -> bool {
        let grows = !self.is_retained && add_within(&self.budget.used, bytes, self.budget.limit());
        self.bytes += if grows { bytes } else { 0 };
        grows
    }

    /// Reserves more bytes whatever the limit is. For a few bytes without which a session could not go on.
    pub fn grow_anyway(&mut self, bytes: usize) {
        self.budget.used.fetch_add(bytes, Ordering::Relaxed);
        if self.is_retained {
            self.budget.retained.fetch_add(bytes, Ordering::Relaxed);
        }
        self.bytes += bytes;
    }

    /// Frees all but so many bytes.
    pub fn shrink_to(&mut self, bytes: usize) {
        let freed = self.bytes.saturating_sub(bytes);
        self.budget.used.fetch_sub(freed, Ordering::Relaxed);
        if self.is_retained {
            self.budget.retained.fetch_sub(freed, Ordering::Relaxed);
        }
        self.bytes -= freed;
    }

    /// Marks the bytes as not needed by a migration. These may take half of the budget, so that the other half is left for
    /// migrations.
    /// False: that half is full.
    #[must_use]
    pub fn retain(&mut self) -> bool {
        self.is_retained = self.is_retained || add_within(&self.budget.retained, self.bytes, self.budget.limit() / 2);
        self.is_retained
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reserved(budget: &Arc<Budget>, bytes: usize) -> Option<Reservation> {
        let mut reservation = budget.reservation();
        reservation.grow(bytes).then_some(reservation)
    }

    #[test]
    fn no_more_is_reserved_than_there_is() {
        let budget = Budget::new(100);
        let first = reserved(&budget, 60).expect("room");
        assert!(reserved(&budget, 41).is_none());
        let mut second = reserved(&budget, 40).expect("room");
        assert!(!second.grow(1));
        assert_eq!((second.bytes(), budget.used()), (40, 100));
        drop(first);
        assert!(second.grow(60) && !second.grow(1));
        assert!(!second.grow(usize::MAX), "no overflow");
        drop(second);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_reservation_shrinks_and_grows_beyond_the_limit_where_it_must() {
        let budget = Budget::new(50);
        let mut one = reserved(&budget, 50).expect("room");
        one.shrink_to(20);
        one.shrink_to(30);
        assert_eq!((one.bytes(), budget.used()), (20, 20));
        one.grow_anyway(35);
        assert_eq!((one.bytes(), budget.used()), (55, 55));
        assert!(reserved(&budget, 1).is_none() && reserved(&budget, 0).is_none());
    }

    #[test]
    fn kept_states_leave_half_of_it_to_moves() {
        let budget = Budget::new(100);
        let mut kept = reserved(&budget, 30).expect("room");
        assert!(kept.retain() && kept.retain(), "the second time nothing changes");
        let mut more = reserved(&budget, 21).expect("room");
        assert!(!more.retain());
        assert!(!kept.grow(1), "what is kept does not grow");
        drop(more);
        let mut fits = reserved(&budget, 20).expect("room");
        assert!(fits.retain());
        let moving = reserved(&budget, 50).expect("the other half");
        drop((kept, fits));
        assert_eq!(budget.used(), 50);
        let mut again = reserved(&budget, 50).expect("room");
        assert!(again.retain(), "the half is free again");
        drop((moving, again));
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_lower_limit_frees_nothing_and_admits_nothing_more() {
        let budget = Budget::new(100);
        let _one = reserved(&budget, 80).expect("room");
        budget.set_limit(50);
        assert_eq!(budget.used(), 80);
        assert!(reserved(&budget, 1).is_none());
    }

    #[test]
    fn threads_that_race_get_no_more_than_there_is() {
        let budget = Budget::new(1000);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 0..5000 {
                        let mut held = Vec::new();
                        while let Some(mut one) = reserved(&budget, 7) {
                            if round % 2 == 0 {
                                let _kept = one.retain();
                            }
                            held.push(one);
                            if held.len() > 50 {
                                break;
                            }
                        }
                        assert!(budget.used() <= 1000);
                    }
                });
            }
        });
        assert_eq!((budget.used(), budget.retained.load(Ordering::Relaxed)), (0, 0));
    }
}
