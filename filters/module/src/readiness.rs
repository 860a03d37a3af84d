//! Whether this Envoy is ready for new clients. The listener for probes answers `/readyz` with it, so that a load
//! balancer in front of several Envoys sends new clients to the others.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use envoy_abi::http_filter::{Responder, Response};

use crate::envoy_drain::DrainPhase;
use crate::worker::WorkerContext;
use crate::{clock, envoy_drain, live_config};

/// Envoy's gauge that is 1 while its heap is full.
pub(crate) const HEAP_FULL_GAUGE: &str = "overload.envoy.overload_actions.stop_accepting_connections.active";
/// How long after the last probe the gauge is read. Envoy searches all of its statistics for it.
const PROBED_FOR: Duration = Duration::from_secs(600);

/// Envoy is closing its ports for clients (`POST /drain_listeners`). It never opens them again.
static HAS_CLOSED_PORTS: AtomicBool = AtomicBool::new(false);
static IS_HEAP_FULL: AtomicBool = AtomicBool::new(false);
/// When the last probe came, in seconds of `clock`, from 1. 0: there was none.
static PROBED_AT: AtomicU64 = AtomicU64::new(0);

/// Why an Envoy is not ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotReady {
    Ending,
    Operator,
    NotConfigured,
    NoNode,
    HeapFull,
}

impl NotReady {
    fn text(self) -> &'static str {
        match self {
            Self::Ending => "it is ending",
            Self::Operator => "an operator has set it to not ready (`tidevoy envoys ready` reverts this)",
            Self::NotConfigured => "no control plane has sent it a configuration yet",
            Self::NoNode => "no TiDB server is in service (`tidevoy nodes` tells why)",
            Self::HeapFull => "its memory is full (overload.max_heap_bytes)",
        }
    }
}

/// What decides about the readiness.
#[derive(Debug, Clone, Copy)]
struct Facts {
    is_ending: bool,
    is_set_not_ready: bool,
    is_configured: bool,
    has_node: bool,
    is_heap_full: bool,
}

/// The first reason that applies, the one that lasts longest first. None: ready.
fn evaluate(facts: Facts) -> Option<NotReady> {
    let reasons = [
        (facts.is_ending, NotReady::Ending),
        (facts.is_set_not_ready, NotReady::Operator),
        (!facts.is_configured, NotReady::NotConfigured),
        (!facts.has_node, NotReady::NoNode),
        (facts.is_heap_full, NotReady::HeapFull),
    ];
    reasons.into_iter().find_map(|(applies, reason)| applies.then_some(reason))
}

/// Envoy has begun to close its ports.
pub(crate) fn on_drain_started() {
    HAS_CLOSED_PORTS.store(true, Ordering::Relaxed);
}

/// Whether Envoy has begun to close its ports.
pub(crate) fn has_closed_ports() -> bool {
    HAS_CLOSED_PORTS.load(Ordering::Relaxed)
}

/// Whether a load balancer probes this Envoy, so that [`set_heap_full`] is worth its cost.
pub(crate) fn is_probed() -> bool {
    let probed_at = PROBED_AT.load(Ordering::Relaxed);
    probed_at > 0 && clock::now().as_secs() < probed_at + PROBED_FOR.as_secs()
}

pub(crate) fn set_heap_full(is_full: bool) {
    IS_HEAP_FULL.store(is_full, Ordering::Relaxed);
}

/// The answer to `/readyz`.
pub(crate) struct ReadinessResponder;

impl Responder for ReadinessResponder {
    fn respond(&self) -> Response {
        PROBED_AT.store(clock::now().as_secs() + 1, Ordering::Relaxed);
        let worker = WorkerContext::current();
        worker.apply_published();
        to_response(evaluate(Facts {
            is_ending: has_closed_ports() || envoy_drain::phase() != DrainPhase::Serving,
            is_set_not_ready: !live_config::is_ready(),
            is_configured: live_config::count() > 0,
            has_node: worker.hosts.has_open_node(),
            is_heap_full: IS_HEAP_FULL.load(Ordering::Relaxed),
        }))
    }
}

fn to_response(reason: Option<NotReady>) -> Response {
    match reason {
        None => Response { status: 200, body: "ready\n".to_owned() },
        Some(reason) => Response { status: 503, body: format!("not ready: {}\n", reason.text()) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READY: Facts =
        Facts { is_ending: false, is_set_not_ready: false, is_configured: true, has_node: true, is_heap_full: false };

    #[test]
    fn envoy_is_ready_unless_a_reason_applies() {
        assert_eq!(evaluate(READY), None);
        for (facts, reason) in [
            (Facts { is_ending: true, ..READY }, NotReady::Ending),
            (Facts { is_set_not_ready: true, ..READY }, NotReady::Operator),
            (Facts { is_configured: false, ..READY }, NotReady::NotConfigured),
            (Facts { has_node: false, ..READY }, NotReady::NoNode),
            (Facts { is_heap_full: true, ..READY }, NotReady::HeapFull),
        ] {
            assert_eq!(evaluate(facts), Some(reason));
        }
    }

    #[test]
    fn reason_that_lasts_longest_is_given() {
        let nothing_is_well = Facts {
            is_ending: true,
            is_set_not_ready: true,
            is_configured: false,
            has_node: false,
            is_heap_full: true,
        };
        assert_eq!(evaluate(nothing_is_well), Some(NotReady::Ending));
        assert_eq!(evaluate(Facts { is_ending: false, ..nothing_is_well }), Some(NotReady::Operator));
    }

    #[test]
    fn response_has_the_reason() {
        assert_eq!(to_response(None), Response { status: 200, body: "ready\n".to_owned() });
        let response = to_response(Some(NotReady::NoNode));
        assert_eq!(response.status, 503);
        assert!(response.body.starts_with("not ready: no TiDB server is in service"), "{}", response.body);
    }
}
