//! A session that moves to another node.

use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use session::begin_text::begins_transaction;
use session::fresh::Fresh;
use session::journey::Stay;
use session::states::Unusable;
use wire::packet::{HEADER, Header};

use super::{METADATA, Phase, Session};
use crate::deadlines::Deadline;
use crate::moving::{self, Ended, Moving};
use crate::node::{self, Here, Standing};
use crate::{clock, departures, events, hosts, reachability, states_memory};

/// Whether a session has begun to move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Begun {
    Yes,
    /// There is no way now.
    No(Obstacle),
    /// Bytes are on their way by Envoy's buffers: when they have arrived, it is asked again.
    Later,
}

/// Why a session stays where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// It cannot leave, as others may.
    Itself,
    /// Not now: it runs something, or no node wants it any more.
    Moment,
    /// The other node, or the way there; or the old one, which lets nobody go.
    Nodes,
}

impl Obstacle {
    pub(crate) fn of(stay: Stay) -> Self {
        match stay {
            Stay::Cancelled => Self::Moment,
            stay if stay.blames_session() => Self::Itself,
            _ => Self::Nodes,
        }
    }
}

impl Session {
    /// Whether its node is one that sessions are to leave.
    pub(crate) fn is_on_a_left_node(&self) -> bool {
        self.phase.get() == Phase::Established && self.node.borrow().as_ref().is_some_and(|node| node.is_to_be_left())
    }

    /// Whether it is to leave its node, or the node, for others' sake.
    pub(crate) fn is_to_leave(&self) -> bool {
        self.is_on_a_left_node() || self.travel.spared().is_some()
    }

    /// Whether it may be chosen to leave a node that stays in service, one of `givers`. `idle`: whether it is to run
    /// nothing.
    pub(crate) fn may_be_spared(&self, idle: bool, givers: &[Rc<Here>], now: Duration) -> bool {
        let is_on_one = |node: &Rc<Here>| givers.iter().any(|giver| Rc::ptr_eq(giver, node));
        self.runs_nothing_else(idle)
            && !self.travel.is_wanted_elsewhere()
            && self.node.borrow().as_ref().is_some_and(is_on_one)
            && self.travel.identity.borrow().is_some()
            && self.travel.export_backoff.get().is_over(now)
            && !self.travel.was_just_disturbed(now)
    }

    /// It is one of those that are to leave its node, which stays in service. False: there are enough.
    pub(crate) fn begins_to_be_spared(&self) -> bool {
        let round = self.node.borrow().as_ref().and_then(|node| node.node.allowance().take());
        if round.is_some() {
            self.travel.begins_to_leave();
            self.travel.set_spared(round);
        }
        round.is_some()
    }

    /// Its node may ask for sessions to leave no more.
    pub(crate) fn look_at_round(&self) {
        if let Some(round) = self.travel.spared() {
            let goes_on = |node: &Rc<Here>| node.gives.get() && node.node.allowance().is_of(round);
            if !self.node.borrow().as_ref().is_some_and(goes_on) {
                self.travel.set_spared(None);
            }
        }
    }

    /// Whether it was to leave for others' sake, which takes longer now than they gain by it.
    pub(crate) fn is_better_left(&self) -> bool {
        self.is_for_others() && !self.runs_nothing_else(true) && !self.runs_nothing_else(false)
    }

    /// A try to move it has failed. True: it stays, since only others' sake was a reason.
    pub(crate) fn gives_up(&self, why: Obstacle) -> bool {
        let gives_up = self.is_for_others();
        if gives_up {
            if let (Some(node), Some(round)) = (&*self.node.borrow(), self.travel.spared())
                && why != Obstacle::Nodes
            {
                node.node.allowance().give_back(round);
            }
            if why == Obstacle::Itself {
                self.travel.is_disturbed(clock::now());
            }
            self.travel.stays();
        }
        gives_up
    }

    /// Whether others' sake is the only reason to leave.
    fn is_for_others(&self) -> bool {
        self.travel.spared().is_some() && !self.is_on_a_left_node()
    }

    /// Whether nothing of it is left at its node only, but what it runs, unless it is `idle`.
    fn runs_nothing_else(&self, idle: bool) -> bool {
        match self.counted.get() {
            Some((Standing::Idle, None)) => idle,
            Some((Standing::Busy, None)) => !idle,
            _ => false,
        }
    }

    /// Whether its node is one that no session may stay on any longer.
    pub(crate) fn is_on_a_closed_node(&self) -> bool {
        self.is_on_a_left_node() && self.node.borrow().as_ref().is_some_and(|node| node.is_closed.get())
    }

    /// Ends it, since its node is closed. One that is in the middle of an answer can be told nothing.
    pub(crate) fn end_of_time(&self) {
        if self.awaits_client() {
            self.last_words.replace(wire::error::node_taken_away());
        }
        self.cut("drain_deadline");
    }

    /// Begins to move. `fresh`: its states, when its node is gone.
    pub(crate) fn begin_to_move(self: &Rc<Self>, fresh: Option<Fresh>) -> Begun {
        let (Some(vehicle), Some(client)) = (self.travel.vehicle(), self.travel.client()) else {
            return Begun::No(Obstacle::Itself);
        };
        if self.travel.is_asking() || self.commands.has_quit() || !(client.link().is_calm() && vehicle.link().is_calm())
        {
            return Begun::Later;
        }
        let Some(identity) = self.travel.identity.borrow().clone().filter(|_| self.is_taken_over()) else {
            return Begun::No(Obstacle::Itself);
        };
        if fresh.is_none() {
            self.travel.node_address.set(vehicle.link().peer());
        }
        let node = self.node.borrow().clone();
        let for_others = fresh.is_none() && self.is_for_others();
        let destination = node.and_then(|node| hosts::destination(&node, &self.travel.patience.borrow(), for_others));
        if for_others && destination.is_none() {
            return Begun::No(Obstacle::Moment);
        }
        let reason = if destination.is_none() { moving::NO_NODE } else { moving::UNREACHABLE };
        let moving = destination.and_then(|to| Moving::begin(self, vehicle, *identity, to, fresh));
        if moving.is_none() {
            self.counts(|counts| moving::count(reason, counts));
            return Begun::No(Obstacle::Nodes);
        }
        self.travel.moving.replace(moving);
        Begun::Yes
    }

    /// All that came is passed on. If it is to leave, and runs nothing, it does.
    pub(crate) fn rests(self: &Rc<Self>) {
        if self.commands.has_quit() {
            if let Some(moving) = self.travel.moving().filter(|moving| !moving.holds()) {
                moving.cancel();
            }
        } else if self.travel.is_wanted_elsewhere() {
            if let Some(moving) = self.travel.moving().filter(|moving| moving.holds()) {
                moving.retry();
            } else if self.is_ready_to_leave() {
                self.departs();
            }
        }
    }

    /// It is to leave, and runs nothing.
    fn departs(self: &Rc<Self>) {
        match self.travel.moving() {
            // What the node has sent by now is no answer to the export. After it has been read, this is called again.
            Some(moving) if moving.waits() && self.travel.vehicle().is_some_and(|node| node.link().has_unread()) => {}
            Some(moving) if moving.waits() => {
                let identity = self.travel.identity.borrow().clone();
                match identity {
                    Some(identity) if departures::may_hold(self) => moving.depart(*identity),
                    Some(_) => {}
                    None => moving.cancel(),
                }
            }
            Some(_) => {}
            // Its states were too large, and its client has run something since.
            None if self.travel.export_backoff.get().until().is_some() && self.travel.has_waited() => {
                departures::add(self);
                departures::wake();
            }
            None => {}
        }
    }

    /// Keeps its states as long as their token is valid, if there is room for them.
    fn keep(self: &Rc<Self>, fresh: Option<Fresh>) {
        let now = clock::now();
        let fresh = fresh.filter(|fresh| states_memory::keep(self, &fresh.states.statement));
        let kept = fresh.zip(self.waker()).map(|(fresh, waker)| {
            let good = fresh.ends().saturating_sub(now);
            (fresh, Deadline::new(waker, good))
        });
        self.travel.keep(kept);
    }

    /// Keeps the states that a failed move has exported. If there are none, those kept before the move remain valid, since
    /// the session has run nothing since.
    fn keep_exported(self: &Rc<Self>, moving: &Moving) {
        if let Some(fresh) = moving.take_fresh() {
            self.keep(Some(fresh));
        }
    }

    /// Whether nothing runs, and nothing of it is left at its node only.
    pub(crate) fn runs_nothing(&self) -> bool {
        matches!(self.counted.get(), Some((Standing::Idle, None)))
    }

    /// Whether nothing runs, nothing is on its way, and its connections are the module's.
    pub(super) fn is_ready_to_leave(&self) -> bool {
        self.runs_nothing() && !self.travel.is_asking() && self.is_taken_over()
    }

    /// Whether the events of both connections come to the module; if they can, they do from now on.
    pub(super) fn is_taken_over(&self) -> bool {
        let (Some(client), Some(vehicle)) = (self.travel.client(), self.travel.vehicle()) else { return false };
        events::is_taken_over(client) && events::is_taken_over(vehicle)
    }

    /// Notices if the client begins a transaction within the open one: then there is no moment at which the session could
    /// leave. Called for each statement of a client, so it has to be cheap.
    pub(crate) fn watch_transactions(&self, bytes: &[u8]) {
        if self.travel.is_wanted_elsewhere()
            && matches!(self.counted.get(), Some((Standing::Transaction, Some(node::PINNED_BY_TRANSACTION))))
            && Header::parse(bytes).is_some_and(|header| HEADER + header.length == bytes.len())
            && begins_transaction(&bytes[HEADER..])
        {
            self.has_endless_transactions.set(true);
        }
    }

    /// Its move has ended so.
    pub(crate) fn moved(self: &Rc<Self>, ended: Ended) {
        let Some(moving) = self.travel.moving.take() else { return };
        if ended != Ended::Lost {
            self.counts(|counts| moving.count_end(ended, counts));
        }
        match ended {
            Ended::Moved => {
                let standing = self.counted.get();
                self.leave_node();
                let to = &moving.destination().here;
                to.node.sessions.fetch_add(1, Ordering::Relaxed);
                self.node.replace(Some(Rc::clone(to)));
                self.endpoint.replace(reachability::endpoint(&moving.destination().endpoint, &to.node.name));
                self.travel.node_address.set(Some(moving.destination().address));
                self.count(standing);
                self.goes_on_idling(moving.wait_timeout());
                self.keep(moving.take_fresh());
                if self.travel.vehicle().is_some_and(|vehicle| vehicle.link().has_tls()) {
                    self.exposed.set(false);
                }
                let moves = self.travel.arrived(clock::now());
                if let Some(filter) = self.filter.get() {
                    filter.set_metadata(METADATA, "node", &to.node.name);
                    filter.set_metadata_number(METADATA, "moves", f64::from(moves));
                }
            }
            Ended::Stayed(stay) => {
                abi::log!(Debug, "a session stays where it is: {stay:?}");
                self.goes_on_idling(moving.wait_timeout());
                self.keep_exported(&moving);
                if stay == Stay::States(Unusable::TooLarge) {
                    let mut backoff = self.travel.export_backoff.get();
                    backoff.failed(clock::now());
                    self.travel.export_backoff.set(backoff);
                }
                if stay != Stay::Cancelled {
                    let blamed = stay.blames_target().then_some(moving.destination().endpoint.as_str());
                    self.travel.patience.borrow_mut().failed(blamed, clock::now());
                }
            }
            Ended::Lost => {
                self.keep_exported(&moving);
                self.travel.patience.borrow_mut().failed(Some(&moving.destination().endpoint), clock::now());
                if !self.is_rescued() {
                    self.counts(|counts| moving.count_end(ended, counts));
                    self.last_words.replace(self.lost_with_its_node());
                    self.cut("move_lost");
                }
                return;
            }
        }
        self.client_rests();
    }

    /// The node to which it is being saved is to be left, too: another one is looked for.
    pub(crate) fn is_saved_elsewhere(self: &Rc<Self>, moving: &Moving) {
        self.keep_exported(moving);
        if !self.is_rescued() {
            self.cut("move_lost");
        }
    }

    /// Its node is gone, and it ran nothing. True: its states are at hand, and it goes on elsewhere with them.
    pub(crate) fn is_rescued(self: &Rc<Self>) -> bool {
        let fresh = self.travel.take_fresh(clock::now()).filter(|_| self.runs_nothing());
        let Some(fresh) = fresh else { return false };
        self.stop_moving();
        self.travel.begins_to_leave();
        let begun = self.begin_to_move(Some(fresh)) == Begun::Yes;
        if begun {
            departures::rescues();
        }
        begun
    }

    /// The client is heard again.
    pub(super) fn client_rests(&self) {
        if self.travel.is_asking() {
            return;
        }
        events::rouse(&self.client);
    }

    pub(super) fn stop_moving(&self) {
        if let Some(moving) = self.travel.moving.take() {
            moving.abandon();
            departures::makes_room(&moving);
        }
    }
}
