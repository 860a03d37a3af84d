//! Logs in many connections before a load begins.

use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::connection::{Connection, SCRATCH};
use crate::failure::Failure;
use crate::poller::{Events, Poller};
use crate::schedule::Schedule;
use crate::target::Target;

/// Logins at the same time. More may overflow the backlog of the server's port, which delays some of them by a second.
const MAX_CONCURRENT_LOGINS: usize = 64;
/// How long the logins may make no progress.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(20);

/// How the connections log in.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct LoginOptions {
    /// The highest number of new connections per second.
    pub(crate) rate: Option<f64>,
    /// The receive buffer of each connection, in bytes.
    pub(crate) buffer: Option<usize>,
}

/// Logs in `wanted` connections with the tokens 0, 1, 2, and so on. Fails as soon as one of them fails.
pub(crate) fn log_in(
    target: &Rc<Target>,
    poller: &Rc<Poller>,
    wanted: usize,
    options: LoginOptions,
) -> Result<Vec<Connection>, Failure> {
    let mut connections = Vec::with_capacity(wanted);
    let mut done = 0;
    match log_in_all(target, poller, wanted, options, &mut connections, &mut done) {
        Ok(()) => Ok(connections),
        Err(failure) => Err(Failure::Crowd { address: target.address, done, wanted, failure: Box::new(failure) }),
    }
}

fn log_in_all(
    target: &Rc<Target>,
    poller: &Rc<Poller>,
    wanted: usize,
    options: LoginOptions,
    connections: &mut Vec<Connection>,
    done: &mut usize,
) -> Result<(), Failure> {
    let (mut events, mut scratch) = (Events::new(), vec![0; SCRATCH]);
    let mut schedule = options.rate.map(|rate| Schedule::new(Instant::now(), rate));
    let mut progressed = Instant::now();
    while *done < wanted {
        let now = Instant::now();
        while connections.len() < wanted.min(*done + MAX_CONCURRENT_LOGINS)
            && schedule.as_mut().is_none_or(|schedule| schedule.take(now).is_some())
        {
            connections.push(Connection::open_with(target, poller, connections.len(), options.buffer)?);
            progressed = now;
        }
        let remaining = (progressed + LOGIN_TIMEOUT).saturating_duration_since(now);
        if remaining.is_zero() && connections.len() > *done {
            return Err(Failure::Slow(LOGIN_TIMEOUT));
        }
        let next = match &schedule {
            Some(schedule) if connections.len() < wanted => schedule.next().saturating_duration_since(now),
            _ => remaining,
        };
        // If no further login may begin, one of the running logins has to end first.
        let timeout = if connections.len() < *done + MAX_CONCURRENT_LOGINS { next } else { remaining };
        for ready in poller.wait(&mut events, timeout)? {
            if connections[ready.token].handle(ready, &mut scratch, &mut ())?.logged_in {
                *done += 1;
                progressed = now;
            }
        }
    }
    Ok(())
}
