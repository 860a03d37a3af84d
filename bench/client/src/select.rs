//! Each connection asks the same again and again, as fast as it is answered or at a fixed rate.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::connection::{Connection, SCRATCH};
use crate::crowd::{self, Coming};
use crate::failure::{Failure, Tally};
use crate::latency::Latency;
use crate::options::Select;
use crate::packets::query;
use crate::poller::{Events, Poller, Ready};
use crate::response::Answer;
use crate::schedule::Schedule;
use crate::target::Target;

/// For answers that are still due at the end.
const PATIENCE: Duration = Duration::from_secs(10);

/// A connection, and since when the answer that it awaits was due to be asked for.
struct Client {
    connection: Connection,
    due: Instant,
}

struct Load {
    clients: Vec<Option<Client>>,
    /// Those that await nothing; who has waited longest is next.
    idle: VecDeque<usize>,
    queries: u64,
    latency: Latency,
    tally: Tally,
    statement: Vec<u8>,
    outstanding: usize,
}

pub(crate) fn run(options: &Select) -> Result<Value, Failure> {
    let target = Rc::new(Target::new(&options.server)?);
    let poller = Rc::new(Poller::new()?);
    let connections = crowd::log_in(&target, &poller, options.connections as usize, Coming::default())?;
    let start = Instant::now();
    let mut load = Load {
        idle: (0..connections.len()).collect(),
        clients: connections.into_iter().map(|connection| Some(Client { connection, due: start })).collect(),
        queries: 0,
        latency: Latency::new()?,
        tally: Tally::default(),
        statement: query(&options.statement),
        outstanding: 0,
    };
    let end = start + Duration::from_secs_f64(options.seconds);
    let unsent = match options.rate {
        Some(rate) => load.at_rate(&poller, Schedule::new(start, rate), end)?,
        None => load.at_will(&poller, end)?,
    };
    load.rest(&poller, end + PATIENCE)?;
    let seconds = start.elapsed().as_secs_f64();
    let queries = load.queries;
    if queries == 0 {
        let why = load.tally.first().unwrap_or("give it more --seconds");
        return Err(Failure::Setting(format!("no statement was answered within {seconds:.1} s: {why}")));
    }
    let mut found = json!({"queries": queries, "seconds": seconds, "per_second": queries as f64 / seconds});
    if options.rate.is_some() {
        found["unsent"] = unsent.into();
    }
    load.latency.tell(&mut found);
    load.tally.tell(&mut found);
    Ok(found)
}

impl Load {
    /// All ask again as soon as they are answered. Nothing is left unsent: 0.
    fn at_will(&mut self, poller: &Poller, end: Instant) -> Result<u64, Failure> {
        let (mut events, mut scratch) = (Events::new(), vec![0; SCRATCH]);
        let mut now = Instant::now();
        while now < end && self.alive() {
            while let Some(index) = self.idle.pop_front() {
                self.ask(index, now);
            }
            for ready in poller.wait(&mut events, end.saturating_duration_since(now))? {
                if let Some(answered) = self.look(ready, &mut scratch) {
                    // At once, and not with all others: the next answer is made meanwhile.
                    if answered < end {
                        self.ask(ready.token, answered);
                    }
                }
            }
            now = Instant::now();
        }
        Ok(0)
    }

    /// Statements are sent when they are due, or as soon as a connection is free.
    ///
    /// Those that were due but found none free until the end are counted, with the time that they have waited.
    fn at_rate(&mut self, poller: &Poller, mut schedule: Schedule, end: Instant) -> Result<u64, Failure> {
        let (mut events, mut scratch) = (Events::new(), vec![0; SCRATCH]);
        let mut now = Instant::now();
        while now < end && self.alive() {
            while !self.idle.is_empty() {
                let Some(due) = schedule.take(now) else { break };
                if let Some(index) = self.idle.pop_front() {
                    self.ask(index, due);
                }
            }
            let until = if self.idle.is_empty() { end } else { schedule.next().min(end) };
            for ready in poller.wait(&mut events, until.saturating_duration_since(now))? {
                if self.look(ready, &mut scratch).is_some() {
                    self.idle.push_back(ready.token);
                }
            }
            now = Instant::now();
        }
        let last = end - Duration::from_nanos(1);
        while let Some(index) = self.idle.pop_front() {
            let Some(due) = schedule.take(last) else { break };
            self.ask(index, due);
        }
        let mut unsent = 0;
        while let Some(due) = schedule.take(last) {
            unsent += 1;
            self.latency.record(end - due);
        }
        Ok(unsent)
    }

    /// Awaits what is still due.
    fn rest(&mut self, poller: &Poller, patience: Instant) -> Result<(), Failure> {
        let (mut events, mut scratch) = (Events::new(), vec![0; SCRATCH]);
        while self.outstanding > 0 {
            let left = patience.saturating_duration_since(Instant::now());
            if left.is_zero() {
                for _ in 0..self.outstanding {
                    self.tally.add(&Failure::Slow(PATIENCE));
                }
                return Ok(());
            }
            for ready in poller.wait(&mut events, left)? {
                self.look(ready, &mut scratch);
            }
        }
        Ok(())
    }

    fn alive(&self) -> bool {
        self.outstanding > 0 || !self.idle.is_empty()
    }

    fn ask(&mut self, index: usize, due: Instant) {
        let Some(client) = &mut self.clients[index] else { return };
        client.due = due;
        match client.connection.ask(&self.statement, 1) {
            Ok(()) => self.outstanding += 1,
            Err(failure) => self.lose(index, &failure),
        }
    }

    /// When an answer was completed; its connection can be asked again.
    fn look(&mut self, ready: Ready, scratch: &mut [u8]) -> Option<Instant> {
        let client = self.clients[ready.token].as_mut()?;
        match client.connection.handle(ready, scratch, &mut ()) {
            Ok(progress) if progress.answers == 0 => None,
            Ok(progress) => {
                let now = Instant::now();
                if let Some(Answer::Refused { code, text }) = progress.answer {
                    self.tally.add(&Failure::Refused { code, text });
                } else {
                    self.latency.record(now - client.due);
                    self.queries += 1;
                }
                self.outstanding -= 1;
                Some(now)
            }
            Err(failure) => {
                self.outstanding -= client.connection.outstanding() as usize;
                self.lose(ready.token, &failure);
                None
            }
        }
    }

    fn lose(&mut self, index: usize, failure: &Failure) {
        self.tally.add(failure);
        self.clients[index] = None;
        self.idle.retain(|&each| each != index);
    }
}
