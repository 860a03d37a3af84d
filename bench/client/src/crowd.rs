//! Connections that all log in before the work begins.

use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::connection::{Connection, SCRATCH};
use crate::failure::Failure;
use crate::poller::{Events, Poller};
use crate::schedule::Schedule;
use crate::target::Target;

/// Logins at a time: a server that is asked more at once may let some wait for a second (its backlog is full).
const AT_A_TIME: usize = 64;
/// For a login that makes no progress.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// How a crowd comes.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Coming {
    /// New ones per second at most.
    pub(crate) rate: Option<f64>,
    /// Receive buffer of each, in bytes.
    pub(crate) buffer: Option<usize>,
}

/// Logs in so many, whose tokens are 0, 1, 2, ... in order. Fails with the first that cannot.
pub(crate) fn log_in(
    target: &Rc<Target>,
    poller: &Rc<Poller>,
    wanted: usize,
    coming: Coming,
) -> Result<Vec<Connection>, Failure> {
    let mut connections = Vec::with_capacity(wanted);
    let mut done = 0;
    match gather(target, poller, wanted, coming, &mut connections, &mut done) {
        Ok(()) => Ok(connections),
        Err(failure) => Err(Failure::Crowd { address: target.address, done, wanted, failure: Box::new(failure) }),
    }
}

fn gather(
    target: &Rc<Target>,
    poller: &Rc<Poller>,
    wanted: usize,
    coming: Coming,
    connections: &mut Vec<Connection>,
    done: &mut usize,
) -> Result<(), Failure> {
    let (mut events, mut scratch) = (Events::new(), vec![0; SCRATCH]);
    let mut schedule = coming.rate.map(|rate| Schedule::new(Instant::now(), rate));
    let mut progressed = Instant::now();
    while *done < wanted {
        let now = Instant::now();
        while connections.len() < wanted.min(*done + AT_A_TIME)
            && schedule.as_mut().is_none_or(|schedule| schedule.take(now).is_some())
        {
            connections.push(Connection::open_with(target, poller, connections.len(), coming.buffer)?);
            progressed = now;
        }
        let patience = (progressed + PATIENCE).saturating_duration_since(now);
        if patience.is_zero() && connections.len() > *done {
            return Err(Failure::Slow(PATIENCE));
        }
        let next = match &schedule {
            Some(schedule) if connections.len() < wanted => schedule.next().saturating_duration_since(now),
            _ => patience,
        };
        // With room for the next one, that is; else a login has to end first.
        let most = if connections.len() < *done + AT_A_TIME { next } else { patience };
        for ready in poller.wait(&mut events, most)? {
            if connections[ready.token].handle(ready, &mut scratch, &mut ())?.logged_in {
                *done += 1;
                progressed = now;
            }
        }
    }
    Ok(())
}
