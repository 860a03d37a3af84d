//! Follows an established session: which command runs, when its response is complete, what state is left.
//!
//! The caller shows each byte once, in order, and the client's before it sends them on: then no response can be seen
//! before what it answers. However the bytes are cut, the same events come.
//!
//! What is not understood makes a session [`State::Opaque`] for good: it is passed on as ever, only not followed.
//! Reasons, besides bytes that no server or client sends:
//!
//! * The links are compressed, or the client does not speak protocol 4.1.
//! * A binlog or table dump, or what announces one (COM_REGISTER_SLAVE); a successful COM_SHUTDOWN.
//! * Bytes of the node while no response is due: the ERR packet that servers send before they close (1053, 1927,
//!   4031), and TiDB's ERR packet to COM_STMT_SEND_LONG_DATA, after which its client takes each response for that to
//!   the next command.
//! * More kinds of commands sent ahead than [`crate::tracker`] remembers (12; a run of equal ones counts once), or
//!   anything sent ahead of the end of COM_CHANGE_USER or behind a LOAD DATA LOCAL.
//! * Definitions that are left out of the response to COM_STMT_PREPARE (CLIENT_OPTIONAL_RESULTSET_METADATA).

use crate::capability::Capabilities;
use crate::dialogue::Dialogue;
pub use crate::events::{Listener, Outcome, Pinned};
use crate::reply;
use crate::walker::{Walker, skip_rows};

/// Where a session stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// No command is outstanding, and no transaction is open.
    Idle,
    /// A command is outstanding, or part of one was sent.
    Busy,
    /// No command is outstanding, a transaction is open.
    InTransaction,
    /// The bytes are not followed any more.
    Opaque,
}

/// Bytes of a command that matter: what it is, and the statement that it names.
const COMMAND: usize = 1 + 4;

/// One session.
#[derive(Debug)]
pub struct Tracker {
    client: Walker<COMMAND>,
    node: Walker<{ reply::KEEP }>,
    dialogue: Dialogue,
    /// Sequence number of the next packet of the response to the first outstanding command.
    next: u8,
}

// There is one a session, and it is touched with each read.
const _: () = assert!(size_of::<Tracker>() <= 256);

impl Tracker {
    /// `capabilities` are what client and node agreed on. The first byte to be shown is the one behind the node's
    /// final OK packet of the login.
    #[must_use]
    pub fn new(capabilities: Capabilities) -> Self {
        Self { client: Walker::new(), node: Walker::new(), dialogue: Dialogue::new(capabilities), next: 1 }
    }

    /// Takes bytes from the client, in any pieces.
    pub fn client(&mut self, mut bytes: &[u8], listener: &mut impl Listener) {
        while !self.dialogue.is_opaque() {
            let Some(piece) = self.client.next(&mut bytes) else { return };
            if piece.begins {
                self.dialogue.begin(piece.prefix, listener);
            }
            if piece.ends && !self.dialogue.is_opaque() {
                self.dialogue.end(piece.length, listener);
                if self.dialogue.is_single() {
                    self.next = self.client.sequence().wrapping_add(1);
                }
            }
        }
    }

    /// Takes bytes from the node, in any pieces.
    pub fn node(&mut self, bytes: &[u8], listener: &mut impl Listener) {
        let mut taken = 0;
        while taken < bytes.len() {
            taken += self.node_to_pong(&bytes[taken..], listener);
        }
    }

    /// The same, as far as the answer to a COM_PING that stands behind another answer. Returns how many bytes were taken.
    pub fn node_to_pong(&mut self, bytes: &[u8], listener: &mut impl Listener) -> usize {
        let mut rest = bytes;
        while !rest.is_empty() && !self.dialogue.is_opaque() {
            if !self.dialogue.awaits_reply() {
                self.give_up();
                break;
            }
            if self.dialogue.in_rows() && self.node.is_between() {
                let (behind, last) = skip_rows(rest);
                rest = behind;
                self.next = last.map_or(self.next, |last| last.wrapping_add(1));
            }
            let Some(piece) = self.node.next(&mut rest) else { break };
            if piece.ends {
                let answered = self.dialogue.reply(piece.prefix, piece.length, listener);
                // A response to a command that was sent ahead begins with number 1.
                self.next = if answered { 1 } else { self.node.sequence().wrapping_add(1) };
                if self.dialogue.owes_pong() && !rest.is_empty() {
                    return bytes.len() - rest.len();
                }
            }
        }
        bytes.len()
    }

    #[must_use]
    pub fn state(&self) -> State {
        if self.dialogue.is_opaque() {
            State::Opaque
        } else if self.dialogue.is_busy() || !self.client.is_between() {
            State::Busy
        } else if self.dialogue.in_transaction() {
            State::InTransaction
        } else {
            State::Idle
        }
    }

    /// Whether the node owes a response, and has got all of the command that it answers. False when that is not known.
    #[must_use]
    pub fn awaits_node(&self) -> bool {
        !self.dialogue.is_opaque()
            && self.client.is_between()
            && self.dialogue.awaits_reply()
            && !self.dialogue.is_uploading()
    }

    /// The sequence number of an ERR packet in place of what the node owes: a response, or the rest of one. None: the node owes
    /// nothing, or is within a packet.
    #[must_use]
    pub fn error_sequence(&self) -> Option<u8> {
        (self.awaits_node() && self.node.is_between()).then_some(self.next)
    }

    /// Whether the node's next answer is that to a COM_PING.
    #[must_use]
    pub fn owes_pong(&self) -> bool {
        !self.dialogue.is_opaque() && self.dialogue.owes_pong()
    }

    /// The status flags that the node told last.
    #[must_use]
    pub fn status(&self) -> u16 {
        self.dialogue.status()
    }

    /// Why the session could not move, were it not busy; None when it could. Of several reasons the first of
    /// opaque, transaction, cursor, long data.
    #[must_use]
    pub fn pinned(&self) -> Option<Pinned> {
        self.dialogue.pinned()
    }

    /// Stops following.
    pub fn give_up(&mut self) {
        self.dialogue.give_up();
    }
}
