//! Follows a transaction that was lost with its connection, so that its rest is not committed without its beginning.

use mysql_proto::command::Command;
use sql_text::{TransactionStep, transaction_step};
use traffic_files::record::Record;

/// Whether the session is within a transaction whose beginning was lost.
#[derive(Debug, Default)]
pub(crate) struct LostTransaction {
    is_open: bool,
}

impl LostTransaction {
    pub(crate) fn new(is_open: bool) -> Self {
        Self { is_open }
    }

    /// Whether a command may run: it does not belong to a lost transaction. `text`: that of its statement, if it is
    /// known.
    pub(crate) fn admits(&mut self, record: &Record, text: Option<&[u8]>) -> bool {
        if !self.is_open {
            return true;
        }
        match record.command {
            Command::Query | Command::Execute | Command::BulkExecute => {
                let first = text.and_then(|text| steps(text).next());
                if matches!(first, Some(TransactionStep::Begin | TransactionStep::CommitBefore)) {
                    self.is_open = false;
                    return true;
                }
                self.pass(record, text);
                false
            }
            Command::ChangeUser | Command::ResetConnection | Command::Quit => {
                self.is_open = false;
                true
            }
            _ => true,
        }
    }

    /// The connection was lost while this command ran. `was_in_transaction`: before the command.
    pub(crate) fn on_connection_lost(&mut self, record: &Record, text: Option<&[u8]>, was_in_transaction: bool) {
        self.is_open |= was_in_transaction;
        self.pass(record, text);
    }

    /// Goes past a command that has not run.
    fn pass(&mut self, record: &Record, text: Option<&[u8]>) {
        for step in text.into_iter().flat_map(steps) {
            match step {
                TransactionStep::Within => {}
                // The captured session was in no transaction if this has failed.
                TransactionStep::Begin => self.is_open = record.is_success,
                TransactionStep::End | TransactionStep::CommitBefore => self.is_open = false,
            }
        }
    }
}

fn steps(text: &[u8]) -> impl Iterator<Item = TransactionStep> {
    sql_text::statements(text).map(|statement| transaction_step(&statement))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_records::record;

    fn query(text: &str) -> Record {
        record(Command::Query, text.as_bytes())
    }

    /// Whether these texts run, one after the other.
    fn admitted(lost: &mut LostTransaction, texts: &[&str]) -> Vec<bool> {
        let admits = |text: &&str| lost.admits(&query(text), Some(text.as_bytes()));
        texts.iter().map(admits).collect()
    }

    #[test]
    fn rest_of_a_lost_transaction_does_not_run() {
        let mut lost = LostTransaction::default();
        assert_eq!(admitted(&mut lost, &["insert 1", "commit", "insert 2"]), [true; 3]);
        lost.on_connection_lost(&query("insert 3"), Some(b"insert 3"), true);
        let texts = ["/* app */ insert 4", "rollback to s", "update t set a = 'commit'", "commit", "insert 5"];
        assert_eq!(admitted(&mut lost, &texts), [false, false, false, false, true]);
    }

    #[test]
    fn another_transaction_runs() {
        for text in ["begin", "/* app */ start transaction", "create table t (a int)"] {
            assert_eq!(admitted(&mut LostTransaction::new(true), &[text, "insert 1"]), [true, true], "{text}");
        }
        // The text does not run, as it ends the lost transaction. So what it has begun is lost as well.
        let texts = ["commit; begin", "insert 1", "rollback; insert 2", "insert 3"];
        assert_eq!(admitted(&mut LostTransaction::new(true), &texts), [false, false, false, true]);
    }

    #[test]
    fn connection_may_be_lost_when_a_transaction_begins_or_ends() {
        for (text, was_in_transaction, is_lost) in
            [("begin", false, true), ("commit", true, false), ("insert 1", false, false), ("insert 1", true, true)]
        {
            let mut lost = LostTransaction::default();
            lost.on_connection_lost(&query(text), Some(text.as_bytes()), was_in_transaction);
            assert_eq!(admitted(&mut lost, &["insert 2"]), [!is_lost], "{text}");
        }
    }

    #[test]
    fn statement_without_a_known_text_belongs_to_the_lost_transaction() {
        let mut lost = LostTransaction::new(true);
        let execute = record(Command::Execute, b"");
        assert!(!lost.admits(&execute, None));
        let reset = record(Command::ResetConnection, b"");
        assert!(lost.admits(&reset, None) && lost.admits(&execute, None));
    }
}
