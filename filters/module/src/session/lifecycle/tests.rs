use proptest::prelude::*;

use super::Effect::{
    CheckIdleTimeout, CheckWait, CloseClient, ContinueConnection, ExtendDeadline, LeaveNode, LeaveUnreachableNode,
    RecordLoginFailure, RejectLogin, ReleaseAll, ReleaseNode, StartDeadline, StartTraffic,
};
use super::Event::{
    ClientClosed, ClientClosing, ClientFinished, ClientProgress, CommandRefused, LoggedIn, LoginFailed, LoginRefused,
    LoginResumed, NodeFailed, NodeFull, NodeGreeted, NodeInService, NodeUnreachable, TimedOut, WaitBegan, WaitOver,
};
use super::SessionPhase::{Closed, Connecting, Established, Login, LoginFailover, Rejected, Waiting};
use super::*;

const PHASES: [SessionPhase; 8] =
    [Waiting, Connecting, Login, LoginFailover, Established, Rejected, SessionPhase::NodeClosed, Closed];

/// An example of an error of the module.
const MODULE_ERROR: ProxyError = ProxyError::TooManyLogins;

const EVENTS: [Event; 19] = [
    WaitBegan,
    NodeInService,
    WaitOver,
    NodeFailed,
    NodeGreeted,
    NodeFull,
    LoginResumed,
    LoggedIn,
    LoginFailed(LoginFailure::Denied),
    LoginRefused(MODULE_ERROR),
    CommandRefused(MODULE_ERROR),
    ClientFinished,
    ClientProgress,
    Event::NodeClosed,
    NodeUnreachable,
    TimedOut,
    ClientClosing,
    ClientClosed { by_client: true },
    ClientClosed { by_client: false },
];

/// State, event, next state, effects. All events that are not in the table change nothing.
type Transition = (SessionPhase, Event, SessionPhase, &'static [Effect]);

const MINUTE: Duration = Duration::from_secs(60);
const SECOND: Duration = Duration::from_secs(1);
const CLIENT_GONE: Effect = RecordLoginFailure(LoginFailure::ClientGone);
const CLOSED_BY_CLIENT: Event = ClientClosed { by_client: true };
const CLOSED_BY_ENVOY: Event = ClientClosed { by_client: false };

const TRANSITIONS: &[Transition] = &[
    (Connecting, WaitBegan, Waiting, &[]),
    (Waiting, NodeInService, Connecting, &[ContinueConnection]),
    (Waiting, TimedOut, Waiting, &[CheckWait]),
    (Waiting, WaitOver, Rejected, &[RejectLogin(Rejection::NoNode), CloseClient("no_node")]),
    (Waiting, ClientFinished, Rejected, &[CLIENT_GONE, CloseClient("client_gone")]),
    (
        Waiting,
        LoginRefused(MODULE_ERROR),
        Rejected,
        &[RejectLogin(Rejection::Error(MODULE_ERROR)), CloseClient("too_many_logins")],
    ),
    (Waiting, ClientClosing, Rejected, &[RejectLogin(Rejection::NoNode)]),
    (Waiting, CLOSED_BY_CLIENT, Closed, &[CLIENT_GONE, ReleaseAll]),
    (Waiting, CLOSED_BY_ENVOY, Closed, &[RejectLogin(Rejection::NodeLost), ReleaseAll]),
    (Connecting, NodeFailed, Connecting, &[ReleaseNode]),
    (Connecting, NodeGreeted, Login, &[]),
    (Connecting, LoginFailed(LoginFailure::Denied), Rejected, &[RecordLoginFailure(LoginFailure::Denied)]),
    (
        Connecting,
        LoginRefused(MODULE_ERROR),
        Rejected,
        &[RejectLogin(Rejection::Error(MODULE_ERROR)), CloseClient("too_many_logins")],
    ),
    (Connecting, ClientFinished, Rejected, &[CLIENT_GONE]),
    (Connecting, TimedOut, Rejected, &[RejectLogin(Rejection::NoNode), CloseClient("no_node")]),
    (Connecting, ClientClosing, Rejected, &[RejectLogin(Rejection::NoNode)]),
    (Connecting, CLOSED_BY_CLIENT, Closed, &[CLIENT_GONE, ReleaseAll]),
    (Connecting, CLOSED_BY_ENVOY, Closed, &[RejectLogin(Rejection::NodeLost), ReleaseAll]),
    (Login, NodeFull, LoginFailover, &[]),
    (Login, LoggedIn, Established, &[StartTraffic]),
    (Login, LoginFailed(LoginFailure::Denied), Rejected, &[RecordLoginFailure(LoginFailure::Denied)]),
    (
        Login,
        LoginRefused(MODULE_ERROR),
        Rejected,
        &[RejectLogin(Rejection::Error(MODULE_ERROR)), CloseClient("too_many_logins")],
    ),
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
    (Login, CLOSED_BY_CLIENT, Closed, &[CLIENT_GONE, ReleaseAll]),
    (Login, CLOSED_BY_ENVOY, Closed, &[RejectLogin(Rejection::NodeLost), ReleaseAll]),
    (LoginFailover, LoginResumed, Login, &[]),
    (LoginFailover, LoginFailed(LoginFailure::Denied), Rejected, &[RecordLoginFailure(LoginFailure::Denied)]),
    (
        LoginFailover,
        LoginRefused(MODULE_ERROR),
        Rejected,
        &[RejectLogin(Rejection::Error(MODULE_ERROR)), CloseClient("too_many_logins")],
    ),
    (LoginFailover, ClientFinished, Rejected, &[CLIENT_GONE]),
    (LoginFailover, TimedOut, Rejected, &[RejectLogin(Rejection::NodeFull), CloseClient("node_full")]),
    (LoginFailover, ClientClosing, Rejected, &[RejectLogin(Rejection::NodeFull)]),
    (LoginFailover, CLOSED_BY_CLIENT, Closed, &[CLIENT_GONE, ReleaseAll]),
    (LoginFailover, CLOSED_BY_ENVOY, Closed, &[RejectLogin(Rejection::NodeLost), ReleaseAll]),
    (
        Established,
        CommandRefused(MODULE_ERROR),
        Rejected,
        &[RecordLoginFailure(LoginFailure::Error(MODULE_ERROR)), LeaveNode, StartDeadline(SECOND)],
    ),
    (Established, Event::NodeClosed, SessionPhase::NodeClosed, &[LeaveNode, StartDeadline(MINUTE)]),
    (Established, NodeUnreachable, Established, &[LeaveUnreachableNode]),
    (Established, TimedOut, Established, &[CheckIdleTimeout]),
    (Established, CLOSED_BY_CLIENT, Closed, &[ReleaseAll]),
    (Established, CLOSED_BY_ENVOY, Closed, &[ReleaseAll]),
    (Rejected, TimedOut, Rejected, &[CloseClient("client_stayed")]),
    (Rejected, CLOSED_BY_CLIENT, Closed, &[ReleaseAll]),
    (Rejected, CLOSED_BY_ENVOY, Closed, &[ReleaseAll]),
    (SessionPhase::NodeClosed, ClientProgress, SessionPhase::NodeClosed, &[ExtendDeadline(MINUTE)]),
    (SessionPhase::NodeClosed, TimedOut, SessionPhase::NodeClosed, &[CloseClient("client_stayed")]),
    (SessionPhase::NodeClosed, CLOSED_BY_CLIENT, Closed, &[ReleaseAll]),
    (SessionPhase::NodeClosed, CLOSED_BY_ENVOY, Closed, &[ReleaseAll]),
    (Closed, CLOSED_BY_CLIENT, Closed, &[ReleaseAll]),
    (Closed, CLOSED_BY_ENVOY, Closed, &[ReleaseAll]),
];

#[test]
fn all_states_and_events_match_the_transition_table() {
    let mut found_transitions = 0;
    for phase in PHASES {
        for event in EVENTS {
            let transition = TRANSITIONS.iter().find(|transition| (transition.0, transition.1) == (phase, event));
            found_transitions += usize::from(transition.is_some());
            let expected = transition.map_or((phase, Vec::new()), |transition| (transition.2, transition.3.to_vec()));
            assert_eq!(next(phase, event), expected, "{event:?} while {phase:?}");
        }
    }
    assert_eq!(found_transitions, TRANSITIONS.len());
}

proptest! {
    #[test]
    fn session_counts_one_login_result_and_is_released_whatever_the_events(
        events in prop::collection::vec(prop::sample::select(&EVENTS), 0..60)
    ) {
        let mut phase = Connecting;
        let mut effects = Vec::new();
        for event in events.into_iter().chain([CLOSED_BY_ENVOY]) {
            let (next_phase, new) = next(phase, event);
            prop_assert!(!phase.is_over() || next_phase.is_over(), "{event:?} revives a session while {phase:?}");
            let is_repeated = new.is_empty() || new == [ReleaseAll];
            prop_assert!(phase != Closed || is_repeated, "{event:?} has effects after the end: {new:?}");
            phase = next_phase;
            effects.extend(new);
        }
        let count = |is_counted: fn(&Effect) -> bool| effects.iter().filter(|&effect| is_counted(effect)).count();
        let logins = count(|effect| *effect == StartTraffic);
        let failures = count(|effect| matches!(effect, RecordLoginFailure(_) | RejectLogin(_)));
        let refused_commands = count(|effect| matches!(effect, RecordLoginFailure(LoginFailure::Error(_))));
        prop_assert_eq!(phase, Closed);
        prop_assert_eq!(effects.last(), Some(&ReleaseAll));
        prop_assert_eq!(logins + failures - refused_commands, 1);
        prop_assert!(refused_commands <= logins);
    }
}
