//! A panic must not leave a hook: unwinding into C++ ends the process, and with it every session.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs a hook, or what one does for another session; after a panic logs it and answers `fallback`, which ends the one
/// session that it happened in.
pub fn guarded<T>(hook: &str, fallback: T, run: impl FnOnce() -> T) -> T {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(value) => value,
        Err(panic) => {
            crate::log!(Critical, "a bug: {hook} panicked: {}; what it served is closed", text(&*panic));
            // Dropping the payload may panic again, and nothing could catch that.
            std::mem::forget(panic);
            fallback
        }
    }
}

fn text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("(no text)")
}
