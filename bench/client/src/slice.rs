//! One slice: statements on the open connections of one target, and new connections beside them.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::connection::{Connection, SCRATCH};
use crate::crowd::{self, Coming};
use crate::failure::Failure;
use crate::options::Server;
use crate::order::{Order, Pace};
use crate::poller::{Events, Poller, Ready};
use crate::record::Record;
use crate::response::Answer;
use crate::schedule::Schedule;
use crate::statements::Statements;
use crate::target::Target;
use crate::visits::Visits;

/// An open connection, and since when the answer that it awaits was due to be asked for; None: it awaits nothing.
///
/// The connection itself counts an answer as soon as it has come, even if what follows it ends the connection.
struct Client {
    connection: Connection,
    due: Option<Instant>,
}

/// A target and its connections. A slice looks at these alone, since each target has its own poller.
pub(crate) struct Site {
    poller: Rc<Poller>,
    /// By token; None: lost.
    clients: Vec<Option<Client>>,
    /// Those that await nothing; who has waited longest is next.
    idle: VecDeque<usize>,
    visits: Visits,
}

struct Slice<'a> {
    site: &'a mut Site,
    statements: &'a mut Statements,
    record: &'a mut Record,
    full_speed: bool,
    asks: Option<Schedule>,
    new_connections: Option<Schedule>,
    end: Instant,
    /// The last moment at which something may become due.
    last: Instant,
    /// Statements that were sent and not answered yet.
    outstanding: usize,
}

impl Site {
    /// With so many connections logged in.
    pub(crate) fn open(server: &Server, connections: usize) -> Result<Self, Failure> {
        let (target, poller) = (Rc::new(Target::new(server)?), Rc::new(Poller::new()?));
        let clients: Vec<_> = crowd::log_in(&target, &poller, connections, Coming::default())?
            .into_iter()
            .map(|connection| Some(Client { connection, due: None }))
            .collect();
        let visits = Visits::new(target, Rc::clone(&poller), connections);
        Ok(Self { poller, idle: (0..connections).collect(), clients, visits })
    }

    /// Follows an order. `patience`: for what is still due when its time is over.
    pub(crate) fn work(
        &mut self,
        order: &Order,
        patience: Duration,
        statements: &mut Statements,
        record: &mut Record,
    ) -> Result<(), Failure> {
        let (poller, mut events, mut scratch) = (Rc::clone(&self.poller), Events::new(), vec![0; SCRATCH]);
        if order.pace == Pace::FullSpeed && !self.clients.is_empty() && self.clients.iter().all(Option::is_none) {
            record.failed(&Failure::Unsent);
        }
        self.look_at_idle(&mut events, &mut scratch, record)?;
        let start = Instant::now();
        let end = start + order.time;
        let mut slice = Slice {
            site: self,
            statements,
            record,
            full_speed: order.pace == Pace::FullSpeed,
            asks: match order.pace {
                Pace::AtRate(rate) => Some(Schedule::new(start, rate)),
                Pace::FullSpeed | Pace::Never => None,
            },
            new_connections: order.new_connections.map(|rate| Schedule::new(start, rate)),
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
                slice.look(ready, &mut scratch);
            }
        }
    }

    /// Finds those that have ended since the slice before.
    fn look_at_idle(&mut self, events: &mut Events, scratch: &mut [u8], record: &mut Record) -> Result<(), Failure> {
        loop {
            let mut any = false;
            for ready in Rc::clone(&self.poller).wait(events, Duration::ZERO)? {
                any = true;
                let Some(client) = &mut self.clients[ready.token] else { continue };
                if let Err(failure) = client.connection.handle(ready, scratch, &mut ()) {
                    self.lose(ready.token, &failure, record);
                }
            }
            if !any {
                return Ok(());
            }
        }
    }

    fn lose(&mut self, index: usize, failure: &Failure, record: &mut Record) {
        record.failed(failure);
        self.clients[index] = None;
        self.idle.retain(|&each| each != index);
    }
}

impl Slice<'_> {
    /// Sends what is due, and begins connections that are.
    fn send(&mut self, now: Instant) {
        if self.full_speed && now < self.end {
            while let Some(index) = self.site.idle.pop_front() {
                let now = Instant::now();
                self.ask(index, now, now);
            }
        }
        let by = now.min(self.last);
        while !self.site.idle.is_empty() {
            let Some(due) = take(&mut self.asks, by) else { break };
            if let Some(index) = self.site.idle.pop_front() {
                self.ask(index, due, now);
            }
        }
        while self.site.visits.has_room() {
            let Some(due) = take(&mut self.new_connections, by) else { break };
            self.record.sent(now);
            self.site.visits.begin(due, self.record);
        }
    }

    /// Until when there is nothing to be sent.
    fn next(&self) -> Instant {
        let ask = self.asks.as_ref().filter(|_| !self.site.idle.is_empty()).map(Schedule::next);
        let connect = self.new_connections.as_ref().filter(|_| self.site.visits.has_room()).map(Schedule::next);
        ask.into_iter().chain(connect).fold(self.end, Instant::min)
    }

    fn is_over(&self, now: Instant) -> bool {
        now >= self.end && self.outstanding == 0 && self.site.visits.open() == 0
    }

    fn ask(&mut self, index: usize, due: Instant, now: Instant) {
        let Some(client) = &mut self.site.clients[index] else { return };
        self.record.sent(now);
        match client.connection.ask(self.statements.next(), 1) {
            Ok(()) => {
                client.due = Some(due);
                self.outstanding += 1;
            }
            Err(failure) => self.site.lose(index, &failure, self.record),
        }
    }

    fn look(&mut self, ready: Ready, scratch: &mut [u8]) {
        let index = ready.token;
        let Some(place) = self.site.clients.get_mut(index) else {
            return self.site.visits.look(ready, scratch, self.statements, self.record);
        };
        let Some(client) = place else { return };
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
                    // At once, and not with all others: the next answer is made meanwhile.
                    self.ask(index, now, now);
                } else {
                    self.site.idle.push_back(index);
                }
            }
            Err(failure) => {
                self.outstanding -= usize::from(client.due.is_some());
                self.site.lose(index, &failure, self.record);
            }
        }
    }

    /// Counts all that was due and has no answer. Connections that await one are of no use any more.
    fn give_up(&mut self, failure: &Failure) {
        for index in 0..self.site.clients.len() {
            if self.site.clients[index].as_ref().is_some_and(|client| client.due.is_some()) {
                self.site.lose(index, failure, self.record);
            }
        }
        self.site.visits.fail_all(failure, self.record);
        while take(&mut self.asks, self.last).is_some() || take(&mut self.new_connections, self.last).is_some() {
            self.record.failed(failure);
        }
    }
}

/// The next thing that is due by `now`, if any.
fn take(schedule: &mut Option<Schedule>, now: Instant) -> Option<Instant> {
    schedule.as_mut()?.take(now)
}
