//! Counts what all workers share, up to a limit.

use std::sync::atomic::{AtomicU64, Ordering};

/// How many slots of one kind are taken.
pub(crate) struct Slots(AtomicU64);

/// One slot, taken as long as this value exists.
pub(crate) struct Slot(&'static Slots);

impl Slots {
    pub(crate) const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// None: `max` slots are taken.
    pub(crate) fn try_acquire(&'static self, max: u64) -> Option<Slot> {
        let increment = |taken| (taken < max).then_some(taken + 1);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, increment).ok().map(|_| Slot(self))
    }

    pub(crate) fn taken(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_of_slots_is_limited() {
        static SLOTS: Slots = Slots::new();
        let slots: Vec<_> = (0..3).map(|_| SLOTS.try_acquire(2)).collect();
        assert_eq!(slots.iter().map(Option::is_some).collect::<Vec<_>>(), [true, true, false]);
        assert_eq!(SLOTS.taken(), 2);
        drop(slots);
        assert!(SLOTS.try_acquire(1).is_some());
        assert!(SLOTS.try_acquire(0).is_none());
    }
}
