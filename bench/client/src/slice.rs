//! Runs a slice: statements on the open connections of one target, and new connections at the same time.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::connection::{Connection, SCRATCH};
use crate::crowd::{self, LoginOptions};
use crate::failure::Failure;
use crate::new_connections::NewConnections;
use crate::options::Server;
use crate::poller::{Events, Poller, Ready};
use crate::record::Record;
use crate::response::Answer;
use crate::schedule::Schedule;
use crate::slice_request::{Pace, SliceRequest};
use crate::statements::Statements;
use crate::target::Target;

/// An open connection.
struct Client {
    connection: Connection,
    /// When the statement was due that now waits for its answer. None: no answer is outstanding.
    ///
    /// `connection` counts an answer as soon as it is complete, even if later bytes of the same read are invalid.
    due: Option<Instant>,
}

/// A target and its connections. Each target has its own poller, so a slice gets events only of these connections.
pub(crate) struct Site {
    poller: Rc<Poller>,
    /// By token. None: the connection has failed.
    clients: Vec<Option<Client>>,
    /// The tokens of clients without an outstanding answer. The client that has been idle longest is first.
    idle: VecDeque<usize>,
    new_connections: NewConnections,
}

struct Slice<'a> {
    site: &'a mut Site,
    statements: &'a mut Statements,
    record: &'a mut Record,
    full_speed: bool,
    statement_schedule: Option<Schedule>,
    connection_schedule: Option<Schedule>,
    end: Instant,
    /// The last moment at which something may become due.
    last: Instant,
    /// Statements that were sent and not answered yet.
    outstanding: usize,
}

impl Site {
    /// Logs in `connections` connections.
    pub(crate) fn open(server: &Server, connections: usize) -> Result<Self, Failure> {
        let (target, poller) = (Rc::new(Target::new(server)?), Rc::new(Poller::new()?));
        let clients: Vec<_> = crowd::log_in(&target, &poller, connections, LoginOptions::default())?
            .into_iter()
            .map(|connection| Some(Client { connection, due: None }))
            .collect();
        let new_connections = NewConnections::new(target, Rc::clone(&poller), connections);
        Ok(Self { poller, idle: (0..connections).collect(), clients, new_connections })
    }

    /// Runs a slice. `patience`: how long outstanding answers may take when the time of the slice is over.
    pub(crate) fn run(
        &mut self,
        request: &SliceRequest,
        patience: Duration,
        statements: &mut Statements,
        record: &mut Record,
    ) -> Result<(), Failure> {
        let (poller, mut events, mut scratch) = (Rc::clone(&self.poller), Events::new(), vec![0; SCRATCH]);
        if request.pace == Pace::FullSpeed && !self.clients.is_empty() && self.clients.iter().all(Option::is_none) {
            record.failed(&Failure::Unsent);
        }
        self.remove_ended(&mut events, &mut scratch, record)?;
        let start = Instant::now();
        let end = start + request.duration;
        let mut slice = Slice {
            site: self,
            statements,
            record,
            full_speed: request.pace == Pace::FullSpeed,
            statement_schedule: match request.pace {
                Pace::AtRate(rate) => Some(Schedule::new(start, rate)),
                Pace::FullSpeed | Pace::Never => None,
            },
            connection_schedule: request.new_connections.map(|rate| Schedule::new(start, rate)),
            end,
            last: end - Duration::from_nanos(1),
            outstanding: 0,
        };
        let limit = end + patience;
        loop {
            let now = Instant::now();
            slice.send(now);
            if slice.is_over(now) {
                slice.give_up(&Failure::Unsent);
                return Ok(());
            }
            if now >= limit {
                slice.give_up(&Failure::Slow(patience));
                return Ok(());
            }
            let until = if now < end { slice.next() } else { limit };
            for ready in poller.wait(&mut events, until.saturating_duration_since(now))? {
                slice.on_ready(ready, &mut scratch);
            }
        }
    }

    /// Removes the connections that have ended since the last slice.
    fn remove_ended(&mut self, events: &mut Events, scratch: &mut [u8], record: &mut Record) -> Result<(), Failure> {
        loop {
            let mut any = false;
            for ready in Rc::clone(&self.poller).wait(events, Duration::ZERO)? {
                any = true;
                let Some(client) = &mut self.clients[ready.token] else { continue };
                if let Err(failure) = client.connection.handle(ready, scratch, &mut ()) {
                    self.drop_client(ready.token, &failure, record);
                }
            }
            if !any {
                return Ok(());
            }
        }
    }

    fn drop_client(&mut self, index: usize, failure: &Failure, record: &mut Record) {
        record.failed(failure);
        self.clients[index] = None;
        self.idle.retain(|&each| each != index);
    }
}

impl Slice<'_> {
    /// Sends the statements and begins the connections that are due.
    fn send(&mut self, now: Instant) {
        if self.full_speed && now < self.end {
            while let Some(index) = self.site.idle.pop_front() {
                let now = Instant::now();
                self.send_statement(index, now, now);
            }
        }
        let by = now.min(self.last);
        while !self.site.idle.is_empty() {
            let Some(due) = take(&mut self.statement_schedule, by) else { break };
            if let Some(index) = self.site.idle.pop_front() {
                self.send_statement(index, due, now);
            }
        }
        while self.site.new_connections.has_room() {
            let Some(due) = take(&mut self.connection_schedule, by) else { break };
            self.record.sent(now);
            self.site.new_connections.begin(due, self.record);
        }
    }

    /// When the next statement or connection has to be begun, at most the end of the slice.
    fn next(&self) -> Instant {
        let statement = self.statement_schedule.as_ref().filter(|_| !self.site.idle.is_empty()).map(Schedule::next);
        let connection =
            self.connection_schedule.as_ref().filter(|_| self.site.new_connections.has_room()).map(Schedule::next);
        statement.into_iter().chain(connection).fold(self.end, Instant::min)
    }

    fn is_over(&self, now: Instant) -> bool {
        now >= self.end && self.outstanding == 0 && self.site.new_connections.open() == 0
    }

    fn send_statement(&mut self, index: usize, due: Instant, now: Instant) {
        let Some(client) = &mut self.site.clients[index] else { return };
        self.record.sent(now);
        match client.connection.send_commands(self.statements.next(), 1) {
            Ok(()) => {
                client.due = Some(due);
                self.outstanding += 1;
            }
            Err(failure) => self.site.drop_client(index, &failure, self.record),
        }
    }

    fn on_ready(&mut self, ready: Ready, scratch: &mut [u8]) {
        let index = ready.token;
        let Some(slot) = self.site.clients.get_mut(index) else {
            return self.site.new_connections.on_ready(ready, scratch, self.statements, self.record);
        };
        let Some(client) = slot else { return };
        match client.connection.handle(ready, scratch, &mut ()) {
            Ok(progress) if progress.answers == 0 => {}
            Ok(progress) => {
                let Some(due) = client.due.take() else { return };
                let now = Instant::now();
                self.outstanding -= 1;
                match progress.answer {
                    Some(Answer::Refused { code, text }) => self.record.failed(&Failure::Refused { code, text }),
                    _ => self.record.answered(due, now),
                }
                if self.full_speed && now < self.end {
                    // Sent at once, and not together with other statements: the server works on it in the meantime.
                    self.send_statement(index, now, now);
                } else {
                    self.site.idle.push_back(index);
                }
            }
            Err(failure) => {
                self.outstanding -= usize::from(client.due.is_some());
                self.site.drop_client(index, &failure, self.record);
            }
        }
    }

    /// Counts all statements and connections that were due and have no answer. Drops connections with an outstanding
    /// answer, since they cannot be used again.
    fn give_up(&mut self, failure: &Failure) {
        for index in 0..self.site.clients.len() {
            if self.site.clients[index].as_ref().is_some_and(|client| client.due.is_some()) {
                self.site.drop_client(index, failure, self.record);
            }
        }
        self.site.new_connections.fail_all(failure, self.record);
        while take(&mut self.statement_schedule, self.last).is_some()
            || take(&mut self.connection_schedule, self.last).is_some()
        {
            self.record.failed(failure);
        }
    }
}

/// Takes the next event of a schedule that is due by `now`.
fn take(schedule: &mut Option<Schedule>, now: Instant) -> Option<Instant> {
    schedule.as_mut()?.take(now)
}
