//! Small packets in pieces, with tiny pauses between them: no response may fail to come.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::connection::{Connection, SCRATCH};
use crate::crowd::{self, Coming};
use crate::failure::{Failure, Tally};
use crate::options::Gaps;
use crate::poller::{Events, Poller, Ready};
use crate::response::Answer;
use crate::splits::{self, Split};
use crate::target::Target;

/// A response that takes longer will not come.
const STALL: Duration = Duration::from_secs(5);
/// The longest pause between two pieces, in nanoseconds.
const LONGEST: u64 = 50_000;
/// More failures say nothing new.
const ENOUGH: u64 = 100;

struct Client {
    connection: Connection,
    /// Of the statement that is sent, the first of two, from 1 on.
    number: u64,
    split: usize,
    /// Pieces that were sent.
    sent: usize,
    pauses: Vec<Pause>,
    /// When the last piece was sent, or the connection was begun.
    since: Instant,
    idle: bool,
}

/// What lies between two pieces.
#[derive(Debug, Clone, Copy)]
enum Pause {
    None,
    /// The thread does nothing else.
    Spin(Duration),
    /// Others are served meanwhile.
    Timer(Duration),
}

struct Load {
    target: Rc<Target>,
    poller: Rc<Poller>,
    clients: Vec<Client>,
    splits: Vec<Split>,
    /// Those that are still to be sent in this turn: each comes once a turn, in an order by chance.
    turn: Vec<usize>,
    dice: fastrand::Rng,
    /// Clients whose next piece is due, the first on top.
    timers: BinaryHeap<Reverse<(Instant, usize)>>,
    begun: u64,
    wanted: u64,
    done: u64,
    stalls: u64,
    tally: Tally,
}

pub(crate) fn run(options: &Gaps) -> Result<Value, Failure> {
    let target = Rc::new(Target::new(&options.server)?);
    let poller = Rc::new(Poller::new()?);
    let connections = crowd::log_in(&target, &poller, options.connections as usize, Coming::default())?;
    let seed = options.seed.unwrap_or_else(|| fastrand::u64(..));
    let start = Instant::now();
    let clients = connections.into_iter().map(|connection| Client::new(connection, start)).collect();
    let mut load = Load {
        target,
        poller,
        clients,
        splits: splits::all(),
        turn: Vec::new(),
        dice: fastrand::Rng::with_seed(seed),
        timers: BinaryHeap::new(),
        begun: 0,
        wanted: options.statements,
        done: 0,
        stalls: 0,
        tally: Tally::default(),
    };
    load.work()?;
    let seconds = start.elapsed().as_secs_f64();
    let mut found = json!({
        "statements": load.done, "stalls": load.stalls, "splits": load.splits.len(), "seconds": seconds,
        "seed": seed,
    });
    load.tally.tell(&mut found);
    Ok(found)
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
            self.next(token)?;
        }
        let mut swept = Instant::now();
        while self.clients.iter().any(|client| !client.idle) && self.tally.total() < ENOUGH {
            let now = Instant::now();
            while let Some(&Reverse((due, token))) = self.timers.peek().filter(|first| first.0.0 <= now) {
                self.timers.pop();
                // It may have been replaced meanwhile, by one that has nothing to send yet.
                if self.clients[token].sent > 0 && due >= self.clients[token].since {
                    self.go_on(token)?;
                }
            }
            let second = Duration::from_secs(1);
            if now - swept > second {
                self.sweep(now, &mut scratch)?;
                swept = now;
            }
            let next = self.timers.peek().map(|first| first.0.0.saturating_duration_since(Instant::now()));
            for ready in poller.wait(&mut events, next.unwrap_or(second).min(second))? {
                self.look(ready, &mut scratch)?;
            }
        }
        Ok(())
    }

    /// Begins with the next statements, if any are left.
    fn next(&mut self, token: usize) -> Result<(), Failure> {
        let client = &mut self.clients[token];
        client.idle = self.begun >= self.wanted;
        client.sent = 0;
        if client.idle {
            return Ok(());
        }
        if self.turn.is_empty() {
            self.turn.extend(0..self.splits.len());
            self.dice.shuffle(&mut self.turn);
        }
        client.split = self.turn.pop().unwrap_or_default();
        client.number = self.begun + 1;
        client.pauses.clear();
        self.begun += u64::from(self.splits[client.split].statements);
        self.go_on(token)
    }

    /// Sends pieces up to a pause that others can use, or the last.
    fn go_on(&mut self, token: usize) -> Result<(), Failure> {
        let client = &mut self.clients[token];
        let split = &self.splits[client.split];
        loop {
            let answers = if client.sent == 0 { split.statements } else { 0 };
            let sent = client.connection.ask(split.piece(client.sent), answers);
            client.sent += 1;
            client.since = Instant::now();
            if let Err(failure) = sent {
                return self.replace(token, &failure);
            }
            if client.sent == split.pieces() {
                return Ok(());
            }
            let pause = pause(&mut self.dice);
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

    fn look(&mut self, ready: Ready, scratch: &mut [u8]) -> Result<(), Failure> {
        let client = &mut self.clients[ready.token];
        let progress = match client.connection.handle(ready, scratch, &mut ()) {
            Ok(progress) => progress,
            Err(failure) => return self.replace(ready.token, &failure),
        };
        if progress.logged_in {
            return self.next(ready.token);
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
        self.next(ready.token)
    }

    /// Finds responses that do not come.
    fn sweep(&mut self, now: Instant, scratch: &mut [u8]) -> Result<(), Failure> {
        for token in 0..self.clients.len() {
            if !self.clients[token].is_late(now) {
                continue;
            }
            // It may be this thread that was not let run: what has come counts.
            self.look(Ready { token, readable: true, writable: false }, scratch)?;
            if self.clients[token].is_late(now) {
                self.stalls += 1;
                self.replace(token, &Failure::Slow(STALL))?;
            }
        }
        Ok(())
    }

    /// Counts a failure; another connection goes on.
    fn replace(&mut self, token: usize, failure: &Failure) -> Result<(), Failure> {
        let client = &self.clients[token];
        let split = &self.splits[client.split];
        self.tally.add_detailed(failure.kind(), || {
            let (number, pauses) = (client.number, &client.pauses);
            format!("statement {number}, {} (pauses: {pauses:?}): {failure}", split.told())
        });
        let connection = Connection::open(&self.target, &self.poller, token)?;
        self.clients[token] = Client::new(connection, Instant::now());
        Ok(())
    }
}

fn pause(dice: &mut fastrand::Rng) -> Pause {
    let time = Duration::from_nanos(dice.u64(..=LONGEST));
    match dice.u8(..3) {
        0 => Pause::None,
        1 => Pause::Spin(time),
        _ => Pause::Timer(time),
    }
}
