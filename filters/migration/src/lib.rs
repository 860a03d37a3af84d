//! Migrates a session from one node to another between two statements: no I/O, no Envoy, no unsafe code.
//!
//! * [`state_machine`] is one attempt, from the connection to the target until the target has restored the session, or
//!   the session stays, or is lost.
//! * [`target_choice`] chooses the target, [`rate_limit`] limits how many sessions migrate at a time, and [`timeouts`]
//!   limits each step.
//! * [`state_export`] reads the states that the old node exports, [`restore`] builds the statement that restores them,
//!   and [`target_login`] logs in to the target and sends that statement. [`state_summary`] extracts from the states
//!   what a migration needs, [`identity`] has the client's part of the login, which the module repeats at the target,
//!   and [`budget`] limits the memory of all states.
//! * [`state_snapshot`] lets a session fail over to another node when its node is gone.
//! * [`quota`] is how many sessions rebalancing migrates from and to each node.
//! * [`transaction_start`] recognizes statements that begin a transaction.
//! * [`ping_reply`] detects that a node announces its shutdown.
//! * [`sentinel`] decides whether a node can be reached.
//!
//! TiDB's part: `SHOW SESSION_STATES`, `SET SESSION_STATES` and the authentication plugin `tidb_session_token`, made
//! for TiDB's own proxy (pingcap/tidb, `pkg/sessionctx/sessionstates`).

#![forbid(unsafe_code)]

pub mod budget;
pub mod identity;
mod json_scanner;
mod messages;
pub mod ping_reply;
pub mod quota;
pub mod rate_limit;
pub mod restore;
pub mod sentinel;
mod session_variables;
pub mod state_export;
pub mod state_machine;
pub mod state_snapshot;
pub mod state_summary;
pub mod target_choice;
pub mod target_login;
mod text_checker;
pub mod timeouts;
pub mod transaction_start;
