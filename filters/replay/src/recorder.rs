//! Records what became of each statement: results, texts, checkpoints, progress. One thread does all of it, so a
//! checkpoint never says more than the files beside it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant, SystemTime};

use traffic_files::compare::TEXTS_FILE;
use traffic_files::gzip::gzip_member;
use traffic_files::names::{Kind, file_name};
use traffic_files::result::{self, ResultLine};

use crate::checkpoint::{Checkpoint, DoneRecords, RecordKey};
use crate::context::Counters;
use crate::files;
use crate::skip::SkipReason;
use crate::totals::Totals;

const CHECKPOINT_INTERVAL: Duration = Duration::from_secs(5);
const TERMINAL_INTERVAL: Duration = Duration::from_secs(1);
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Bytes of unwritten lines at which the next checkpoint is made early.
const MAX_UNSAVED_BYTES: usize = 1 << 20;
/// The error of a statement whose connection was lost (CR_SERVER_LOST).
pub(crate) const SERVER_LOST: u16 = 2013;

/// What became of a record.
pub(crate) enum Event {
    Replayed(Box<Replayed>),
    Skipped(SkipReason),
    /// An earlier replay has done it.
    DoneBefore,
}

pub(crate) struct Finished {
    /// How many records were read before it.
    pub(crate) sequence: u64,
    pub(crate) key: RecordKey,
    pub(crate) event: Event,
}

pub(crate) struct Replayed {
    pub(crate) line: ResultLine,
    /// The normalized text, if its digest is new.
    pub(crate) text: Option<Vec<u8>>,
    pub(crate) is_recorded: bool,
    pub(crate) local_files: u64,
    pub(crate) lag: Duration,
}

/// The files of a replay's output directory.
struct Output {
    directory: PathBuf,
    results: File,
    open_path: PathBuf,
    lines: Vec<u8>,
    /// By digest, in hexadecimal.
    texts: BTreeMap<String, String>,
    has_new_texts: bool,
}

pub(crate) struct Recorder<'a> {
    output: Output,
    done: DoneRecords,
    /// Without what the counters have.
    totals: Totals,
    counters: &'a Counters,
    start: Instant,
    is_terminal: bool,
}

impl<'a> Recorder<'a> {
    pub(crate) fn new(
        directory: &Path,
        inputs: Vec<PathBuf>,
        checkpoint: &Checkpoint,
        counters: &'a Counters,
    ) -> io::Result<Self> {
        Ok(Self {
            output: Output::create(directory)?,
            done: DoneRecords::new(inputs, checkpoint),
            totals: checkpoint.totals.clone(),
            counters,
            start: Instant::now(),
            is_terminal: io::stderr().is_terminal(),
        })
    }

    /// The totals, with those of earlier runs.
    pub(crate) fn totals(&self) -> Totals {
        let mut totals = self.totals.clone();
        totals.seconds += self.start.elapsed().as_secs_f64();
        self.counters.add_to(&mut totals);
        totals
    }

    /// Records until all senders are gone.
    pub(crate) fn run(&mut self, finished: &Receiver<Finished>) -> io::Result<()> {
        // From now on, the directory belongs to this replay.
        self.save()?;
        let progress_interval = if self.is_terminal { TERMINAL_INTERVAL } else { LOG_INTERVAL };
        let mut next_checkpoint = self.start + CHECKPOINT_INTERVAL;
        let mut next_progress = self.start + progress_interval;
        let mut replayed_before = self.totals.replayed;
        loop {
            let timeout = next_checkpoint.min(next_progress).saturating_duration_since(Instant::now());
            match finished.recv_timeout(timeout) {
                Ok(one) => self.record(one),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            let now = Instant::now();
            if self.output.lines.len() >= MAX_UNSAVED_BYTES {
                next_checkpoint = now;
            }
            if now >= next_progress {
                let per_second = (self.totals.replayed - replayed_before) as f64 / progress_interval.as_secs_f64();
                replayed_before = self.totals.replayed;
                self.show_progress(per_second);
                next_progress = now + progress_interval;
            }
            if now >= next_checkpoint {
                self.save()?;
                next_checkpoint = Instant::now() + CHECKPOINT_INTERVAL;
            }
        }
        if self.is_terminal {
            eprintln!();
        }
        self.save()?;
        self.output.close()
    }

    fn record(&mut self, finished: Finished) {
        self.done.add(finished.sequence, finished.key);
        let totals = &mut self.totals;
        match finished.event {
            Event::DoneBefore => return,
            Event::Skipped(reason) => totals.skip(reason),
            Event::Replayed(replayed) => {
                let line = &replayed.line;
                totals.replayed += 1;
                totals.rows += line.rows;
                totals.bytes += line.bytes;
                totals.latency_us += line.latency_us;
                totals.local_files += replayed.local_files;
                totals.max_lag_us = totals.max_lag_us.max(replayed.lag.as_micros() as u64);
                if line.error != 0 {
                    totals.errors += 1;
                    *totals.errors_by_code.entry(line.error).or_default() += 1;
                }
                if replayed.is_recorded {
                    self.output.add(&replayed);
                } else {
                    totals.warm_up += 1;
                }
            }
        }
        self.totals.records += 1;
        self.totals.add_time(finished.key.time);
    }

    fn save(&mut self) -> io::Result<()> {
        self.output.flush()?;
        self.done.checkpoint(self.totals()).save(&self.output.directory)
    }

    fn show_progress(&self, per_second: f64) {
        let totals = &self.totals;
        let text = format!(
            "{} replayed ({per_second:.0}/s), {} errors, {} skipped, {:.0} s of the capture",
            totals.replayed,
            totals.errors,
            totals.skipped.values().sum::<u64>(),
            totals.captured_seconds(),
        );
        if self.is_terminal {
            eprint!("\r\x1b[K{text}");
        } else {
            eprintln!("{text}");
        }
    }
}

impl Output {
    fn create(directory: &Path) -> io::Result<Self> {
        fs::create_dir_all(directory)?;
        let open_path = directory.join(file_name(Kind::Results, SystemTime::now(), true));
        let texts = match fs::read(directory.join(TEXTS_FILE)) {
            Ok(json) => serde_json::from_slice(&json).unwrap_or_default(),
            Err(_) => BTreeMap::new(),
        };
        Ok(Self {
            directory: directory.to_path_buf(),
            results: File::create_new(&open_path)?,
            open_path,
            lines: Vec::new(),
            texts,
            has_new_texts: true,
        })
    }

    fn add(&mut self, replayed: &Replayed) {
        if let (Some(digest), Some(text)) = (&replayed.line.digest, &replayed.text) {
            self.texts.insert(sql_text::hexadecimal(digest), String::from_utf8_lossy(text).into_owned());
            self.has_new_texts = true;
        }
        result::encode(replayed.line.as_ref(), &mut self.lines);
    }

    fn flush(&mut self) -> io::Result<()> {
        if !self.lines.is_empty() {
            let mut member = Vec::new();
            gzip_member(&self.lines, &mut member);
            self.lines.clear();
            self.results.write_all(&member)?;
        }
        if std::mem::take(&mut self.has_new_texts) {
            files::replace(&self.directory.join(TEXTS_FILE), &serde_json::to_vec(&self.texts)?)?;
        }
        Ok(())
    }

    /// Gives the results file its final name.
    fn close(&mut self) -> io::Result<()> {
        self.results.sync_all()?;
        fs::rename(&self.open_path, self.directory.join(file_name(Kind::Results, SystemTime::now(), false)))
    }
}
