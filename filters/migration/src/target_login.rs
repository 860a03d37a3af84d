//! The login of a migrating session at its target: greeting, TLS, login with a token, restore of the states.
//!
//! The slow part, up to the greeting, takes place while the old node still serves the session. The rest follows when
//! the states are exported. The node's answers are checked strictly: anything unexpected ends the attempt, without harm
//! to the session.
//!
//! Sources: "Connection Phase" (dev.mysql.com); TiDB's `pkg/server/conn.go` and
//! `pkg/sessionctx/sessionstates/session_token.go` for the token.

use std::rc::Rc;

use mysql_proto::capability::Capabilities;
use mysql_proto::error;
use mysql_proto::greeting::{self, Greeting};
use mysql_proto::handshake_response;
use mysql_proto::login::NodeTls;
use mysql_proto::secret::SecretBytes;

use crate::identity::Identity;
use crate::messages::{Message, MessageReader, packets};
use crate::restore::{RESTORE_STATEMENTS, RestoreStatement};
use crate::state_export::ExportedStates;

/// What the caller does.
#[derive(Debug, PartialEq, Eq)]
pub enum LoginAction {
    Send(SecretBytes),
    /// Send this statement. It may be long.
    RestoreStates(Rc<RestoreStatement>),
    /// Send these bytes, then start TLS. Call [`TargetLogin::on_tls_established`] when it is established.
    StartTls(Vec<u8>),
    /// The node waits for the login. Call [`TargetLogin::log_in`] when the states are exported.
    Greeted,
    /// The node has restored the session.
    Restored,
}

/// Why the login or the restore failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LoginFailure {
    /// The node sent this error instead of its greeting, or after it, before the login.
    GreetedWithError(u16),
    /// The node lacks capabilities that client and old node agreed on.
    MissingCapabilities,
    /// TLS is required, but the node does not offer it.
    NoTls,
    /// The node denied the login: 1045 for a token that it does not accept or cannot check without a certificate; 3118
    /// for an account that was locked meanwhile.
    Denied(u16),
    /// The node rejected the states with this error.
    RestoreRejected(u16),
    /// The node sent something unexpected.
    ProtocolError,
}

/// Maximum payload bytes of an answer; there are no result sets.
const MAX_MESSAGE_BYTES: usize = greeting::MAX_GREETING_BYTES;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TargetLoginPhase {
    Greeting,
    StartingTls,
    /// The node waits for the login, and the session is not ready yet.
    Ready,
    /// The node processes the login.
    Login,
    /// The node runs the statements of the restore, of which it still owes this many answers.
    Restoring(u8),
    Finished,
}

/// One attempt at one node.
#[derive(Debug)]
pub struct TargetLogin {
    identity: Identity,
    tls: NodeTls,
    /// The connection uses TLS, or will.
    has_tls: bool,
    inbox: MessageReader,
    phase: TargetLoginPhase,
    /// Sequence number of the next packet.
    sequence: u8,
    /// Restores the states. Sent after the login.
    restore_statement: Option<Rc<RestoreStatement>>,
    connection_id: Option<u32>,
}

impl TargetLogin {
    /// `tls`: whether the connection uses TLS.
    #[must_use]
    pub const fn new(identity: Identity, tls: NodeTls) -> Self {
        Self {
            identity,
            tls,
            has_tls: false,
            inbox: MessageReader::new(MAX_MESSAGE_BYTES),
            phase: TargetLoginPhase::Greeting,
            sequence: 1,
            restore_statement: None,
            connection_id: None,
        }
    }

    /// The connection id in the node's greeting. None: it has not greeted.
    #[must_use]
    pub const fn connection_id(&self) -> Option<u32> {
        self.connection_id
    }

    /// Sets the session's current identity, which its client may have changed.
    pub fn set_identity(&mut self, identity: Identity) {
        self.identity = identity;
    }

    /// Processes bytes of the node, decrypted if there is TLS. After an error the attempt is over.
    pub fn receive(&mut self, bytes: &[u8]) -> Result<Vec<LoginAction>, LoginFailure> {
        let done = self.read(bytes);
        if done.is_err() {
            self.phase = TargetLoginPhase::Finished;
        }
        done
    }

    /// TLS is established.
    pub fn on_tls_established(&mut self) -> Result<Vec<LoginAction>, LoginFailure> {
        if self.phase != TargetLoginPhase::StartingTls {
            return Err(LoginFailure::ProtocolError);
        }
        self.phase = TargetLoginPhase::Ready;
        Ok(vec![LoginAction::Greeted])
    }

    /// Returns the login packet. Err: the node does not wait for a login; the session is unharmed.
    pub fn log_in(&mut self, states: &ExportedStates) -> Result<SecretBytes, LoginFailure> {
        if self.phase != TargetLoginPhase::Ready {
            return Err(LoginFailure::ProtocolError);
        }
        self.restore_statement = Some(Rc::clone(&states.statement));
        self.phase = TargetLoginPhase::Login;
        let login = packets(
            &self.identity.handshake_response(&states.token, &states.summary.database, self.has_tls),
            self.sequence,
        );
        self.sequence = self.sequence.wrapping_add(1);
        Ok(login.into())
    }

    /// Whether the login has succeeded. Meaningless after a failure.
    #[must_use]
    pub const fn is_logged_in(&self) -> bool {
        matches!(self.phase, TargetLoginPhase::Restoring(_) | TargetLoginPhase::Finished)
    }

    fn read(&mut self, bytes: &[u8]) -> Result<Vec<LoginAction>, LoginFailure> {
        self.inbox.push(bytes);
        let mut actions = Vec::new();
        while let Some(message) = self.inbox.next().map_err(|_| LoginFailure::ProtocolError)? {
            actions.push(self.on_message(&message)?);
        }
        // In these phases the node owes nothing.
        let is_silent =
            matches!(self.phase, TargetLoginPhase::StartingTls | TargetLoginPhase::Ready | TargetLoginPhase::Finished);
        if is_silent && !self.inbox.is_empty() {
            return Err(LoginFailure::ProtocolError);
        }
        Ok(actions.into_iter().flatten().collect())
    }

    fn on_message(&mut self, message: &Message) -> Result<Option<LoginAction>, LoginFailure> {
        match self.phase {
            TargetLoginPhase::Greeting => self.on_greeting(message).map(Some),
            TargetLoginPhase::Login => {
                self.expect_ok(message, LoginFailure::Denied)?;
                self.phase = TargetLoginPhase::Restoring(RESTORE_STATEMENTS);
                self.sequence = 1;
                Ok(self.restore_statement.take().map(LoginAction::RestoreStates))
            }
            TargetLoginPhase::Restoring(answers) => {
                self.expect_ok(message, LoginFailure::RestoreRejected)?;
                let is_last = answers <= 1;
                self.phase =
                    if is_last { TargetLoginPhase::Finished } else { TargetLoginPhase::Restoring(answers - 1) };
                Ok(is_last.then_some(LoginAction::Restored))
            }
            // A node that shuts down may send an error before the login.
            TargetLoginPhase::Ready => {
                Err(error::code(&message.payload).map_or(LoginFailure::ProtocolError, LoginFailure::GreetedWithError))
            }
            TargetLoginPhase::StartingTls | TargetLoginPhase::Finished => Err(LoginFailure::ProtocolError),
        }
    }

    fn on_greeting(&mut self, message: &Message) -> Result<LoginAction, LoginFailure> {
        if let Some(code) = error::code(&message.payload) {
            return Err(LoginFailure::GreetedWithError(code));
        }
        let greeting = Greeting::parse(&message.payload).ok_or(LoginFailure::ProtocolError)?;
        if message.sequence != 0 {
            return Err(LoginFailure::ProtocolError);
        }
        self.connection_id = greeting::connection_id(&message.payload);
        let needed = handshake_response::capabilities(&self.identity.handshake_head(false));
        if !greeting.capabilities.understood().has(needed) {
            return Err(LoginFailure::MissingCapabilities);
        }
        let offers_tls = greeting.capabilities.has(Capabilities::SSL);
        self.has_tls = match self.tls {
            NodeTls::Disabled => false,
            NodeTls::Preferred => offers_tls,
            NodeTls::Required if offers_tls => true,
            NodeTls::Required => return Err(LoginFailure::NoTls),
        };
        if !self.has_tls {
            self.phase = TargetLoginPhase::Ready;
            return Ok(LoginAction::Greeted);
        }
        self.phase = TargetLoginPhase::StartingTls;
        let request = packets(&self.identity.handshake_head(true), self.sequence);
        self.sequence = self.sequence.wrapping_add(1);
        Ok(LoginAction::StartTls(request))
    }

    /// Expects an OK packet with the next sequence number. `to_failure`: the failure for an ERR packet.
    fn expect_ok(&self, message: &Message, to_failure: fn(u16) -> LoginFailure) -> Result<(), LoginFailure> {
        const OK: u8 = 0x00;
        match message.payload.first() {
            _ if message.sequence != self.sequence.max(1) => Err(LoginFailure::ProtocolError),
            Some(&OK) => Ok(()),
            _ => Err(error::code(&message.payload).map_or(LoginFailure::ProtocolError, to_failure)),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::restore::tests::statement;
    use crate::state_summary::StateSummary;
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
        Identity::from_handshake_response(&login, agreed).expect("a login")
    }

    fn exported() -> ExportedStates {
        let summary = StateSummary { database: "d".to_owned(), ..StateSummary::default() };
        let statement = Rc::new(statement(b"{\"current-db\":\"d\"}"));
        ExportedStates { statement, token: vec![b't'; 500].into(), summary }
    }

    fn ready_login() -> TargetLogin {
        let mut target_login = TargetLogin::new(identity(), NodeTls::Disabled);
        assert_eq!(target_login.receive(&greeting(OFFERED)), Ok(vec![LoginAction::Greeted]));
        target_login
    }

    pub(crate) fn error(code: u16, sequence: u8) -> Vec<u8> {
        let [low, high] = code.to_le_bytes();
        packets(&[&[0xff, low, high][..], b"#HY000no"].concat(), sequence)
    }

    #[test]
    fn login_restores_the_session() {
        let mut target_login = ready_login();
        let login = target_login.log_in(&exported()).expect("the node is ready");
        assert_eq!(login[3], 1);
        let Ok(actions) = target_login.receive(&packets(OK, 2)) else { panic!("denied") };
        assert_eq!(actions, [LoginAction::RestoreStates(exported().statement)]);
        assert_eq!(target_login.receive(&packets(OK, 1).repeat(2)), Ok(vec![]));
        assert_eq!(target_login.receive(&packets(OK, 1)), Ok(vec![LoginAction::Restored]));
    }

    #[test]
    fn answers_may_come_byte_by_byte() {
        let mut target_login = TargetLogin::new(identity(), NodeTls::Disabled);
        let mut seen = Vec::new();
        let mut feed = |target_login: &mut TargetLogin, bytes: &[u8]| {
            for byte in bytes {
                seen.extend(target_login.receive(&[*byte]).expect("as expected"));
            }
        };
        feed(&mut target_login, &greeting(OFFERED));
        target_login.log_in(&exported()).expect("the node is ready");
        feed(&mut target_login, &packets(OK, 2));
        feed(&mut target_login, &packets(OK, 1).repeat(3));
        assert_eq!(seen.len(), 3);
        assert_eq!(seen.last(), Some(&LoginAction::Restored));
    }

    #[test]
    fn with_tls_the_sequence_includes_the_ssl_request() {
        let mut target_login = TargetLogin::new(identity(), NodeTls::Required);
        let Ok(actions) = target_login.receive(&greeting(OFFERED.with(Capabilities::SSL))) else {
            panic!("not greeted")
        };
        let [LoginAction::StartTls(request)] = &actions[..] else { panic!("{actions:?}") };
        assert_eq!((request[3], request.len()), (1, 36));
        assert_eq!(target_login.on_tls_established(), Ok(vec![LoginAction::Greeted]));
        assert_eq!(target_login.log_in(&exported()).expect("the node is ready")[3], 2);
        assert!(target_login.receive(&packets(OK, 3)).is_ok());
    }

    proptest! {
        /// However the bytes are split.
        #[test]
        fn bytes_of_the_node_before_tls_end_the_login(
            behind in prop::collection::vec(any::<u8>(), 1..40),
            cuts in prop::collection::vec(1..100usize, 1..8),
        ) {
            let mut target_login = TargetLogin::new(identity(), NodeTls::Required);
            let sent = [greeting(OFFERED.with(Capabilities::SSL)), behind].concat();
            let mut rest = &sent[..];
            let mut failed = false;
            for cut in cuts.into_iter().cycle() {
                let (piece, behind) = rest.split_at(cut.min(rest.len()));
                failed = target_login.receive(piece).is_err();
                rest = behind;
                if failed || rest.is_empty() {
                    break;
                }
            }
            prop_assert!(failed);
            prop_assert_eq!(target_login.on_tls_established(), Err(LoginFailure::ProtocolError));
            prop_assert!(target_login.log_in(&exported()).is_err());
        }
    }

    #[test]
    fn required_tls_is_never_left_out() {
        assert_eq!(
            TargetLogin::new(identity(), NodeTls::Required).receive(&greeting(OFFERED)),
            Err(LoginFailure::NoTls)
        );
    }

    #[test]
    fn preferred_tls_is_used_if_offered() {
        let mut plain = TargetLogin::new(identity(), NodeTls::Preferred);
        assert_eq!(plain.receive(&greeting(OFFERED)), Ok(vec![LoginAction::Greeted]));
        let mut secured = TargetLogin::new(identity(), NodeTls::Preferred);
        let greeting = greeting(OFFERED.with(Capabilities::SSL));
        assert!(matches!(secured.receive(&greeting).as_deref(), Ok([LoginAction::StartTls(_)])));
        let mut disabled = TargetLogin::new(identity(), NodeTls::Disabled);
        assert_eq!(disabled.receive(&greeting), Ok(vec![LoginAction::Greeted]));
    }

    #[test]
    fn node_that_lacks_capabilities_is_rejected() {
        let lesser = greeting(OFFERED.without(Capabilities::DEPRECATE_EOF));
        assert_eq!(
            TargetLogin::new(identity(), NodeTls::Disabled).receive(&lesser),
            Err(LoginFailure::MissingCapabilities)
        );
    }

    #[test]
    fn errors_are_reported_with_their_codes() {
        assert_eq!(
            TargetLogin::new(identity(), NodeTls::Disabled).receive(&error(1040, 0)),
            Err(LoginFailure::GreetedWithError(1040))
        );
        assert_eq!(ready_login().receive(&error(1053, 1)), Err(LoginFailure::GreetedWithError(1053)));
        let mut target_login = ready_login();
        target_login.log_in(&exported()).expect("the node is ready");
        assert_eq!(target_login.receive(&error(1045, 2)), Err(LoginFailure::Denied(1045)));
        let ok = packets(OK, 1);
        for answers in [vec![error(1064, 1)], vec![ok.clone(), error(1146, 1)], vec![ok.clone(), ok, error(1064, 1)]] {
            let mut target_login = ready_login();
            target_login.log_in(&exported()).expect("the node is ready");
            target_login.receive(&packets(OK, 2)).expect("logged in");
            assert!(matches!(target_login.receive(&answers.concat()), Err(LoginFailure::RestoreRejected(1064 | 1146))));
        }
    }

    #[test]
    fn unexpected_message_ends_the_login() {
        assert_eq!(
            TargetLogin::new(identity(), NodeTls::Disabled).receive(&packets(b"HTTP/1.1 400", 0)),
            Err(LoginFailure::ProtocolError)
        );
        let behind = [greeting(OFFERED), b"\x01".to_vec()].concat();
        assert_eq!(TargetLogin::new(identity(), NodeTls::Disabled).receive(&behind), Err(LoginFailure::ProtocolError));
        // Another authentication method, a wrong sequence number, an additional answer.
        for answer in [packets(b"\xfemysql_native_password\0salt\0", 2), packets(OK, 1)] {
            let mut target_login = ready_login();
            target_login.log_in(&exported()).expect("the node is ready");
            assert_eq!(target_login.receive(&answer), Err(LoginFailure::ProtocolError));
        }
        let mut target_login = ready_login();
        target_login.log_in(&exported()).expect("the node is ready");
        target_login.receive(&packets(OK, 2)).expect("logged in");
        assert_eq!(target_login.receive(&packets(OK, 1).repeat(4)), Err(LoginFailure::ProtocolError));
    }

    #[test]
    fn login_needs_a_greeting_and_is_sent_once() {
        let mut early = TargetLogin::new(identity(), NodeTls::Disabled);
        assert!(early.log_in(&exported()).is_err());
        let mut target_login = ready_login();
        assert!(target_login.log_in(&exported()).is_ok());
        assert!(target_login.log_in(&exported()).is_err());
    }
}
