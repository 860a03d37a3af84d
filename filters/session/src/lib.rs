//! Moving a session from one node to another between two statements: no I/O, no Envoy, no unsafe code.
//!
//! * [`journey`] is one attempt, from the connection to the target until the session is there, or stays.
//! * [`choice`] is where to, [`pace`] how many at a time, [`limits`] how long a step may take.
//! * [`export`] reads what the old node says, [`restore`] makes the statement for the new one of it, and [`arrival`] talks with
//!   that. [`states`] knows what is carried over, [`identity`] who logs in, and [`budget`] how much memory all of it may take.
//! * [`fresh`] states let a session go on elsewhere when its node has gone.
//! * [`quota`] is how many sessions are to leave a node that stays.
//! * [`begin_text`] knows the statements that begin a transaction.
//! * [`pong`] hears when a node announces its end.
//!
//! TiDB's side of it: `SHOW SESSION_STATES`, `SET SESSION_STATES` and the authentication plugin `tidb_session_token`, made
//! for its own proxy (pingcap/tidb, `pkg/sessionctx/sessionstates`).

#![forbid(unsafe_code)]

pub mod arrival;
pub mod begin_text;
pub mod budget;
pub mod choice;
pub mod export;
pub mod fresh;
pub mod identity;
pub mod journey;
pub mod limits;
mod messages;
pub mod pace;
pub mod pong;
pub mod quota;
pub mod restore;
mod scan;
pub mod sentinel;
pub mod states;
