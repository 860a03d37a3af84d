//! Decides whether a node can be reached, from a silent connection to it: the sentinel.
//!
//! Each Envoy has one sentinel for each node. The kernel sends a TCP keepalive probe on it each second. The kernel of
//! the node's machine answers even for a process that is stopped or does not read. If nothing arrives for
//! [`SentinelTimeouts::suspect_after`], new connections are attempted as well. A node is unreachable if nothing has
//! arrived for [`SentinelTimeouts::unreachable_after`] on any of these connections, not even a refusal. A sentinel that
//! the node closes is replaced: MariaDB closes a connection that does not log in after 10 s, while TiDB keeps it
//! (pingcap/tidb `pkg/server/internal/packetio.go`: no read timeout before the login).
//!
//! The caller owns the connections, and calls [`Sentinel::observe`] several times a second. All times are of one
//! monotonic clock.

use std::time::Duration;

/// The timeouts of a sentinel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SentinelTimeouts {
    /// Silence until new connections are attempted.
    pub suspect_after: Duration,
    /// Silence until the node counts as unreachable.
    pub unreachable_after: Duration,
    /// How long a connection attempt must stay unanswered to count.
    pub attempt_timeout: Duration,
    /// Time between two attempts; half of it after the first attempt at a suspected node. Also the time until the next
    /// attempt after the node has closed a connection that existed for less than this time.
    pub retry_interval: Duration,
    /// A sign of life counts only if it is later than the last one by more than this time. Otherwise both may be
    /// reports of one sign.
    pub precision: Duration,
    /// After a longer time between two observations, this process or its machine must have been stopped.
    pub max_observe_gap: Duration,
}

impl Default for SentinelTimeouts {
    fn default() -> Self {
        Self {
            suspect_after: Duration::from_millis(2000),
            unreachable_after: Duration::from_millis(3500),
            attempt_timeout: Duration::from_millis(1000),
            retry_interval: Duration::from_millis(1000),
            precision: Duration::from_millis(100),
            max_observe_gap: Duration::from_millis(1000),
        }
    }
}

/// How many attempts must stay unanswered, because a single packet may be lost by chance.
const MIN_UNANSWERED_ATTEMPTS: usize = 2;

/// Whether a node can be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reachability {
    Reachable,
    /// Nothing has arrived lately. The caller asks the sessions of the node for a sign of life.
    Suspected,
    Unreachable,
}

/// The sentinel of one node.
#[derive(Debug)]
pub struct Sentinel {
    timeouts: SentinelTimeouts,
    state: Reachability,
    /// When something last arrived from the node.
    last_heard: Duration,
    observed_at: Duration,
    /// Since when this process has run without a stop.
    running_since: Duration,
    /// When the first attempts after `last_heard` began.
    attempts: [Option<Duration>; MIN_UNANSWERED_ATTEMPTS],
    next_attempt: Duration,
}

impl Sentinel {
    /// Begins as reachable.
    #[must_use]
    pub fn new(timeouts: SentinelTimeouts, now: Duration) -> Self {
        Self {
            timeouts,
            state: Reachability::Reachable,
            last_heard: now,
            observed_at: now,
            running_since: now,
            attempts: [None; MIN_UNANSWERED_ATTEMPTS],
            next_attempt: now,
        }
    }

    /// An acknowledgement, data or a refusal has arrived from the node at that time. One sign of life may be reported
    /// several times with slightly different times, because the kernel counts in ticks.
    pub fn record_heard(&mut self, at: Duration) {
        if at > self.last_heard + self.timeouts.precision {
            self.last_heard = at;
            self.attempts.iter_mut().for_each(|attempt| *attempt = attempt.filter(|&began| began > at));
        }
    }

    /// The node has closed the connection, which existed for `lived`.
    pub fn record_close(&mut self, lived: Duration, now: Duration) {
        self.record_heard(now);
        self.next_attempt = if lived < self.timeouts.retry_interval { now + self.timeouts.retry_interval } else { now };
    }

    /// Whether a connection attempt should begin now. `connected`: whether there is a connection.
    #[must_use]
    pub fn needs_attempt(&self, connected: bool, now: Duration) -> bool {
        now >= self.next_attempt && (!connected || self.silence(now) >= self.timeouts.suspect_after)
    }

    /// A connection attempt has begun.
    pub fn record_attempt(&mut self, now: Duration) {
        if let Some(free) = self.attempts.iter_mut().find(|attempt| attempt.is_none()) {
            *free = Some(now);
        }
        let is_last = self.attempts.iter().all(Option::is_some);
        let pause = if is_last || self.silence(now) < self.timeouts.suspect_after {
            self.timeouts.retry_interval
        } else {
            self.timeouts.retry_interval / 2
        };
        self.next_attempt = now + pause;
    }

    /// Updates the state, after all signs of life were reported. Returns the state if it has changed.
    pub fn observe(&mut self, now: Duration) -> Option<Reachability> {
        if now - self.observed_at > self.timeouts.max_observe_gap {
            self.running_since = now; // signs of life from the pause may be reported late
        }
        self.observed_at = now;
        let silence = self.silence(now);
        let state = if silence < self.timeouts.suspect_after {
            Reachability::Reachable
        } else if self.state == Reachability::Unreachable || self.is_lost(now) {
            Reachability::Unreachable
        } else {
            Reachability::Suspected
        };
        (std::mem::replace(&mut self.state, state) != state).then_some(state)
    }

    fn is_lost(&self, now: Duration) -> bool {
        let unanswered =
            |attempt: &Option<Duration>| attempt.is_some_and(|at| now - at >= self.timeouts.attempt_timeout);
        self.silence(now) >= self.timeouts.unreachable_after
            && self.attempts.iter().all(unanswered)
            && now - self.running_since >= self.timeouts.attempt_timeout
    }

    /// Whether a suspected node will soon be unreachable, unless a session has a sign of life.
    #[must_use]
    pub fn is_nearly_lost(&self, now: Duration) -> bool {
        self.state == Reachability::Suspected
            && self.silence(now) >= self.timeouts.suspect_after + self.timeouts.attempt_timeout
    }

    /// For how long nothing has arrived.
    #[must_use]
    pub fn silence(&self, now: Duration) -> Duration {
        now.saturating_sub(self.last_heard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: u64 = 200;

    const fn at(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    /// Observes from `from` to `to`; `sign` returns when something last arrived. Returns the changes of state and the
    /// connection attempts, which stay unanswered, with their times.
    fn run(
        sentinel: &mut Sentinel,
        connected: bool,
        (from, to): (u64, u64),
        sign: impl Fn(u64) -> Option<u64>,
    ) -> (Vec<(u64, Reachability)>, Vec<u64>) {
        let (mut changes, mut attempts) = (Vec::new(), Vec::new());
        for now in (from..=to).step_by(STEP as usize) {
            if let Some(sign) = sign(now) {
                sentinel.record_heard(at(sign));
            }
            if sentinel.needs_attempt(connected, at(now)) {
                sentinel.record_attempt(at(now));
                attempts.push(now);
            }
            changes.extend(sentinel.observe(at(now)).map(|state| (now, state)));
        }
        (changes, attempts)
    }

    fn new() -> Sentinel {
        Sentinel::new(SentinelTimeouts::default(), at(0))
    }

    /// The last probe that was answered, one each second.
    #[allow(clippy::unnecessary_wraps)]
    fn probes(now: u64) -> Option<u64> {
        Some(now / 1000 * 1000)
    }

    #[test]
    fn node_that_answers_probes_gets_no_connection_attempts() {
        let (changes, attempts) = run(&mut new(), true, (0, 100_000), probes);
        assert_eq!((changes, attempts), (vec![], vec![]));
    }

    #[test]
    fn silence_and_two_attempts_make_a_node_unreachable_until_a_sign_of_life() {
        let mut sentinel = new();
        let (changes, attempts) = run(&mut sentinel, true, (0, 9000), |now| probes(now.min(4000)));
        assert_eq!(changes, [(6000, Reachability::Suspected), (7600, Reachability::Unreachable)]);
        assert_eq!(attempts, [6000, 6600, 7600, 8600]);
        let (changes, _) = run(&mut sentinel, true, (9200, 20_000), probes);
        assert_eq!(changes, [(9200, Reachability::Reachable)]);
    }

    #[test]
    fn sign_of_life_reported_with_several_times_counts_once() {
        let mut sentinel = new();
        let jitters = |now: u64| Some(now.min(4000) + now / STEP);
        let (changes, attempts) = run(&mut sentinel, true, (0, 9000), jitters);
        assert_eq!(changes, [(6200, Reachability::Suspected), (7800, Reachability::Unreachable)]);
        assert_eq!(attempts[..2], [6200, 6800]);
    }

    #[test]
    fn one_sign_of_life_prevents_unreachable() {
        for sign in [5100, 6300, 7300] {
            let mut sentinel = new();
            let came = |now| if now >= sign { Some(sign) } else { Some(4000.min(now)) };
            let (changes, _) = run(&mut sentinel, true, (0, sign + 1800), came);
            assert!(!changes.iter().any(|change| change.1 == Reachability::Unreachable), "{sign}: {changes:?}");
        }
    }

    #[test]
    fn without_a_connection_only_attempts_decide() {
        let mut sentinel = new();
        sentinel.record_close(at(50), at(1000));
        let (changes, attempts) = run(&mut sentinel, false, (1000, 6000), |_| None);
        assert_eq!(attempts[..2], [2000, 3000]);
        assert_eq!(changes, [(3000, Reachability::Suspected), (4600, Reachability::Unreachable)]);
    }

    #[test]
    fn long_lived_connection_is_replaced_at_once() {
        let mut sentinel = new();
        sentinel.record_close(at(10_000), at(10_000));
        assert!(sentinel.needs_attempt(false, at(10_000)));
        sentinel.record_close(at(10), at(10_000));
        assert!(!sentinel.needs_attempt(false, at(10_900)) && sentinel.needs_attempt(false, at(11_000)));
    }

    #[test]
    fn stop_of_this_process_does_not_make_a_node_unreachable() {
        let mut sentinel = new();
        run(&mut sentinel, true, (0, 3000), probes);
        // Suspended for a minute; the answer to the next probe takes a second.
        let (changes, _) = run(&mut sentinel, true, (63_000, 70_000), |now| (now >= 64_400).then(|| now / 1000 * 1000));
        assert_eq!(changes, [(63_000, Reachability::Suspected), (64_400, Reachability::Reachable)]);
        // The node is gone as well.
        let mut sentinel = new();
        let (changes, _) = run(&mut sentinel, true, (63_000, 70_000), |_| None);
        assert_eq!(changes, [(63_000, Reachability::Suspected), (64_600, Reachability::Unreachable)]);
    }

    #[test]
    fn node_is_not_unreachable_without_attempts() {
        let mut sentinel = new();
        for now in (0..60_000).step_by(200) {
            assert_ne!(sentinel.observe(at(now)), Some(Reachability::Unreachable));
        }
    }
}
