//! How a session ends, and what its client is told.

use std::time::Duration;

use abi::filter::Filter;
use wire::error::Refusal;
use wire::tracker::State;

use super::{METADATA, Phase, Session, refusal};
use crate::deadlines::Deadline;
use crate::{departures, node, reachability, wakers};

/// Time that a client has to read what the node said before it closed.
const UNREAD: Duration = Duration::from_secs(60);

impl Session {
    /// Nothing more is expected of the client, which gets so much time to read what it was told, and to close.
    pub(crate) fn close_after(&self, time: Duration) {
        if let Some(deadline) = &*self.deadline.borrow() {
            deadline.set(time);
        }
    }

    /// The node has closed. What it said last is on its way to the client, who has some time to read it.
    pub(crate) fn node_closed(&self) {
        if self.phase.get() != Phase::Established {
            return;
        }
        self.phase.set(Phase::Over);
        self.drops_probes();
        self.stop_moving();
        self.leave_node();
        if let Some(waker) = self.filter.get().and_then(Filter::waker) {
            self.deadline.replace(Some(Deadline::new(waker, UNREAD)));
        }
    }

    /// The client reads on what a node said that has closed.
    pub(crate) fn client_takes(&self) {
        if self.phase.get() == Phase::Over && self.failure.get().is_none() {
            self.close_after(UNREAD);
        }
    }

    /// The error packet that tells the client of a refusal which the proxy decides on, and which ends the login.
    pub(crate) fn refuse(&self, why: Refusal) -> Vec<u8> {
        let packet = self.login(|login| login.refusal(why)).unwrap_or_default();
        self.failed(refusal(why));
        packet
    }

    /// Ends the session from outside its sockets.
    pub(crate) fn close(&self, why: Refusal) {
        let words = self.refuse(why);
        self.last_words.replace(words);
        self.cut(why.name());
    }

    /// No node was found. If one was full, the client gets its error, which says more than the proxy's.
    fn refuse_without_node(&self) -> Vec<u8> {
        match self.full_node.take() {
            Some((node, packet)) => {
                self.failed_at(&node.counts, node::NODE_FULL);
                packet
            }
            None => self.refuse(Refusal::NoNode),
        }
    }

    /// What the client has to be told before its socket closes; once.
    pub(crate) fn take_last_words(&self) -> Vec<u8> {
        match self.phase.get() {
            Phase::Connecting => self.refuse_without_node(),
            Phase::Login => self.stops_asking_elsewhere().unwrap_or_else(|| self.refuse(self.lost_login())),
            Phase::Established | Phase::Over => self.last_words.take(),
        }
    }

    /// A deadline may have passed, or it is time for sessions to leave.
    pub(crate) fn woken(&self) {
        reachability::look();
        departures::look();
        self.travel.forgets_in_time();
        if let Some(moving) = self.travel.moving() {
            moving.woken();
        }
        let asking = self.login_elsewhere.borrow().clone();
        if let Some(asking) = asking {
            asking.woken();
        }
        self.checks_probe_deadlines();
        if !self.deadline.borrow().as_ref().is_some_and(Deadline::has_passed) {
            return;
        }
        match self.phase.get() {
            // It was not the client that took so long.
            Phase::Connecting => {
                let words = self.refuse_without_node();
                self.last_words.replace(words);
                self.cut(Refusal::NoNode.name());
            }
            Phase::Login => match self.stops_asking_elsewhere() {
                Some(words) => {
                    self.last_words.replace(words);
                    self.cut("node_full");
                }
                None => self.close(Refusal::LoginTooSlow),
            },
            Phase::Established => self.look_at_idleness(),
            // It was refused, by the node or here, or the node is gone, and the client has not closed.
            Phase::Over => self.cut("client_stayed"),
        }
    }

    pub(super) fn cut(&self, why: &str) {
        if let Some(filter) = self.filter.get() {
            filter.close(why);
        }
    }

    /// A node has been asked for the session's states, and has begun to count its idle time anew with that, or another
    /// node has: it ends all the same when `wait_timeout` is over.
    pub(super) fn goes_on_idling(&self, wait_timeout: Option<Duration>) {
        let since = self.commands.rests_since().or(self.established_at.get());
        let (Some(limit), Some(since)) = (wait_timeout, since) else { return };
        let left = |limit: Duration| limit.saturating_sub(since.elapsed());
        let idle_timeout = self.idle_timeout.get();
        let shortest = if idle_timeout.is_zero() { left(limit) } else { left(limit).min(left(idle_timeout)) };
        self.idle_since.set(Some(since));
        let deadline = self.waker().map(|waker| Deadline::new(waker, shortest));
        self.deadline.replace(deadline);
    }

    pub(super) fn look_at_idleness(&self) {
        let idle_since = self.idle_since.take();
        if self.idle_timeout.get().is_zero() && idle_since != self.commands.rests_since().or(self.established_at.get())
        {
            // It has done something since.
            self.deadline.replace(None);
            return;
        }
        let busy = self.tracker.borrow().as_ref().is_some_and(|tracker| match tracker.state() {
            State::Busy => true,
            State::Opaque => self.client_spoke_last.get(),
            State::Idle | State::InTransaction => false,
        });
        if busy {
            self.is_active();
        } else {
            self.cut("idle_timeout");
        }
    }

    /// The time until it counts as idle begins anew.
    pub(super) fn is_active(&self) {
        let idle_timeout = self.idle_timeout.get();
        if !idle_timeout.is_zero()
            && let Some(deadline) = &*self.deadline.borrow()
        {
            deadline.set(idle_timeout);
        }
    }

    /// The client's connection has ended, and with it the session; to hear so again changes nothing.
    pub(crate) fn ended(&self, by_client: bool) {
        if matches!(self.phase.get(), Phase::Connecting | Phase::Login) {
            self.failed(if by_client { node::CLIENT_GONE } else { refusal(self.lost_login()) });
        }
        self.phase.set(Phase::Over);
        self.deadline.replace(None);
        wakers::ended(self);
        if let Some(asking) = self.login_elsewhere.take() {
            asking.abandon();
        }
        self.drops_probes();
        self.stop_moving();
        self.leave_node();
        self.tell_bytes();
        self.travel.keep(None);
        if self.travel.is_wanted_elsewhere() {
            self.travel.stays();
            departures::one_has_ended();
        }
    }

    /// For the access log, since Envoy does not count what goes past it.
    fn tell_bytes(&self) {
        if let Some(filter) = self.filter.get() {
            for (key, bytes) in [("bytes_from_client", &self.from_client), ("bytes_to_client", &self.to_client)] {
                filter.set_metadata_number(METADATA, key, bytes.get() as f64);
            }
        }
    }
}
