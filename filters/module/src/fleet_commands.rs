//! Commands of the control plane about live sessions, and the question which session a KILL means.
//!
//! The control plane never connects to an Envoy, so the module calls: see [`channel`]. A command becomes a [`jobs::Job`]
//! that each worker runs in its next turn ([`workers`]). A KILL is held in its session until the control plane has
//! answered ([`kills`]).

pub(crate) mod channel;
mod jobs;
mod kills;
mod messages;
mod recent;
mod reports;
mod rows;
mod workers;

pub(crate) use kills::{KillAnswer, WorkerKills, ask};
pub(crate) use messages::{ListSessions, SessionMessage};
pub(crate) use workers::run;

use std::sync::{Mutex, PoisonError};

use envoy_abi::extension::MainWaker;

/// Wakes Envoy's main thread. None: it has not started, or has stopped.
static MAIN: Mutex<Option<MainWaker>> = Mutex::new(None);

pub(crate) fn set_main_waker(waker: Option<MainWaker>) {
    *MAIN.lock().unwrap_or_else(PoisonError::into_inner) = waker;
}

/// Wakes the main thread. False: there is none to wake.
fn wake_main() -> bool {
    let main = MAIN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(waker) = &*main {
        waker.wake();
    }
    main.is_some()
}
