//! Counters per client address, in a table of fixed size.
//!
//! The table is a count-min sketch of two rows. A hash with a random key gives each address one slot in each row.
//! Several addresses may share a slot. The lower of the two counters is exact unless other addresses use both slots;
//! then it is too high. So memory does not grow with the number of addresses, no entry has to be removed, and all
//! workers count without locks: a count takes two atomic additions on slots that other addresses rarely use.

use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};

const ROWS: usize = 2;
/// The number of slots in a row.
const SLOTS: usize = 1 << 14;

/// The slots of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AddressSlots([usize; ROWS]);

impl AddressSlots {
    /// All IPv6 addresses of a /64 network get the same slots, since one client can use all of them.
    pub(crate) fn new(address: IpAddr, hash_key: &RandomState) -> Self {
        let network = match address.to_canonical() {
            IpAddr::V4(address) => u128::from(address.to_bits()),
            IpAddr::V6(address) => address.to_bits() & !u128::from(u64::MAX),
        };
        let hash = hash_key.hash_one(network);
        Self([hash as usize % SLOTS, (hash >> 32) as usize % SLOTS])
    }
}

/// One number for each slot of each row.
struct Table([Box<[AtomicU64]>; ROWS]);

impl Table {
    fn new() -> Self {
        Self(std::array::from_fn(|_| (0..SLOTS).map(|_| AtomicU64::new(0)).collect()))
    }

    fn slots(&self, slots: AddressSlots) -> [&AtomicU64; ROWS] {
        std::array::from_fn(|row| &self.0[row][slots.0[row]])
    }
}

/// How much of a limited resource each address uses.
pub(crate) struct AddressCounters(Table);

impl AddressCounters {
    pub(crate) fn new() -> Self {
        Self(Table::new())
    }

    /// Adds `amount`, unless the counter of the address would then exceed `limit`.
    pub(crate) fn try_add(&self, slots: AddressSlots, amount: u64, limit: u64) -> bool {
        let before = self.0.slots(slots).map(|slot| slot.fetch_add(amount, Ordering::Relaxed));
        let fits = before.into_iter().min().unwrap_or_default() + amount <= limit;
        if !fits {
            self.subtract(slots, amount);
        }
        fits
    }

    /// Subtracts an amount that was added before.
    pub(crate) fn subtract(&self, slots: AddressSlots, amount: u64) {
        for slot in self.0.slots(slots) {
            slot.fetch_sub(amount, Ordering::Relaxed);
        }
    }
}

/// A limit of events per second, which allows a burst of as many events as some seconds would.
///
/// This is the generic cell rate algorithm (ITU-T I.371). Its state is the time by which all past events would have
/// happened at exactly this rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rate {
    /// Microseconds between two events.
    interval: u64,
    /// Microseconds whose events may come at once.
    burst: u64,
}

impl Rate {
    pub(crate) const BURST_SECONDS: u64 = 10;
    const BURST: u64 = Self::BURST_SECONDS * 1_000_000;

    /// None: `rate` sets no limit.
    pub(crate) fn per_second(rate: f64) -> Option<Self> {
        (rate > 0.0).then(|| Self { interval: ((1e6 / rate) as u64).clamp(1, Self::BURST), burst: Self::BURST })
    }

    /// A rate that allows the events of one second at once, but at least one event. None: `rate` sets no limit.
    pub(crate) fn with_short_burst(rate: f64) -> Option<Self> {
        const SECOND: u64 = 1_000_000;
        (rate > 0.0).then(|| {
            let interval = ((1e6 / rate) as u64).clamp(1, 3600 * SECOND);
            Self { interval, burst: interval.max(SECOND) }
        })
    }

    /// The state after an event at `now`. None: the event would exceed the limit.
    fn next(self, state: u64, now: u64) -> Option<u64> {
        let next = state.max(now) + self.interval;
        (next <= now + self.burst).then_some(next)
    }

    /// Takes back an event that was counted.
    pub(crate) fn give_back(self, state: &AtomicU64) {
        let _ = state
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |before| Some(before.saturating_sub(self.interval)));
    }

    /// Must be called when this rate replaces another one: events of a lower rate must not count for longer than they
    /// could at this rate.
    pub(crate) fn take_over(self, state: &AtomicU64, now: u64) {
        state.fetch_min(now + self.burst, Ordering::Relaxed);
    }

    /// Counts an event at `now`, in microseconds of any clock. False: the event would exceed the limit, and does not
    /// count.
    pub(crate) fn try_take(self, state: &AtomicU64, now: u64) -> bool {
        state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |before| self.next(before, now)).is_ok()
    }
}

/// The states of a [`Rate`] for each address.
pub(crate) struct AddressRates(Table);

impl AddressRates {
    pub(crate) fn new() -> Self {
        Self(Table::new())
    }

    /// Counts an event of an address at `now`, in microseconds of any clock. False: the event exceeds the limit.
    pub(crate) fn try_take(&self, slots: AddressSlots, rate: Rate, now: u64) -> bool {
        // Both slots count the event. It is enough if one allows it: other addresses may have used up the other.
        let taken = self.0.slots(slots).map(|slot| rate.try_take(slot, now));
        taken.into_iter().any(|taken| taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(key: &RandomState, address: &str) -> AddressSlots {
        AddressSlots::new(address.parse().expect("an address"), key)
    }

    #[test]
    fn addresses_of_an_ipv6_network_and_both_forms_of_an_ipv4_address_share_slots() {
        let key = RandomState::new();
        assert_eq!(slots(&key, "2001:db8::1"), slots(&key, "2001:db8::ffff:ffff:ffff:ffff"));
        assert_eq!(slots(&key, "10.1.2.3"), slots(&key, "::ffff:10.1.2.3"));
        // Two addresses may get the same slots by chance, but not all five.
        let others = ["2001:db8:0:1::1", "10.1.2.4", "2001:db8::", "10.1.2.3", "10.3.2.1"].map(|one| slots(&key, one));
        assert!(others.iter().any(|one| *one != others[0]));
    }

    #[test]
    fn count_of_an_address_does_not_exceed_its_limit() {
        let (key, counters) = (RandomState::new(), AddressCounters::new());
        let one = slots(&key, "10.0.0.1");
        for _ in 0..3 {
            assert!(counters.try_add(one, 1, 3));
        }
        assert!(!counters.try_add(one, 1, 3));
        counters.subtract(one, 1);
        assert!(!counters.try_add(one, 2, 3), "an amount is not added in part");
        assert!(counters.try_add(one, 1, 3));
    }

    #[test]
    fn addresses_at_their_limit_hardly_affect_others() {
        let (key, counters) = (RandomState::new(), AddressCounters::new());
        for attacker in 0..100_u32 {
            let attacker = AddressSlots::new(IpAddr::V4((0x0a00_0000 + attacker).into()), &key);
            while counters.try_add(attacker, 1, 10) {}
        }
        let refused = (0..1000_u32)
            .filter(|other| {
                let other = AddressSlots::new(IpAddr::V4((0xc0a8_0000 + other).into()), &key);
                let fits = counters.try_add(other, 1, 10);
                if fits {
                    counters.subtract(other, 1);
                }
                !fits
            })
            .count();
        // One address in 27,000 shares both slots with attackers.
        assert!(refused < 5, "{refused}");
    }

    #[test]
    fn subtracting_all_amounts_resets_all_slots() {
        let (key, counters) = (RandomState::new(), AddressCounters::new());
        for number in 0..50_000_u32 {
            let one = AddressSlots::new(IpAddr::V4(number.into()), &key);
            assert!(counters.try_add(one, 5, 5), "{number}");
            counters.subtract(one, 5);
        }
        assert!(counters.0.0.iter().flatten().all(|slot| slot.load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn rate_allows_a_burst_and_then_its_number_of_events_per_second() {
        let rate = Rate::per_second(20.0).expect("a limit");
        let state = AtomicU64::new(0);
        let take = |now: u64| (0..1000).filter(|_| rate.try_take(&state, now)).count() as u64;
        let start = 3_600_000_000;
        assert_eq!(take(start), 20 * Rate::BURST_SECONDS);
        assert_eq!(take(start), 0);
        assert_eq!(take(start + 1_000_000), 20);
        assert_eq!(take(start + 1_050_000), 1);
        assert_eq!(take(start + 100_000_000), 20 * Rate::BURST_SECONDS, "a pause allows no larger burst");
    }

    #[test]
    fn rate_limit_of_an_address_does_not_affect_others() {
        let (key, rates, rate) = (RandomState::new(), AddressRates::new(), Rate::per_second(0.5).expect("a limit"));
        let one = slots(&key, "10.0.0.1");
        let taken = (0..100).filter(|_| rates.try_take(one, rate, 1_000_000)).count();
        assert_eq!(taken as u64, Rate::BURST_SECONDS / 2);
        let served = (0..100_u32)
            .filter(|other| {
                rates.try_take(AddressSlots::new(IpAddr::V4((0xc0a8_0000 + other).into()), &key), rate, 1_000_000)
            })
            .count();
        assert!(served >= 99, "{served}");
    }

    #[test]
    fn rate_of_zero_or_nan_sets_no_limit() {
        assert_eq!(Rate::per_second(0.0), None);
        assert_eq!(Rate::per_second(f64::NAN), None);
        let lowest = Rate::per_second(1e-9).expect("a limit");
        assert!(lowest.try_take(&AtomicU64::new(0), 0), "even the lowest rate allows one event");
    }
}
