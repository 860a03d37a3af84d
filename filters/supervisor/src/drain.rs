//! The course of a drain: what the supervisor does next. No I/O.

use std::fmt;
use std::time::Duration;

/// How long Envoy's admin port may fail, in a row, until the module has been asked to drain Envoy.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// How long it may fail afterwards. The module continues meanwhile: Envoy's main thread may only be busy.
const WATCH_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the module may take to begin the drain. It checks for a request ten times a second.
const BEGIN_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the module may take to close the last sessions.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long Envoy still runs after its last client has left. The kernel may still be sending the last bytes of closed
/// connections, and they are lost if the container's network is removed before. Envoy also reports to the control plane
/// that it has ended, so that no drain of a node waits for it. By default, it reports once a second.
const LINGER: Duration = Duration::from_secs(2);

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
    /// The module has not closed these clients in time, although the drain's timeout has passed.
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

/// What the supervisor does next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    RequestDrain,
    CloseListeners,
    ReadGauges,
    Stop(StopReason),
}

/// A drain. All times are since the signal to stop.
#[derive(Debug, Default)]
pub(crate) struct Drain {
    requested_at: Option<Duration>,
    /// The module has begun to drain Envoy.
    has_begun: bool,
    gauges: Gauges,
    has_closed_listeners: bool,
    failing_since: Option<Duration>,
    closing_since: Option<Duration>,
    empty_since: Option<Duration>,
}

impl Drain {
    /// What to do next.
    pub(crate) fn next(&self, now: Duration) -> Action {
        let is_over = |since: Option<Duration>, timeout| since.is_some_and(|since| now >= since + timeout);
        let Some(requested_at) = self.requested_at else { return Action::RequestDrain };
        match self.gauges.drain_phase {
            // The request was withdrawn, but the signal to stop was not.
            Some(0) if self.has_begun => Action::RequestDrain,
            None | Some(0) if now >= requested_at + BEGIN_TIMEOUT => Action::Stop(StopReason::NotDrainable),
            None | Some(0 | 1) => Action::ReadGauges,
            Some(_) if !self.has_closed_listeners => Action::CloseListeners,
            Some(_) if is_over(self.empty_since, LINGER) => Action::Stop(StopReason::Drained),
            Some(_) if self.empty_since.is_none() && is_over(self.closing_since, CLOSE_TIMEOUT) => {
                Action::Stop(StopReason::ClientsLeft(self.gauges.clients.unwrap_or_default()))
            }
            Some(_) => Action::ReadGauges,
        }
    }

    /// The module was asked to drain Envoy.
    pub(crate) fn on_requested(&mut self, now: Duration) {
        self.failing_since = None;
        self.requested_at = Some(now);
        self.gauges = Gauges::default();
    }

    /// Envoy has closed the ports for clients.
    pub(crate) fn on_listeners_closed(&mut self) {
        self.failing_since = None;
        self.has_closed_listeners = true;
    }

    pub(crate) fn on_gauges(&mut self, now: Duration, gauges: Gauges) {
        // Otherwise a port that fails to close the listeners, but returns gauges, would never count as failing.
        if self.has_closed_listeners || gauges.drain_phase.is_none_or(|phase| phase < 2) {
            self.failing_since = None;
        }
        self.gauges = gauges;
        self.has_begun |= gauges.drain_phase.is_some_and(|phase| phase > 0);
        let since = |before: Option<Duration>, applies: bool| applies.then(|| before.unwrap_or(now));
        self.closing_since = since(self.closing_since, gauges.drain_phase == Some(3));
        self.empty_since = since(self.empty_since, gauges.clients == Some(0));
    }

    /// The admin port has failed. Some: it has failed for too long.
    pub(crate) fn on_failure(&mut self, now: Duration, error: &dyn fmt::Display) -> Option<StopReason> {
        let since = *self.failing_since.get_or_insert(now);
        let timeout = if self.requested_at.is_some() { WATCH_TIMEOUT } else { REQUEST_TIMEOUT };
        (now >= since + timeout).then(|| StopReason::AdminFails(error.to_string()))
    }

    /// How many clients Envoy had when it was last asked.
    pub(crate) fn clients(&self) -> u64 {
        self.gauges.clients.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn gauges(drain_phase: u64, clients: u64) -> Gauges {
        Gauges { drain_phase: Some(drain_phase), clients: Some(clients) }
    }

    /// A drain that was requested at the first second.
    fn requested() -> Drain {
        let mut drain = Drain::default();
        assert_eq!(drain.next(SECOND), Action::RequestDrain);
        drain.on_requested(SECOND);
        drain
    }

    fn next(drain: &mut Drain, now: u32, gauges: Gauges) -> Action {
        drain.on_gauges(now * SECOND, gauges);
        drain.next(now * SECOND)
    }

    #[test]
    fn gauges_are_read_from_envoys_text() {
        assert_eq!(Gauges::parse("tidevoy.clients: 17\ntidevoy.drain_phase: 2\n"), gauges(2, 17));
        assert_eq!(Gauges::parse(""), Gauges::default());
        assert_eq!(Gauges::parse("tidevoy.clients: many\n"), Gauges::default());
    }

    #[test]
    fn envoy_is_stopped_when_the_last_client_has_left() {
        let mut drain = requested();
        assert_eq!(next(&mut drain, 1, gauges(0, 3)), Action::ReadGauges);
        assert_eq!(next(&mut drain, 2, gauges(1, 0)), Action::ReadGauges, "new clients are still served");
        assert_eq!(next(&mut drain, 30, gauges(2, 3)), Action::CloseListeners);
        assert_eq!(next(&mut drain, 30, gauges(2, 0)), Action::CloseListeners, "the first attempt has failed");
        drain.on_listeners_closed();
        assert_eq!(next(&mut drain, 31, gauges(2, 3)), Action::ReadGauges);
        let unknown = Gauges { drain_phase: Some(2), clients: None };
        assert_eq!(next(&mut drain, 32, unknown), Action::ReadGauges);
        assert_eq!(next(&mut drain, 33, gauges(2, 0)), Action::ReadGauges, "their last bytes are on the way");
        assert_eq!(next(&mut drain, 34, gauges(2, 0)), Action::ReadGauges, "Envoy has not reported yet");
        assert_eq!(next(&mut drain, 35, gauges(2, 0)), Action::Stop(StopReason::Drained));
    }

    #[test]
    fn last_clients_have_a_limited_time_to_close() {
        let mut drain = requested();
        drain.on_listeners_closed();
        assert_eq!(next(&mut drain, 60, gauges(3, 2)), Action::ReadGauges);
        assert_eq!(next(&mut drain, 64, gauges(3, 1)), Action::ReadGauges);
        assert_eq!(next(&mut drain, 65, gauges(3, 1)), Action::Stop(StopReason::ClientsLeft(1)));
    }

    #[test]
    fn envoy_that_cannot_drain_is_stopped_soon() {
        for without in [Gauges::default(), gauges(0, 0)] {
            let mut drain = requested();
            assert_eq!(next(&mut drain, 2, without), Action::ReadGauges);
            assert_eq!(next(&mut drain, 3, without), Action::Stop(StopReason::NotDrainable));
        }
    }

    #[test]
    fn drain_that_was_withdrawn_is_requested_again() {
        let mut drain = requested();
        assert_eq!(next(&mut drain, 2, gauges(1, 5)), Action::ReadGauges);
        assert_eq!(next(&mut drain, 9, gauges(0, 5)), Action::RequestDrain);
        drain.on_requested(9 * SECOND);
        assert_eq!(next(&mut drain, 10, gauges(1, 5)), Action::ReadGauges);
    }

    #[test]
    fn admin_port_may_fail_for_a_while() {
        let fails = |drain: &mut Drain, now: u32| drain.on_failure(now * SECOND, &"refused");
        let failed = Some(StopReason::AdminFails("refused".to_owned()));
        let mut drain = Drain::default();
        assert_eq!([0, 4, 5].map(|now| fails(&mut drain, now)), [None, None, failed.clone()]);
        let mut drain = requested();
        assert_eq!([2, 61, 62].map(|now| fails(&mut drain, now)), [None, None, failed.clone()]);
        let mut drain = requested();
        assert_eq!(fails(&mut drain, 2), None);
        assert_eq!(next(&mut drain, 61, gauges(1, 0)), Action::ReadGauges);
        assert_eq!([62, 121, 122].map(|now| fails(&mut drain, now)), [None, None, failed]);
    }

    #[test]
    fn port_that_never_closes_the_listeners_counts_as_failing() {
        let mut drain = requested();
        for now in 2..62 {
            assert_eq!(next(&mut drain, now, gauges(2, 0)), Action::CloseListeners);
            assert_eq!(drain.on_failure(now * SECOND, &"refused"), None);
        }
        assert!(drain.on_failure(62 * SECOND, &"refused").is_some());
    }
}
