//! Small packets, and every way to send them in up to three pieces.

use mysql_proto::command::Command;

use crate::packets::{packet, query};

/// One or two packets, and where their bytes are cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Split {
    /// The names of the packets.
    pub(crate) about: &'static str,
    pub(crate) statements: u32,
    bytes: Vec<u8>,
    /// Where each piece ends.
    ends: Vec<usize>,
}

impl Split {
    pub(crate) fn pieces(&self) -> usize {
        self.ends.len()
    }

    /// One of the pieces, in order.
    pub(crate) fn piece(&self, number: usize) -> &[u8] {
        let start = if number == 0 { 0 } else { self.ends[number - 1] };
        &self.bytes[start..self.ends[number]]
    }

    /// Describes the packets and the lengths of the pieces.
    pub(crate) fn describe(&self) -> String {
        let lengths: Vec<_> = (0..self.pieces()).map(|number| self.piece(number).len().to_string()).collect();
        format!("{} in pieces of {} bytes", self.about, lengths.join(" + "))
    }
}

/// All splits of COM_PING and `do 1`, alone and in pairs.
pub(crate) fn all() -> Vec<Split> {
    let (ping, do_one) = (packet(0, &[Command::Ping as u8]), query("do 1"));
    [
        ("COM_PING", 1, ping.clone()),
        ("`do 1`", 1, do_one.clone()),
        ("COM_PING and COM_PING", 2, [&ping[..], &ping].concat()),
        ("COM_PING and `do 1`", 2, [&ping[..], &do_one].concat()),
        ("`do 1` and COM_PING", 2, [&do_one[..], &ping].concat()),
        ("`do 1` and `do 1`", 2, [&do_one[..], &do_one].concat()),
    ]
    .into_iter()
    .flat_map(|(about, statements, bytes)| {
        cuts(bytes.len()).map(move |ends| Split { about, statements, bytes: bytes.clone(), ends })
    })
    .collect()
}

/// Every way to cut `length` bytes into one, two or three pieces: the ends of the pieces.
fn cuts(length: usize) -> impl Iterator<Item = Vec<usize>> {
    let two = (1..length).map(move |first| vec![first, length]);
    let three = (1..length).flat_map(move |first| (first + 1..length).map(move |second| vec![first, second, length]));
    std::iter::once(vec![length]).chain(two).chain(three)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn all_splits_exist_once() {
        let splits = all();
        let different: HashSet<_> = splits.iter().map(|split| (split.bytes.clone(), split.ends.clone())).collect();
        assert_eq!(different.len(), splits.len());
        // For n bytes: one without a cut, n - 1 with one cut, and one for each pair of cuts.
        let expected: usize = [5, 9, 10, 14, 14, 18].iter().map(|n| 1 + (n - 1) + (n - 1) * (n - 2) / 2).sum();
        assert_eq!(splits.len(), expected);
    }

    #[test]
    fn pieces_of_a_split_make_up_whole_packets() {
        for split in all() {
            let pieces: Vec<_> = (0..split.pieces()).map(|number| split.piece(number)).collect();
            assert!(pieces.iter().all(|piece| !piece.is_empty()) && pieces.len() <= 3);
            assert_eq!(pieces.concat(), split.bytes);
            assert!(
                split.bytes.len() == 5 * split.statements as usize
                    || split.bytes.ends_with(b"do 1")
                    || split.statements == 2
            );
        }
        assert_eq!(all()[6].describe(), "COM_PING in pieces of 1 + 2 + 2 bytes");
    }
}
