//! Reads the input and gives each record to its session, at its time.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use traffic_files::TrafficError;
use traffic_files::directory::Statement;

use crate::budget::Budget;
use crate::checkpoint::{Checkpoint, CheckpointError, RecordKey};
use crate::connection::{Connection, ConnectionError};
use crate::context::{Context, Counters, Failure, KnownDigests, Reports, Warnings};
use crate::files;
use crate::input::Input;
use crate::options::{RunOptions, WarmUp};
use crate::recorder::{Event, Finished, Recorder};
use crate::running::Running;
use crate::selection::{Choice, choose};
use crate::session::{Task, Work};
use crate::sessions::Sessions;
use crate::skip::SkipReason;
use crate::stop::Stop;
use crate::target::{Target, TargetError};
use crate::totals::Totals;

/// Reports of sessions that wait for the recorder.
const MAX_REPORTS: usize = 10_000;
/// How long before its time a record goes to its session, which then waits for the time.
const AHEAD: Duration = Duration::from_secs(1);
const SUMMARY_FILE: &str = "summary.json";

#[derive(Debug, thiserror::Error)]
pub(crate) enum ReplayError {
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error("cannot connect to {target}: {source}")]
    Unreachable { target: String, source: ConnectionError },
    #[error(transparent)]
    Input(#[from] TrafficError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("{} has a replay already; --resume continues it, or choose another directory", .0.display())]
    OutputInUse(PathBuf),
    #[error("cannot write into {}: {source}", directory.display())]
    Output { directory: PathBuf, source: io::Error },
    #[error("{0}")]
    System(#[from] io::Error),
}

/// What `summary.json` says.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    version: u32,
    /// Whether the whole input was replayed.
    pub(crate) is_complete: bool,
    /// Why not.
    pub(crate) error: Option<String>,
    target: String,
    user: String,
    inputs: Vec<PathBuf>,
    settings: Settings,
    /// In nanoseconds since 1970.
    started_ns: u64,
    captured_seconds: f64,
    pub(crate) totals: Totals,
}

#[derive(Debug, Serialize)]
struct Settings {
    /// None: unbounded.
    speed: Option<f64>,
    warm_up_statements: u64,
    warm_up_seconds: f64,
    from_ns: Option<i64>,
    to_ns: Option<i64>,
    #[serde(flatten)]
    selection: crate::options::SelectionOptions,
}

/// Replays the input. An error that prevents the first statement is returned; the summary has later errors.
pub(crate) fn run(options: &RunOptions, directory: &Path) -> Result<Summary, ReplayError> {
    let target = Target::new(&options.target)?;
    let input = Input::open(&options.input)?;
    let checkpoint = open_checkpoint(options, directory, &input.paths)?;
    let context = Context {
        target,
        reads_only: options.selection.reads_only,
        timeout: Duration::from_secs_f64(options.timeout),
        stop: Stop::default(),
        budget: Budget::default(),
        running: Running::new(options.max_running),
        counters: Counters::default(),
        digests: KnownDigests::default(),
        warnings: Warnings::default(),
        failure: Failure::default(),
    };
    // A wrong address or account is reported before anything is written.
    match Connection::open(&context.target, b"", &context.stop) {
        Ok(connection) => connection.quit(),
        Err(source) => return Err(ReplayError::Unreachable { target: context.target.name.clone(), source }),
    }
    let output_failed = |source| ReplayError::Output { directory: directory.to_path_buf(), source };
    let recorder = Recorder::new(directory, input.paths.clone(), &checkpoint, &context.counters);
    let mut recorder = recorder.map_err(output_failed)?;
    let started = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let inputs = input.paths.clone();
    let clock = AtomicU64::new(0);
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let signal_handle = CloseWhenDropped(signals.handle());
    let missing = thread::scope(|scope| {
        // Also after a panic, so that it ends the program.
        let _signal_handle = signal_handle;
        scope.spawn(|| {
            for _ in signals.forever() {
                context.failure.set("ended by a signal; --resume continues".into(), &context.stop);
            }
        });
        let (reports, finished) = sync_channel(MAX_REPORTS);
        let recording = scope.spawn({
            let (context, recorder) = (&context, &mut recorder);
            move || {
                if let Err(error) = recorder.run(&finished) {
                    context.failure.set(format!("cannot write into {}: {error}", directory.display()), &context.stop);
                }
                // If it has failed, sessions must not wait for it.
                drop(finished);
            }
        });
        let begun = thread::scope(|scope| {
            let sessions = Sessions::new(scope, &context, &clock, reports.clone(), options.max_connections as usize);
            let dispatcher = Dispatcher { options, context: &context, reports, sessions, checkpoint: &checkpoint };
            dispatcher.run(input)
        });
        if recording.join().is_err() {
            context.failure.set_later("the results could not be recorded, because of a fault of this program".into());
        }
        begun
    });
    let mut totals = recorder.totals();
    totals.dropped_in_capture = missing.dropped;
    if missing.incomplete > 0 {
        totals.skipped.insert(SkipReason::Incomplete, missing.incomplete);
    }
    let error = context.failure.take();
    let (warm_up_statements, warm_up_seconds) = match options.pace.warm_up {
        WarmUp::Statements(count) => (count, 0.0),
        WarmUp::Captured(time) => (0, time.as_secs_f64()),
    };
    let summary = Summary {
        version: 1,
        is_complete: error.is_none(),
        error,
        target: context.target.name.clone(),
        user: context.target.user.clone(),
        inputs,
        settings: Settings {
            speed: (!options.pace.unbounded).then_some(options.pace.speed),
            warm_up_statements,
            warm_up_seconds,
            from_ns: options.selection.from,
            to_ns: options.selection.to,
            selection: options.selection.clone(),
        },
        started_ns: started.as_nanos() as u64,
        captured_seconds: totals.captured_seconds(),
        totals,
    };
    let json = serde_json::to_vec_pretty(&summary).map_err(io::Error::from).map_err(output_failed)?;
    files::replace(&directory.join(SUMMARY_FILE), &json).map_err(output_failed)?;
    Ok(summary)
}

fn open_checkpoint(options: &RunOptions, directory: &Path, inputs: &[PathBuf]) -> Result<Checkpoint, ReplayError> {
    let found = Checkpoint::load(directory, inputs)?;
    match found {
        Some(checkpoint) if options.resume => Ok(checkpoint),
        Some(_) => Err(ReplayError::OutputInUse(directory.to_path_buf())),
        None => Ok(Checkpoint::default()),
    }
}

/// Ends the thread that waits for signals.
struct CloseWhenDropped(Handle);

impl Drop for CloseWhenDropped {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// What is missing in the input.
struct Missing {
    /// Records that the capture has lost.
    dropped: u64,
    /// Entries of slow logs of which a part is missing.
    incomplete: u64,
}

struct Dispatcher<'a, 'scope, 'env> {
    options: &'a RunOptions,
    context: &'env Context,
    reports: Reports,
    sessions: Sessions<'scope, 'env>,
    checkpoint: &'a Checkpoint,
}

impl Dispatcher<'_, '_, '_> {
    fn run(mut self, mut input: Input) -> Missing {
        let mut schedule = Schedule::new(self.options);
        let mut sequence = 0;
        while !self.context.stop.is_requested() {
            let statement = match input.next() {
                Some(Ok(statement)) => statement,
                Some(Err(error)) => {
                    self.context.failure.set_later(error.to_string());
                    break;
                }
                None => break,
            };
            if let Err(reason) = self.dispatch(statement, sequence, &mut schedule) {
                self.context.failure.set(reason, &self.context.stop);
                break;
            }
            sequence += 1;
        }
        Missing { dropped: input.dropped(), incomplete: input.incomplete() }
    }

    fn dispatch(&mut self, statement: Statement, sequence: u64, schedule: &mut Schedule) -> Result<(), String> {
        let key = RecordKey { conn: statement.record.connection, time: statement.record.time_ns };
        if self.checkpoint.contradicts(sequence, key) {
            return Err("the input is not what was replayed before, so the replay cannot be resumed".into());
        }
        let is_done = self.checkpoint.is_done(sequence, key);
        if is_done {
            self.report(sequence, key, Event::DoneBefore);
        }
        let task = match choose(&statement, &self.options.selection) {
            Choice::Ignore if is_done => return Ok(()),
            Choice::Ignore if self.sessions.is_open(key.conn) => Task::Ignore,
            Choice::Ignore => {
                self.report(sequence, key, Event::Skipped(SkipReason::Filtered));
                return Ok(());
            }
            Choice::Remember => Task::Remember((!is_done).then_some(SkipReason::Filtered)),
            Choice::Replay => {
                let is_recorded = schedule.is_recorded(key.time);
                if is_done {
                    Task::Remember(None)
                } else {
                    let due = schedule.due(key.time);
                    if let Some(due) = due
                        && !self.context.stop.sleep_until(due - AHEAD)
                    {
                        return Ok(());
                    }
                    Task::Replay { due, is_recorded }
                }
            }
        };
        if !self.context.budget.acquire(&statement.record, &self.context.stop) {
            return Ok(());
        }
        let sent = self.sessions.send(Work { statement, sequence, task });
        sent.map_err(|error| format!("cannot start another session: {error}; a lower --max-connections may help"))
    }

    fn report(&self, sequence: u64, key: RecordKey, event: Event) {
        let _ = self.reports.send(Finished { sequence, key, event });
    }
}

/// When records are due, and which ones belong to the warm-up.
struct Schedule {
    /// None: as fast as possible.
    speed: Option<f64>,
    warm_up: WarmUp,
    chosen: u64,
    /// The time of the first record that was chosen.
    first_ns: Option<i64>,
    /// The time of the first record that is replayed now, and when that was.
    origin: Option<(i64, Instant)>,
}

impl Schedule {
    fn new(options: &RunOptions) -> Self {
        let speed = (!options.pace.unbounded).then_some(options.pace.speed);
        Self { speed, warm_up: options.pace.warm_up, chosen: 0, first_ns: None, origin: None }
    }

    fn is_recorded(&mut self, time_ns: i64) -> bool {
        self.chosen += 1;
        let first_ns = *self.first_ns.get_or_insert(time_ns);
        match self.warm_up {
            WarmUp::Statements(count) => self.chosen > count,
            WarmUp::Captured(time) => i128::from(time_ns) - i128::from(first_ns) >= time.as_nanos() as i128,
        }
    }

    fn due(&mut self, time_ns: i64) -> Option<Instant> {
        let speed = self.speed?;
        // The first records get as much time ahead as all others.
        let (first_ns, start) = *self.origin.get_or_insert_with(|| (time_ns, Instant::now() + AHEAD));
        let after = Duration::from_nanos(time_ns.saturating_sub(first_ns).max(0) as u64);
        Some(start + after.div_f64(speed))
    }
}
