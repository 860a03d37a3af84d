//! The commands that run: each worker adds what it knows, and the main thread collects the results.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::messages::{CommandContent, ResultMessage, SessionMessage};
use super::rows::sort_and_cut;

/// How long the workers may take. The control plane waits for 2 s.
pub(super) const TIME_LIMIT: Duration = Duration::from_millis(1500);
/// More commands at the same time are not run.
pub(super) const MAX_JOBS: usize = 1000;

/// A command that runs.
pub(super) struct Job {
    pub(super) command: u64,
    pub(super) content: CommandContent,
    expires_at: Duration,
    progress: Mutex<Progress>,
}

#[derive(Default)]
struct Progress {
    /// The workers that have not answered.
    workers: HashSet<usize>,
    sessions: Vec<SessionMessage>,
    total: u64,
}

static JOBS: Mutex<Vec<Arc<Job>>> = Mutex::new(Vec::new());
/// The number of jobs, so that workers need no lock to know that there are none.
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Job {
    pub(super) fn new(command: u64, content: CommandContent, workers: HashSet<usize>, now: Duration) -> Self {
        let progress = Mutex::new(Progress { workers, ..Progress::default() });
        Self { command, content, expires_at: now + TIME_LIMIT, progress }
    }

    fn limit(&self) -> usize {
        match &self.content {
            CommandContent::List(list) => list.rows(),
            CommandContent::Find(_) | CommandContent::End(_) => usize::MAX,
        }
    }

    fn waits_for(&self, worker: usize) -> bool {
        lock(&self.progress).workers.contains(&worker)
    }

    /// A worker answers. `total`: its matching sessions. True: no other worker has to answer.
    pub(super) fn answer(&self, worker: usize, sessions: Vec<SessionMessage>, total: u64) -> bool {
        let mut progress = lock(&self.progress);
        if !progress.workers.remove(&worker) {
            return false;
        }
        progress.sessions.extend(sessions);
        progress.total += total;
        sort_and_cut(&mut progress.sessions, self.limit());
        progress.workers.is_empty()
    }

    /// The result, if all workers with sessions have answered, or the time is over.
    fn result(&self, workers: &HashSet<usize>, now: Duration) -> Option<ResultMessage> {
        let mut progress = lock(&self.progress);
        // A worker without sessions cannot be woken, and has nothing to tell.
        let is_incomplete = progress.workers.iter().any(|worker| workers.contains(worker));
        (!is_incomplete || now >= self.expires_at).then(|| ResultMessage {
            command: self.command,
            is_incomplete,
            sessions: std::mem::take(&mut progress.sessions),
            total: progress.total,
        })
    }
}

/// Adds a job. False: too many run.
pub(super) fn add(job: Job) -> bool {
    let mut jobs = lock(&JOBS);
    let has_room = jobs.len() < MAX_JOBS;
    if has_room {
        jobs.push(Arc::new(job));
        COUNT.store(jobs.len(), Ordering::Relaxed);
    }
    has_room
}

/// The jobs that this worker has not answered.
pub(super) fn of_worker(worker: usize) -> Vec<Arc<Job>> {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return Vec::new();
    }
    lock(&JOBS).iter().filter(|job| job.waits_for(worker)).map(Arc::clone).collect()
}

/// Removes the jobs that have ended. `workers`: those that have sessions.
pub(super) fn take_results(workers: impl FnOnce() -> HashSet<usize>, now: Duration) -> Vec<ResultMessage> {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return Vec::new();
    }
    let workers = workers();
    let mut results = Vec::new();
    let mut jobs = lock(&JOBS);
    jobs.retain(|job| {
        let result = job.result(&workers, now);
        let has_ended = result.is_some();
        results.extend(result);
        !has_ended
    });
    COUNT.store(jobs.len(), Ordering::Relaxed);
    results
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet_commands::messages::FindSessions;

    fn job(workers: &[usize]) -> Job {
        let content = CommandContent::Find(FindSessions { id: 7 });
        Job::new(1, content, workers.iter().copied().collect(), Duration::ZERO)
    }

    fn session(connection: u64) -> SessionMessage {
        SessionMessage { connection, ..SessionMessage::default() }
    }

    #[test]
    fn a_job_ends_with_the_answer_of_its_last_worker() {
        let job = job(&[1, 2]);
        let all = HashSet::from([1, 2]);
        assert!(!job.answer(1, vec![session(5)], 1));
        assert!(!job.waits_for(1) && job.waits_for(2));
        assert_eq!(job.result(&all, Duration::ZERO), None);
        assert!(!job.answer(1, vec![session(5)], 1)); // it has answered already
        assert!(job.answer(2, vec![session(6)], 1));
        let result = job.result(&all, Duration::ZERO).expect("a result");
        assert_eq!((result.sessions.len(), result.total, result.is_incomplete), (2, 2, false));
    }

    #[test]
    fn a_job_does_not_wait_for_a_worker_without_sessions() {
        let job = job(&[1, 2]);
        assert!(!job.answer(1, Vec::new(), 0));
        assert!(!job.result(&HashSet::from([1]), Duration::ZERO).expect("a result").is_incomplete);
    }

    #[test]
    fn a_late_worker_makes_the_result_incomplete() {
        let job = job(&[1]);
        let all = HashSet::from([1]);
        assert_eq!(job.result(&all, TIME_LIMIT - Duration::from_millis(1)), None);
        assert!(job.result(&all, TIME_LIMIT).expect("a result").is_incomplete);
    }
}
