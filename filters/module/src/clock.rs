//! The clock of everything that waits: it never goes back.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Time since the first call.
pub(crate) fn now() -> Duration {
    START.elapsed()
}
