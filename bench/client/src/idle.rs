//! Holds idle connections, and checks at the end whether each of them still answers.

use std::io::{self, Read, Write};
use std::rc::Rc;
use std::time::{Duration, Instant};

use mysql_proto::command::Command;
use serde_json::{Value, json};

use crate::connection::{Connection, SCRATCH};
use crate::crowd::{self, LoginOptions};
use crate::failure::{Failure, FailureCounts};
use crate::options::Idle;
use crate::packets::packet;
use crate::poller::{Events, Interest, Poller};
use crate::target::Target;

/// How long all answers at the end may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// The timeout of a wait in which nothing else has to be done.
const LONG_TIMEOUT: Duration = Duration::from_secs(3600);

struct Held {
    connections: Vec<Option<Connection>>,
    failures: FailureCounts,
    /// Answers that have arrived.
    alive: usize,
}

pub(crate) fn run(options: &Idle) -> Result<Value, Failure> {
    let target = Rc::new(Target::new(&options.server)?);
    let poller = Rc::new(Poller::new()?);
    let login_options = LoginOptions { rate: options.ramp, ..LoginOptions::default() };
    let connections = crowd::log_in(&target, &poller, options.connections as usize, login_options)?;
    let connected = connections.len();
    println!("{}", json!({"connected": connected}));
    io::stdout().flush()?;
    let connections = connections.into_iter().map(Some).collect();
    let mut held = Held { connections, failures: FailureCounts::default(), alive: 0 };
    held.hold(&poller)?;
    held.ping_all(&poller)?;
    let mut result = json!({"connected": connected, "alive": held.alive});
    held.failures.add_to(&mut result);
    Ok(result)
}

impl Held {
    /// Holds the connections until standard input ends.
    fn hold(&mut self, poller: &Poller) -> Result<(), Failure> {
        let token = self.connections.len();
        match poller.watch(io::stdin(), token, Interest { read: true, write: false }) {
            Ok(()) => {}
            // epoll cannot watch a file or /dev/null, and these have no later end.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        let (mut events, mut scratch) = (Events::new(), vec![0; SCRATCH]);
        loop {
            for ready in poller.wait(&mut events, LONG_TIMEOUT)? {
                if ready.token == token {
                    if io::stdin().read(&mut scratch)? == 0 {
                        // The poller would report the end again and again.
                        return Ok(poller.change(io::stdin(), token, Interest { read: false, write: false })?);
                    }
                } else {
                    self.with_connection(ready.token, |connection| {
                        connection.handle(ready, &mut scratch, &mut ()).map(|_| 0)
                    });
                }
            }
        }
    }

    /// Sends one COM_PING on each connection, and waits for the answers.
    fn ping_all(&mut self, poller: &Poller) -> Result<(), Failure> {
        let ping = packet(0, &[Command::Ping as u8]);
        for index in 0..self.connections.len() {
            self.with_connection(index, |connection| connection.send_commands(&ping, 1).map(|()| 0));
        }
        let (mut events, mut scratch) = (Events::new(), vec![0; SCRATCH]);
        let end = Instant::now() + ANSWER_TIMEOUT;
        while self.alive < self.connections.iter().flatten().count() {
            let remaining = end.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                for _ in self.alive..self.connections.iter().flatten().count() {
                    self.failures.add(&Failure::Slow(ANSWER_TIMEOUT));
                }
                return Ok(());
            }
            for ready in poller.wait(&mut events, remaining)? {
                self.with_connection(ready.token, |connection| {
                    connection.handle(ready, &mut scratch, &mut ()).map(|progress| progress.answers)
                });
            }
        }
        Ok(())
    }

    /// Calls `act` with one connection, and drops the connection if the call fails.
    fn with_connection(&mut self, index: usize, act: impl FnOnce(&mut Connection) -> Result<u32, Failure>) {
        let Some(Some(connection)) = self.connections.get_mut(index) else { return };
        match act(connection) {
            Ok(answers) => self.alive += answers as usize,
            Err(failure) => {
                self.failures.add(&failure);
                self.connections[index] = None;
            }
        }
    }
}
