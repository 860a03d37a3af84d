//! The session states that were exported last. The module keeps them for a failover, in case the node fails.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use migration::state_snapshot::StateSnapshot;

use crate::deadlines::Deadline;

/// The maximum number of failover attempts before the client sends something.
const MAX_FAILOVER_ATTEMPTS: u8 = 3;

/// States are valid until the client sends something, or until their token expires.
#[derive(Default)]
pub(crate) struct KeptStates {
    snapshot: RefCell<Option<Box<(StateSnapshot, Deadline)>>>,
    failover_attempts: Cell<u8>,
}

impl KeptStates {
    /// Replaces the states. The deadline passes when their token expires.
    pub(crate) fn set(&self, snapshot: Option<(StateSnapshot, Deadline)>) {
        self.snapshot.replace(snapshot.map(Box::new));
    }

    /// Drops the states when their token has expired.
    pub(crate) fn drop_expired(&self) {
        if self.snapshot.borrow().as_ref().is_some_and(|kept| kept.1.has_passed()) {
            self.snapshot.replace(None);
        }
    }

    /// The client has sent something that may change the states, so they are dropped.
    pub(crate) fn on_client_bytes(&self) {
        self.failover_attempts.set(0);
        if self.snapshot.borrow().is_some() {
            self.snapshot.replace(None);
        }
    }

    /// Whether there are valid states.
    pub(crate) fn are_valid(&self, now: Duration) -> bool {
        self.snapshot.borrow().as_ref().is_some_and(|kept| now < kept.0.expires_at() && !kept.1.has_passed())
    }

    /// Takes the states for a failover. None: there are none, or too many attempts were made.
    pub(crate) fn take(&self, now: Duration) -> Option<StateSnapshot> {
        let (snapshot, expiry) = *self.snapshot.take()?;
        self.failover_attempts.set(self.failover_attempts.get() + 1);
        (now < snapshot.expires_at() && !expiry.has_passed() && self.failover_attempts.get() <= MAX_FAILOVER_ATTEMPTS)
            .then_some(snapshot)
    }
}
