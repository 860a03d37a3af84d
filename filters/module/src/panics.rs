//! A panic in code that serves one session ends this session, and not the session whose hook Envoy has called.

/// The reason in the access log for a session that was closed after a panic.
pub(crate) const PANIC_REASON: &str = "tidevoy_bug";

/// Something that serves a session, or none.
pub(crate) trait CloseAfterPanic {
    /// Closes the session, if there is one.
    fn close_after_panic(&self);
}

/// Calls `run`, and closes the session of `owner` if it panics. `what`: for the log.
pub(crate) fn run_guarded(what: &str, owner: &(impl CloseAfterPanic + ?Sized), run: impl FnOnce()) {
    let is_done = envoy_abi::guarded(what, false, || {
        run();
        true
    });
    if !is_done {
        envoy_abi::guarded("closing after a panic", (), || owner.close_after_panic());
    }
}
