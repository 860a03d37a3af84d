//! The monotonic clock of all deadlines and timeouts.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The time since the first call of this function.
pub(crate) fn now() -> Duration {
    START.elapsed()
}
