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

/// The highest number of open connections. Further ones wait after they are due, and this wait counts as part of their
/// time.
const MAX_OPEN: usize = 4096;

/// A new connection, and when it was due.
#[derive(Debug)]
struct Visit {
    connection: Connection,
    due: Instant,
}

#[derive(Debug)]
pub(crate) struct Visits {
    target: Rc<Target>,
    poller: Rc<Poller>,
    /// The first token of new connections.
    first: usize,
    /// By token.
    visits: Vec<Option<Visit>>,
    free: Vec<usize>,
}

impl Visits {
    pub(crate) fn new(target: Rc<Target>, poller: Rc<Poller>, first: usize) -> Self {
        Self { target, poller, first, visits: Vec::new(), free: Vec::new() }
    }

    pub(crate) fn open(&self) -> usize {
        self.visits.len() - self.free.len()
    }

    /// Whether another connection may begin.
    pub(crate) fn has_room(&self) -> bool {
        self.open() < MAX_OPEN
    }

    pub(crate) fn begin(&mut self, due: Instant, record: &mut Record) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.visits.push(None);
            self.visits.len() - 1
        });
        match Connection::open(&self.target, &self.poller, self.first + index) {
            Ok(connection) => self.visits[index] = Some(Visit { connection, due }),
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
        let index = ready.token - self.first;
        let Some(Some(visit)) = self.visits.get_mut(index) else { return };
        match visit.advance(ready, scratch, statements) {
            Ok(false) => {}
            Ok(true) => {
                let due = visit.due;
                self.close(index);
                record.visited(due, Instant::now());
            }
            Err(failure) => self.fail(index, &failure, record),
        }
    }

    /// Drops all connections, which count as failed.
    pub(crate) fn fail_all(&mut self, failure: &Failure, record: &mut Record) {
        for index in 0..self.visits.len() {
            if self.visits[index].is_some() {
                self.fail(index, failure, record);
            }
        }
    }

    fn fail(&mut self, index: usize, failure: &Failure, record: &mut Record) {
        self.close(index);
        record.failed(failure);
    }

    fn close(&mut self, index: usize) {
        self.visits[index] = None;
        self.free.push(index);
    }
}

impl Visit {
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
