//! Catches panics in hooks: unwinding into C++ would end the process, and every session with it.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs a hook, or a part of a hook that serves another session than the one for which Envoy called it. After a panic,
/// logs it and returns `fallback`. It is up to the caller to end the session that was served.
pub fn guarded<T>(hook: &str, fallback: T, run: impl FnOnce() -> T) -> T {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(value) => value,
        Err(panic) => {
            crate::log!(Critical, "a bug: {hook} panicked: {}", text(&*panic));
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

/// Defines hooks that do nothing. Those with a result return 0.
macro_rules! unused_hooks {
    ($( $name:ident ( $($ty:ty),* ) $(-> $result:ident)?; )*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name($(_: $ty),*) $(-> $result)? { $( 0 as $result )? }
        )*
    };
}
pub(crate) use unused_hooks;
