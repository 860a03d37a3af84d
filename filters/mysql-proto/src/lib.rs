//! The MySQL protocol as a proxy sees it: no I/O, no Envoy, no unsafe code.
//!
//! * [`login`] relays the handshake between two connections that may differ in TLS, and edits what must differ.
//! * [`tracker`] follows an established session: which command runs, when its response ends, what state is left.
//! * The other modules are the pieces of messages that these two need.
//!
//! Protocol facts are those of "MySQL Client/Server Protocol" (dev.mysql.com, MySQL source documentation) and
//! of MariaDB's "Client/Server Protocol" pages; where TiDB differs, the comment says so.

#![forbid(unsafe_code)]

pub mod capability;
pub mod change_user;
pub mod command;
mod command_observer;
mod command_tracker;
pub mod error;
pub mod greeting;
pub mod lenenc;
pub mod login;
pub mod packet;
mod packet_framer;
mod pipeline_queue;
mod reply;
pub mod response;
pub mod secret;
mod statements;
pub mod status;
pub mod tracker;
