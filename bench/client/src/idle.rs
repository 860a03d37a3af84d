//! Connections that are held, and asked at the end whether they still live.

use std::io::{self, Read, Write};
use std::rc::Rc;
use std::time::{Duration, Instant};

use mysql_proto::command::Command;
use serde_json::{Value, json};

use crate::connection::{Connection, SCRATCH};
use crate::crowd::{self, Coming};
use crate::failure::{Failure, Tally};
use crate::options::Idle;
use crate::packets::packet;
use crate::poller::{Events, Interest, Poller};
use crate::target::Target;

/// For all answers at the end.
const PATIENCE: Duration = Duration::from_secs(30);
/// Nothing is to be done before.
const LONG: Duration = Duration::from_secs(3600);

struct Held {
    connections: Vec<Option<Connection>>,
    tally: Tally,
    /// Answers that came.
    alive: usize,
}

pub(crate) fn run(options: &Idle) -> Result<Value, Failure> {
    let target = Rc::new(Target::new(&options.server)?);
    let poller = Rc::new(Poller::new()?);
    let coming = Coming { rate: options.ramp, ..Coming::default() };
    let connections = crowd::log_in(&target, &poller, options.connections as usize, coming)?;
    let connected = connections.len();
    println!("{}", json!({"connected": connected}));
    io::stdout().flush()?;
    let mut held = Held { connections: connections.into_iter().map(Some).collect(), tally: Tally::default(), alive: 0 };
    held.hold(&poller)?;
    held.ask(&poller)?;
    let mut found = json!({"connected": connected, "alive": held.alive});
    held.tally.tell(&mut found);
    Ok(found)
}

impl Held {
    /// Until standard input ends.
    fn hold(&mut self, poller: &Poller) -> Result<(), Failure> {
        let token = self.connections.len();
        match poller.watch(io::stdin(), token, Interest { read: true, write: false }) {
            Ok(()) => {}
            // A file, or /dev/null: nothing that could end later.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        let (mut events, mut scratch) = (Events::new(), vec![0; SCRATCH]);
        loop {
            for ready in poller.wait(&mut events, LONG)? {
                if ready.token == token {
                    if io::stdin().read(&mut scratch)? == 0 {
                        // What has ended is told again and again.
                        return Ok(poller.change(io::stdin(), token, Interest { read: false, write: false })?);
                    }
                } else {
                    self.look(ready.token, |connection| connection.handle(ready, &mut scratch, &mut ()).map(|_| 0));
                }
            }
        }
    }

    /// Each once.
    fn ask(&mut self, poller: &Poller) -> Result<(), Failure> {
        let ping = packet(0, &[Command::Ping as u8]);
        for index in 0..self.connections.len() {
            self.look(index, |connection| connection.ask(&ping, 1).map(|()| 0));
        }
        let (mut events, mut scratch) = (Events::new(), vec![0; SCRATCH]);
        let end = Instant::now() + PATIENCE;
        while self.alive < self.connections.iter().flatten().count() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                for _ in self.alive..self.connections.iter().flatten().count() {
                    self.tally.add(&Failure::Slow(PATIENCE));
                }
                return Ok(());
            }
            for ready in poller.wait(&mut events, left)? {
                self.look(ready.token, |connection| {
                    connection.handle(ready, &mut scratch, &mut ()).map(|progress| progress.answers)
                });
            }
        }
        Ok(())
    }

    /// Does something with one connection, which is given up when that fails.
    fn look(&mut self, index: usize, act: impl FnOnce(&mut Connection) -> Result<u32, Failure>) {
        let Some(Some(connection)) = self.connections.get_mut(index) else { return };
        match act(connection) {
            Ok(answers) => self.alive += answers as usize,
            Err(failure) => {
                self.tally.add(&failure);
                self.connections[index] = None;
            }
        }
    }
}
