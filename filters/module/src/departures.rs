//! Which sessions of a worker leave their nodes, in which order, and what comes of it.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use abi::events::Events;
use abi::filter::Waker;
use session::journey::Stay;
use session::limits::Step;
use session::pace::{Gate, Pace};

use crate::deadlines::Deadline;
use crate::moving::{Ended, Moving};
use crate::queue::Queue;
use crate::session::{Begun, Obstacle, Session};
use crate::{clock, hosts, worker};

/// Of all workers.
static GATE: LazyLock<Mutex<Gate>> = LazyLock::new(|| Mutex::new(Gate::new(Pace::default(), clock::now())));

/// Whether sessions can move at all.
static POSSIBLE: LazyLock<bool> = LazyLock::new(|| match Events::try_out() {
    Ok(()) => true,
    Err(why) => {
        abi::log!(Warn, "sessions stay where they are, also when their nodes are drained: on this machine {why}");
        false
    }
});

/// Sessions whose clients are held at the same time, over all workers, unless there are more of those. The more there are,
/// the longer each of them waits for its nodes; a few keep them busy.
const HELD: usize = 2;
/// Sessions of a worker that have begun to move while they ran something, and may have to wait for its end. More of them
/// would keep those from moving that run nothing.
const PATIENT: usize = 16;
/// Until one beyond these is asked again.
const LATER: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Departures {
    /// Sessions that are to leave, and have not begun to.
    queue: RefCell<Queue<Weak<Session>>>,
    /// When to look again, by a session of the queue.
    alarm: RefCell<Option<Deadline>>,
    held: Cell<usize>,
    patient: Cell<usize>,
    /// A session could not leave for others' sake, in whose place another may.
    lacks: Cell<bool>,
    /// Sessions that were ready when too many others were held.
    line: RefCell<VecDeque<Weak<Session>>>,
}

thread_local! {
    static DEPARTURES: Departures = Departures::default();
}

fn gate() -> MutexGuard<'static, Gate> {
    // Nothing panics while it is held.
    GATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sessions may move from now on, at that pace.
pub(crate) fn begin(pace: Pace) {
    gate().set_pace(pace);
    let _ = *POSSIBLE;
}

/// Whether sessions can move at all.
pub(crate) fn are_possible() -> bool {
    *POSSIBLE
}

/// Nodes are to be left, or not any more.
pub(crate) fn nodes_changed() {
    let astray = RefCell::new(Vec::<(Rc<Session>, Rc<Moving>)>::new());
    let closed = RefCell::new(Vec::<Rc<Session>>::new());
    worker::each(|session| {
        session.look_at_round();
        if session.is_on_a_closed_node() {
            closed.borrow_mut().push(Rc::clone(session));
            return;
        }
        let moving = session
            .travel
            .moving()
            .filter(|moving| moving.goes_to_a_left_node() || !moving.is_rescue() && !session.is_to_leave());
        astray.borrow_mut().extend(moving.map(|moving| (Rc::clone(session), moving)));
        if session.is_on_a_left_node() && *POSSIBLE && session.travel.begins_to_leave() {
            add(session);
        }
    });
    // Behind that, since both may end sessions.
    closed.into_inner().iter().for_each(|session| session.end_of_time());
    for (session, moving) in astray.into_inner() {
        if moving.is_rescue() {
            session.is_saved_elsewhere(&moving);
        } else {
            moving.cancel();
        }
    }
    if *POSSIBLE {
        spare();
    }
    wake();
}

/// Chooses the sessions that leave nodes which have more than their share, as far as others want them: idle ones first,
/// since they need not wait. True: there are some.
fn spare() -> bool {
    let (givers, now) = (hosts::givers(), clock::now());
    let any = Cell::new(false);
    for idle in [true, false].into_iter().filter(|_| !givers.is_empty()) {
        worker::each(|session| {
            if session.may_be_spared(idle, &givers, now) && session.begins_to_be_spared() {
                add(session);
                any.set(true);
            }
        });
    }
    any.get()
}

/// A session cannot move. True: it stays, since only others' sake was a reason.
fn gives_up(session: &Session, why: Obstacle) -> bool {
    let gives_up = session.gives_up(why);
    if gives_up && why != Obstacle::Nodes {
        DEPARTURES.with(|here| here.lacks.set(true));
    }
    gives_up
}

/// One more that is to leave, when it may be tried.
pub(crate) fn add(session: &Rc<Session>) {
    let Some(until) = session.travel.export_backoff.get().until() else { return session.travel.waits() };
    let until = until.max(session.travel.patience.borrow().until());
    DEPARTURES.with(|here| here.queue.borrow_mut().add(Rc::downgrade(session), until, clock::now()));
}

/// Looks soon, outside of whatever runs now.
pub(crate) fn wake() {
    if let Some(waker) = waker() {
        waker.wake();
    }
}

/// That of any session which is to leave. A session may have moved already while it is in the queue, because its node had
/// failed. It is no choice, since [`one_has_ended`] is not called for it.
fn waker() -> Option<Waker> {
    let waker = |session: Rc<Session>| session.living_waker().filter(|_| session.travel.is_wanted_elsewhere());
    DEPARTURES.with(|here| here.queue.borrow().iter().find_map(|one| waker(one.upgrade()?)))
}

/// A session has ended that was to leave. It may have been the one that was to wake this worker for all.
pub(crate) fn one_has_ended() {
    DEPARTURES.with(|here| here.alarm.replace(None));
    wake();
}

/// Lets those go that may.
pub(crate) fn look() {
    DEPARTURES.with(|here| {
        if here.queue.borrow().is_empty() && !here.lacks.get() {
            return;
        }
        let now = clock::now();
        let mut pause = Duration::from_secs(1);
        loop {
            let next = here.queue.borrow_mut().next(now);
            let Some(next) = next else {
                if here.lacks.take() && spare() {
                    continue;
                }
                break;
            };
            let Some(session) = next.upgrade().filter(|session| session.travel.moving().is_none()) else { continue };
            if !session.is_to_leave() {
                session.travel.stays();
                continue;
            }
            if session.is_better_left() && gives_up(&session, Obstacle::Moment) {
                continue;
            }
            let patient = !session.runs_nothing();
            if patient && here.patient.get() >= PATIENT {
                here.queue.borrow_mut().add(next, now + LATER, now);
                continue;
            }
            if !gate().admits(now) {
                pause = gate().wait().clamp(Duration::from_millis(1), pause);
                here.queue.borrow_mut().add_first(next);
                break;
            }
            match session.begin_to_move(None) {
                Begun::Yes => {
                    if patient && let Some(moving) = session.travel.moving() {
                        here.patient.set(here.patient.get() + 1);
                        moving.set_patient();
                    }
                    continue;
                }
                Begun::Later => session.travel.waits(),
                Begun::No(why) if gives_up(&session, why) => {}
                Begun::No(_) => {
                    session.travel.patience.borrow_mut().failed(None, now);
                    add(&session);
                }
            }
            gate().ended();
        }
        let pause = here.queue.borrow().due().map_or(pause, |due| due.saturating_sub(now).min(pause));
        here.alarm.replace(waker().map(|waker| Deadline::new(waker, pause)));
    });
}

/// How many sessions of a worker may be held.
fn most_held() -> usize {
    (HELD / worker::count()).max(1)
}

/// Whether one more session may be held; it is, then, until its move ends. Else it has its turn later.
pub(crate) fn may_hold(session: &Rc<Session>) -> bool {
    DEPARTURES.with(|here| {
        let may = here.held.get() < most_held();
        if may {
            here.held.set(here.held.get() + 1);
        } else if session.travel.gets_in_line() {
            here.line.borrow_mut().push_back(Rc::downgrade(session));
        }
        may
    })
}

/// A session moves no more, or takes longer than others should wait for: they have its place.
pub(crate) fn makes_room(moving: &Moving) {
    let places = moving.take_places();
    if places.at_all {
        gate().ended();
    }
    DEPARTURES.with(|here| {
        here.patient.set(here.patient.get().saturating_sub(usize::from(places.patient)));
        here.held.set(here.held.get().saturating_sub(usize::from(places.held)));
    });
    if places.held {
        has_room();
    }
}

/// Those that wait to be held have their turn.
fn has_room() {
    while let Some(next) = DEPARTURES.with(|here| {
        let may = here.held.get() < most_held();
        may.then(|| here.line.borrow_mut().pop_front()).flatten()
    }) {
        if let Some(session) = next.upgrade() {
            session.travel.leaves_line();
            session.rests();
        }
    }
}

/// A session whose node is gone begins to move, whatever the pace.
pub(crate) fn rescues() {
    gate().forced();
}

/// A move has ended.
pub(crate) fn ended(session: &Rc<Session>, moving: &Moving, ended: Ended) {
    session.moved(ended);
    makes_room(moving);
    match ended {
        Ended::Stayed(stay) if gives_up(session, Obstacle::of(stay)) => {}
        Ended::Moved => {
            session.travel.stays();
            // It may be left by now, too.
            if session.is_on_a_left_node() && session.travel.begins_to_leave() {
                add(session);
            }
        }
        // When its statement or transaction ends, it is asked again.
        Ended::Stayed(Stay::TooSlow(Step::Waiting)) => session.travel.waits(),
        Ended::Stayed(_) => add(session),
        Ended::Lost => return,
    }
    look();
}
