//! What a session needs to be able to move: who it is, where its sockets are, and whether it is on its way.

use std::cell::{Cell, OnceCell, RefCell};
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::time::Duration;

use session::fresh::Fresh;
use session::identity::Identity;
use session::pace::{ExportBackoff, Patience};
use session::pong::Pong;

use wire::packet::{HEADER, Header};

use crate::commands::Change;
use crate::deadlines::Deadline;
use crate::events::Member;
use crate::moving::{Moving, Vehicle};
use crate::old_connection::OldConnection;
use crate::session::Question;

const CHANGE_USER: u8 = 0x11;
const SET_OPTION: u8 = 0x1b;
/// Bytes of a change of user that are kept.
const LONGEST_CHANGE: usize = 64 * 1024;
/// Attempts to save a session whose node has gone.
const RESCUES: u8 = 3;
/// Until a session that has moved, or was found unable to, is disturbed again for others' sake.
const BETWEEN: Duration = Duration::from_secs(60);

/// Whether a session is to leave its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Wish {
    #[default]
    Stay,
    /// It is in the queue, or on its way.
    Leave,
    /// As soon as it runs nothing.
    LeaveLater,
}

#[derive(Default)]
pub(crate) struct Travel {
    /// None: nobody could log in for it elsewhere.
    pub(crate) identity: RefCell<Option<Box<Identity>>>,
    pub(crate) client: OnceCell<Weak<dyn Member>>,
    pub(crate) vehicle: RefCell<Option<Weak<dyn Vehicle>>>,
    pub(crate) moving: RefCell<Option<Rc<Moving>>>,
    pub(crate) patience: RefCell<Patience>,
    /// Its states were too large.
    pub(crate) export_backoff: Cell<ExportBackoff>,
    pub(crate) pong: RefCell<Pong>,
    wish: Cell<Wish>,
    /// Its node stays in service: it is to leave for the others' sake, in this round.
    spared: Cell<Option<u64>>,
    /// It waits for others to have moved.
    is_in_line: Cell<bool>,
    /// What it was when it was asked last, until its client speaks.
    fresh: RefCell<Option<Box<(Fresh, Deadline)>>>,
    /// The address of its node. Known since the session began to move for the first time.
    pub(crate) node_address: Cell<Option<SocketAddr>>,
    /// A probe of a node that has closed a connection of it.
    pub(crate) question: RefCell<Option<Rc<Question>>>,
    /// The connection to the node that it has just left, until that is closed.
    pub(crate) left: RefCell<Option<Rc<OldConnection>>>,
    /// Attempts to save it since its node has gone.
    rescues: Cell<u8>,
    /// How often it has moved.
    moves: Cell<u32>,
    /// When it did last, or was found unable to.
    disturbed_at: Cell<Option<Duration>>,
    /// The command that changes the identity, as far as it was sent.
    change: RefCell<Vec<u8>>,
    /// What the client has sent of a command that has to be whole, and that went nowhere yet.
    pub(crate) begun: RefCell<Vec<u8>>,
}

impl Travel {
    /// Bytes of the client, of which the tracker has told this. The command stands alone, or nobody knows who the
    /// session is from then on.
    pub(crate) fn client_sent(&self, bytes: &[u8], change: Change) {
        if self.fresh.borrow().is_some() {
            self.fresh.replace(None);
            self.rescues.set(0);
        }
        let mut backoff = self.export_backoff.get();
        backoff.statement_sent();
        self.export_backoff.set(backoff);
        if change == Change::Nothing && self.change.borrow().is_empty() {
            return;
        }
        self.change.borrow_mut().extend_from_slice(bytes);
        let begins = |command: u8| self.change.borrow().get(HEADER).is_none_or(|&first| first == command);
        if self.change.borrow().len() > LONGEST_CHANGE || !(begins(CHANGE_USER) || begins(SET_OPTION)) {
            self.change.borrow_mut().clear();
            self.identity.replace(None);
        }
    }

    /// Bytes of the node have ended it so.
    pub(crate) fn node_sent(&self, change: Change) {
        let packet = match change {
            Change::Nothing | Change::Began => return,
            Change::Failed | Change::Done => self.change.take(),
        };
        let mut identity = self.identity.borrow_mut();
        let whole = Header::parse(&packet).is_some_and(|header| HEADER + header.length <= packet.len());
        let known = match (identity.as_mut(), packet.get(HEADER)) {
            (Some(_), _) if change == Change::Failed => true,
            (Some(identity), Some(&CHANGE_USER)) if whole => {
                let end = HEADER + Header::parse(&packet).map_or(0, |header| header.length);
                identity.change(&packet[HEADER..end])
            }
            (Some(identity), Some(&SET_OPTION)) if whole => {
                identity.allow_multi_statements(packet.get(HEADER + 1) == Some(&0));
                true
            }
            _ => false,
        };
        if !known {
            *identity = None;
        }
    }

    /// It is to leave its node. True: that is new.
    pub(crate) fn begins_to_leave(&self) -> bool {
        let before = self.wish.get();
        if before == Wish::Stay {
            self.wish.set(Wish::Leave);
        }
        before == Wish::Stay
    }

    /// It is one of those that are to leave a node which stays in service, in the round that is returned.
    pub(crate) fn spared(&self) -> Option<u64> {
        self.spared.get()
    }

    pub(crate) fn set_spared(&self, round: Option<u64>) {
        self.spared.set(round);
    }

    /// It waits until others have moved. False: it does already.
    pub(crate) fn gets_in_line(&self) -> bool {
        !self.is_in_line.replace(true)
    }

    pub(crate) fn leaves_line(&self) {
        self.is_in_line.set(false);
    }

    /// It has arrived at another node. Returns how often it has moved.
    pub(crate) fn arrived(&self, now: Duration) -> u32 {
        self.is_disturbed(now);
        self.moves.set(self.moves.get().saturating_add(1));
        self.moves.get()
    }

    pub(crate) fn has_moved(&self) -> bool {
        self.moves.get() > 0
    }

    /// It has moved, or was found unable to.
    pub(crate) fn is_disturbed(&self, now: Duration) {
        self.disturbed_at.set(Some(now));
    }

    /// Whether that was a short time ago, so that it should be left in peace where others' sake is the only reason.
    pub(crate) fn was_just_disturbed(&self, now: Duration) -> bool {
        self.disturbed_at.get().is_some_and(|at| now < at + BETWEEN)
    }

    /// States that are true until its client speaks.
    pub(crate) fn keep(&self, fresh: Option<(Fresh, Deadline)>) {
        self.fresh.replace(fresh.map(Box::new));
    }

    /// Nobody could log in with them any more: they go.
    pub(crate) fn forgets_in_time(&self) {
        if self.fresh.borrow().as_ref().is_some_and(|kept| kept.1.has_passed()) {
            self.fresh.replace(None);
        }
    }

    /// Whether such states are at hand.
    pub(crate) fn has_fresh(&self, now: Duration) -> bool {
        self.fresh.borrow().as_ref().is_some_and(|kept| now < kept.0.ends() && !kept.1.has_passed())
    }

    /// The same, for an attempt to save it. None: there are none, or too many attempts were made.
    pub(crate) fn take_fresh(&self, now: Duration) -> Option<Fresh> {
        let (fresh, deadline) = *self.fresh.take()?;
        self.rescues.set(self.rescues.get() + 1);
        (now < fresh.ends() && !deadline.has_passed() && self.rescues.get() <= RESCUES).then_some(fresh)
    }

    /// It is where it is to be.
    pub(crate) fn stays(&self) {
        self.wish.set(Wish::Stay);
        self.spared.set(None);
        self.patience.replace(Patience::default());
    }

    /// It is to be asked when it runs nothing.
    pub(crate) fn waits(&self) {
        self.wish.set(Wish::LeaveLater);
    }

    /// Whether it is to leave. Asked behind each event, so it costs little.
    pub(crate) fn is_wanted_elsewhere(&self) -> bool {
        self.wish.get() != Wish::Stay
    }

    /// Whether it has waited for a moment at which it runs nothing; it does not any more.
    pub(crate) fn has_waited(&self) -> bool {
        let waited = self.wish.get() == Wish::LeaveLater;
        if waited {
            self.wish.set(Wish::Leave);
        }
        waited
    }

    pub(crate) fn moving(&self) -> Option<Rc<Moving>> {
        self.moving.borrow().clone()
    }

    /// Whether a node is being probed that has closed a connection of it.
    pub(crate) fn is_asking(&self) -> bool {
        self.question.borrow().is_some()
    }

    /// Whether nothing of the client may be passed on.
    pub(crate) fn holds(&self) -> bool {
        self.is_asking() || self.is_wanted_elsewhere() && self.moving().is_some_and(|moving| moving.holds())
    }

    pub(crate) fn vehicle(&self) -> Option<Rc<dyn Vehicle>> {
        self.vehicle.borrow().as_ref().and_then(Weak::upgrade)
    }

    pub(crate) fn client(&self) -> Option<Rc<dyn Member>> {
        self.client.get().and_then(Weak::upgrade)
    }
}
