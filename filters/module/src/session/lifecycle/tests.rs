use proptest::prelude::*;

use super::Effect::{
    CheckIdleTimeout, CloseClient, CountLoginFailure, ExtendDeadline, LeaveNode, LeaveUnreachableNode, RejectLogin,
    ReleaseAll, ReleaseNode, StartDeadline, StartTraffic,
};
use super::Event::{
    ClientClosed, ClientClosing, ClientFinished, ClientProgress, CommandRefused, LoggedIn, LoginFailed, LoginRefused,
    LoginResumed, NodeFailed, NodeFull, NodeGreeted, NodeUnreachable, TimedOut,
};
use super::SessionPhase::{Closed, Connecting, Established, Login, LoginFailover, Rejected};
use super::*;

const PHASES: [SessionPhase; 7] =
    [Connecting, Login, LoginFailover, Established, Rejected, SessionPhase::NodeClosed, Closed];

/// An error of the module.
const WHY: ProxyError = ProxyError::TooManyLogins;

const EVENTS: [Event; 16] = [
    NodeFailed,
    NodeGreeted,
    NodeFull,
    LoginResumed,
    LoggedIn,
    LoginFailed(LoginFailure::Denied),
    LoginRefused(WHY),
    CommandRefused(WHY),
    ClientFinished,
    ClientProgress,
    Event::NodeClosed,
    NodeUnreachable,
    TimedOut,
    ClientClosing,
    ClientClosed { by_client: true },
    ClientClosed { by_client: false },
];

/// State, event, next state, effects. In all other pairs of a state and an event nothing happens.
type Row = (SessionPhase, Event, SessionPhase, &'static [Effect]);

const MINUTE: Duration = Duration::from_secs(60);
const SECOND: Duration = Duration::from_secs(1);
const CLIENT_GONE: Effect = CountLoginFailure(LoginFailure::ClientGone);
const BY_CLIENT: Event = ClientClosed { by_client: true };
const BY_ENVOY: Event = ClientClosed { by_client: false };

const ROWS: &[Row] = &[
    (Connecting, NodeFailed, Connecting, &[ReleaseNode]),
    (Connecting, NodeGreeted, Login, &[]),
    (Connecting, LoginFailed(LoginFailure::Denied), Rejected, &[CountLoginFailure(LoginFailure::Denied)]),
    (Connecting, LoginRefused(WHY), Rejected, &[RejectLogin(Rejection::Error(WHY)), CloseClient("too_many_logins")]),
    (Connecting, ClientFinished, Rejected, &[CLIENT_GONE]),
    (Connecting, TimedOut, Rejected, &[RejectLogin(Rejection::NoNode), CloseClient("no_node")]),
    (Connecting, ClientClosing, Rejected, &[RejectLogin(Rejection::NoNode)]),
    (Connecting, BY_CLIENT, Closed, &[CLIENT_GONE, ReleaseAll]),
    (Connecting, BY_ENVOY, Closed, &[RejectLogin(Rejection::NodeLost), ReleaseAll]),
    (Login, NodeFull, LoginFailover, &[]),
    (Login, LoggedIn, Established, &[StartTraffic]),
    (Login, LoginFailed(LoginFailure::Denied), Rejected, &[CountLoginFailure(LoginFailure::Denied)]),
    (Login, LoginRefused(WHY), Rejected, &[RejectLogin(Rejection::Error(WHY)), CloseClient("too_many_logins")]),
    (Login, ClientFinished, Rejected, &[CLIENT_GONE]),
    (
        Login,
        NodeUnreachable,
        Rejected,
        &[RejectLogin(Rejection::Error(ProxyError::NodeUnreachable)), CloseClient("node_unreachable")],
    ),
    (
        Login,
        TimedOut,
        Rejected,
        &[RejectLogin(Rejection::Error(ProxyError::LoginTooSlow)), CloseClient("login_too_slow")],
    ),
    (Login, ClientClosing, Rejected, &[RejectLogin(Rejection::NodeLost)]),
    (Login, BY_CLIENT, Closed, &[CLIENT_GONE, ReleaseAll]),
    (Login, BY_ENVOY, Closed, &[RejectLogin(Rejection::NodeLost), ReleaseAll]),
    (LoginFailover, LoginResumed, Login, &[]),
    (LoginFailover, LoginFailed(LoginFailure::Denied), Rejected, &[CountLoginFailure(LoginFailure::Denied)]),
    (LoginFailover, LoginRefused(WHY), Rejected, &[RejectLogin(Rejection::Error(WHY)), CloseClient("too_many_logins")]),
    (LoginFailover, ClientFinished, Rejected, &[CLIENT_GONE]),
    (LoginFailover, TimedOut, Rejected, &[RejectLogin(Rejection::NodeFull), CloseClient("node_full")]),
    (LoginFailover, ClientClosing, Rejected, &[RejectLogin(Rejection::NodeFull)]),
    (LoginFailover, BY_CLIENT, Closed, &[CLIENT_GONE, ReleaseAll]),
    (LoginFailover, BY_ENVOY, Closed, &[RejectLogin(Rejection::NodeLost), ReleaseAll]),
    (
        Established,
        CommandRefused(WHY),
        Rejected,
        &[CountLoginFailure(LoginFailure::Error(WHY)), LeaveNode, StartDeadline(SECOND)],
    ),
    (Established, Event::NodeClosed, SessionPhase::NodeClosed, &[LeaveNode, StartDeadline(MINUTE)]),
    (Established, NodeUnreachable, Established, &[LeaveUnreachableNode]),
    (Established, TimedOut, Established, &[CheckIdleTimeout]),
    (Established, BY_CLIENT, Closed, &[ReleaseAll]),
    (Established, BY_ENVOY, Closed, &[ReleaseAll]),
    (Rejected, TimedOut, Rejected, &[CloseClient("client_stayed")]),
    (Rejected, BY_CLIENT, Closed, &[ReleaseAll]),
    (Rejected, BY_ENVOY, Closed, &[ReleaseAll]),
    (SessionPhase::NodeClosed, ClientProgress, SessionPhase::NodeClosed, &[ExtendDeadline(MINUTE)]),
    (SessionPhase::NodeClosed, TimedOut, SessionPhase::NodeClosed, &[CloseClient("client_stayed")]),
    (SessionPhase::NodeClosed, BY_CLIENT, Closed, &[ReleaseAll]),
    (SessionPhase::NodeClosed, BY_ENVOY, Closed, &[ReleaseAll]),
];

#[test]
fn each_event_has_its_effects_in_each_state() {
    let mut used_rows = 0;
    for phase in PHASES {
        for event in EVENTS {
            let row = ROWS.iter().find(|row| (row.0, row.1) == (phase, event));
            used_rows += usize::from(row.is_some());
            let expected = row.map_or((phase, Vec::new()), |row| (row.2, row.3.to_vec()));
            assert_eq!(next(phase, event), expected, "{event:?} while {phase:?}");
        }
    }
    assert_eq!(used_rows, ROWS.len());
}

proptest! {
    #[test]
    fn any_order_of_events_counts_one_result_and_releases_once(events in prop::collection::vec(prop::sample::select(&EVENTS), 0..60)) {
        let mut phase = Connecting;
        let mut effects = Vec::new();
        for event in events.into_iter().chain([BY_ENVOY]) {
            let (next_phase, new) = next(phase, event);
            prop_assert!(!phase.is_over() || next_phase.is_over(), "{event:?} revives a session while {phase:?}");
            prop_assert!(phase != Closed || new.is_empty(), "{event:?} has effects after the end: {new:?}");
            phase = next_phase;
            effects.extend(new);
        }
        let count = |is_one: fn(&Effect) -> bool| effects.iter().filter(|&effect| is_one(effect)).count();
        let has_logged_in = count(|effect| *effect == StartTraffic);
        let failures = count(|effect| matches!(effect, CountLoginFailure(_) | RejectLogin(_)));
        let refused_commands = count(|effect| matches!(effect, CountLoginFailure(LoginFailure::Error(_))));
        prop_assert_eq!(phase, Closed);
        prop_assert_eq!(count(|effect| *effect == ReleaseAll), 1);
        prop_assert_eq!(has_logged_in + failures - refused_commands, 1);
        prop_assert!(refused_commands <= has_logged_in);
    }
}
