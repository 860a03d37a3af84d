//! The threads of the sessions that are being replayed.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::{Builder, Scope};
use std::time::{Duration, Instant};

use mysql_proto::command::Command;

use crate::context::{Context, Counters, Reports};
use crate::lost_transaction::LostTransaction;
use crate::session::{Session, SessionStatus, Task, Work};

/// A session needs little: the largest item is the buffer for a read.
const STACK_BYTES: usize = 256 * 1024;
const WAIT_INTERVAL: Duration = Duration::from_millis(1);
/// How long a session that waits for a connection leaves an idle one its open transaction.
const IDLE_TRANSACTION_TIMEOUT: Duration = Duration::from_secs(2);

struct Handle {
    work: Sender<Work>,
    status: Arc<SessionStatus>,
}

impl Handle {
    /// Only certain while the session is idle.
    fn is_in_transaction(&self) -> bool {
        self.status.is_in_transaction.load(Ordering::Relaxed)
    }
}

pub(crate) struct Sessions<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    context: &'env Context,
    clock: &'env AtomicU64,
    reports: Reports,
    max: usize,
    open: HashMap<u64, Handle>,
    /// Connections that were taken from their sessions within a transaction, by their ids in the capture.
    ended_in_transaction: HashSet<u64>,
}

impl<'scope, 'env> Sessions<'scope, 'env> {
    pub(crate) fn new(
        scope: &'scope Scope<'scope, 'env>,
        context: &'env Context,
        clock: &'env AtomicU64,
        reports: Reports,
        max: usize,
    ) -> Self {
        Self { scope, context, clock, reports, max, open: HashMap::new(), ended_in_transaction: HashSet::new() }
    }

    /// Gives a record to its session, which begins if there is none. The caller has acquired the budget for it.
    pub(crate) fn send(&mut self, work: Work) -> io::Result<()> {
        let connection = work.statement.record.connection;
        let is_last = work.statement.record.command == Command::Quit && matches!(work.task, Task::Replay { .. });
        if !self.open.contains_key(&connection) {
            self.make_room();
            let handle = self.start(connection)?;
            self.open.insert(connection, handle);
        }
        if let Some(handle) = self.open.get(&connection) {
            handle.status.queued.fetch_add(1, Ordering::Release);
            // It fails only after a panic in the session, which ends the replay.
            let _ = handle.work.send(work);
        }
        if is_last {
            self.open.remove(&connection);
        }
        Ok(())
    }

    /// Whether the session is being replayed, so that earlier records of it may still wait or run.
    pub(crate) fn is_open(&self, connection: u64) -> bool {
        self.open.contains_key(&connection)
    }

    fn start(&mut self, connection: u64) -> io::Result<Handle> {
        let (sender, receiver) = channel();
        let status = Arc::new(SessionStatus::default());
        let lost_transaction = LostTransaction::new(self.ended_in_transaction.remove(&connection));
        let session = Session::new(self.context, self.reports.clone(), Arc::clone(&status), lost_transaction);
        let (context, clock) = (self.context, self.clock);
        context.counters.live_sessions.fetch_add(1, Ordering::AcqRel);
        let spawned = Builder::new().stack_size(STACK_BYTES).spawn_scoped(self.scope, move || {
            session.run(&receiver, clock);
            context.counters.live_sessions.fetch_sub(1, Ordering::AcqRel);
        });
        spawned?;
        Counters::add(&context.counters.sessions);
        Ok(Handle { work: sender, status })
    }

    /// Waits until another session may begin. The session that has been idle longest outside of a transaction is ended
    /// for it; after a while, also one within a transaction, since its next statement may come in the input after the
    /// one that waits.
    fn make_room(&mut self) {
        let timeout = Instant::now() + IDLE_TRANSACTION_TIMEOUT;
        while self.context.counters.live_sessions.load(Ordering::Acquire) >= self.max {
            let idle = self.open.iter().filter(|(_, handle)| {
                let is_idle = handle.status.queued.load(Ordering::Acquire) == 0;
                is_idle && (!handle.is_in_transaction() || Instant::now() > timeout)
            });
            let longest = idle.min_by_key(|(_, handle)| handle.status.last_used.load(Ordering::Relaxed));
            // Otherwise a session is ending already.
            if self.open.len() >= self.max
                && let Some(connection) = longest.map(|(connection, _)| *connection)
            {
                let ended = self.open.remove(&connection);
                if ended.is_some_and(|handle| handle.is_in_transaction()) && !self.context.reads_only {
                    self.ended_in_transaction.insert(connection);
                }
                Counters::add(&self.context.counters.displaced_sessions);
            }
            if !self.context.stop.sleep_until(Instant::now() + WAIT_INTERVAL) {
                return;
            }
        }
    }
}
