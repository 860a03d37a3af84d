//! Reads large results: nothing for a while, then slowly, then all.

use std::rc::Rc;
use std::time::{Duration, Instant};

use mysql_proto::lenenc;
use serde_json::{Value, json};

use crate::connection::{Connection, SCRATCH};
use crate::crowd::{self, LoginOptions};
use crate::failure::{Failure, FailureCounts};
use crate::options::Slow;
use crate::packets::query;
use crate::poller::{Events, Poller, Ready};
use crate::response::{Answer, Rows};
use crate::target::Target;

/// The length of a row's value.
const ROW: u64 = 1024;
/// The receive buffer of a client in bytes. It is small, so that the server and the proxy have to wait.
const BUFFER: usize = 64 * 1024;
/// Bytes that are read at once while reading slowly.
const DRIBBLE: usize = 2048;
const DRIBBLE_INTERVAL: Duration = Duration::from_millis(10);
/// How long no client may receive any byte.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(30);

/// A client, and the check of its result.
struct Reader {
    connection: Option<Connection>,
    check: Numbered,
}

/// Checks rows that begin with their number, from 1 on, and are filled with x.
#[derive(Default)]
struct Numbered {
    row: u64,
    expected: Vec<u8>,
    bytes: u64,
}

impl Rows for Numbered {
    fn row(&mut self, at: usize, length: usize, bytes: &[u8]) -> Result<(), String> {
        if at == 0 {
            self.row += 1;
            self.expected.clear();
            lenenc::write(&mut self.expected, ROW);
            let text = self.expected.len();
            self.expected.extend(format!("{}-", self.row).as_bytes());
            self.expected.resize(text + ROW as usize, b'x');
            if length != self.expected.len() {
                return Err(format!("row {} has {length} bytes, and not {}", self.row, self.expected.len()));
            }
        }
        self.bytes += bytes.len() as u64;
        if bytes != &self.expected[at..at + bytes.len()] {
            let shown = &bytes[..bytes.len().min(48)];
            return Err(format!("row {} has \"{}\" at byte {at}", self.row, shown.escape_ascii()));
        }
        Ok(())
    }
}

struct Load {
    readers: Vec<Reader>,
    rows: u64,
    failures: FailureCounts,
    done: u64,
}

pub(crate) fn run(options: &Slow) -> Result<Value, Failure> {
    let target = Rc::new(Target::new(&options.server)?);
    let poller = Rc::new(Poller::new()?);
    let login_options = LoginOptions { buffer: Some(BUFFER), ..LoginOptions::default() };
    let connections = crowd::log_in(&target, &poller, options.connections as usize, login_options)?;
    let rows = options.bytes.div_ceil(ROW);
    let statement = query(&format!("select rpad(concat(seq, '-'), {ROW}, 'x') from mysql.seq_1_to_{rows}"));
    let readers = connections
        .into_iter()
        .map(|connection| Reader { connection: Some(connection), check: Numbered::default() })
        .collect();
    let mut load = Load { readers, rows, failures: FailureCounts::default(), done: 0 };
    let start = Instant::now();
    load.for_each(|connection| {
        connection.set_reading(false)?;
        connection.send_commands(&statement, 1)
    });
    load.wait(&poller, Duration::from_secs_f64(options.pause))?;
    load.dribble(&poller, Duration::from_secs_f64(options.dribble))?;
    load.for_each(|connection| connection.set_reading(true));
    load.read_all(&poller)?;
    let bytes: u64 = load.readers.iter().map(|reader| reader.check.bytes).sum();
    let mut result = json!({
        "connections": load.readers.len(), "done": load.done, "rows": rows, "bytes": bytes,
        "seconds": start.elapsed().as_secs_f64(),
    });
    load.failures.add_to(&mut result);
    Ok(result)
}

impl Load {
    /// Calls `act` with each connection.
    fn for_each(&mut self, mut act: impl FnMut(&mut Connection) -> Result<(), Failure>) {
        for index in 0..self.readers.len() {
            if let Some(Err(failure)) = self.readers[index].connection.as_mut().map(&mut act) {
                self.drop_reader(index, &failure);
            }
        }
    }

    /// Reads nothing for the time `pause`. Connections that end in the meantime count as failed.
    fn wait(&mut self, poller: &Poller, pause: Duration) -> Result<(), Failure> {
        let (mut events, end) = (Events::new(), Instant::now() + pause);
        while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            for ready in poller.wait(&mut events, left)? {
                if ready.readable {
                    self.drop_reader(ready.token, &Failure::Closed);
                }
            }
        }
        Ok(())
    }

    fn dribble(&mut self, poller: &Poller, time: Duration) -> Result<(), Failure> {
        let mut scratch = [0; DRIBBLE];
        let end = Instant::now() + time;
        while Instant::now() < end {
            for token in 0..self.readers.len() {
                self.on_ready(Ready { token, readable: true, writable: false }, &mut scratch);
            }
            self.wait(poller, DRIBBLE_INTERVAL)?;
        }
        Ok(())
    }

    fn read_all(&mut self, poller: &Poller) -> Result<(), Failure> {
        let (mut events, mut scratch) = (Events::new(), vec![0; SCRATCH]);
        let mut progressed = Instant::now();
        while self.readers.iter().any(|reader| reader.connection.is_some()) {
            let left = (progressed + RECEIVE_TIMEOUT).saturating_duration_since(Instant::now());
            if left.is_zero() {
                for index in 0..self.readers.len() {
                    if self.readers[index].connection.is_some() {
                        self.drop_reader(index, &Failure::Slow(RECEIVE_TIMEOUT));
                    }
                }
            }
            for ready in poller.wait(&mut events, left)? {
                self.on_ready(ready, &mut scratch);
                progressed = Instant::now();
            }
        }
        Ok(())
    }

    fn on_ready(&mut self, ready: Ready, scratch: &mut [u8]) {
        let Some(Reader { connection: Some(connection), check }) = self.readers.get_mut(ready.token) else { return };
        let progress = match connection.handle(ready, scratch, check) {
            Ok(progress) => progress,
            Err(failure) => return self.drop_reader(ready.token, &failure),
        };
        match progress.answer {
            None => {}
            Some(Answer::Rows(rows)) if rows == self.rows => {
                self.readers[ready.token].connection = None;
                self.done += 1;
            }
            Some(Answer::Refused { code, text }) => self.drop_reader(ready.token, &Failure::Refused { code, text }),
            Some(other) => {
                let text = format!("{other:?}, where {} rows are due", self.rows);
                self.drop_reader(ready.token, &Failure::Content(text));
            }
        }
    }

    fn drop_reader(&mut self, index: usize, failure: &Failure) {
        if self.readers[index].connection.take().is_some() {
            let row = self.readers[index].check.row;
            self.failures.add_detailed(failure.kind(), || format!("connection {index}, in row {row}: {failure}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(number: u64) -> Vec<u8> {
        let mut row = Vec::new();
        lenenc::write(&mut row, ROW);
        row.extend(format!("{number}-").as_bytes());
        row.resize(3 + ROW as usize, b'x');
        row
    }

    #[test]
    fn missing_or_repeated_row_is_reported() {
        for second in [1, 3] {
            let (mut check, bytes) = (Numbered::default(), row(second));
            check.row(0, 1027, &row(1)).expect("row 1");
            let error = check.row(0, 1027, &bytes).expect_err("another row");
            assert!(error.starts_with("row 2 has"), "{error}");
        }
    }

    #[test]
    fn wrong_byte_is_reported_in_any_piece() {
        let (mut check, mut bytes) = (Numbered::default(), row(1));
        check.row(0, 1027, &bytes[..500]).expect("a piece");
        bytes[700] = b'y';
        assert!(check.row(500, 1027, &bytes[500..]).is_err());
        assert!(Numbered::default().row(0, 1026, &row(1)[..1026]).is_err());
    }
}
