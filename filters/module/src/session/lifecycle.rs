//! The life of a session as a state machine: what each event means in each state.
//!
//! [`next`] is a pure function. [`Session`](super::Session) applies the effects that it returns while no part of the
//! session is borrowed: an effect may close a connection, and then Envoy calls hooks of the session.

use std::time::Duration;

use mysql_proto::error::ProxyError;

use crate::node::LoginFailure;

/// How long a client may take to read the last bytes of a node that has closed.
const MAX_UNREAD_TIME: Duration = Duration::from_secs(60);

/// How long a client whose login or command was rejected may take to read the error and to close. Until then, the
/// module discards what the client sends. If a connection is closed with unread bytes, the kernel resets it, and a
/// client that is still sending would not read the error.
pub(crate) const REJECTION_TIMEOUT: Duration = Duration::from_secs(1);

/// The state of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SessionPhase {
    /// No node is in service. The connection is withheld from Envoy's proxy.
    Waiting,
    /// No node has greeted yet, and the client was sent nothing.
    Connecting,
    /// The client has got a node's greeting. The module relays the login.
    Login,
    /// The node has answered the login with the error that it is full. The module tries the login at other nodes.
    LoginFailover,
    /// The node has accepted the login.
    Established,
    /// The login or a change of user has failed. The client reads the error, and is expected to close.
    Rejected,
    /// The node has closed the connection. The client reads what the node sent last.
    NodeClosed,
    /// The client's connection is closed.
    Closed,
}

impl SessionPhase {
    /// Whether the session no longer uses a node.
    pub(crate) fn is_over(self) -> bool {
        matches!(self, Self::Rejected | Self::NodeClosed | Self::Closed)
    }
}

/// What happens to a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// No node is in service, and the login waits for one.
    WaitBegan,
    /// A node is in service now.
    NodeInService,
    /// The login has waited for as long as it may.
    WaitOver,
    /// Envoy's connection to the chosen node has failed. Envoy may ask the policy for another node.
    NodeFailed,
    /// The node has greeted. Its greeting goes to the client.
    NodeGreeted,
    /// The node has answered the login with the error that it is full, and the login may fail over.
    NodeFull,
    /// The failover of the login has ended. The login continues at another node, or with the error of the first node.
    LoginResumed,
    /// The node has accepted the login.
    LoggedIn,
    /// The login has failed. The login relay has already produced the error for the client.
    LoginFailed(LoginFailure),
    /// The module refuses the login.
    LoginRefused(ProxyError),
    /// The module has refused a command of the client, and has sent the error.
    CommandRefused(ProxyError),
    /// The client has closed its sending side.
    ClientFinished,
    /// Envoy has sent bytes to the client.
    ClientProgress,
    /// The node's connection is closed.
    NodeClosed,
    /// The node no longer answers.
    NodeUnreachable,
    /// The deadline of the present state has passed.
    TimedOut,
    /// Envoy is about to close the client's connection.
    ClientClosing,
    /// The client's connection is closed.
    ClientClosed { by_client: bool },
}

/// Why the module ends a login. The session makes the error packet for the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rejection {
    Error(ProxyError),
    /// No node was found. If a node was full, the client gets the error of that node, which is more precise.
    NoNode,
    /// The node has closed the connection.
    NodeLost,
    /// The failover has not finished. The client gets the error of the first node.
    NodeFull,
}

/// What a session does because of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Stops counting the session at its node.
    ReleaseNode,
    /// Counts and logs the login, starts the idle timeout, and requests a migration if the node is draining.
    StartTraffic,
    /// Counts and logs a failed login.
    RecordLoginFailure(LoginFailure),
    /// Counts and logs a failed login, and keeps the error for the client until its connection closes.
    RejectLogin(Rejection),
    /// Stops the session's probes and its migration, and stops counting it at its node.
    LeaveNode,
    /// Fails over to another node if the session is idle and has valid states. Otherwise ends the session.
    LeaveUnreachableNode,
    /// Lets Envoy's proxy see the connection.
    ContinueConnection,
    /// Ends the wait if it is over, or if the client has left.
    CheckWait,
    /// Ends the session if it has been idle for too long.
    CheckIdleTimeout,
    /// Replaces the deadline.
    StartDeadline(Duration),
    /// Moves the deadline, if there is one.
    ExtendDeadline(Duration),
    /// Makes Envoy close the client's connection. The text is the reason in the access log.
    CloseClient(&'static str),
    /// Releases everything that the session holds.
    ReleaseAll,
}

/// The state after an event, and the effects in the order in which they must be applied.
pub(crate) fn next(phase: SessionPhase, event: Event) -> (SessionPhase, Vec<Effect>) {
    use SessionPhase::{Closed, Connecting, Established, Login, LoginFailover, NodeClosed, Rejected, Waiting};

    let stay = |effects| (phase, effects);
    let reject = |rejection, reason| (Rejected, vec![Effect::RejectLogin(rejection), Effect::CloseClient(reason)]);
    match (phase, event) {
        (Connecting, Event::WaitBegan) => (Waiting, vec![]),
        (Waiting, Event::NodeInService) => (Connecting, vec![Effect::ContinueConnection]),
        (Waiting, Event::TimedOut) => stay(vec![Effect::CheckWait]),
        (Waiting, Event::WaitOver) => reject(Rejection::NoNode, ProxyError::NoNode.name()),
        (Waiting, Event::ClientFinished) => (
            Rejected,
            vec![
                Effect::RecordLoginFailure(LoginFailure::ClientGone),
                Effect::CloseClient(LoginFailure::ClientGone.name()),
            ],
        ),
        (Connecting, Event::NodeFailed) => stay(vec![Effect::ReleaseNode]),
        (Connecting, Event::NodeGreeted) => (Login, vec![]),
        (Login, Event::NodeFull) => (LoginFailover, vec![]),
        (LoginFailover, Event::LoginResumed) => (Login, vec![]),
        (Login, Event::LoggedIn) => (Established, vec![Effect::StartTraffic]),

        (Connecting | Login | LoginFailover, Event::LoginFailed(failure)) => {
            (Rejected, vec![Effect::RecordLoginFailure(failure)])
        }
        (Waiting | Connecting | Login | LoginFailover, Event::LoginRefused(why)) => {
            reject(Rejection::Error(why), why.name())
        }
        (Connecting | Login | LoginFailover, Event::ClientFinished) => {
            (Rejected, vec![Effect::RecordLoginFailure(LoginFailure::ClientGone)])
        }
        // The nodes took too long, not the client.
        (Connecting, Event::TimedOut) => reject(Rejection::NoNode, ProxyError::NoNode.name()),
        (Login, Event::TimedOut) => reject(Rejection::Error(ProxyError::LoginTooSlow), ProxyError::LoginTooSlow.name()),
        (LoginFailover, Event::TimedOut) => reject(Rejection::NodeFull, LoginFailure::NodeFull.name()),
        // In `Connecting` and `LoginFailover`, the attempt has its own timeout.
        (Login, Event::NodeUnreachable) => {
            reject(Rejection::Error(ProxyError::NodeUnreachable), ProxyError::NodeUnreachable.name())
        }
        (Waiting | Connecting, Event::ClientClosing) => (Rejected, vec![Effect::RejectLogin(Rejection::NoNode)]),
        (Login, Event::ClientClosing) => (Rejected, vec![Effect::RejectLogin(Rejection::NodeLost)]),
        (LoginFailover, Event::ClientClosing) => (Rejected, vec![Effect::RejectLogin(Rejection::NodeFull)]),
        (Waiting | Connecting | Login | LoginFailover, Event::ClientClosed { by_client: true }) => {
            (Closed, vec![Effect::RecordLoginFailure(LoginFailure::ClientGone), Effect::ReleaseAll])
        }
        (Waiting | Connecting | Login | LoginFailover, Event::ClientClosed { by_client: false }) => {
            (Closed, vec![Effect::RejectLogin(Rejection::NodeLost), Effect::ReleaseAll])
        }

        // A change of user counts as a login.
        (Established, Event::CommandRefused(why)) => (
            Rejected,
            vec![
                Effect::RecordLoginFailure(LoginFailure::Error(why)),
                Effect::LeaveNode,
                Effect::StartDeadline(REJECTION_TIMEOUT),
            ],
        ),
        (Established, Event::NodeClosed) => {
            (NodeClosed, vec![Effect::LeaveNode, Effect::StartDeadline(MAX_UNREAD_TIME)])
        }
        (Established, Event::NodeUnreachable) => stay(vec![Effect::LeaveUnreachableNode]),
        (Established, Event::TimedOut) => stay(vec![Effect::CheckIdleTimeout]),

        (NodeClosed, Event::ClientProgress) => stay(vec![Effect::ExtendDeadline(MAX_UNREAD_TIME)]),
        (Rejected | NodeClosed, Event::TimedOut) => stay(vec![Effect::CloseClient("client_stayed")]),
        // Envoy reports the end of the connection twice. The second report finishes what a panic has interrupted.
        (Established | Rejected | NodeClosed | Closed, Event::ClientClosed { .. }) => {
            (Closed, vec![Effect::ReleaseAll])
        }

        // The event has no meaning in this state.
        _ => stay(vec![]),
    }
}

#[cfg(test)]
mod tests;
