use std::time::Instant;

use super::*;

/// Counts its calls.
struct TestOwner {
    calls: Cell<u32>,
    /// The time after which a call sets the deadline again.
    next_after: Cell<Option<Duration>>,
    deadline: RefCell<Option<Deadline>>,
}

impl CloseAfterPanic for TestOwner {
    fn close_after_panic(&self) {}
}

impl DeadlineOwner for TestOwner {
    fn on_deadline(self: Rc<Self>) {
        self.calls.set(self.calls.get() + 1);
        if let Some(after) = self.next_after.get() {
            self.deadline.borrow().as_ref().expect("a deadline").set(after);
        } else {
            self.deadline.replace(None);
        }
    }
}

/// The deadlines of a worker, with the time set by the test.
struct TestWorker {
    next_turn: Arc<NextTurn>,
    deadlines: Rc<Deadlines>,
}

impl TestWorker {
    fn new() -> Self {
        let next_turn = Arc::default();
        Self { deadlines: Deadlines::new(&next_turn), next_turn }
    }

    fn owner(&self) -> Rc<TestOwner> {
        let owner =
            Rc::new(TestOwner { calls: Cell::new(0), next_after: Cell::new(None), deadline: RefCell::new(None) });
        let deadline = Deadline::new(&self.deadlines, Duration::MAX, &Rc::downgrade(&owner));
        owner.deadline.replace(Some(deadline));
        owner
    }

    fn owner_due_at(&self, at: u64) -> Rc<TestOwner> {
        let owner = self.owner();
        self.set(&owner, at);
        owner
    }

    fn set(&self, owner: &TestOwner, at: u64) {
        self.deadlines.set(&owner.deadline.borrow().as_ref().expect("a deadline").entry, at);
    }

    fn run(&self, now: u64) {
        while self.next_turn.is_due(now) {
            self.deadlines.run_until(now, &Turn::start(), &DeadlineOwner::on_deadline);
        }
    }

    fn queued(&self) -> usize {
        self.deadlines.queue.borrow().len()
    }
}

#[test]
fn each_owner_of_a_passed_deadline_is_called_once() {
    let worker = TestWorker::new();
    let [first, second, third] = [5, 7, 9].map(|at| worker.owner_due_at(at));
    let calls = || [&first, &second, &third].map(|owner| owner.calls.get());
    assert!(!worker.next_turn.is_due(4) && worker.next_turn.is_due(5));
    worker.run(4);
    assert_eq!(calls(), [0, 0, 0]);
    worker.run(7);
    worker.run(7);
    assert_eq!(calls(), [1, 1, 0]);
    assert!(!worker.next_turn.is_due(8) && worker.next_turn.is_due(9));
    drop(first);
    worker.run(9);
    assert_eq!((second.calls.get(), third.calls.get(), worker.queued()), (1, 1, 0));
    assert!(!worker.next_turn.is_due(u64::MAX - 1));
}

#[test]
fn setting_a_later_time_changes_the_queue_only_when_the_earlier_time_has_come() {
    let worker = TestWorker::new();
    let owner = worker.owner_due_at(5);
    for at in 6..1000 {
        worker.set(&owner, at);
    }
    assert_eq!((worker.queued(), worker.next_turn.is_due(5)), (1, true));
    worker.run(500);
    assert_eq!((owner.calls.get(), worker.queued()), (0, 1));
    assert!(!worker.next_turn.is_due(998) && worker.next_turn.is_due(999));
    worker.run(999);
    assert_eq!((owner.calls.get(), worker.queued()), (1, 0));
}

#[test]
fn setting_an_earlier_time_applies_at_once_and_never_cancels_the_deadline() {
    let worker = TestWorker::new();
    let owner = worker.owner_due_at(50);
    worker.set(&owner, 5);
    assert_eq!((worker.queued(), worker.next_turn.is_due(5)), (1, true));
    worker.set(&owner, NEVER);
    worker.run(1000);
    assert_eq!((owner.calls.get(), worker.queued()), (0, 0));
    worker.set(&owner, 2000);
    worker.run(2000);
    assert_eq!(owner.calls.get(), 1);
}

#[test]
fn dropping_a_deadline_removes_its_entry_from_the_queue() {
    let worker = TestWorker::new();
    let (gone, stays) = (worker.owner_due_at(5), worker.owner_due_at(6));
    worker.set(&gone, 100);
    gone.deadline.replace(None);
    assert_eq!((worker.queued(), worker.next_turn.is_due(5), worker.next_turn.is_due(6)), (1, false, true));
    worker.run(1000);
    assert_eq!((gone.calls.get(), stays.calls.get(), worker.queued()), (0, 1, 0));
}

#[test]
fn owner_that_sets_its_deadline_again_does_not_delay_other_owners() {
    let worker = TestWorker::new();
    let repeated = worker.owner_due_at(1);
    repeated.next_after.set(Some(Duration::from_secs(3600)));
    let last = worker.owner_due_at(3);
    worker.run(3);
    assert_eq!((repeated.calls.get(), last.calls.get(), worker.queued()), (1, 1, 1));
}

/// Run with `--nocapture`, it prints the longest turn.
#[test]
fn all_of_ten_thousand_deadlines_that_are_due_at_once_are_called() {
    const ALL: u64 = 100_000;
    const DUE: u64 = 10_000;
    let worker = TestWorker::new();
    let owners: Vec<Rc<TestOwner>> = (0..ALL).map(|_| worker.owner_due_at(10)).collect();
    // The others were set to a later time, like those of sessions that have sent a command since.
    for (index, owner) in (0..ALL).zip(&owners).filter(|(index, _)| index % (ALL / DUE) != 0) {
        worker.set(owner, 1_000 + index);
    }
    let (mut turns, mut longest) = (0, Duration::ZERO);
    while worker.next_turn.is_due(10) {
        let begun = Instant::now();
        worker.deadlines.run_until(10, &Turn::start(), &DeadlineOwner::on_deadline);
        longest = longest.max(begun.elapsed());
        turns += 1;
    }
    println!("{ALL} deadlines, {DUE} of them due: {turns} turns, the longest took {longest:?}");
    let called: u64 = owners.iter().map(|owner| u64::from(owner.calls.get())).sum();
    assert_eq!((called, worker.queued() as u64), (DUE, ALL - DUE));
    assert!(owners.iter().step_by((ALL / DUE) as usize).all(|owner| owner.calls.get() == 1));
}
