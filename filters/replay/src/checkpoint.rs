//! How far a replay has come. Sessions run concurrently, so records end in another order than they are read.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::files;
use crate::totals::Totals;

const VERSION: u32 = 1;
const FILE: &str = "checkpoint.json";

/// What identifies a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RecordKey {
    pub(crate) conn: u64,
    pub(crate) time: i64,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckpointError {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: {source}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{}: of another version of this program", path.display())]
    Version { path: PathBuf },
    #[error("{}: of a replay of other input: {}", path.display(), list(inputs))]
    OtherInput { path: PathBuf, inputs: Vec<PathBuf> },
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Where a replay continues. The same input always gives the records in the same order.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Checkpoint {
    version: u32,
    pub(crate) inputs: Vec<PathBuf>,
    /// The number of records, from the first one on, that are all done.
    pub(crate) records: u64,
    /// The last one of them, to see whether the input is still the same.
    pub(crate) last: Option<RecordKey>,
    /// For sessions that are further: the time of their last record that is done.
    pub(crate) sessions: HashMap<u64, i64>,
    pub(crate) totals: Totals,
}

impl Checkpoint {
    /// Reads the checkpoint in a directory. None: there is none.
    pub(crate) fn load(directory: &Path, inputs: &[PathBuf]) -> Result<Option<Self>, CheckpointError> {
        let path = directory.join(FILE);
        let json = match fs::read(&path) {
            Ok(json) => json,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(CheckpointError::Io { path, source }),
        };
        let checkpoint: Self = match serde_json::from_slice(&json) {
            Ok(checkpoint) => checkpoint,
            Err(source) => return Err(CheckpointError::Json { path, source }),
        };
        if checkpoint.version != VERSION {
            return Err(CheckpointError::Version { path });
        }
        if checkpoint.inputs != inputs {
            return Err(CheckpointError::OtherInput { path, inputs: checkpoint.inputs });
        }
        Ok(Some(checkpoint))
    }

    /// Replaces the checkpoint in the directory.
    pub(crate) fn save(&self, directory: &Path) -> io::Result<()> {
        files::replace(&directory.join(FILE), &serde_json::to_vec(self)?)
    }

    /// Whether a record is done. `sequence`: how many were read before it.
    pub(crate) fn is_done(&self, sequence: u64, key: RecordKey) -> bool {
        sequence < self.records || self.sessions.get(&key.conn).is_some_and(|done| key.time <= *done)
    }

    /// Whether the input differs from what was replayed before.
    pub(crate) fn contradicts(&self, sequence: u64, key: RecordKey) -> bool {
        sequence + 1 == self.records && self.last != Some(key)
    }
}

/// Which records are done.
#[derive(Debug)]
pub(crate) struct DoneRecords {
    inputs: Vec<PathBuf>,
    records: u64,
    last: Option<RecordKey>,
    /// Done, but not all before them.
    ahead: BTreeMap<u64, RecordKey>,
    /// Of earlier runs: what was done ahead of them.
    sessions: HashMap<u64, i64>,
}

impl DoneRecords {
    pub(crate) fn new(inputs: Vec<PathBuf>, checkpoint: &Checkpoint) -> Self {
        Self {
            inputs,
            records: checkpoint.records,
            last: checkpoint.last,
            ahead: BTreeMap::new(),
            sessions: checkpoint.sessions.clone(),
        }
    }

    pub(crate) fn add(&mut self, sequence: u64, key: RecordKey) {
        self.ahead.insert(sequence, key);
        while let Some(key) = self.ahead.remove(&self.records) {
            self.records += 1;
            self.last = Some(key);
        }
    }

    pub(crate) fn checkpoint(&self, totals: Totals) -> Checkpoint {
        let mut sessions = self.sessions.clone();
        for key in self.ahead.values() {
            let done = sessions.entry(key.conn).or_insert(key.time);
            *done = (*done).max(key.time);
        }
        let (inputs, last) = (self.inputs.clone(), self.last);
        Checkpoint { version: VERSION, inputs, records: self.records, last, sessions, totals }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(conn: u64, time: i64) -> RecordKey {
        RecordKey { conn, time }
    }

    #[test]
    fn each_record_is_done_once() {
        let records = [key(1, 10), key(2, 20), key(1, 30), key(3, 40), key(2, 50), key(3, 60)];
        let mut done = DoneRecords::new(Vec::new(), &Checkpoint::default());
        for sequence in [0, 3, 1, 5] {
            done.add(sequence as u64, records[sequence]);
        }
        let checkpoint = done.checkpoint(Totals::default());
        assert_eq!((checkpoint.records, checkpoint.last), (2, Some(key(2, 20))));
        let open = |checkpoint: &Checkpoint| {
            let open = records.iter().enumerate();
            let open = open.filter(|(sequence, key)| !checkpoint.is_done(*sequence as u64, **key));
            open.map(|(sequence, _)| sequence).collect::<Vec<_>>()
        };
        assert_eq!(open(&checkpoint), [2, 4]);
        // What was done ahead of the first run stays known in the second one, which sees these records as done, too.
        let mut done = DoneRecords::new(Vec::new(), &checkpoint);
        done.add(2, records[2]);
        done.add(3, records[3]);
        assert_eq!(open(&done.checkpoint(Totals::default())), [4]);
        done.add(4, records[4]);
        done.add(5, records[5]);
        assert_eq!(done.checkpoint(Totals::default()).records, 6);
    }

    #[test]
    fn checkpoint_is_loaded_for_the_same_input_only() {
        let directory = tempfile::tempdir().expect("a directory");
        let inputs = vec![PathBuf::from("/capture")];
        assert_eq!(Checkpoint::load(directory.path(), &inputs).expect("no file"), None);
        let mut done = DoneRecords::new(inputs.clone(), &Checkpoint::default());
        done.add(0, key(1, 10));
        let checkpoint = done.checkpoint(Totals { errors_by_code: BTreeMap::from([(1146, 2)]), ..Totals::default() });
        checkpoint.save(directory.path()).expect("a file");
        let loaded = Checkpoint::load(directory.path(), &inputs).expect("a checkpoint");
        assert_eq!(loaded.as_ref(), Some(&checkpoint));
        let other = Checkpoint::load(directory.path(), &[]).expect_err("other input");
        assert!(other.to_string().ends_with("of a replay of other input: /capture"), "{other}");
        assert!(!checkpoint.contradicts(0, key(1, 10)) && checkpoint.contradicts(0, key(1, 11)));
        fs::write(directory.path().join(FILE), "{}").expect("a file");
        assert!(matches!(Checkpoint::load(directory.path(), &inputs), Err(CheckpointError::Json { .. })));
    }
}
