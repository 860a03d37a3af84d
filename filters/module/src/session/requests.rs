//! The requests of an established session: the module finds them in the client's bytes, and sees some of them as a whole.
//!
//! A command that changes the identity is held until it is complete, if no response is outstanding. A KILL is held until
//! it is known which session it means. While there are rules, requests with statements are held until the rules
//! have decided. While statements are observed, these requests are returned after their bytes were forwarded.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use mysql_proto::command::Command;
use mysql_proto::error::ProxyError;
use mysql_proto::request_reader::{Found, Interest, Request, RequestReader, RequestStart};
use mysql_proto::secret::SecretBytes;
use mysql_proto::tracker::TrackerState;

use super::{Session, identity, kill};
use crate::commands::{ChangeUserResult, Commands};
use crate::fleet_commands::KillAnswer;
use crate::held_memory::HeldMemory;
use crate::rules;
use crate::statements::{self, ClientConnection};

/// How to continue with a held request.
pub(crate) enum Decision {
    Pass,
    /// These packets pass instead.
    Change(SecretBytes),
    /// The client gets this packet instead of a response of the node.
    Answer(Vec<u8>),
    /// The client gets this error, and the session ends.
    Reject(ProxyError),
    /// The request waits, and is then decided about again.
    Wait,
    /// The request waits until the client has got all responses, and is then decided about again.
    WaitForResponses,
}

/// Whether the client's next request is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum HoldState {
    #[default]
    NotHeld,
    /// It waits until the client has got all responses.
    UntilResponses,
    /// It waits until it is decided about again.
    UntilDecision,
    /// It may continue, and is read again next.
    Resuming,
}

/// The requests of one session.
#[derive(Default)]
pub(super) struct SessionRequests {
    reader: RefCell<RequestReader>,
    hold: Cell<HoldState>,
    /// The answer to the held request, if it must follow other responses.
    answer: RefCell<Option<Vec<u8>>>,
    /// What the control plane has answered about the held KILL.
    kill_answer: RefCell<Option<KillAnswer>>,
    /// Of the request that is incomplete or waits.
    memory: HeldMemory,
}

impl SessionRequests {
    pub(super) fn set_kill_answer(&self, answer: KillAnswer) {
        self.kill_answer.replace(Some(answer));
    }

    pub(super) fn take_kill_answer(&self) -> Option<KillAnswer> {
        self.kill_answer.take()
    }
}

impl Session {
    /// To be called first with bytes of the client. Some: the bytes to read instead, which begin with earlier ones.
    pub(crate) fn join_client_bytes(&self, bytes: &[u8]) -> Option<SecretBytes> {
        let mut reader = self.requests.reader.borrow_mut();
        if !self.is_opaque() {
            return reader.join(bytes);
        }
        let mut kept = reader.stop();
        if kept.is_empty() {
            return None;
        }
        kept.extend_from_slice(bytes);
        Some(kept)
    }

    /// Whether the session must end because the module cannot follow it any more: the rules cannot be applied, or a request
    /// that the reader has dropped cannot be answered.
    pub(crate) fn must_end_opaque(&self) -> bool {
        self.is_opaque() && (rules::must_enforce() || self.requests.reader.borrow().has_dropped())
    }

    /// Finds the next request in the bytes of the client, which must not be empty. None: all bytes are kept.
    pub(crate) fn next_request<'a>(&self, bytes: &mut &'a [u8]) -> Option<Found<'a>> {
        let awaits_client = self.awaits_client();
        let mut traffic = self.traffic.borrow_mut();
        let Some(traffic) = traffic.as_mut().filter(|traffic| traffic.tracker.state() != TrackerState::Opaque) else {
            self.forget_held_request();
            return Some(Found::Bytes(std::mem::take(bytes)));
        };
        self.follow_statements_switch(&mut traffic.commands);
        let statements = &traffic.commands.statements;
        let has_attributes = statements.has_attributes();
        let expects_command = traffic.tracker.expects_command();
        let holds_changes_of_user = rules::must_enforce();
        let interest = |start: RequestStart<'_>| match Command::from(start.command) {
            Command::ChangeUser | Command::SetOption if start.is_first && awaits_client => identity::interest(start),
            Command::ChangeUser if holds_changes_of_user => identity::interest(start),
            _ if self.needs_states_before(start, traffic) => Interest::Hold,
            _ if Self::is_judged(start) => Interest::Hold,
            _ => kill::interest(start, has_attributes)
                .unwrap_or_else(|| if statements.needs_request(start) { Interest::Observe } else { Interest::None }),
        };
        let mut reader = self.requests.reader.borrow_mut();
        let found = reader.next(bytes, expects_command, interest);
        if !self.requests.memory.try_set(reader.held_bytes()) {
            reader.drop_held();
            self.requests.memory.try_set(0);
        }
        if self.is_request_resuming() && matches!(found, Some(Found::Bytes(_) | Found::Observed(..))) {
            self.forget_held_request(); // the rules that have held the request are gone
        }
        found
    }

    /// The client's bytes up to the end of this request were tracked.
    pub(crate) fn on_request(&self, request: &Request<'_>) {
        let (permit, must_log) = (self.take_permit(), self.take_must_log());
        let node = self.node.borrow();
        let node = node.as_ref().map_or("", |assigned| &assigned.node.shared.name);
        self.with_traffic(|traffic| {
            let statements = &mut traffic.commands.statements;
            statements.on_request(&self.worker.statements, request, permit, node);
            if must_log {
                statements.log_newest();
            }
        });
    }

    /// Decides about a held request.
    pub(crate) fn decide(self: &Rc<Self>, request: &Request<'_>) -> Decision {
        let decision = self.decide_by_command(request);
        if matches!(decision, Decision::Answer(_) | Decision::Reject(_)) {
            self.release_permit();
        }
        decision
    }

    fn decide_by_command(self: &Rc<Self>, request: &Request<'_>) -> Decision {
        self.requests.hold.set(HoldState::NotHeld);
        if let Some(answer) = self.requests.answer.take() {
            return Decision::Answer(answer);
        }
        if !matches!(request.command(), Some(Command::ChangeUser | Command::ResetConnection))
            && self.start_state_export()
        {
            return Decision::Wait;
        }
        match request.command() {
            // The rules have to know the user of what follows.
            Some(Command::ChangeUser) if rules::must_enforce() && !self.awaits_client() => Decision::WaitForResponses,
            Some(Command::ChangeUser | Command::SetOption) => match self.check_identity_command(request) {
                Ok(None) => Decision::Pass,
                Ok(Some(changed)) => Decision::Change(changed),
                Err(why) => Decision::Reject(why),
            },
            Some(Command::ProcessKill) => self.decide_process_kill(request),
            Some(Command::Query) if self.requests.kill_answer.borrow().is_some() => self.decide_kill(request),
            Some(Command::Query) => match self.judge(request) {
                Decision::Pass => self.decide_kill(request),
                decision => decision,
            },
            _ => self.judge(request),
        }
    }

    fn decide_process_kill(self: &Rc<Self>, request: &Request<'_>) -> Decision {
        if self.requests.kill_answer.borrow().is_none()
            && let Some(statement) = self.kill_statement(request)
        {
            match self.judge(&statement) {
                Decision::Pass => {}
                decision => return decision,
            }
        }
        self.decide_kill(request)
    }

    /// The held request passes without a decision.
    fn forget_held_request(&self) {
        self.requests.hold.set(HoldState::NotHeld);
        self.requests.answer.take();
        self.requests.kill_answer.take();
        self.requests.memory.try_set(0);
        self.stop_waiting_for_limit();
        self.release_permit();
    }

    /// Whether the client has got all responses, so that it may get an answer of the module.
    pub(crate) fn may_answer(&self) -> bool {
        self.awaits_client() && !self.client.has_unsent()
    }

    /// The module has answered a request.
    pub(crate) fn on_answered(&self) {
        self.restart_idle_timeout();
    }

    /// Holds the client's next request until it may be answered.
    pub(crate) fn hold_answer(&self, answer: Vec<u8>) {
        self.requests.answer.replace(Some(answer));
        self.requests.hold.set(HoldState::UntilResponses);
    }

    /// Holds the client's next request until the client has got all responses.
    pub(crate) fn hold_until_responses(&self) {
        self.requests.hold.set(HoldState::UntilResponses);
    }

    /// Whether the client's next request waits for something other than responses: nothing of it was done yet.
    pub(crate) fn waits_for_decision(&self) -> bool {
        self.requests.hold.get() == HoldState::UntilDecision
    }

    /// Whether a part of a request has arrived, but not all of it.
    pub(super) fn has_partial_request(&self) -> bool {
        self.requests.reader.borrow().has_partial_request()
    }

    /// Holds the client's next request until it is decided about again.
    pub(crate) fn hold_until_decision(&self) {
        self.requests.hold.set(HoldState::UntilDecision);
    }

    /// Decides again about the request that waits.
    pub(super) fn decide_again(&self) {
        if self.requests.hold.get() == HoldState::UntilDecision {
            self.resume_request();
        }
    }

    /// The client's next request, and what follows it, are kept until the request is read again.
    pub(crate) fn count_held_bytes(&self, bytes: usize) {
        self.requests.memory.set(bytes);
    }

    /// Whether the client's next request waits, so that nothing is read from the client.
    pub(crate) fn is_request_waiting(&self) -> bool {
        matches!(self.requests.hold.get(), HoldState::UntilResponses | HoldState::UntilDecision)
    }

    /// Whether the module has a request that it has neither passed on nor answered.
    pub(super) fn has_held_request(&self) -> bool {
        self.requests.hold.get() != HoldState::NotHeld
    }

    /// The node has responded, or the client has received bytes.
    pub(super) fn continue_after_responses(&self) {
        if self.requests.hold.get() == HoldState::UntilResponses && (self.may_answer() || self.is_opaque()) {
            self.resume_request();
        }
    }

    /// Ends the hold of the client's next request. If the client is held for another reason, too, the request is read
    /// when that reason has ended.
    pub(super) fn resume_request(&self) {
        self.requests.hold.set(HoldState::Resuming);
        if !self.migration.is_client_held() {
            self.client.read_again();
        }
    }

    /// Whether the session must read a request again that it has held. Its bytes were received before, so no event of the
    /// socket announces them.
    pub(super) fn is_request_resuming(&self) -> bool {
        self.requests.hold.get() == HoldState::Resuming
    }

    /// Observes executions or not, as the control plane wants.
    fn follow_statements_switch(&self, commands: &mut Commands) {
        let is_on = statements::is_on();
        if commands.statements.is_collecting() != is_on {
            if is_on {
                let client = ClientConnection { id: self.id, address: self.addresses().map(|(client, _)| client) };
                commands.statements.collect(&self.worker.statements, &self.user(), client);
            } else {
                commands.statements.stop_collecting();
            }
        }
        if commands.statements.must_follow_capture()
            && let Some(assigned) = &*self.node.borrow()
        {
            commands.statements.follow_capture(&assigned.node.group, &assigned.node.shared.name);
        }
    }

    /// A change of user has ended.
    pub(super) fn update_statements_user(&self, result: ChangeUserResult) {
        let names = self.identity.change_user_names();
        if let Some(names) = names.filter(|_| result.error.is_none()) {
            self.with_traffic(|traffic| {
                let statements = &mut traffic.commands.statements;
                statements.on_user_changed(&self.worker.statements, names.user(), names.database());
            });
        }
    }

    /// Whether client and node have agreed on query attributes.
    pub(super) fn has_query_attributes(&self) -> bool {
        self.with_traffic(|traffic| traffic.commands.statements.has_attributes()).unwrap_or_default()
    }

    fn is_opaque(&self) -> bool {
        self.with_traffic(|traffic| traffic.tracker.state() == TrackerState::Opaque).unwrap_or_default()
    }
}
