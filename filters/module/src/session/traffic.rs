//! What goes by once a session is established.

use std::rc::Rc;

use session::pong::Answer;
use wire::error::Refusal;
use wire::tracker::Tracker;

use super::{Passing, Session, refusal, standing};
use crate::commands::Watcher;
use crate::departures;
use crate::node::{self, Standing};

impl Session {
    /// The client's link has TLS and the node's has none, and passwords must not go from the one to the other.
    pub(crate) fn set_exposed(&self) {
        self.exposed.set(true);
    }

    /// Bytes of the client go by. False: they must not go on, and the session must end.
    pub(crate) fn client_sent(&self, bytes: &[u8]) -> bool {
        self.client_spoke_last.set(true);
        self.from_client.set(self.from_client.get() + bytes.len() as u64);
        self.counts(|counts| counts.to_node.add(bytes.len() as u64));
        self.track(|tracker, watcher| tracker.client(bytes, watcher));
        self.travel.client_sent(bytes, self.commands.take_change());
        self.is_active();
        !self.is_out_of_sight()
    }

    /// Bytes of the node go by, as far as the answer to a COM_PING that stands behind others. Returns how many, too.
    pub(crate) fn node_sent(&self, bytes: &[u8]) -> (usize, Passing) {
        self.client_spoke_last.set(false);
        let mut taken = bytes.len();
        self.track(|tracker, watcher| taken = tracker.node_to_pong(bytes, watcher));
        self.to_client.set(self.to_client.get() + taken as u64);
        self.counts(|counts| counts.to_client.add(taken as u64));
        self.travel.node_sent(self.commands.take_change());
        self.is_active();
        let passing = if self.commands.take_clear_text() && self.exposed.get() {
            // A change of user is a login, too.
            self.counts(|counts| counts.login_failures[refusal(Refusal::ClearTextPassword)].add(1));
            Passing::AsksForClearText
        } else if self.is_out_of_sight() {
            Passing::Last
        } else {
            Passing::On
        };
        (taken, passing)
    }

    /// Whether the node's next answer is that to a COM_PING.
    pub(crate) fn owes_pong(&self) -> bool {
        self.tracker.borrow().as_ref().is_some_and(Tracker::owes_pong)
    }

    /// Bytes of the node that answer a COM_PING: how many were taken, and what goes to the client once it is whole.
    /// When the node announces its end so, its sessions leave, and the client hears nothing of it.
    pub(crate) fn pong(self: &Rc<Self>, bytes: &[u8]) -> (usize, Option<Vec<u8>>) {
        let status = self.tracker.borrow().as_ref().map_or(0, Tracker::status);
        let (taken, answer) = self.travel.pong.borrow_mut().take(bytes, status);
        let (packet, stops) = match answer {
            Answer::Part => return (taken, None),
            Answer::Whole(packet) => (packet, false),
            Answer::Stopping(packet) => (packet, true),
        };
        let node = self.node.borrow().clone();
        if node.is_some_and(|node| node.says_that_it_stops(stops)) {
            departures::nodes_changed();
        }
        (taken, Some(packet))
    }

    /// Whether the node speaks next: it has all of a command, and owes the response.
    pub(crate) fn awaits_node(&self) -> bool {
        self.tracker.borrow().as_ref().is_some_and(Tracker::awaits_node)
    }

    /// Whether the client speaks next: it has all of the responses.
    pub(crate) fn awaits_client(&self) -> bool {
        matches!(self.counted.get(), Some((Standing::Idle | Standing::Transaction, _)))
    }

    /// Whether a change of user might expose a password unseen.
    pub(super) fn is_out_of_sight(&self) -> bool {
        let lost = self.exposed.get() && self.counted.get().is_some_and(|(standing, _)| standing == Standing::Opaque);
        if lost {
            abi::log!(Warn, "a session is ended: it cannot be followed any more, so it might expose a password");
        }
        lost
    }

    pub(super) fn track(&self, run: impl FnOnce(&mut Tracker, &mut Watcher<'_>)) {
        let mut tracker = self.tracker.borrow_mut();
        let Some(tracker) = tracker.as_mut() else {
            return;
        };
        let here = self.node.borrow();
        let Some(here) = &*here else { return };
        run(tracker, &mut self.commands.counted_in(&here.counts));
        let now = Some(self.standing(tracker));
        if now != self.counted.get() {
            self.count(now);
        }
    }

    pub(super) fn recount(&self) {
        let now = self.tracker.borrow().as_ref().map(|tracker| self.standing(tracker));
        self.count(now);
    }

    /// Where it stands, and why it could not move.
    fn standing(&self, tracker: &Tracker) -> (Standing, Option<usize>) {
        let (standing, pinned) = standing(tracker);
        if pinned != Some(node::PINNED_BY_TRANSACTION) {
            self.has_endless_transactions.set(false);
        } else if self.has_endless_transactions.get() {
            return (standing, Some(node::PINNED_BY_ENDLESS_TRANSACTIONS));
        }
        (standing, pinned)
    }
}
