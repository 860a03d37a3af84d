//! New connections at a fixed rate: login, one statement, end.

use std::rc::Rc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::connection::{Connection, SCRATCH};
use crate::failure::{Failure, Tally};
use crate::latency::Latency;
use crate::options::Churn;
use crate::packets::query;
use crate::poller::{Events, Poller, Ready};
use crate::response::Answer;
use crate::schedule::Schedule;
use crate::target::Target;

/// For one connection from its begin to its end.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often that is looked at.
const EVERY: Duration = Duration::from_secs(1);
/// Open ones at a time; more that are due wait, which counts as theirs.
const AT_A_TIME: usize = 4096;

/// A connection on its way, and when it was due.
struct Visit {
    connection: Connection,
    due: Instant,
    begun: Instant,
}

struct Load {
    target: Rc<Target>,
    poller: Rc<Poller>,
    /// By token.
    visits: Vec<Option<Visit>>,
    free: Vec<usize>,
    statement: Vec<u8>,
    latency: Latency,
    tally: Tally,
    done: u64,
    begun: u64,
}

pub(crate) fn run(options: &Churn) -> Result<Value, Failure> {
    let mut load = Load {
        target: Rc::new(Target::new(&options.server)?),
        poller: Rc::new(Poller::new()?),
        visits: Vec::new(),
        free: Vec::new(),
        statement: query(&options.statement),
        latency: Latency::new()?,
        tally: Tally::default(),
        done: 0,
        begun: 0,
    };
    let start = Instant::now();
    load.come_and_go(Schedule::new(start, options.rate), start + Duration::from_secs_f64(options.seconds))?;
    let seconds = start.elapsed().as_secs_f64();
    let (begun, done) = (load.begun, load.done);
    let mut found = json!({
        "connections": begun, "done": done, "seconds": seconds, "per_second": done as f64 / seconds,
    });
    load.latency.tell(&mut found);
    load.tally.tell(&mut found);
    Ok(found)
}

impl Load {
    /// Begins all that are due before `end`, if need be later, and returns when the last has ended.
    fn come_and_go(&mut self, mut schedule: Schedule, end: Instant) -> Result<(), Failure> {
        let (poller, mut events, mut scratch) = (Rc::clone(&self.poller), Events::new(), vec![0; SCRATCH]);
        let last = end - Duration::from_nanos(1);
        let mut swept = Instant::now();
        loop {
            let now = Instant::now();
            while self.open() < AT_A_TIME {
                let Some(due) = schedule.take(now.min(last)) else { break };
                self.begin(due, now);
            }
            if schedule.next() > last && now >= end && self.open() == 0 {
                return Ok(());
            }
            if now - swept > EVERY {
                self.sweep(now);
                swept = now;
            }
            let next = schedule.next().min(end).saturating_duration_since(now);
            let waits = now < end && self.open() < AT_A_TIME;
            let most = if waits { next.min(EVERY) } else { EVERY };
            for ready in poller.wait(&mut events, most)? {
                self.look(ready, &mut scratch);
            }
        }
    }

    fn open(&self) -> usize {
        self.visits.len() - self.free.len()
    }

    fn begin(&mut self, due: Instant, begun: Instant) {
        self.begun += 1;
        let token = self.free.pop().unwrap_or_else(|| {
            self.visits.push(None);
            self.visits.len() - 1
        });
        match Connection::open(&self.target, &self.poller, token) {
            Ok(connection) => self.visits[token] = Some(Visit { connection, due, begun }),
            Err(failure) => self.end(token, Err(failure)),
        }
    }

    fn look(&mut self, ready: Ready, scratch: &mut [u8]) {
        let Some(Some(visit)) = self.visits.get_mut(ready.token) else { return };
        let progress = match visit.connection.handle(ready, scratch, &mut ()) {
            Ok(progress) => progress,
            Err(failure) => return self.end(ready.token, Err(failure)),
        };
        if progress.logged_in {
            if let Err(failure) = visit.connection.ask(&self.statement, 1) {
                self.end(ready.token, Err(failure));
            }
        } else if progress.answers > 0 {
            let outcome = match progress.answer {
                Some(Answer::Refused { code, text }) => Err(Failure::Refused { code, text }),
                _ => visit.connection.quit(),
            };
            self.end(ready.token, outcome);
        }
    }

    /// Closes one, and counts it.
    fn end(&mut self, token: usize, outcome: Result<(), Failure>) {
        let visit = self.visits[token].take();
        self.free.push(token);
        match (outcome, visit) {
            (Ok(()), Some(Visit { connection, due, .. })) => {
                drop(connection);
                self.latency.record(due.elapsed());
                self.done += 1;
            }
            (Err(failure), _) => self.tally.add(&failure),
            (Ok(()), None) => {}
        }
    }

    /// Gives up those that take too long.
    fn sweep(&mut self, now: Instant) {
        for token in 0..self.visits.len() {
            if self.visits[token].as_ref().is_some_and(|visit| now - visit.begun > PATIENCE) {
                self.end(token, Err(Failure::Slow(PATIENCE)));
            }
        }
    }
}
