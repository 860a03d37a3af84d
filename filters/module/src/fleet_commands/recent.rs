//! Remembers the ids of the latest commands.

use std::collections::VecDeque;

/// More commands than several control planes send within the time in which they may repeat one.
const MAX_IDS: usize = 4096;

/// The ids of the latest commands, since several control planes may send the same one.
#[derive(Debug, Default)]
pub(super) struct RecentIds(VecDeque<u64>);

impl RecentIds {
    /// Remembers an id. False: it is known already.
    pub(super) fn add(&mut self, id: u64) -> bool {
        if self.0.contains(&id) {
            return false;
        }
        if self.0.len() >= MAX_IDS {
            self.0.pop_front();
        }
        self.0.push_back(id);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_latest_ids_are_known() {
        let mut recent = RecentIds::default();
        assert!(recent.add(0) && !recent.add(0));
        for id in 1..=MAX_IDS as u64 {
            assert!(recent.add(id));
        }
        assert!(recent.add(0) && !recent.add(MAX_IDS as u64));
    }
}
