//! Limits the records that wait for sessions. The limit is for all sessions together: with a limit for each, a session
//! that waits for a lock could keep the replay from reaching the statement that releases the lock.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use traffic_files::record::Record;

use crate::stop::Stop;

const MAX_RECORDS: usize = 100_000;
const MAX_BYTES: usize = 256 << 20;
/// What a record takes besides its texts.
const RECORD_BYTES: usize = 500;
const STOP_INTERVAL: Duration = Duration::from_millis(200);

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Load {
    records: usize,
    bytes: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Budget {
    load: Mutex<Load>,
    released: Condvar,
}

impl Budget {
    /// Waits until there is room. Returns false if the replay is to end.
    pub(crate) fn acquire(&self, record: &Record, stop: &Stop) -> bool {
        let mut load = self.lock();
        while load.records >= MAX_RECORDS || load.bytes >= MAX_BYTES {
            if stop.is_requested() {
                return false;
            }
            load = self.released.wait_timeout(load, STOP_INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
        }
        load.records += 1;
        load.bytes += size(record);
        true
    }

    pub(crate) fn release(&self, bytes: usize) {
        let mut load = self.lock();
        load.records -= 1;
        load.bytes -= bytes;
        self.released.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Load> {
        self.load.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a record takes of the budget.
pub(crate) fn size(record: &Record) -> usize {
    RECORD_BYTES + record.payload.len() + record.prepared_text.as_ref().map_or(0, Vec::len)
}
