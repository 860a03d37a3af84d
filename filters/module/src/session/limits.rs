//! The slots that a session holds under the limits of connections.

use std::cell::RefCell;
use std::net::IpAddr;

use mysql_proto::error::ProxyError;

use super::Session;
use crate::commands::IdentityChange;
use crate::connection_limits::{self, Refusal, Rule, RuleSlot};

#[derive(Default)]
pub(crate) struct SessionSlots {
    /// None: the client has not logged in.
    pub(super) user: RefCell<Option<Box<[u8]>>>,
    held: RefCell<Vec<RuleSlot>>,
    /// Of a COM_CHANGE_USER that the node has not answered.
    next: RefCell<Option<NextUser>>,
    /// The text of the error for a refused client. None: it gets the general text.
    refusal_text: RefCell<Option<String>>,
}

/// The user of a COM_CHANGE_USER, and the slots of this user.
struct NextUser {
    user: Box<[u8]>,
    slots: Vec<RuleSlot>,
}

impl Session {
    /// Counts the client under the rules that need no user.
    ///
    /// # Errors
    /// A limit is reached.
    pub(crate) fn take_slots_of_address(&self) -> Result<(), ProxyError> {
        let slots = connection_limits::take_slots_of_address(&connection_limits::rules(), self.client_address())
            .map_err(|refusal| self.refuse(refusal))?;
        self.slots.held.borrow_mut().extend(slots);
        Ok(())
    }

    /// Counts the client under the rules of its user, once.
    ///
    /// # Errors
    /// A limit is reached.
    pub(super) fn take_slots_of_user(&self, user: &[u8]) -> Result<(), ProxyError> {
        if self.slots.user.borrow().is_some() {
            return Ok(());
        }
        let rules = connection_limits::rules();
        let slots = connection_limits::take_slots_of_user(&rules, self.client_address(), user, true)
            .map_err(|refusal| self.refuse(refusal))?;
        self.slots.user.replace(Some(user.into()));
        self.slots.held.borrow_mut().extend(slots);
        Ok(())
    }

    /// Takes slots for the user of a COM_CHANGE_USER that is about to be forwarded. The present slots stay until the
    /// node has accepted the command.
    ///
    /// # Errors
    /// A limit is reached.
    pub(super) fn take_slots_of_next_user(&self, user: &[u8]) -> Result<(), ProxyError> {
        if self.slots.user.borrow().as_deref() == Some(user) {
            return Ok(());
        }
        let rules = connection_limits::rules();
        let slots = connection_limits::take_slots_of_user(&rules, self.client_address(), user, false)
            .map_err(|refusal| self.refuse(refusal))?;
        self.slots.next.replace(Some(NextUser { user: user.into(), slots }));
        Ok(())
    }

    /// If the node has answered a command that changes the identity, counts the client under the rules of its user.
    pub(super) fn on_identity_change(&self, change: IdentityChange) {
        if !matches!(change, IdentityChange::Done | IdentityChange::Failed) {
            return;
        }
        let next = self.slots.next.take();
        if change == IdentityChange::Failed {
            return;
        }
        // A command that the module could not collect has no slots yet. Its user is known if the identity is.
        let (user, slots) = match next {
            Some(next) => (Some(next.user), next.slots),
            None => (self.identity.get().map(|identity| identity.user().into()), Vec::new()),
        };
        if user.is_some() && *self.slots.user.borrow() != user {
            self.slots.user.replace(user);
            self.slots.held.borrow_mut().extend(slots);
            self.recount_limits(&connection_limits::rules());
        }
    }

    /// The user. Empty: not known.
    pub(super) fn user(&self) -> Box<[u8]> {
        self.slots.user.borrow().clone().unwrap_or_default()
    }

    /// Counts the session under changed rules. It does not end if a limit is exceeded.
    pub(crate) fn recount_limits(&self, rules: &[Rule]) {
        if self.phase().is_over() || self.filter.get().is_none() {
            return; // it has no slots any more, or has not taken any yet
        }
        let user = self.slots.user.borrow();
        let slots = connection_limits::recount(rules, self.client_address(), user.as_deref(), self.slots.held.take());
        self.slots.held.replace(slots);
    }

    /// The session no longer counts.
    pub(super) fn release_slots(&self) {
        self.slots.held.take();
        self.slots.next.take();
    }

    /// The text of the error for a refused client. None: it gets the general text.
    pub(super) fn refusal_text(&self) -> Option<String> {
        self.slots.refusal_text.borrow().clone()
    }

    /// The ERR packet that answers a refused command.
    pub(crate) fn command_error_packet(&self, why: ProxyError) -> Vec<u8> {
        match self.refusal_text() {
            Some(text) => why.packet_with_text(&text, 1, true),
            None => why.packet(1, true),
        }
    }

    fn client_address(&self) -> Option<IpAddr> {
        self.addresses().map(|(client, _)| client.ip())
    }

    /// A refused client, which still has to read the error, does not count.
    fn refuse(&self, refusal: Refusal) -> ProxyError {
        self.release_slots();
        if let Some(line) = refusal.log {
            envoy_abi::log!(Warn, "{line}");
        }
        self.slots.refusal_text.replace(Some(refusal.text));
        refusal.error
    }
}
