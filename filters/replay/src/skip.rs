//! Why commands of the capture are not replayed.

use std::fmt;

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SkipReason {
    /// Another user, database or time was asked for.
    Filtered,
    /// Only reads were asked for, and it may write.
    MayWrite,
    /// It would end sessions or servers that are not those of the capture, or start a binlog stream.
    NeverReplayed,
    /// It executes a prepared statement of which the capture has no text.
    UnknownStatement,
    /// The slow log has the statement only in part.
    Incomplete,
}

impl fmt::Display for SkipReason {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Filtered => "for another user, database or time",
            Self::MayWrite => "that may write",
            Self::NeverReplayed => "that are never replayed",
            Self::UnknownStatement => "of unknown prepared statements",
            Self::Incomplete => "of which the slow log lacks a part",
        })
    }
}
