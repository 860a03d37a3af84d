//! Sends small packets in pieces with tiny pauses between them, and checks that every response arrives.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::connection::{Connection, SCRATCH};
use crate::crowd::{self, LoginOptions};
use crate::failure::{Failure, FailureCounts};
use crate::options::Gaps;
use crate::poller::{Events, Poller, Ready};
use crate::response::Answer;
use crate::splits::{self, Split};
use crate::target::Target;

/// A response that takes longer counts as missing.
const STALL: Duration = Duration::from_secs(5);
/// The longest pause between two pieces, in nanoseconds.
const MAX_PAUSE_NANOSECONDS: u64 = 50_000;
/// The number of failures after which the run ends.
const MAX_FAILURES: u64 = 100;

struct Client {
    connection: Connection,
    /// The number of the current statement, from 1 on; of two statements that are sent together, that of the first.
    number: u64,
    split: usize,
    /// Pieces that were sent.
    sent: usize,
    pauses: Vec<Pause>,
    /// When the last piece was sent, or the connection began.
    since: Instant,
    idle: bool,
}

/// The pause between two pieces.
#[derive(Debug, Clone, Copy)]
enum Pause {
    None,
    /// A busy wait.
    Spin(Duration),
    /// Other clients are served in the meantime.
    Timer(Duration),
}

struct Load {
    target: Rc<Target>,
    poller: Rc<Poller>,
    clients: Vec<Client>,
    splits: Vec<Split>,
    /// The splits that are still to be sent in this round. Each round sends every split once, in random order.
    round: Vec<usize>,
    rng: fastrand::Rng,
    /// When the next pieces of clients are due, the earliest on top.
    timers: BinaryHeap<Reverse<(Instant, usize)>>,
    begun: u64,
    wanted: u64,
    done: u64,
    stalls: u64,
    failures: FailureCounts,
}

pub(crate) fn run(options: &Gaps) -> Result<Value, Failure> {
    let target = Rc::new(Target::new(&options.server)?);
    let poller = Rc::new(Poller::new()?);
    let connections = crowd::log_in(&target, &poller, options.connections as usize, LoginOptions::default())?;
    let seed = options.seed.unwrap_or_else(|| fastrand::u64(..));
    let start = Instant::now();
    let clients = connections.into_iter().map(|connection| Client::new(connection, start)).collect();
    let mut load = Load {
        target,
        poller,
        clients,
        splits: splits::all(),
        round: Vec::new(),
        rng: fastrand::Rng::with_seed(seed),
        timers: BinaryHeap::new(),
        begun: 0,
        wanted: options.statements,
        done: 0,
        stalls: 0,
        failures: FailureCounts::default(),
    };
    load.work()?;
    let seconds = start.elapsed().as_secs_f64();
    let mut result = json!({
        "statements": load.done, "stalls": load.stalls, "splits": load.splits.len(), "seconds": seconds,
        "seed": seed,
    });
    load.failures.add_to(&mut result);
    Ok(result)
}

impl Client {
    fn new(connection: Connection, since: Instant) -> Self {
        Self { connection, number: 0, split: 0, sent: 0, pauses: Vec::new(), since, idle: false }
    }

    fn is_late(&self, now: Instant) -> bool {
        !self.idle && now.saturating_duration_since(self.since) > STALL
    }
}

impl Load {
    fn work(&mut self) -> Result<(), Failure> {
        let (poller, mut events, mut scratch) = (Rc::clone(&self.poller), Events::new(), vec![0; SCRATCH]);
        for token in 0..self.clients.len() {
            self.begin_next(token)?;
        }
        let mut checked_at = Instant::now();
        while self.clients.iter().any(|client| !client.idle) && self.failures.total() < MAX_FAILURES {
            let now = Instant::now();
            while let Some(&Reverse((due, token))) = self.timers.peek().filter(|first| first.0.0 <= now) {
                self.timers.pop();
                // The client may have been replaced by one that has nothing to send yet.
                if self.clients[token].sent > 0 && due >= self.clients[token].since {
                    self.send_pieces(token)?;
                }
            }
            let second = Duration::from_secs(1);
            if now - checked_at > second {
                self.replace_stalled(now, &mut scratch)?;
                checked_at = now;
            }
            let next = self.timers.peek().map(|first| first.0.0.saturating_duration_since(Instant::now()));
            for ready in poller.wait(&mut events, next.unwrap_or(second).min(second))? {
                self.on_ready(ready, &mut scratch)?;
            }
        }
        Ok(())
    }

    /// Begins the next one or two statements, if any are left.
    fn begin_next(&mut self, token: usize) -> Result<(), Failure> {
        let client = &mut self.clients[token];
        client.idle = self.begun >= self.wanted;
        client.sent = 0;
        if client.idle {
            return Ok(());
        }
        if self.round.is_empty() {
            self.round.extend(0..self.splits.len());
            self.rng.shuffle(&mut self.round);
        }
        client.split = self.round.pop().unwrap_or_default();
        client.number = self.begun + 1;
        client.pauses.clear();
        self.begun += u64::from(self.splits[client.split].statements);
        self.send_pieces(token)
    }

    /// Sends pieces up to the next timer, or to the last piece.
    fn send_pieces(&mut self, token: usize) -> Result<(), Failure> {
        let client = &mut self.clients[token];
        let split = &self.splits[client.split];
        loop {
            let answers = if client.sent == 0 { split.statements } else { 0 };
            let sent = client.connection.send_commands(split.piece(client.sent), answers);
            client.sent += 1;
            client.since = Instant::now();
            if let Err(failure) = sent {
                return self.replace(token, &failure);
            }
            if client.sent == split.pieces() {
                return Ok(());
            }
            let pause = pause(&mut self.rng);
            client.pauses.push(pause);
            match pause {
                Pause::None => {}
                Pause::Spin(time) => while client.since.elapsed() < time {},
                Pause::Timer(time) => {
                    self.timers.push(Reverse((client.since + time, token)));
                    return Ok(());
                }
            }
        }
    }

    fn on_ready(&mut self, ready: Ready, scratch: &mut [u8]) -> Result<(), Failure> {
        let client = &mut self.clients[ready.token];
        let progress = match client.connection.handle(ready, scratch, &mut ()) {
            Ok(progress) => progress,
            Err(failure) => return self.replace(ready.token, &failure),
        };
        if progress.logged_in {
            return self.begin_next(ready.token);
        }
        match progress.answer {
            None => return Ok(()),
            Some(Answer::Ok) => {}
            Some(Answer::Refused { code, text }) => {
                return self.replace(ready.token, &Failure::Refused { code, text });
            }
            Some(Answer::Rows(_)) => {
                return self.replace(ready.token, &Failure::Content("rows, where OK is due".into()));
            }
        }
        self.done += u64::from(progress.answers);
        if client.connection.outstanding() > 0 {
            return Ok(());
        }
        if client.sent < self.splits[client.split].pieces() {
            return self.replace(ready.token, &Failure::Content("it came before the statement was complete".into()));
        }
        self.begin_next(ready.token)
    }

    /// Replaces the connections whose responses are missing.
    fn replace_stalled(&mut self, now: Instant, scratch: &mut [u8]) -> Result<(), Failure> {
        for token in 0..self.clients.len() {
            if !self.clients[token].is_late(now) {
                continue;
            }
            // This thread may have been delayed itself, so a response that has arrived by now counts.
            self.on_ready(Ready { token, readable: true, writable: false }, scratch)?;
            if self.clients[token].is_late(now) {
                self.stalls += 1;
                self.replace(token, &Failure::Slow(STALL))?;
            }
        }
        Ok(())
    }

    /// Counts a failure, and replaces the connection.
    fn replace(&mut self, token: usize, failure: &Failure) -> Result<(), Failure> {
        let client = &self.clients[token];
        let split = &self.splits[client.split];
        self.failures.add_detailed(failure.kind(), || {
            let (number, pauses) = (client.number, &client.pauses);
            format!("statement {number}, {} (pauses: {pauses:?}): {failure}", split.describe())
        });
        let connection = Connection::open(&self.target, &self.poller, token)?;
        self.clients[token] = Client::new(connection, Instant::now());
        Ok(())
    }
}

fn pause(rng: &mut fastrand::Rng) -> Pause {
    let time = Duration::from_nanos(rng.u64(..=MAX_PAUSE_NANOSECONDS));
    match rng.u8(..3) {
        0 => Pause::None,
        1 => Pause::Spin(time),
        _ => Pause::Timer(time),
    }
}
