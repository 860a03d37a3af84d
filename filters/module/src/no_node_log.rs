//! The log line about a login that finds no node.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::clock;
use crate::hosts::WorkerHosts;

/// The second of the last line, from 1. 0: there was none.
static LAST_SECOND: AtomicU64 = AtomicU64::new(0);

/// Logs which nodes the login has tried, and the state of all nodes. At most one line per second, because without nodes
/// all clients fail.
pub(crate) fn log_login_without_node(hosts: &WorkerHosts, tried_endpoints: &[String]) {
    if is_first_in(clock::now().as_secs() + 1) {
        let tried = if tried_endpoints.is_empty() { "none".to_owned() } else { tried_endpoints.join(", ") };
        envoy_abi::log!(Warn, "a login found no node; tried: {tried}; known: {}", hosts.describe());
    }
}

fn is_first_in(second: u64) -> bool {
    LAST_SECOND.swap(second, Ordering::Relaxed) != second
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_is_logged_per_second() {
        assert_eq!([5, 5, 6, 6, 6, 9].map(is_first_in), [true, false, true, false, false, true]);
    }
}
