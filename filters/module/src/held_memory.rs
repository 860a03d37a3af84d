//! The memory of the long requests that sessions hold for the rules: those that are incomplete, and those that wait.

use std::cell::RefCell;
use std::sync::{Arc, LazyLock};

use migration::budget::{Budget, Reservation};

/// Shorter requests are not counted: long ones do not get them refused.
const MIN_COUNTED_BYTES: usize = 1 << 20;

static BUDGET: LazyLock<Arc<Budget>> = LazyLock::new(|| Budget::new(256 << 20));

/// Sets how many bytes all sessions may hold.
pub(crate) fn set_limit(bytes: usize) {
    BUDGET.set_limit(bytes);
}

pub(crate) fn limit() -> usize {
    BUDGET.limit()
}

/// What one session holds.
#[derive(Default)]
pub(crate) struct HeldMemory(RefCell<Option<Reservation>>);

impl HeldMemory {
    /// The session holds this many bytes of an incomplete request, or none. False: all sessions together hold too much.
    pub(crate) fn try_set(&self, bytes: usize) -> bool {
        let mut reservation = self.0.borrow_mut();
        if bytes < MIN_COUNTED_BYTES {
            *reservation = None;
            return true;
        }
        let reservation = reservation.get_or_insert_with(|| BUDGET.reservation());
        reservation.shrink_to(bytes);
        reservation.grow(bytes - reservation.bytes())
    }

    /// The session holds this many bytes of a whole request.
    pub(crate) fn set(&self, bytes: usize) {
        if !self.try_set(bytes)
            && let Some(reservation) = &mut *self.0.borrow_mut()
        {
            reservation.grow_anyway(bytes - reservation.bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn long_requests_share_the_limit() {
        set_limit(10 * MIB);
        let [one, two] = [HeldMemory::default(), HeldMemory::default()];
        assert!(one.try_set(6 * MIB) && two.try_set(4 * MIB));
        assert!(!one.try_set(7 * MIB) && two.try_set(MIB - 1) && one.try_set(7 * MIB));
        two.set(8 * MIB);
        assert!(!one.try_set(8 * MIB) && one.try_set(2 * MIB) && !one.try_set(3 * MIB));
        drop(two);
        assert!(one.try_set(10 * MIB) && one.try_set(0));
        assert_eq!(BUDGET.used(), 0);
    }
}
