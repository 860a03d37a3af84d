//! The node that a session uses or connects to, and how the session counts at this node.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use mysql_proto::tracker::{PinReason, Tracker, TrackerState};

use crate::node::{self, SessionState, WorkerNode};
use crate::reachability::MonitoredEndpoint;

/// How a session is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CountedState {
    pub(super) state: SessionState,
    /// The index in [`node::PINNED`] of what prevents a migration.
    pub(super) pinned: Option<usize>,
}

impl CountedState {
    pub(super) const LOGIN: Self = Self { state: SessionState::Login, pinned: None };

    /// The state of an established session. `has_endless_transactions`: see [`node::PINNED_BY_ENDLESS_TRANSACTIONS`].
    pub(super) fn of(tracker: &Tracker, has_endless_transactions: bool) -> Self {
        let state = match tracker.state() {
            TrackerState::Idle => SessionState::Idle,
            TrackerState::Busy => SessionState::Busy,
            TrackerState::InTransaction => SessionState::Transaction,
            TrackerState::Opaque => SessionState::Opaque,
        };
        let pinned = tracker.pin_reason().map(|reason| match reason {
            PinReason::Transaction if has_endless_transactions => node::PINNED_BY_ENDLESS_TRANSACTIONS,
            PinReason::Transaction => node::PINNED_BY_TRANSACTION,
            PinReason::Cursor => node::PINNED_BY_CURSOR,
            PinReason::LongData => node::PINNED_BY_LONG_DATA,
            PinReason::Opaque => node::PINNED_AS_OPAQUE,
        });
        Self { state, pinned }
    }

    pub(super) fn is_in_transaction(self) -> bool {
        matches!(self.pinned, Some(node::PINNED_BY_TRANSACTION | node::PINNED_BY_ENDLESS_TRANSACTIONS))
    }
}

/// The node of a session. The session counts at this node as long as this value exists.
pub(super) struct AssignedNode {
    pub(super) node: Rc<WorkerNode>,
    /// None: the node has no IP address.
    pub(super) endpoint: Option<Arc<MonitoredEndpoint>>,
    counted: Cell<CountedState>,
}

impl AssignedNode {
    pub(super) fn new(node: &Rc<WorkerNode>, endpoint: Option<Arc<MonitoredEndpoint>>, state: CountedState) -> Self {
        node.shared.sessions.fetch_add(1, Ordering::Relaxed);
        let assigned = Self { node: Rc::clone(node), endpoint, counted: Cell::new(state) };
        assigned.add_to_counts(state);
        assigned
    }

    pub(super) fn counted(&self) -> CountedState {
        self.counted.get()
    }

    /// Counts the session in this state, in place of the state before.
    pub(super) fn count_as(&self, state: CountedState) {
        let before = self.counted.replace(state);
        if before != state {
            self.subtract_from_counts(before);
            self.add_to_counts(state);
        }
    }

    fn add_to_counts(&self, CountedState { state, pinned }: CountedState) {
        self.node.counts.sessions[state as usize].add(1);
        if let Some(reason) = pinned {
            self.node.counts.pinned[reason].add(1);
        }
    }

    fn subtract_from_counts(&self, CountedState { state, pinned }: CountedState) {
        self.node.counts.sessions[state as usize].subtract(1);
        if let Some(reason) = pinned {
            self.node.counts.pinned[reason].subtract(1);
        }
    }
}

impl Drop for AssignedNode {
    fn drop(&mut self) {
        self.subtract_from_counts(self.counted.get());
        self.node.shared.sessions.fetch_sub(1, Ordering::Relaxed);
    }
}
