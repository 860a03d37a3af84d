//! State that prepared statements leave at the node and that pins the session there.
//!
//! The record need not be exact. TiDB itself refuses to export a session with open cursors or with parameters sent
//! ahead (error 8146, pingcap/tidb `pkg/server/driver_tidb.go`, `EncodeSessionStates`). So a missing mark only costs a
//! failed migration attempt, but a mark that is never removed would pin the session for ever.

/// Slots for statements. Marks of further statements stay set until all slots are free.
const STATEMENTS: usize = 8;

/// Rows of a cursor are left to be fetched.
pub(crate) const CURSOR: u8 = 1;
/// Parameters were sent ahead of an execution.
pub(crate) const LONG_DATA: u8 = 2;

/// A bounded map from statement ids to marks.
#[derive(Debug)]
pub(crate) struct Statements {
    ids: [u32; STATEMENTS],
    /// Marks of the statement in the same slot; 0 means that the slot is free.
    marks: [u8; STATEMENTS],
    /// Marks of statements without a slot.
    overflow: u8,
}

impl Statements {
    pub(crate) const fn new() -> Self {
        Self { ids: [0; STATEMENTS], marks: [0; STATEMENTS], overflow: 0 }
    }

    /// Whether any statement has `mark`.
    pub(crate) fn any(&self, mark: u8) -> bool {
        self.marks.iter().fold(self.overflow, |all, marks| all | marks) & mark != 0
    }

    /// Adds `mark` to a statement.
    pub(crate) fn add(&mut self, id: u32, mark: u8) {
        match self.slot(id).or_else(|| self.marks.iter().position(|marks| *marks == 0)) {
            Some(slot) => {
                self.ids[slot] = id;
                self.marks[slot] |= mark;
            }
            None => self.overflow |= mark,
        }
    }

    /// Removes `mark` from a statement.
    pub(crate) fn remove(&mut self, id: u32, mark: u8) {
        if let Some(slot) = self.slot(id) {
            self.marks[slot] &= !mark;
            // Statements without a slot have probably lost their marks too.
            if self.marks.iter().all(|marks| *marks == 0) {
                self.overflow = 0;
            }
        }
    }

    /// Removes all marks.
    pub(crate) fn clear(&mut self) {
        *self = Self::new();
    }

    fn slot(&self, id: u32) -> Option<usize> {
        (0..STATEMENTS).find(|&slot| self.ids[slot] == id && self.marks[slot] != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_kept_per_statement() {
        let mut statements = Statements::new();
        statements.add(1, CURSOR);
        statements.add(1, LONG_DATA);
        statements.add(2, CURSOR);
        statements.remove(1, CURSOR);
        assert!(statements.any(CURSOR) && statements.any(LONG_DATA));
        statements.remove(2, CURSOR | LONG_DATA);
        assert!(!statements.any(CURSOR) && statements.any(LONG_DATA));
        statements.remove(1, LONG_DATA);
        assert!(!statements.any(CURSOR | LONG_DATA));
    }

    #[test]
    fn marks_without_a_slot_stay_until_all_slots_are_free() {
        let full = || {
            let mut statements = Statements::new();
            (0..=STATEMENTS as u32).for_each(|id| statements.add(id, if id == 0 { LONG_DATA } else { CURSOR }));
            statements
        };
        let mut statements = full();
        (1..=STATEMENTS as u32).for_each(|id| statements.remove(id, CURSOR));
        assert!(statements.any(CURSOR) && statements.any(LONG_DATA));
        statements.remove(0, LONG_DATA);
        assert!(!statements.any(CURSOR | LONG_DATA));
        let mut statements = full();
        statements.clear();
        assert!(!statements.any(CURSOR | LONG_DATA));
    }

    #[test]
    fn slot_is_free_after_its_marks_are_removed() {
        let mut statements = Statements::new();
        for id in 0..1000 {
            statements.add(id, LONG_DATA);
            statements.remove(id, LONG_DATA);
        }
        assert!(!statements.any(LONG_DATA));
    }
}
