//! Follows an established session: which command runs, when its response is complete, and what state it leaves at the
//! node.
//!
//! The caller passes each byte once, in order, and the client's bytes before it sends them on. So the tracker sees each
//! command before its response. The events do not depend on how the bytes are split.
//!
//! A session that the tracker does not understand becomes [`TrackerState::Opaque`] for good: the proxy still forwards
//! it, but no longer tracks it. Reasons, besides bytes that no server or client sends:
//!
//! * The connections are compressed, or the client does not speak protocol 4.1.
//! * A binlog or table dump, or COM_REGISTER_SLAVE, which announces one; a successful COM_SHUTDOWN.
//! * Bytes of the node while no response is due, such as the ERR packet that servers send before they close (1053,
//!   1927, 4031). An exception is TiDB's ERR packet for COM_STMT_SEND_LONG_DATA. If the client has already sent another
//!   command, that packet counts as its response, and the session is pinned until it is clear which response belongs to
//!   which command.
//! * More than 12 runs of equal commands in the pipeline, where a run has at most 4096 commands, or anything sent ahead
//!   of the end of COM_CHANGE_USER or behind a LOAD DATA LOCAL.
//! * A response to COM_STMT_PREPARE without definitions (CLIENT_OPTIONAL_RESULTSET_METADATA).

use crate::capability::Capabilities;
pub use crate::command_observer::{CommandObserver, CommandOutcome, PasswordRequest, PinReason, ResultSize};
use crate::command_tracker::CommandTracker;
use crate::packet_framer::{PacketFramer, skip_rows};
use crate::reply;

/// The state of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TrackerState {
    /// No command is outstanding, and no transaction is open.
    Idle,
    /// A command is outstanding, or the client has sent a part of one.
    Busy,
    /// No command is outstanding, and a transaction is open.
    InTransaction,
    /// The session is not tracked any more.
    Opaque,
}

/// Payload bytes of a command that matter: the command and its statement id.
const COMMAND_PREFIX_BYTES: usize = 1 + 4;

/// The tracker of one session.
#[derive(Debug)]
pub struct Tracker {
    client_framer: PacketFramer<COMMAND_PREFIX_BYTES>,
    node_framer: PacketFramer<{ reply::REPLY_PREFIX_BYTES }>,
    commands: CommandTracker,
    /// Sequence number of the next packet of the response to the first outstanding command.
    next_sequence: u8,
}

// Each session has a tracker, and every read uses it.
const _: () = assert!(size_of::<Tracker>() <= 272);

impl Tracker {
    /// `capabilities` are those that client and node agreed on. Tracking begins with the byte after the node's final OK
    /// packet of the login.
    #[must_use]
    pub fn new(capabilities: Capabilities) -> Self {
        Self {
            client_framer: PacketFramer::new(),
            node_framer: PacketFramer::new(),
            commands: CommandTracker::new(capabilities),
            next_sequence: 1,
        }
    }

    /// Processes bytes from the client, split anywhere.
    pub fn on_client_bytes(&mut self, mut bytes: &[u8], observer: &mut impl CommandObserver) {
        while !self.commands.is_opaque() {
            let Some(piece) = self.client_framer.next(&mut bytes) else { return };
            if piece.begins {
                self.commands.begin_client_message(piece.prefix, observer);
            }
            if piece.ends && !self.commands.is_opaque() {
                self.commands.end_client_message(piece.length, observer);
                if self.commands.has_one_command() {
                    self.next_sequence = self.client_framer.sequence().wrapping_add(1);
                }
            }
        }
    }

    /// Processes bytes from the node, split anywhere.
    pub fn on_node_bytes(&mut self, bytes: &[u8], observer: &mut impl CommandObserver) {
        let mut taken = 0;
        while taken < bytes.len() {
            taken += self.on_node_bytes_until_ping_reply(&bytes[taken..], observer);
        }
    }

    /// Like [`Self::on_node_bytes`], but stops before the response to a COM_PING that follows another response. Returns
    /// the number of bytes processed.
    pub fn on_node_bytes_until_ping_reply(&mut self, bytes: &[u8], observer: &mut impl CommandObserver) -> usize {
        let mut rest = bytes;
        while !rest.is_empty() && !self.commands.is_opaque() {
            if !self.commands.awaits_reply() {
                self.receive_unrequested(&mut rest);
                continue;
            }
            let before = rest;
            let has_rows = observer.wants_rows() && self.commands.expects_rows();
            if self.commands.is_in_rows() && self.node_framer.is_between_messages() {
                let (behind, rows, last) = skip_rows(rest);
                rest = behind;
                self.commands.add_rows(rows);
                self.next_sequence = last.map_or(self.next_sequence, |last| last.wrapping_add(1));
            }
            let piece = self.node_framer.next(&mut rest);
            let taken = &before[..before.len() - rest.len()];
            self.commands.add_bytes(taken.len());
            if has_rows {
                observer.on_row_bytes(taken);
            }
            let Some(piece) = piece else { break };
            if piece.ends {
                let answered = self.commands.receive_reply(piece.prefix, piece.length, observer);
                // The response to a command that was sent ahead begins with sequence number 1.
                self.next_sequence = if answered { 1 } else { self.node_framer.sequence().wrapping_add(1) };
                if self.commands.owes_ping_reply() && !rest.is_empty() {
                    return bytes.len() - rest.len();
                }
            }
        }
        bytes.len()
    }

    /// Processes bytes of the node while it owes no response.
    fn receive_unrequested(&mut self, bytes: &mut &[u8]) {
        if !self.commands.may_reject_data() {
            return self.stop_tracking();
        }
        let Some(piece) = self.node_framer.next(bytes).filter(|piece| piece.ends) else { return };
        let is_error = piece.prefix.first() == Some(&reply::ERROR);
        let is_unknown = reply::is_unknown_statement(piece.prefix);
        // Errors that announce the end of the connection have sequence number 0.
        if is_error && self.node_framer.sequence() == 1 {
            self.commands.on_data_rejected(is_unknown);
        } else {
            self.stop_tracking();
        }
    }

    #[must_use]
    pub fn state(&self) -> TrackerState {
        if self.commands.is_opaque() {
            TrackerState::Opaque
        } else if self.commands.is_busy() || !self.client_framer.is_between_messages() {
            TrackerState::Busy
        } else if self.commands.is_in_transaction() {
            TrackerState::InTransaction
        } else {
            TrackerState::Idle
        }
    }

    /// Whether the node owes a response to a command that is complete. False for an opaque session.
    #[must_use]
    pub fn awaits_node(&self) -> bool {
        !self.commands.is_opaque()
            && self.client_framer.is_between_messages()
            && self.commands.awaits_reply()
            && !self.commands.is_uploading()
    }

    /// Whether the client's next message is a command, and not authentication data or a part of a file.
    #[must_use]
    pub fn expects_command(&self) -> bool {
        self.commands.expects_command()
    }

    /// The sequence number for an ERR packet that replaces the response, or rest of a response, that the node owes.
    /// None if the node owes nothing, has sent a part of a packet, or its session is opaque.
    #[must_use]
    pub fn error_sequence(&self) -> Option<u8> {
        (self.awaits_node() && self.node_framer.is_between_messages()).then_some(self.next_sequence)
    }

    /// Whether the node's next response answers a COM_PING.
    #[must_use]
    pub fn owes_ping_reply(&self) -> bool {
        !self.commands.is_opaque() && self.commands.owes_ping_reply()
    }

    /// The status flags that the node sent last.
    #[must_use]
    pub fn status(&self) -> u16 {
        self.commands.status()
    }

    /// What pins the session to its node even when it is idle; None: nothing. If there are several reasons, the first
    /// of opaque, transaction, cursor, long data.
    #[must_use]
    pub fn pin_reason(&self) -> Option<PinReason> {
        self.commands.pin_reason()
    }

    /// Makes the session opaque.
    pub fn stop_tracking(&mut self) {
        self.commands.stop_tracking();
    }
}
