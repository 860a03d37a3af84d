//! KILLs that wait for the control plane to tell which session they mean.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::sync::{Arc, Mutex, PoisonError};

use super::messages::ResolveResponse;
use super::wake_main;
use crate::session::Session;
use crate::worker::WorkerContext;

/// More KILLs at the same time are refused.
const MAX_PENDING: usize = 1000;

/// How to continue with a held KILL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum KillAnswer {
    /// It passes with its own id.
    Unchanged,
    /// It passes with this id, which the session has at its node.
    NodeId(u32),
    /// The client gets this error.
    Refused(String),
}

impl From<ResolveResponse> for KillAnswer {
    fn from(response: ResolveResponse) -> Self {
        match response {
            ResolveResponse { node_id: 0, refusal } if refusal.is_empty() => Self::Unchanged,
            ResolveResponse { node_id, refusal } if refusal.is_empty() => Self::NodeId(node_id),
            ResolveResponse { refusal, .. } => Self::Refused(refusal),
        }
    }
}

/// A KILL that waits.
#[derive(Debug)]
pub(crate) struct PendingKill {
    pub(super) id: u64,
    answer: Mutex<Option<KillAnswer>>,
}

impl PendingKill {
    pub(super) fn set_answer(&self, answer: KillAnswer) {
        *self.answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
    }

    fn take_answer(&self) -> Option<KillAnswer> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The KILLs that the main thread has not sent to the control plane yet.
static UNSENT: Mutex<VecDeque<Arc<PendingKill>>> = Mutex::new(VecDeque::new());

/// Asks the control plane about a KILL of this id. None: there is no main thread to ask it.
///
/// # Errors
/// Too many KILLs wait.
pub(crate) fn ask(id: u64) -> Result<Option<Arc<PendingKill>>, String> {
    let pending = Arc::new(PendingKill { id, answer: Mutex::new(None) });
    {
        let mut unsent = UNSENT.lock().unwrap_or_else(PoisonError::into_inner);
        if unsent.len() >= MAX_PENDING {
            return Err("Tidevoy: too many KILLs at the same time; try again".to_owned());
        }
        unsent.push_back(Arc::clone(&pending));
    }
    if wake_main() {
        return Ok(Some(pending));
    }
    take_unsent(); // the main thread will not send them
    Ok(None)
}

pub(super) fn take_unsent() -> VecDeque<Arc<PendingKill>> {
    std::mem::take(&mut *UNSENT.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The sessions of one worker that hold a KILL.
#[derive(Default)]
pub(crate) struct WorkerKills(RefCell<Vec<(Weak<Session>, Arc<PendingKill>)>>);

impl WorkerKills {
    pub(crate) fn add(&self, session: &Rc<Session>, kill: Arc<PendingKill>) {
        self.0.borrow_mut().push((Rc::downgrade(session), kill));
    }
}

/// Continues the sessions whose KILL is decided.
pub(super) fn resume(worker: &WorkerContext) {
    if worker.kills.0.borrow().is_empty() {
        return;
    }
    let mut decided = Vec::new();
    worker.kills.0.borrow_mut().retain(|(session, kill)| {
        let Some(session) = session.upgrade() else { return false };
        let answer = kill.take_answer();
        let is_decided = answer.is_some();
        decided.extend(answer.map(|answer| (session, answer)));
        !is_decided
    });
    for (session, answer) in decided {
        session.guarded(|| session.on_kill_answer(answer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn response_decides_about_a_kill() {
        for (node_id, refusal, expected) in [
            (0, "", KillAnswer::Unchanged),
            (7, "", KillAnswer::NodeId(7)),
            (0, "why", KillAnswer::Refused("why".to_owned())),
            (7, "why", KillAnswer::Refused("why".to_owned())),
        ] {
            assert_eq!(KillAnswer::from(ResolveResponse { node_id, refusal: refusal.to_owned() }), expected);
        }
    }
}
