//! The MySQL protocol from a proxy's view: no I/O, no Envoy, no unsafe code.
//!
//! * [`login`] relays the handshake between two connections that may differ in TLS, and edits it accordingly.
//! * [`tracker`] follows an established session: its commands, the ends of their responses, its state at the node.
//! * The other modules parse and write parts of messages.
//!
//! Protocol facts are from "MySQL Client/Server Protocol" (dev.mysql.com, MySQL source documentation) and MariaDB's
//! "Client/Server Protocol" pages. Comments say where TiDB differs.

#![forbid(unsafe_code)]

pub mod capability;
pub mod change_user;
pub mod command;
mod command_observer;
mod command_tracker;
pub mod error;
pub mod greeting;
pub mod handshake_response;
pub mod lenenc;
pub mod login;
pub mod login_names;
pub mod packet;
mod packet_framer;
mod pipeline_queue;
pub mod query;
mod reply;
pub mod request_reader;
pub mod rows;
pub mod secret;
#[cfg(test)]
mod splitting;
mod statements;
pub mod status;
pub mod tracker;
