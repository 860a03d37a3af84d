//! The course of a drain: what the supervisor does next. No I/O.

use std::fmt;
use std::time::Duration;

/// How long Envoy's admin port may fail, in a row.
const ADMIN_PATIENCE: Duration = Duration::from_secs(5);
/// How long the module may take to begin the drain. It looks ten times a second.
const BEGIN_PATIENCE: Duration = Duration::from_secs(2);
/// How long the module may take to close the last sessions.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);

/// The gauges of the module. None: Envoy has no such gauge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Gauges {
    /// 0: there is no drain; 1: not ready; 2: sessions end; 3: the last sessions are closed.
    pub(crate) drain_phase: Option<u64>,
    pub(crate) clients: Option<u64>,
}

impl Gauges {
    /// Reads Envoy's text: a line `NAME: VALUE` for each gauge.
    pub(crate) fn parse(text: &str) -> Self {
        let value = |name: &str| {
            let mut lines = text.lines().filter_map(|line| line.trim().split_once(": "));
            lines.find(|(key, _)| key.ends_with(name)).and_then(|(_, value)| value.parse().ok())
        };
        Self { drain_phase: value("drain_phase"), clients: value("clients") }
    }
}

/// Why Envoy is stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StopReason {
    /// All clients have left.
    Drained,
    /// The timeout of the drain has passed.
    ClientsLeft(u64),
    /// A second signal has come.
    Forced,
    /// Envoy has no module of Tidevoy, or it does not begin to drain.
    NotDrainable,
    /// The admin port fails with this error.
    AdminFails(String),
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Drained => write!(f, "stopping Envoy: no client is left"),
            Self::ClientsLeft(clients) => write!(f, "stopping Envoy: it did not close the last {clients} clients"),
            Self::Forced => write!(f, "stopping Envoy at once: a second signal has come"),
            Self::NotDrainable => write!(f, "stopping Envoy at once: it has no module of Tidevoy that can drain it"),
            Self::AdminFails(error) => write!(f, "stopping Envoy at once: {error}"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    Wait,
    CloseListeners,
    Stop(StopReason),
}

/// A drain. All times are since the signal to stop.
#[derive(Debug, Default)]
pub(crate) struct Drain {
    requested_at: Option<Duration>,
    has_closed_listeners: bool,
    failing_since: Option<Duration>,
    closing_since: Option<Duration>,
}

impl Drain {
    /// Whether the module was asked to drain Envoy.
    pub(crate) fn is_requested(&self) -> bool {
        self.requested_at.is_some()
    }

    /// The module was asked to drain Envoy.
    pub(crate) fn on_requested(&mut self, now: Duration) {
        self.requested_at = Some(now);
    }

    /// The admin port has done what it was asked.
    pub(crate) fn on_success(&mut self) {
        self.failing_since = None;
    }

    /// The admin port has failed.
    pub(crate) fn on_failure(&mut self, now: Duration, error: String) -> Action {
        let since = *self.failing_since.get_or_insert(now);
        if now >= since + ADMIN_PATIENCE { Action::Stop(StopReason::AdminFails(error)) } else { Action::Wait }
    }

    /// Envoy has closed the ports for clients.
    pub(crate) fn on_listeners_closed(&mut self) {
        self.has_closed_listeners = true;
    }

    /// The admin port has returned the gauges.
    pub(crate) fn on_gauges(&mut self, now: Duration, gauges: Gauges) -> Action {
        let has_begun_late = self.requested_at.is_some_and(|at| now >= at + BEGIN_PATIENCE);
        let clients = gauges.clients.unwrap_or(0);
        match gauges.drain_phase {
            None | Some(0) if has_begun_late => Action::Stop(StopReason::NotDrainable),
            None | Some(0 | 1) => Action::Wait,
            Some(_) if !self.has_closed_listeners => Action::CloseListeners,
            Some(_) if clients == 0 => Action::Stop(StopReason::Drained),
            Some(2) => Action::Wait,
            Some(_) => {
                let since = *self.closing_since.get_or_insert(now);
                let is_over = now >= since + CLOSE_PATIENCE;
                if is_over { Action::Stop(StopReason::ClientsLeft(clients)) } else { Action::Wait }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn gauges(drain_phase: u64, clients: u64) -> Gauges {
        Gauges { drain_phase: Some(drain_phase), clients: Some(clients) }
    }

    #[test]
    fn gauges_are_read_from_envoys_text() {
        assert_eq!(Gauges::parse("tidevoy.clients: 17\ntidevoy.drain_phase: 2\n"), gauges(2, 17));
        assert_eq!(Gauges::parse(""), Gauges::default());
        assert_eq!(Gauges::parse("tidevoy.clients: many\n"), Gauges::default());
    }

    #[test]
    fn envoy_is_stopped_when_the_last_client_has_left() {
        let mut drain = Drain::default();
        assert_eq!(drain.on_gauges(Duration::ZERO, gauges(0, 3)), Action::Wait);
        assert_eq!(drain.on_gauges(SECOND, gauges(1, 0)), Action::Wait, "new clients are still served");
        assert_eq!(drain.on_gauges(30 * SECOND, gauges(2, 3)), Action::CloseListeners);
        assert_eq!(drain.on_gauges(30 * SECOND, gauges(2, 0)), Action::CloseListeners, "the first attempt has failed");
        drain.on_listeners_closed();
        assert_eq!(drain.on_gauges(31 * SECOND, gauges(2, 3)), Action::Wait);
        assert_eq!(drain.on_gauges(32 * SECOND, gauges(2, 0)), Action::Stop(StopReason::Drained));
    }

    #[test]
    fn last_clients_have_a_limited_time_to_close() {
        let mut drain = Drain::default();
        drain.on_listeners_closed();
        assert_eq!(drain.on_gauges(60 * SECOND, gauges(3, 2)), Action::Wait);
        assert_eq!(drain.on_gauges(64 * SECOND, gauges(3, 1)), Action::Wait);
        assert_eq!(drain.on_gauges(65 * SECOND, gauges(3, 1)), Action::Stop(StopReason::ClientsLeft(1)));
    }

    #[test]
    fn envoy_that_cannot_drain_is_stopped_soon() {
        for without in [Gauges::default(), gauges(0, 0)] {
            let mut drain = Drain::default();
            drain.on_requested(SECOND);
            assert_eq!(drain.on_gauges(2 * SECOND, without), Action::Wait);
            assert_eq!(drain.on_gauges(3 * SECOND, without), Action::Stop(StopReason::NotDrainable));
        }
    }

    #[test]
    fn admin_port_may_fail_for_a_while() {
        let mut drain = Drain::default();
        let fail = |drain: &mut Drain, now| drain.on_failure(now * SECOND, "refused".to_owned());
        assert_eq!([1, 5].map(|now| fail(&mut drain, now)), [Action::Wait, Action::Wait]);
        drain.on_success();
        assert_eq!(fail(&mut drain, 7), Action::Wait, "the patience begins again");
        assert_eq!(fail(&mut drain, 12), Action::Stop(StopReason::AdminFails("refused".to_owned())));
    }
}
