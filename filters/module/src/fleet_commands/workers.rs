//! What a worker does for commands and KILLs, in its turns.

use std::rc::Rc;
use std::time::Duration;

use super::jobs::{self, Job};
use super::kills;
use super::messages::{CommandContent, EndSession, ListSessions, SessionMessage};
use super::rows::sort_and_cut;
use super::wake_main;
use crate::session::Session;
use crate::worker::WorkerContext;

/// How long a session that was found does not migrate, so that a KILL reaches it at its present node.
const PIN_TIME: Duration = Duration::from_secs(3);

/// Answers the commands, and continues the sessions whose KILL is decided.
pub(crate) fn run(worker: &WorkerContext) {
    kills::resume(worker);
    for job in jobs::of_worker(worker.number) {
        match &job.content {
            CommandContent::List(list) => {
                let (sessions, total) = list_sessions(worker, list);
                answer(worker, &job, sessions, total);
            }
            CommandContent::Find(find) => match find_sessions(worker, find.id) {
                Some(sessions) => {
                    let total = sessions.len() as u64;
                    answer(worker, &job, sessions, total);
                }
                None => worker.waker.continue_later(),
            },
            CommandContent::End(EndSession { connection }) => {
                let session = worker.sessions.get(*connection).filter(|session| !session.phase().is_over());
                let sessions: Vec<_> = session.iter().map(|session| session.describe()).collect();
                let total = sessions.len() as u64;
                answer(worker, &job, sessions, total);
                if let Some(session) = session {
                    session.guarded(|| session.end_by_operator());
                }
            }
        }
    }
}

fn answer(worker: &WorkerContext, job: &Job, sessions: Vec<SessionMessage>, total: u64) {
    if job.answer(worker.number, sessions, total) {
        wake_main();
    }
}

fn list_sessions(worker: &WorkerContext, list: &ListSessions) -> (Vec<SessionMessage>, u64) {
    let (mut rows, mut total) = (Vec::new(), 0);
    let limit = list.rows();
    worker.sessions.for_each(|session| {
        if !session.phase().is_over() && session.fits(list) {
            total += 1;
            rows.push(session.describe());
            // Sorting now and then keeps the memory small, and does not sort for each session.
            if rows.len() >= 2 * limit.max(500) {
                sort_and_cut(&mut rows, limit);
            }
        }
    });
    sort_and_cut(&mut rows, limit);
    (rows, total)
}

/// The sessions with this id, which then do not migrate for some time. None: one of them is on its way to another node.
fn find_sessions(worker: &WorkerContext, id: u64) -> Option<Vec<SessionMessage>> {
    let mut found = Vec::new();
    worker.sessions.for_each(|session| {
        if session.has_id(id) && !session.phase().is_over() {
            found.push(Rc::clone(session));
        }
    });
    let is_settled = !found.iter().any(|session| session.is_on_its_way());
    for session in found.iter().filter(|session| !session.is_on_its_way()) {
        session.pin(PIN_TIME);
    }
    is_settled.then(|| found.iter().map(Session::describe).collect())
}
