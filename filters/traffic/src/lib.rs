//! Files of captured traffic.
//!
//! `traffic-<time>.log.gz` has TiProxy's native format: what clients sent, in the order in which the commands ended.
//! `results-<time>.jsonl.gz` beside it has a JSON line for each of its records: latency, error, rows and their
//! checksum. A replay writes results files, too, so that results can be compared.
//!
//! Encoding and decoding do no I/O: [`record`], [`result`], [`names`], [`meta`], [`checksum`], [`response`], [`gzip`].
//! Readers: [`directory`], and [`merge`] for several directories. [`compare`] compares results of the same statements.

pub mod checksum;
pub mod compare;
pub mod directory;
mod error;
pub mod gzip;
pub mod merge;
pub mod meta;
pub mod names;
pub mod record;
pub mod response;
pub mod result;
mod text;
mod time;

pub use error::{Content, TrafficError};
pub use time::{parse_rfc3339, push_rfc3339};
