//! A memory limit that all sessions of a process share, such as the one for exported states.
//!
//! A [`Reservation`] is made before the memory is allocated, and dropped with it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The memory that the states of one session, and of all sessions, may take.
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
    /// The part of `used` that no migration needs any more. It is retained in case a node fails.
    retained: AtomicUsize,
}

impl Budget {
    #[must_use]
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit: AtomicUsize::new(limit), used: AtomicUsize::new(0), retained: AtomicUsize::new(0) })
    }

    /// Sets another limit. Existing reservations stay.
    pub fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// Reserved bytes.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// An empty reservation, which can grow.
    #[must_use]
    pub fn reservation(self: &Arc<Self>) -> Reservation {
        Reservation { budget: Arc::clone(self), bytes: 0, is_retained: false }
    }

    /// How many bytes may be reserved.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }
}

/// Adds `bytes`, unless the sum would exceed `limit`. Returns whether it did.
fn add_within(sum: &AtomicUsize, bytes: usize, limit: usize) -> bool {
    sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |before| {
        before.checked_add(bytes).filter(|after| *after <= limit)
    })
    .is_ok()
}

/// A part of the budget. Dropping it frees the bytes.
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

    /// Reserves more bytes. False: the budget lacks room, or the reservation is retained; nothing has changed.
    #[must_use]
    pub fn grow(&mut self, bytes: usize) -> bool {
        let grows = !self.is_retained && add_within(&self.budget.used, bytes, self.budget.limit());
        self.bytes += if grows { bytes } else { 0 };
        grows
    }

    /// Reserves more bytes regardless of the limit. For a few bytes that a session needs to continue.
    pub fn grow_anyway(&mut self, bytes: usize) {
        self.budget.used.fetch_add(bytes, Ordering::Relaxed);
        if self.is_retained {
            self.budget.retained.fetch_add(bytes, Ordering::Relaxed);
        }
        self.bytes += bytes;
    }

    /// Frees all but `bytes` bytes.
    pub fn shrink_to(&mut self, bytes: usize) {
        let freed = self.bytes.saturating_sub(bytes);
        self.budget.used.fetch_sub(freed, Ordering::Relaxed);
        if self.is_retained {
            self.budget.retained.fetch_sub(freed, Ordering::Relaxed);
        }
        self.bytes -= freed;
    }

    /// Marks the bytes as not needed by a migration. Retained bytes may take half of the budget, so that the other half
    /// is left for migrations. False: that half is full.
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
    fn reservations_never_exceed_the_limit() {
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
    fn reservation_shrinks_and_may_grow_anyway_beyond_the_limit() {
        let budget = Budget::new(50);
        let mut reservation = reserved(&budget, 50).expect("room");
        reservation.shrink_to(20);
        reservation.shrink_to(30);
        assert_eq!((reservation.bytes(), budget.used()), (20, 20));
        reservation.grow_anyway(35);
        assert_eq!((reservation.bytes(), budget.used()), (55, 55));
        assert!(reserved(&budget, 1).is_none() && reserved(&budget, 0).is_none());
    }

    #[test]
    fn retained_bytes_take_at_most_half_of_the_budget() {
        let budget = Budget::new(100);
        let mut retained = reserved(&budget, 30).expect("room");
        assert!(retained.retain() && retained.retain(), "the second time nothing changes");
        let mut more = reserved(&budget, 21).expect("room");
        assert!(!more.retain());
        assert!(!retained.grow(1), "a retained reservation does not grow");
        drop(more);
        let mut fits = reserved(&budget, 20).expect("room");
        assert!(fits.retain());
        let moving = reserved(&budget, 50).expect("the other half");
        drop((retained, fits));
        assert_eq!(budget.used(), 50);
        let mut again = reserved(&budget, 50).expect("room");
        assert!(again.retain(), "the half is free again");
        drop((moving, again));
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn lower_limit_keeps_reservations_and_rejects_new_ones() {
        let budget = Budget::new(100);
        let _reservation = reserved(&budget, 80).expect("room");
        budget.set_limit(50);
        assert_eq!(budget.used(), 80);
        assert!(reserved(&budget, 1).is_none());
    }

    #[test]
    fn concurrent_reservations_never_exceed_the_limit() {
        let budget = Budget::new(1000);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 0..5000 {
                        let mut held = Vec::new();
                        while let Some(mut reservation) = reserved(&budget, 7) {
                            if round % 2 == 0 {
                                let _is_retained = reservation.retain();
                            }
                            held.push(reservation);
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
