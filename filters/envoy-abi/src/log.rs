//! Envoy's log (component `dynamic_modules`).

use crate::sys::{self, Buffer};

/// The severity of a line; the numbers are Envoy's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Level {
    Trace = 0,
    Debug = 1,
    Info = 2,
    Warn = 3,
    Error = 4,
    Critical = 5,
}

/// Whether lines of this level are logged. Check this before formatting a costly line.
#[must_use]
pub fn enabled(level: Level) -> bool {
    // SAFETY: takes a number; may be called on any thread.
    unsafe { sys::log_enabled(level as u32) }
}

/// Writes one message. `file`, `line`: where in the source it is.
pub fn write(level: Level, text: &str, file: &str, line: u32) {
    // SAFETY: Envoy copies both texts before it returns.
    unsafe {
        sys::log(level as u32, Buffer::of(text.as_bytes()), Buffer::of(file.as_bytes()), line);
    }
}

/// `log!(Warn, "the file {path} is gone")`; formats the line only if it is logged.
#[macro_export]
macro_rules! log {
    ($level:ident, $($text:tt)+) => {
        if $crate::log::enabled($crate::log::Level::$level) {
            $crate::log::write($crate::log::Level::$level, &format!($($text)+), file!(), line!());
        }
    };
}
