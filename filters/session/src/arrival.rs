//! A session arrives at a node: greeting, TLS if wanted, login with its token, and its states again.
//!
//! The slow part, up to the greeting, comes while the session is still served elsewhere; the rest only once its states
//! are there. The node's answers are read strictly: whatever is not as expected ends the attempt, and costs the session
//! nothing.
//!
//! Sources: "Connection Phase" (dev.mysql.com); TiDB's `pkg/server/conn.go` and
//! `pkg/sessionctx/sessionstates/session_token.go` for the token.

use std::rc::Rc;

use wire::capability::Capabilities;
use wire::error;
use wire::greeting::{self, Greeting};
use wire::login::NodeTls;
use wire::response;

use crate::export::States;
use crate::identity::Identity;
use crate::messages::{Inbox, Message, packets};
use crate::restore::RestoreStatement;

/// What is to be done next.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    Send(Vec<u8>),
    /// Send this, which may be long.
    Restore(Rc<RestoreStatement>),
    /// Send this, and begin TLS behind it; [`Arrival::secured`] when it stands.
    StartTls(Vec<u8>),
    /// The node waits for the login. [`Arrival::enter`] when the states are there.
    Greeted,
    /// The session is there.
    Arrived,
}

/// Why a session could not arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Failure {
    /// The node greeted with this error.
    Unwelcome(u16),
    /// The node lacks what client and old node have agreed on.
    Incapable,
    /// TLS is wanted, and the node has none.
    NoTls,
    /// The node did not let the session in: 1045 for a token that it does not believe, or has no certificate for; 3118 for
    /// an account that was locked meanwhile.
    Denied(u16),
    /// The node did not take the states.
    NotRestored(u16),
    /// The node said what nobody expects there.
    Nonsense,
}

/// Payload bytes that an answer may have; none of them is a result.
const MOST: usize = greeting::MOST;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Greeting,
    Securing,
    /// The session is not ready yet.
    Waiting,
    Login,
    Preparing,
    Restoring,
    Over,
}

/// One attempt at one node.
#[derive(Debug)]
pub struct Arrival {
    identity: Identity,
    tls: NodeTls,
    /// The link to the node has TLS, or is about to.
    has_tls: bool,
    inbox: Inbox,
    phase: Phase,
    /// Of the next packet.
    sequence: u8,
    /// Restores the states. Sent after the login.
    restoring: Option<Rc<RestoreStatement>>,
}

impl Arrival {
    /// `tls`: whether the link to the node must have it, or has it if the node offers it.
    #[must_use]
    pub const fn new(identity: Identity, tls: NodeTls) -> Self {
        Self {
            identity,
            tls,
            has_tls: false,
            inbox: Inbox::new(MOST),
            phase: Phase::Greeting,
            sequence: 1,
            restoring: None,
        }
    }

    /// Who the session is now: its client may have said so since.
    pub fn is_now(&mut self, identity: Identity) {
        self.identity = identity;
    }

    /// Takes bytes of the node, decrypted where there is TLS. The attempt is over after an error.
    pub fn take(&mut self, bytes: &[u8]) -> Result<Vec<Action>, Failure> {
        let done = self.read(bytes);
        if done.is_err() {
            self.phase = Phase::Over;
        }
        done
    }

    /// TLS stands.
    pub fn secured(&mut self) -> Result<Vec<Action>, Failure> {
        if self.phase != Phase::Securing {
            return Err(Failure::Nonsense);
        }
        self.phase = Phase::Waiting;
        Ok(vec![Action::Greeted])
    }

    /// The session is ready: what is to be sent. Err when the node is not; nothing was lost then.
    pub fn enter(&mut self, states: &States) -> Result<Vec<u8>, Failure> {
        if self.phase != Phase::Waiting {
            return Err(Failure::Nonsense);
        }
        self.restoring = Some(Rc::clone(&states.statement));
        self.phase = Phase::Login;
        let login =
            packets(&self.identity.response(&states.token, &states.summary.database, self.has_tls), self.sequence);
        self.sequence = self.sequence.wrapping_add(1);
        Ok(login)
    }

    /// Whether the login has succeeded. Meaningless after a failure.
    #[must_use]
    pub const fn is_let_in(&self) -> bool {
        matches!(self.phase, Phase::Preparing | Phase::Restoring | Phase::Over)
    }

    fn read(&mut self, bytes: &[u8]) -> Result<Vec<Action>, Failure> {
        self.inbox.push(bytes);
        let mut actions = Vec::new();
        while let Some(message) = self.inbox.next().map_err(|_| Failure::Nonsense)? {
            actions.push(self.step(&message)?);
        }
        // Behind an SSLRequest the node waits, and so it does before the login.
        let silent = matches!(self.phase, Phase::Securing | Phase::Waiting | Phase::Over);
        if silent && !self.inbox.is_empty() {
            return Err(Failure::Nonsense);
        }
        Ok(actions.into_iter().flatten().collect())
    }

    fn step(&mut self, message: &Message) -> Result<Option<Action>, Failure> {
        match self.phase {
            Phase::Greeting => self.greeted(message).map(Some),
            Phase::Login => {
                self.answer(message, Failure::Denied)?;
                self.phase = Phase::Preparing;
                self.sequence = 1;
                Ok(self.restoring.take().map(Action::Restore))
            }
            Phase::Preparing => {
                self.answer(message, Failure::NotRestored)?;
                self.phase = Phase::Restoring;
                Ok(None)
            }
            Phase::Restoring => {
                self.answer(message, Failure::NotRestored)?;
                self.phase = Phase::Over;
                Ok(Some(Action::Arrived))
            }
            // A node that shuts down may say so to one that is logging in.
            Phase::Waiting => Err(error::code(&message.payload).map_or(Failure::Nonsense, Failure::Unwelcome)),
            Phase::Securing | Phase::Over => Err(Failure::Nonsense),
        }
    }

    fn greeted(&mut self, message: &Message) -> Result<Action, Failure> {
        if let Some(code) = error::code(&message.payload) {
            return Err(Failure::Unwelcome(code));
        }
        let greeting = Greeting::parse(&message.payload).ok_or(Failure::Nonsense)?;
        if message.sequence != 0 {
            return Err(Failure::Nonsense);
        }
        let needed = response::capabilities(&self.identity.head(false));
        if !greeting.capabilities.understood().has(needed) {
            return Err(Failure::Incapable);
        }
        let offers_tls = greeting.capabilities.has(Capabilities::SSL);
        self.has_tls = match self.tls {
            NodeTls::Disabled => false,
            NodeTls::Preferred => offers_tls,
            NodeTls::Required if offers_tls => true,
            NodeTls::Required => return Err(Failure::NoTls),
        };
        if !self.has_tls {
            self.phase = Phase::Waiting;
            return Ok(Action::Greeted);
        }
        self.phase = Phase::Securing;
        let request = packets(&self.identity.head(true), self.sequence);
        self.sequence = self.sequence.wrapping_add(1);
        Ok(Action::StartTls(request))
    }

    /// An OK packet with the sequence number that is due.
    fn answer(&self, message: &Message, refused: fn(u16) -> Failure) -> Result<(), Failure> {
        const OK: u8 = 0x00;
        match message.payload.first() {
            _ if message.sequence != self.sequence.max(1) => Err(Failure::Nonsense),
            Some(&OK) => Ok(()),
            _ => Err(error::code(&message.payload).map_or(Failure::Nonsense, refused)),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::restore::tests::statement;
    use crate::states::Summary;
    use proptest::prelude::*;

    const OK: &[u8] = &[0, 0, 0, 2, 0, 0, 0];
    pub(crate) const OFFERED: Capabilities = Capabilities(!(Capabilities::SSL.0 | Capabilities::COMPRESS.0));

    pub(crate) fn greeting(offered: Capabilities) -> Vec<u8> {
        let [a, b, c, d] = offered.0.to_le_bytes();
        let mut payload = b"\x0a8.0.11-TiDB-v8.5.3\0\x01\0\0\0saltsalt\0".to_vec();
        payload.extend([a, b, 46, 2, 0, c, d, 21]);
        payload.extend([0; 10]);
        payload.extend(b"moresaltmore\0mysql_native_password\0");
        packets(&payload, 0)
    }

    fn identity() -> Identity {
        let agreed = Capabilities::PROTOCOL_41.with(Capabilities::PLUGIN_AUTH).with(Capabilities::DEPRECATE_EOF);
        let mut login = agreed.0.to_le_bytes().to_vec();
        login.extend([0, 0, 0, 1, 46]);
        login.extend([0; 23]);
        login.extend(b"root\0\0");
        Identity::of(&login, agreed).expect("a login")
    }

    fn exported() -> States {
        let summary = Summary { database: "d".to_owned(), ..Summary::default() };
        let statement = Rc::new(statement(b"{\"current-db\":\"d\"}"));
        States { statement, token: vec![b't'; 500], summary }
    }

    fn waiting() -> Arrival {
        let mut arrival = Arrival::new(identity(), NodeTls::Disabled);
        assert_eq!(arrival.take(&greeting(OFFERED)), Ok(vec![Action::Greeted]));
        arrival
    }

    pub(crate) fn error(code: u16, sequence: u8) -> Vec<u8> {
        let [low, high] = code.to_le_bytes();
        packets(&[&[0xff, low, high][..], b"#HY000no"].concat(), sequence)
    }

    #[test]
    fn a_session_arrives() {
        let mut arrival = waiting();
        let login = arrival.enter(&exported()).expect("it waits");
        assert_eq!(login[3], 1);
        let Ok(actions) = arrival.take(&packets(OK, 2)) else { panic!("denied") };
        assert_eq!(actions, [Action::Restore(exported().statement)]);
        assert_eq!(arrival.take(&[packets(OK, 1), packets(OK, 1)].concat()), Ok(vec![Action::Arrived]));
    }

    #[test]
    fn answers_may_come_byte_by_byte() {
        let mut arrival = Arrival::new(identity(), NodeTls::Disabled);
        let mut seen = Vec::new();
        let mut feed = |arrival: &mut Arrival, bytes: &[u8]| {
            for byte in bytes {
                seen.extend(arrival.take(&[*byte]).expect("as expected"));
            }
        };
        feed(&mut arrival, &greeting(OFFERED));
        arrival.enter(&exported()).expect("it waits");
        feed(&mut arrival, &packets(OK, 2));
        feed(&mut arrival, &packets(OK, 1));
        feed(&mut arrival, &packets(OK, 1));
        assert_eq!(seen.len(), 3);
        assert_eq!(seen.last(), Some(&Action::Arrived));
    }

    #[test]
    fn with_tls_the_numbers_count_the_request() {
        let mut arrival = Arrival::new(identity(), NodeTls::Required);
        let Ok(actions) = arrival.take(&greeting(OFFERED.with(Capabilities::SSL))) else { panic!("not greeted") };
        let [Action::StartTls(request)] = &actions[..] else { panic!("{actions:?}") };
        assert_eq!((request[3], request.len()), (1, 36));
        assert_eq!(arrival.secured(), Ok(vec![Action::Greeted]));
        assert_eq!(arrival.enter(&exported()).expect("it waits")[3], 2);
        assert!(arrival.take(&packets(OK, 3)).is_ok());
    }

    proptest! {
        /// However it is cut, and whether or not the request for TLS was ordered by then.
        #[test]
        fn what_a_node_sends_before_tls_ends_it(
            behind in prop::collection::vec(any::<u8>(), 1..40),
            cuts in prop::collection::vec(1..100usize, 1..8),
        ) {
            let mut arrival = Arrival::new(identity(), NodeTls::Required);
            let sent = [greeting(OFFERED.with(Capabilities::SSL)), behind].concat();
            let mut rest = &sent[..];
            let mut failed = false;
            for cut in cuts.into_iter().cycle() {
                let (piece, behind) = rest.split_at(cut.min(rest.len()));
                failed = arrival.take(piece).is_err();
                rest = behind;
                if failed || rest.is_empty() {
                    break;
                }
            }
            prop_assert!(failed);
            prop_assert_eq!(arrival.secured(), Err(Failure::Nonsense));
            prop_assert!(arrival.enter(&exported()).is_err());
        }
    }

    #[test]
    fn tls_is_never_left_out() {
        assert_eq!(Arrival::new(identity(), NodeTls::Required).take(&greeting(OFFERED)), Err(Failure::NoTls));
    }

    #[test]
    fn tls_that_is_preferred_is_used_where_it_is_offered() {
        let mut plain = Arrival::new(identity(), NodeTls::Preferred);
        assert_eq!(plain.take(&greeting(OFFERED)), Ok(vec![Action::Greeted]));
        let mut secured = Arrival::new(identity(), NodeTls::Preferred);
        let greeting = greeting(OFFERED.with(Capabilities::SSL));
        assert!(matches!(secured.take(&greeting).as_deref(), Ok([Action::StartTls(_)])));
        let mut disabled = Arrival::new(identity(), NodeTls::Disabled);
        assert_eq!(disabled.take(&greeting), Ok(vec![Action::Greeted]));
    }

    #[test]
    fn a_node_that_can_do_less_is_no_target() {
        let lesser = greeting(OFFERED.without(Capabilities::DEPRECATE_EOF));
        assert_eq!(Arrival::new(identity(), NodeTls::Disabled).take(&lesser), Err(Failure::Incapable));
    }

    #[test]
    fn errors_have_their_codes() {
        assert_eq!(Arrival::new(identity(), NodeTls::Disabled).take(&error(1040, 0)), Err(Failure::Unwelcome(1040)));
        assert_eq!(waiting().take(&error(1053, 1)), Err(Failure::Unwelcome(1053)));
        let mut arrival = waiting();
        arrival.enter(&exported()).expect("it waits");
        assert_eq!(arrival.take(&error(1045, 2)), Err(Failure::Denied(1045)));
        for answers in [vec![error(1064, 1)], vec![packets(OK, 1), error(1146, 1)]] {
            let mut arrival = waiting();
            arrival.enter(&exported()).expect("it waits");
            arrival.take(&packets(OK, 2)).expect("let in");
            assert!(matches!(arrival.take(&answers.concat()), Err(Failure::NotRestored(1064 | 1146))));
        }
    }

    #[test]
    fn what_nobody_expects_ends_it() {
        assert_eq!(
            Arrival::new(identity(), NodeTls::Disabled).take(&packets(b"HTTP/1.1 400", 0)),
            Err(Failure::Nonsense)
        );
        let behind = [greeting(OFFERED), b"\x01".to_vec()].concat();
        assert_eq!(Arrival::new(identity(), NodeTls::Disabled).take(&behind), Err(Failure::Nonsense));
        // Another method of authentication, a wrong number, an answer too many.
        for answer in [packets(b"\xfemysql_native_password\0salt\0", 2), packets(OK, 1)] {
            let mut arrival = waiting();
            arrival.enter(&exported()).expect("it waits");
            assert_eq!(arrival.take(&answer), Err(Failure::Nonsense));
        }
        let mut arrival = waiting();
        arrival.enter(&exported()).expect("it waits");
        arrival.take(&packets(OK, 2)).expect("let in");
        assert_eq!(arrival.take(&[packets(OK, 1), packets(OK, 1), packets(OK, 1)].concat()), Err(Failure::Nonsense));
    }

    #[test]
    fn nothing_is_said_before_the_greeting_or_twice() {
        let mut early = Arrival::new(identity(), NodeTls::Disabled);
        assert!(early.enter(&exported()).is_err());
        let mut arrival = waiting();
        assert!(arrival.enter(&exported()).is_ok());
        assert!(arrival.enter(&exported()).is_err());
    }
}
