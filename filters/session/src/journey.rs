//! One attempt to move one session to one node, step by step.
//!
//! Everything slow comes first: the target is connected, secured and has greeted while the session is served as ever. Then,
//! at a moment when nothing runs, the client is held, the old node exports the session's states, and the target takes
//! them. Until [`Order::Switch`] nothing has changed for the session; whatever fails before that ends with
//! [`Order::Release`], and the session goes on where it was.
//!
//! The caller executes the orders one after the other, and reports the results. Times are of one clock that never goes back.

mod order;

use std::time::Duration;

use wire::login::NodeTls;

use crate::arrival::{Action, Arrival, Failure};
use crate::budget::MemoryLimits;
use crate::export::{self, Export, Exported, States};
use crate::fresh::Fresh;
use crate::identity::Identity;
use crate::limits::{Limits, Step};
use crate::states::{Summary, Unusable};
pub use order::{Order, Stay};

#[derive(Debug)]
enum At {
    /// Not connected yet, or not greeted, or not secured, or not called for.
    Target,
    /// The same, but the old node is gone.
    TargetAlone,
    Exporting(Export),
    /// Its states, should they have to be put back. None: the old node is gone, and there is no way back.
    Entering {
        undo: Option<Vec<u8>>,
        /// The target has taken all of it.
        arrived: bool,
    },
    /// The old node answers; then it stays, for this reason.
    Undoing {
        answer: Export,
        stay: Stay,
    },
    /// The old node still owes the states, which nobody wants any more.
    Draining {
        answer: Export,
        stay: Stay,
    },
    Over,
}

/// One attempt.
#[derive(Debug)]
pub struct Journey {
    at: At,
    step: Step,
    arrival: Arrival,
    deprecate_eof: bool,
    /// The old connection was closed, and it is not known yet whether the node is gone.
    old_in_doubt: bool,
    /// What the session was when it was asked, as it is until its client speaks again.
    fresh: Option<Fresh>,
    asked: Duration,
    /// How long the old node lets the session be idle, if it has said so.
    wait_timeout: Option<Duration>,
    limits: Limits,
    memory: MemoryLimits,
    step_ends: Option<Duration>,
    ends: Duration,
}

impl Journey {
    /// The caller connects to the target. `tls`: whether that link must have it, or has it if the target offers it.
    #[must_use]
    pub fn begin(identity: Identity, tls: NodeTls, limits: Limits, now: Duration) -> Self {
        let deprecate_eof = identity.capabilities().has(wire::capability::Capabilities::DEPRECATE_EOF);
        let mut journey = Self {
            at: At::Target,
            step: Step::Connecting,
            arrival: Arrival::new(identity, tls),
            deprecate_eof,
            old_in_doubt: false,
            fresh: None,
            asked: now,
            wait_timeout: None,
            limits,
            memory: MemoryLimits::default(),
            step_ends: None,
            ends: now + limits.whole,
        };
        journey.enter(Step::Connecting, now);
        journey
    }

    /// The same for a session whose node is gone. Its client is held from now on.
    #[must_use]
    pub fn resume(identity: Identity, tls: NodeTls, limits: Limits, fresh: Fresh, now: Duration) -> Self {
        let ends = (now + limits.whole).min(fresh.ends());
        Self { at: At::TargetAlone, fresh: Some(fresh), ends, ..Self::begin(identity, tls, limits, now) }
    }

    /// Sets the limits for the memory of its states.
    #[must_use]
    pub fn within(self, memory: MemoryLimits) -> Self {
        Self { memory, ..self }
    }

    /// The states that were exported, if they came. They are those of the session until its client speaks again.
    pub fn take_fresh(&mut self) -> Option<Fresh> {
        self.fresh.take()
    }

    /// How long the old node lets the session be idle, if that was exported with the states.
    #[must_use]
    pub const fn wait_timeout(&self) -> Option<Duration> {
        self.wait_timeout
    }

    /// What it is at.
    #[must_use]
    pub const fn step(&self) -> Step {
        self.step
    }

    /// Whether the client is held.
    #[must_use]
    pub const fn holds(&self) -> bool {
        !matches!(self.at, At::Target | At::Over)
    }

    /// Whether it goes on without the old node.
    #[must_use]
    pub const fn is_alone(&self) -> bool {
        matches!(self.at, At::TargetAlone | At::Entering { undo: None, .. })
    }

    /// Whether the old node owes an answer.
    #[must_use]
    pub const fn awaits_old(&self) -> bool {
        matches!(self.at, At::Exporting(_) | At::Undoing { .. } | At::Draining { .. })
    }

    /// Whether the login at the target has succeeded, so that its process list shows the session.
    #[must_use]
    pub const fn is_let_in(&self) -> bool {
        matches!(self.at, At::Entering { .. }) && self.arrival.is_let_in()
    }

    /// The session is at the target now. The old connection can be closed.
    pub fn switched(&mut self) {
        self.at = At::Over;
    }

    /// [`Order::Switch`] once more, if the session has arrived, and the old connection is not in doubt.
    #[must_use]
    pub fn retry(&mut self) -> Vec<Order> {
        match self.at {
            At::Entering { arrived: true, .. } if !self.old_in_doubt => vec![Order::Switch],
            _ => Vec::new(),
        }
    }

    /// When [`Self::late`] is due; None: never.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        match self.at {
            At::Over => None,
            At::Undoing { .. } | At::Draining { .. } => self.step_ends,
            _ => Some(self.step_ends.map_or(self.ends, |step| step.min(self.ends))),
        }
    }

    /// Bytes of the target, decrypted where there is TLS.
    pub fn target(&mut self, bytes: &[u8], now: Duration) -> Vec<Order> {
        if matches!(self.at, At::Over | At::Undoing { .. } | At::Draining { .. }) {
            return Vec::new();
        }
        match self.arrival.take(bytes) {
            Ok(actions) => self.done(actions, now),
            Err(failure) => self.stay(Stay::Target(failure), now),
        }
    }

    /// TLS with the target stands.
    pub fn secured(&mut self, now: Duration) -> Vec<Order> {
        match self.arrival.secured() {
            Ok(actions) => self.done(actions, now),
            Err(failure) => self.stay(Stay::Target(failure), now),
        }
    }

    /// The target has sent what no server sends at that point, such as more than its greeting before TLS began.
    pub fn target_invalid(&mut self, now: Duration) -> Vec<Order> {
        self.stay(Stay::Target(Failure::Nonsense), now)
    }

    /// The target has closed, or cannot be reached.
    pub fn target_lost(&mut self, now: Duration) -> Vec<Order> {
        self.stay(Stay::Unreachable(self.step), now)
    }

    /// The session runs nothing, and nothing of the client is on its way. `identity`: who it is now.
    pub fn depart(&mut self, identity: Identity, now: Duration) -> Vec<Order> {
        if !matches!((&self.at, self.step), (At::Target, Step::Waiting)) {
            return Vec::new();
        }
        self.arrival.is_now(identity);
        self.at = At::Exporting(Export::new(self.deprecate_eof, self.memory.clone()));
        self.enter(Step::Exporting, now);
        self.asked = now;
        vec![Order::Hold(export::command())]
    }

    /// Bytes of the old node, while the client is held.
    pub fn old(&mut self, bytes: &[u8], now: Duration) -> Vec<Order> {
        let (answer, stay) = match &mut self.at {
            At::Exporting(export) => (export, None),
            At::Undoing { answer, stay } | At::Draining { answer, stay } => (answer, Some(*stay)),
            // It was not asked anything: servers send an error before they close.
            At::Entering { undo, .. } => {
                *undo = None;
                return Vec::new();
            }
            At::TargetAlone => return Vec::new(),
            At::Target | At::Over => return self.over(Order::Lost),
        };
        let Some(exported) = answer.take(bytes) else { return Vec::new() };
        let closes = answer.says_more();
        let undoing = matches!(self.at, At::Undoing { .. });
        match (exported, stay) {
            (Exported::Nonsense, _) | (Exported::Ok, None) => self.over(Order::Lost),
            (Exported::States(states), None) => self.take_states(states, closes, now),
            (_, _) if closes => self.over(Order::Lost),
            (Exported::NoToken(mut summary), None) => self.undo(&mut summary, Stay::NoToken, now),
            (Exported::Unusable(why, mut summary), None) => self.undo(&mut summary, Stay::States(why), now),
            (Exported::Refused(code), None) => self.over(Order::Release(Stay::Refused(code))),
            (Exported::States(mut states), Some(stay)) if !undoing => {
                let orders = self.undo(&mut states.summary, stay, now);
                self.keep(states);
                orders
            }
            // Whatever the reason to stay was: another export would take as long.
            (Exported::Unusable(why @ Unusable::TooLarge, mut summary), Some(_)) if !undoing => {
                self.undo(&mut summary, Stay::States(why), now)
            }
            (Exported::NoToken(mut summary) | Exported::Unusable(_, mut summary), Some(stay)) if !undoing => {
                self.undo(&mut summary, stay, now)
            }
            (_, Some(stay)) => self.over(Order::Release(stay)),
        }
    }

    /// The old node has closed or reset the connection. The cause may be a KILL, which ends the session. If the node is gone,
    /// [`Self::old_lost`] follows. Until then there is no [`Order::Switch`].
    pub const fn old_closed(&mut self) {
        self.old_in_doubt = true;
    }

    /// The old node is gone. Once its states are here, that does not matter, unless they find no other place.
    pub fn old_lost(&mut self) -> Vec<Order> {
        self.old_in_doubt = false;
        match &mut self.at {
            At::Entering { undo, .. } => {
                *undo = None;
                self.retry()
            }
            At::TargetAlone | At::Over => Vec::new(),
            _ => self.over(Order::Lost),
        }
    }

    /// The deadline has passed.
    pub fn late(&mut self, now: Duration) -> Vec<Order> {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return Vec::new();
        }
        if matches!(self.at, At::Undoing { .. } | At::Draining { .. }) {
            self.step_ends = None;
            return vec![Order::Overdue];
        }
        self.stay(Stay::TooSlow(self.step), now)
    }

    /// Nobody wants the session to move any more.
    pub fn cancel(&mut self, now: Duration) -> Vec<Order> {
        self.stay(Stay::Cancelled, now)
    }

    fn enter(&mut self, step: Step, now: Duration) {
        self.step = step;
        self.step_ends = Some(now + self.limits.of(step));
    }

    fn done(&mut self, actions: Vec<Action>, now: Duration) -> Vec<Order> {
        let mut orders = Vec::new();
        for action in actions {
            orders.push(match action {
                Action::Send(bytes) => Order::Target(bytes),
                Action::Restore(statement) => Order::Restore(statement),
                Action::StartTls(bytes) => {
                    self.enter(Step::Securing, now);
                    Order::Secure(bytes)
                }
                Action::Greeted if matches!(self.at, At::TargetAlone) => match self.enter_alone(now) {
                    Some(login) => Order::Target(login),
                    None => {
                        self.at = At::Over;
                        Order::Lost
                    }
                },
                Action::Greeted => {
                    self.enter(Step::Waiting, now);
                    Order::Ready
                }
                Action::Arrived => {
                    if let At::Entering { arrived, .. } = &mut self.at {
                        *arrived = true;
                    }
                    if self.old_in_doubt {
                        continue;
                    }
                    Order::Switch
                }
            });
        }
        orders
    }

    /// Sends the states on. `closes`: the old node has said behind them that it does.
    fn take_states(&mut self, mut states: States, closes: bool, now: Duration) -> Vec<Order> {
        match self.arrival.enter(&states) {
            Ok(login) => {
                self.wait_timeout = states.summary.wait_timeout;
                let undo = states.summary.undo.take().filter(|_| !closes);
                self.keep(states);
                self.at = At::Entering { undo, arrived: false };
                self.enter(Step::Entering, now);
                vec![Order::Target(login)]
            }
            Err(_) if closes => self.over(Order::Lost),
            Err(failure) => self.undo(&mut states.summary, Stay::Target(failure), now),
        }
    }

    fn enter_alone(&mut self, now: Duration) -> Option<Vec<u8>> {
        let fresh = self.fresh.take()?;
        let sent = self.arrival.enter(&fresh.states);
        self.wait_timeout = fresh.states.summary.wait_timeout;
        self.fresh = Some(fresh);
        self.at = At::Entering { undo: None, arrived: false };
        self.enter(Step::Entering, now);
        sent.ok()
    }

    fn keep(&mut self, states: States) {
        self.fresh = Some(Fresh { states, since: self.asked });
    }

    /// The session stays; what the export has changed is put back first.
    fn stay(&mut self, stay: Stay, now: Duration) -> Vec<Order> {
        match std::mem::replace(&mut self.at, At::Over) {
            At::Target => vec![Order::Release(stay)],
            At::TargetAlone => self.over(Order::Lost),
            At::Exporting(answer) => {
                // Its answer must not reach the client.
                self.at = At::Draining { answer, stay };
                self.step_ends = None;
                vec![Order::Overdue]
            }
            At::Entering { undo: Some(undo), .. } => self.send_undo(undo, stay, now),
            At::Entering { undo: None, .. } => self.over(Order::Lost),
            waiting @ (At::Undoing { .. } | At::Draining { .. }) => {
                self.at = waiting;
                Vec::new()
            }
            At::Over => Vec::new(),
        }
    }

    fn undo(&mut self, summary: &mut Summary, stay: Stay, now: Duration) -> Vec<Order> {
        self.wait_timeout = summary.wait_timeout;
        match summary.undo.take() {
            Some(undo) => self.send_undo(undo, stay, now),
            None => self.over(Order::Release(stay)),
        }
    }

    fn send_undo(&mut self, undo: Vec<u8>, stay: Stay, now: Duration) -> Vec<Order> {
        self.enter(Step::Undoing, now);
        self.at = At::Undoing { answer: Export::of_ok(), stay };
        vec![Order::Old(undo)]
    }

    fn over(&mut self, order: Order) -> Vec<Order> {
        self.at = At::Over;
        vec![order]
    }
}

#[cfg(test)]
mod tests;
