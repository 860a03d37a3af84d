//! Which sessions a list has: filter, order and limits.

use std::cmp::Reverse;

use prost::Message;

use super::messages::{ListSessions, SessionMessage};

/// The highest number of sessions in a list of one Envoy.
const MAX_ROWS: usize = 10_000;
/// The control plane accepts messages of at most 4 MiB.
const MAX_BYTES: usize = 3 << 20;
/// Bytes of a row beyond its message: its tag and its length.
const ROW_BYTES: usize = 8;

impl ListSessions {
    pub(super) fn rows(&self) -> usize {
        (self.limit as usize).min(MAX_ROWS)
    }

    /// Whether the list may have a session. It is asked first, since a message costs more.
    pub(crate) fn fits(&self, user: &[u8], node: &str, client: &str) -> bool {
        let is_client = || {
            let address = client.rsplit_once(':').map_or(client, |(address, _)| address);
            [client, address, address.trim_matches(['[', ']'])].contains(&self.client.as_str())
        };
        (self.user.is_empty() || self.user.as_bytes() == user)
            && (self.node.is_empty() || self.node == node)
            && (self.client.is_empty() || is_client())
    }
}

/// Sorts: first the sessions that have been busy for the longest time, then those that have had a transaction open for
/// the longest time, then the others, those first that were used last. Cuts off what exceeds the limits.
pub(super) fn sort_and_cut(rows: &mut Vec<SessionMessage>, limit: usize) {
    rows.sort_by_key(|row| match row.state.as_str() {
        "busy" => (0, Reverse(row.milliseconds_in_state), 0, row.connection),
        "transaction" => (1, Reverse(row.milliseconds_in_state), 0, row.connection),
        _ => (2, Reverse(0), row.milliseconds_in_state, row.connection),
    });
    let mut bytes = 0;
    let fitting = rows.iter().take(limit).take_while(|row| {
        bytes += row.encoded_len() + ROW_BYTES;
        bytes <= MAX_BYTES
    });
    let count = fitting.count();
    rows.truncate(count);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(state: &str, milliseconds: u64) -> SessionMessage {
        SessionMessage { state: state.to_owned(), milliseconds_in_state: milliseconds, ..SessionMessage::default() }
    }

    #[test]
    fn busy_sessions_come_first() {
        let mut rows = [("idle", 9), ("busy", 1), ("login", 3), ("transaction", 5), ("busy", 8), ("transaction", 6)]
            .map(|(state, milliseconds)| row(state, milliseconds))
            .to_vec();
        sort_and_cut(&mut rows, 5);
        let order: Vec<_> = rows.iter().map(|row| (row.state.as_str(), row.milliseconds_in_state)).collect();
        assert_eq!(order, [("busy", 8), ("busy", 1), ("transaction", 6), ("transaction", 5), ("login", 3)]);
    }

    #[test]
    fn a_list_fits_into_a_message() {
        let mut rows = vec![SessionMessage { text: "x".repeat(512), ..row("idle", 0) }; MAX_ROWS];
        sort_and_cut(&mut rows, MAX_ROWS);
        let bytes: usize = rows.iter().map(Message::encoded_len).sum();
        assert!((MAX_BYTES - 600..MAX_BYTES).contains(&(bytes + rows.len() * ROW_BYTES)), "{bytes}");
    }

    #[test]
    fn filters_must_all_match() {
        let list = |user: &str, node: &str, client: &str| ListSessions {
            user: user.to_owned(),
            node: node.to_owned(),
            client: client.to_owned(),
            limit: 1,
        };
        let fits = |list: ListSessions| list.fits(b"app", "tidb:4000", "10.0.0.1:555");
        assert!(fits(list("", "", "")) && fits(list("app", "tidb:4000", "10.0.0.1")));
        assert!(fits(list("", "", "10.0.0.1:555")));
        assert!(!fits(list("ap", "", "")) && !fits(list("", "tidb", "")) && !fits(list("", "", "10.0.0.11")));
        assert!(list("", "", "::1").fits(b"", "", "[::1]:555"));
    }
}
