//! Limits for clients that have not finished their login: the number of logins, the bytes that the module keeps for
//! them, and the rate of password decryptions. Each has one limit per client address, and one for all clients of this
//! Envoy.

use std::cell::Cell;
use std::hash::RandomState;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Instant;

use ipnet::IpNet;
use mysql_proto::error::ProxyError;

use crate::address_table::{AddressCounters, AddressRates, AddressSlots, Rate};
use crate::config::{LoginLimitsConfig, limit};

/// Shared by all listeners, so that a changed listener still counts the clients of the old one.
static USAGE: LazyLock<LoginUsage> = LazyLock::new(LoginUsage::new);

/// The limits of a listener.
pub(crate) struct LoginLimits {
    logins: u64,
    logins_per_address: u64,
    bytes: u64,
    bytes_per_address: u64,
    decryptions: Option<Rate>,
    decryptions_per_address: Option<Rate>,
    /// Networks to whose addresses no limit per address applies.
    shared_addresses: Vec<IpNet>,
}

impl LoginLimits {
    pub(crate) fn new(config: &LoginLimitsConfig) -> Self {
        Self {
            logins: limit(config.max_logins),
            logins_per_address: limit(config.max_logins_per_address),
            bytes: limit(config.max_bytes),
            bytes_per_address: limit(config.max_bytes_per_address),
            decryptions: Rate::per_second(config.max_decryptions_per_second),
            decryptions_per_address: Rate::per_second(config.max_decryptions_per_second_per_address),
            shared_addresses: config.shared_addresses.clone(),
        }
    }

    fn slots(&self, address: Option<IpAddr>, hash_key: &RandomState) -> Option<AddressSlots> {
        let address = address?.to_canonical();
        let is_shared = self.shared_addresses.iter().any(|network| network.contains(&address));
        (!is_shared).then(|| AddressSlots::new(address, hash_key))
    }
}

/// What all logins of this process use.
struct LoginUsage {
    hash_key: RandomState,
    started_at: Instant,
    logins: AtomicU64,
    logins_by_address: AddressCounters,
    bytes: AtomicU64,
    bytes_by_address: AddressCounters,
    decryptions: AtomicU64,
    decryptions_by_address: AddressRates,
}

impl LoginUsage {
    fn new() -> Self {
        Self {
            hash_key: RandomState::new(),
            started_at: Instant::now(),
            logins: AtomicU64::new(0),
            logins_by_address: AddressCounters::new(),
            bytes: AtomicU64::new(0),
            bytes_by_address: AddressCounters::new(),
            decryptions: AtomicU64::new(0),
            decryptions_by_address: AddressRates::new(),
        }
    }
}

/// Adds `amount` to a total, unless it would then be more than `limit`.
fn try_add(total: &AtomicU64, amount: u64, limit: u64) -> bool {
    let increased = |value: u64| value.checked_add(amount).filter(|sum| *sum <= limit);
    total.fetch_update(Ordering::Relaxed, Ordering::Relaxed, increased).is_ok()
}

/// A login that is not finished. Dropping the slot releases what the login uses of the limits.
pub(crate) struct LoginSlot {
    limits: Arc<LoginLimits>,
    usage: &'static LoginUsage,
    /// None: no limit per address applies to the login.
    address: Option<AddressSlots>,
    bytes: Cell<u64>,
}

impl LoginSlot {
    /// # Errors
    /// The number of logins has reached a limit.
    pub(crate) fn try_acquire(limits: &Arc<LoginLimits>, address: Option<IpAddr>) -> Result<Self, ProxyError> {
        Self::try_acquire_in(&USAGE, limits, address)
    }

    fn try_acquire_in(
        usage: &'static LoginUsage,
        limits: &Arc<LoginLimits>,
        address: Option<IpAddr>,
    ) -> Result<Self, ProxyError> {
        let address = limits.slots(address, &usage.hash_key);
        if address.is_some_and(|slots| !usage.logins_by_address.try_add(slots, 1, limits.logins_per_address)) {
            return Err(ProxyError::TooManyLoginsOfAddress);
        }
        if !try_add(&usage.logins, 1, limits.logins) {
            if let Some(slots) = address {
                usage.logins_by_address.subtract(slots, 1);
            }
            return Err(ProxyError::TooManyLogins);
        }
        Ok(Self { limits: Arc::clone(limits), usage, address, bytes: Cell::new(0) })
    }

    /// Sets how many bytes the module keeps for this login.
    ///
    /// # Errors
    /// The bytes would exceed a limit. The number stays as before.
    pub(crate) fn set_bytes(&self, bytes: u64) -> Result<(), ProxyError> {
        let before = self.bytes.get();
        if bytes > before {
            let more = bytes - before;
            if self
                .address
                .is_some_and(|slots| !self.usage.bytes_by_address.try_add(slots, more, self.limits.bytes_per_address))
            {
                return Err(ProxyError::TooManyLoginsOfAddress);
            }
            if !try_add(&self.usage.bytes, more, self.limits.bytes) {
                self.subtract_bytes_of_address(more);
                return Err(ProxyError::TooManyLogins);
            }
        } else if bytes < before {
            self.subtract_bytes_of_address(before - bytes);
            self.usage.bytes.fetch_sub(before - bytes, Ordering::Relaxed);
        }
        self.bytes.set(bytes);
        Ok(())
    }

    fn subtract_bytes_of_address(&self, bytes: u64) {
        if let Some(slots) = self.address {
            self.usage.bytes_by_address.subtract(slots, bytes);
        }
    }

    /// Counts a password decryption, which the caller then carries out.
    ///
    /// # Errors
    /// The rate of decryptions has reached a limit.
    pub(crate) fn check_decryption(&self) -> Result<(), ProxyError> {
        let now = u64::try_from(self.usage.started_at.elapsed().as_micros()).unwrap_or(u64::MAX / 2);
        let of_address = self.address.zip(self.limits.decryptions_per_address);
        let is_allowed = of_address
            .is_none_or(|(slots, rate)| self.usage.decryptions_by_address.try_take(slots, rate, now))
            && self.limits.decryptions.is_none_or(|rate| rate.try_take(&self.usage.decryptions, now));
        if is_allowed { Ok(()) } else { Err(ProxyError::TooManyDecryptions) }
    }
}

impl Drop for LoginSlot {
    fn drop(&mut self) {
        let _ = self.set_bytes(0); // a decrease cannot fail
        self.usage.logins.fetch_sub(1, Ordering::Relaxed);
        if let Some(slots) = self.address {
            self.usage.logins_by_address.subtract(slots, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_LIMITS: LoginLimits = LoginLimits {
        logins: u64::MAX,
        logins_per_address: u64::MAX,
        bytes: u64::MAX,
        bytes_per_address: u64::MAX,
        decryptions: None,
        decryptions_per_address: None,
        shared_addresses: Vec::new(),
    };

    /// Logins from 10.0.0.`host`.
    struct Server {
        usage: &'static LoginUsage,
        limits: Arc<LoginLimits>,
    }

    impl Server {
        fn new(limits: LoginLimits) -> Self {
            Self { usage: Box::leak(Box::new(LoginUsage::new())), limits: Arc::new(limits) }
        }

        fn log_in(&self, host: u8) -> Result<LoginSlot, ProxyError> {
            LoginSlot::try_acquire_in(self.usage, &self.limits, Some(IpAddr::from([10, 0, 0, host])))
        }
    }

    #[test]
    fn login_limit_of_an_address_does_not_affect_others() {
        let server = Server::new(LoginLimits { logins_per_address: 2, ..NO_LIMITS });
        let logins = [server.log_in(1), server.log_in(1)].map(|login| login.expect("a login within the limits"));
        assert_eq!(server.log_in(1).err(), Some(ProxyError::TooManyLoginsOfAddress));
        assert!(server.log_in(2).is_ok());
        drop(logins);
        assert!(server.log_in(1).is_ok());
    }

    #[test]
    fn login_limit_of_all_addresses_applies_to_their_sum() {
        let server = Server::new(LoginLimits { logins: 2, logins_per_address: 2, ..NO_LIMITS });
        let logins = [server.log_in(1), server.log_in(2)].map(|login| login.expect("a login within the limits"));
        for _ in 0..5 {
            assert_eq!(server.log_in(3).err(), Some(ProxyError::TooManyLogins));
        }
        drop(logins);
        // The rejected logins have not counted for the address.
        assert!([server.log_in(3), server.log_in(3)].iter().all(Result::is_ok));
    }

    #[test]
    fn bytes_are_limited_per_address_and_in_total_and_released_by_a_drop() {
        let server = Server::new(LoginLimits { bytes: 150, bytes_per_address: 100, ..NO_LIMITS });
        let [a, b] = [server.log_in(1), server.log_in(1)].map(|login| login.expect("a login within the limits"));
        let other = server.log_in(2).expect("a login within the limits");
        assert_eq!(a.set_bytes(60), Ok(()));
        assert_eq!(b.set_bytes(41), Err(ProxyError::TooManyLoginsOfAddress));
        assert_eq!(b.set_bytes(40), Ok(()));
        assert_eq!(other.set_bytes(51), Err(ProxyError::TooManyLogins));
        assert_eq!(a.set_bytes(20), Ok(()));
        assert_eq!(other.set_bytes(90), Ok(()));
        assert_eq!(other.set_bytes(91), Err(ProxyError::TooManyLogins));
        drop((a, b, other));
        assert_eq!(server.log_in(2).expect("a login within the limits").set_bytes(100), Ok(()));
        assert_eq!(server.usage.bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn decryptions_are_rate_limited_per_address_and_in_total() {
        let per_address = Rate::per_second(0.2).expect("a limit");
        let server = Server::new(LoginLimits {
            decryptions: Rate::per_second(0.3),
            decryptions_per_address: Some(per_address),
            ..NO_LIMITS
        });
        let count =
            |host| (0..50).filter(|_| server.log_in(host).is_ok_and(|one| one.check_decryption().is_ok())).count();
        assert_eq!((count(1), count(2), count(3)), (2, 1, 0));
    }

    #[test]
    fn shared_addresses_have_no_limit_per_address() {
        let shared_addresses = vec!["10.0.0.0/30".parse().expect("a network")];
        let server = Server::new(LoginLimits { logins_per_address: 1, logins: 4, shared_addresses, ..NO_LIMITS });
        let _logins = [1, 1, 1].map(|host| server.log_in(host).expect("no limit"));
        let _other = server.log_in(9).expect("a login within the limits");
        assert_eq!(server.log_in(9).err(), Some(ProxyError::TooManyLoginsOfAddress));
        assert_eq!(server.log_in(1).err(), Some(ProxyError::TooManyLogins));
    }

    #[test]
    fn limits_of_zero_allow_everything() {
        let config = LoginLimitsConfig {
            max_logins: 0.0,
            max_logins_per_address: 0.0,
            max_bytes: 0.0,
            max_bytes_per_address: 0.0,
            max_decryptions_per_second: 0.0,
            max_decryptions_per_second_per_address: 0.0,
            shared_addresses: Vec::new(),
        };
        let server = Server::new(LoginLimits::new(&config));
        let logins: Vec<_> = (0..100).map(|_| server.log_in(1).expect("no limit")).collect();
        assert!(logins.iter().all(|login| login.set_bytes(1 << 40).is_ok() && login.check_decryption().is_ok()));
    }
}
