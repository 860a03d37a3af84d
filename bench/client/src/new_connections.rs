//! New connections, each of which logs in, runs one statement, and ends.

use std::rc::Rc;
use std::time::Instant;

use crate::connection::Connection;
use crate::failure::Failure;
use crate::poller::{Poller, Ready};
use crate::record::Record;
use crate::response::Answer;
use crate::statements::Statements;
use crate::target::Target;

/// The maximum number of open connections. Further ones begin late, but their latency counts from when they were due.
const MAX_OPEN: usize = 4096;

/// A new connection, and when it was due.
#[derive(Debug)]
struct NewConnection {
    connection: Connection,
    due: Instant,
}

#[derive(Debug)]
pub(crate) struct NewConnections {
    target: Rc<Target>,
    poller: Rc<Poller>,
    /// The first token of new connections. Smaller tokens belong to other connections.
    first_token: usize,
    /// The index is the token minus `first_token`.
    connections: Vec<Option<NewConnection>>,
    free: Vec<usize>,
}

impl NewConnections {
    pub(crate) fn new(target: Rc<Target>, poller: Rc<Poller>, first_token: usize) -> Self {
        Self { target, poller, first_token, connections: Vec::new(), free: Vec::new() }
    }

    pub(crate) fn open(&self) -> usize {
        self.connections.len() - self.free.len()
    }

    /// Whether another connection may begin.
    pub(crate) fn has_room(&self) -> bool {
        self.open() < MAX_OPEN
    }

    pub(crate) fn begin(&mut self, due: Instant, record: &mut Record) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        match Connection::open(&self.target, &self.poller, self.first_token + index) {
            Ok(connection) => self.connections[index] = Some(NewConnection { connection, due }),
            Err(failure) => self.fail(index, &failure, record),
        }
    }

    pub(crate) fn on_ready(
        &mut self,
        ready: Ready,
        scratch: &mut [u8],
        statements: &mut Statements,
        record: &mut Record,
    ) {
        let index = ready.token - self.first_token;
        let Some(Some(connection)) = self.connections.get_mut(index) else { return };
        match connection.advance(ready, scratch, statements) {
            Ok(false) => {}
            Ok(true) => {
                let due = connection.due;
                self.close(index);
                record.connected(due, Instant::now());
            }
            Err(failure) => self.fail(index, &failure, record),
        }
    }

    /// Drops all connections, which count as failed.
    pub(crate) fn fail_all(&mut self, failure: &Failure, record: &mut Record) {
        for index in 0..self.connections.len() {
            if self.connections[index].is_some() {
                self.fail(index, failure, record);
            }
        }
    }

    fn fail(&mut self, index: usize, failure: &Failure, record: &mut Record) {
        self.close(index);
        record.failed(failure);
    }

    fn close(&mut self, index: usize) {
        self.connections[index] = None;
        self.free.push(index);
    }
}

impl NewConnection {
    /// Handles an event. True: the statement is answered, and the connection ends.
    fn advance(&mut self, ready: Ready, scratch: &mut [u8], statements: &mut Statements) -> Result<bool, Failure> {
        let progress = self.connection.handle(ready, scratch, &mut ())?;
        if progress.logged_in {
            self.connection.send_commands(statements.next(), 1)?;
        }
        match progress.answer {
            None => Ok(false),
            Some(Answer::Refused { code, text }) => Err(Failure::Refused { code, text }),
            Some(Answer::Ok | Answer::Rows(_)) => self.connection.quit().map(|()| true),
        }
    }
}
