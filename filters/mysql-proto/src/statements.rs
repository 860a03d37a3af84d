//! What prepared statements leave behind at the node, so that the session cannot move.
//!
//! That need not be exact: TiDB itself does not export a session with open cursors or with parameters that were sent ahead
//! (error 8146, pingcap/tidb `pkg/server/driver_tidb.go`, `EncodeSessionStates`). A mark that is missing costs an attempt, but
//! one that is never removed would keep the session on its node for ever.

/// Statements that are remembered one by one. What others leave counts until none of these has a mark.
const STATEMENTS: usize = 8;

/// Rows of a cursor are left to be fetched.
pub(crate) const CURSOR: u8 = 1;
/// Parameters were sent ahead of an execution.
pub(crate) const LONG_DATA: u8 = 2;

/// A bounded map from statement to its marks.
#[derive(Debug)]
pub(crate) struct Statements {
    ids: [u32; STATEMENTS],
    /// Marks of the statement in the same place; 0 is a free place.
    marks: [u8; STATEMENTS],
    /// Marks of statements that found no place.
    lost: u8,
}

impl Statements {
    pub(crate) const fn new() -> Self {
        Self { ids: [0; STATEMENTS], marks: [0; STATEMENTS], lost: 0 }
    }

    /// Whether any statement has `mark`.
    pub(crate) fn any(&self, mark: u8) -> bool {
        self.marks.iter().fold(self.lost, |all, marks| all | marks) & mark != 0
    }

    /// Adds `mark` to a statement.
    pub(crate) fn add(&mut self, id: u32, mark: u8) {
        match self.place(id).or_else(|| self.marks.iter().position(|marks| *marks == 0)) {
            Some(place) => {
                self.ids[place] = id;
                self.marks[place] |= mark;
            }
            None => self.lost |= mark,
        }
    }

    /// Takes `mark` off a statement.
    pub(crate) fn remove(&mut self, id: u32, mark: u8) {
        if let Some(place) = self.place(id) {
            self.marks[place] &= !mark;
            // The others have probably lost their marks, too, which was not noticed.
            if self.marks.iter().all(|marks| *marks == 0) {
                self.lost = 0;
            }
        }
    }

    /// Takes all marks off all statements.
    pub(crate) fn clear(&mut self) {
        *self = Self::new();
    }

    fn place(&self, id: u32) -> Option<usize> {
        (0..STATEMENTS).find(|&place| self.ids[place] == id && self.marks[place] != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_kept_a_statement() {
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
    fn what_finds_no_place_stays_as_long_as_a_remembered_mark() {
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
    fn a_place_is_free_again() {
        let mut statements = Statements::new();
        for id in 0..1000 {
            statements.add(id, LONG_DATA);
            statements.remove(id, LONG_DATA);
        }
        assert!(!statements.any(LONG_DATA));
    }
}
