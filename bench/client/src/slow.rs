//! Large results for clients that read nothing for a while, then little, then all.

use std::rc::Rc;
use std::time::{Duration, Instant};

use mysql_proto::lenenc;
use serde_json::{Value, json};

use crate::connection::{Connection, SCRATCH};
use crate::crowd::{self, Coming};
use crate::failure::{Failure, Tally};
use crate::options::Slow;
use crate::packets::query;
use crate::poller::{Events, Poller, Ready};
use crate::response::{Answer, Rows};
use crate::target::Target;

/// Bytes of a row's value.
const ROW: u64 = 1024;
/// Receive buffer of a client in bytes, so that it is the server that waits, and what is between.
const BUFFER: usize = 64 * 1024;
/// Little: so many bytes, so often.
const DRIBBLE: usize = 2048;
const EVERY: Duration = Duration::from_millis(10);
/// Without any byte for anybody.
const PATIENCE: Duration = Duration::from_secs(30);

/// A client, and what its answer must be: row n begins with its number.
struct Reader {
    connection: Option<Connection>,
    check: Numbered,
}

/// Checks rows that are numbered from 1 on and filled with x.
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
    tally: Tally,
    done: u64,
}

pub(crate) fn run(options: &Slow) -> Result<Value, Failure> {
    let target = Rc::new(Target::new(&options.server)?);
    let poller = Rc::new(Poller::new()?);
    let coming = Coming { buffer: Some(BUFFER), ..Coming::default() };
    let connections = crowd::log_in(&target, &poller, options.connections as usize, coming)?;
    let rows = options.bytes.div_ceil(ROW);
    let statement = query(&format!("select rpad(concat(seq, '-'), {ROW}, 'x') from mysql.seq_1_to_{rows}"));
    let readers = connections
        .into_iter()
        .map(|connection| Reader { connection: Some(connection), check: Numbered::default() })
        .collect();
    let mut load = Load { readers, rows, tally: Tally::default(), done: 0 };
    let start = Instant::now();
    load.act(|connection| {
        connection.read_on(false)?;
        connection.ask(&statement, 1)
    });
    load.wait(&poller, Duration::from_secs_f64(options.pause))?;
    load.dribble(&poller, Duration::from_secs_f64(options.dribble))?;
    load.act(|connection| connection.read_on(true));
    load.read_all(&poller)?;
    let bytes: u64 = load.readers.iter().map(|reader| reader.check.bytes).sum();
    let mut found = json!({
        "connections": load.readers.len(), "done": load.done, "rows": rows, "bytes": bytes,
        "seconds": start.elapsed().as_secs_f64(),
    });
    load.tally.tell(&mut found);
    Ok(found)
}

impl Load {
    /// Does something with each connection.
    fn act(&mut self, mut act: impl FnMut(&mut Connection) -> Result<(), Failure>) {
        for index in 0..self.readers.len() {
            if let Some(Err(failure)) = self.readers[index].connection.as_mut().map(&mut act) {
                self.lose(index, &failure);
            }
        }
    }

    /// For so long nothing is read. What ends meanwhile is told all the same.
    fn wait(&mut self, poller: &Poller, pause: Duration) -> Result<(), Failure> {
        let (mut events, end) = (Events::new(), Instant::now() + pause);
        while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            for ready in poller.wait(&mut events, left)? {
                if ready.readable {
                    self.lose(ready.token, &Failure::Closed);
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
                self.look(Ready { token, readable: true, writable: false }, &mut scratch);
            }
            self.wait(poller, EVERY)?;
        }
        Ok(())
    }

    fn read_all(&mut self, poller: &Poller) -> Result<(), Failure> {
        let (mut events, mut scratch) = (Events::new(), vec![0; SCRATCH]);
        let mut progressed = Instant::now();
        while self.readers.iter().any(|reader| reader.connection.is_some()) {
            let left = (progressed + PATIENCE).saturating_duration_since(Instant::now());
            if left.is_zero() {
                for index in 0..self.readers.len() {
                    if self.readers[index].connection.is_some() {
                        self.lose(index, &Failure::Slow(PATIENCE));
                    }
                }
            }
            for ready in poller.wait(&mut events, left)? {
                self.look(ready, &mut scratch);
                progressed = Instant::now();
            }
        }
        Ok(())
    }

    fn look(&mut self, ready: Ready, scratch: &mut [u8]) {
        let Some(Reader { connection: Some(connection), check }) = self.readers.get_mut(ready.token) else { return };
        let progress = match connection.handle(ready, scratch, check) {
            Ok(progress) => progress,
            Err(failure) => return self.lose(ready.token, &failure),
        };
        match progress.answer {
            None => {}
            Some(Answer::Rows(rows)) if rows == self.rows => {
                self.readers[ready.token].connection = None;
                self.done += 1;
            }
            Some(Answer::Refused { code, text }) => self.lose(ready.token, &Failure::Refused { code, text }),
            Some(other) => {
                let told = format!("{other:?}, where {} rows are due", self.rows);
                self.lose(ready.token, &Failure::Content(told));
            }
        }
    }

    fn lose(&mut self, index: usize, failure: &Failure) {
        if self.readers[index].connection.take().is_some() {
            let row = self.readers[index].check.row;
            self.tally.add_detailed(failure.kind(), || format!("connection {index}, in row {row}: {failure}"));
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
    fn a_row_that_is_missing_or_comes_twice_is_told() {
        for second in [1, 3] {
            let (mut check, bytes) = (Numbered::default(), row(second));
            check.row(0, 1027, &row(1)).expect("row 1");
            let told = check.row(0, 1027, &bytes).expect_err("another row");
            assert!(told.starts_with("row 2 has"), "{told}");
        }
    }

    #[test]
    fn a_byte_that_differs_is_told_in_any_piece() {
        let (mut check, mut bytes) = (Numbered::default(), row(1));
        check.row(0, 1027, &bytes[..500]).expect("a piece");
        bytes[700] = b'y';
        assert!(check.row(500, 1027, &bytes[500..]).is_err());
        assert!(Numbered::default().row(0, 1026, &row(1)[..1026]).is_err());
    }
}
