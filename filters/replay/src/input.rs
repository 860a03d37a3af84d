//! The statements of all inputs, by the time at which they began.

use std::fs::{self, File};
use std::io::BufReader;
use std::path::PathBuf;

use traffic_files::TrafficError;
use traffic_files::directory::{self, Reader, Statement};
use traffic_files::merge::{Merge, Window};

use crate::options::InputOptions;
use crate::slow_log::SlowLogReader;

/// How far a slow log is read ahead: its entries are in the order in which statements ended.
const SLOW_LOG_WINDOW: Window = Window { time: std::time::Duration::from_secs(60), max_bytes: 256 << 20 };

enum Source {
    Capture(Merge<Reader>),
    SlowLog(Merge<SlowLogReader<BufReader<File>>>),
}

pub(crate) struct Input {
    source: Source,
    /// Directories, or files.
    pub(crate) paths: Vec<PathBuf>,
}

impl Input {
    pub(crate) fn open(options: &InputOptions) -> Result<Self, TrafficError> {
        if options.slow_log.is_empty() {
            let paths = directory::find(&options.directories)?;
            let readers = paths.iter().map(|path| Reader::open(path)).collect::<Result<Vec<_>, _>>()?;
            return Ok(Self { source: Source::Capture(Merge::new(readers, Window::default())), paths });
        }
        let failed = |file: &PathBuf| {
            let file = file.clone();
            |source| TrafficError::Io { file, source }
        };
        let mut paths = Vec::new();
        let mut readers = Vec::new();
        for path in &options.slow_log {
            let path = fs::canonicalize(path).map_err(failed(path))?;
            let file = File::open(&path).map_err(failed(&path))?;
            readers.push(SlowLogReader::new(BufReader::new(file), path.as_path().into()));
            paths.push(path);
        }
        Ok(Self { source: Source::SlowLog(Merge::new(readers, SLOW_LOG_WINDOW)), paths })
    }

    /// Records that are missing so far, by the capture's own account.
    pub(crate) fn dropped(&self) -> u64 {
        match &self.source {
            Source::Capture(merge) => merge.sources().map(Reader::dropped).sum(),
            Source::SlowLog(_) => 0,
        }
    }

    /// Entries of slow logs so far of which a part is missing.
    pub(crate) fn incomplete(&self) -> u64 {
        match &self.source {
            Source::Capture(_) => 0,
            Source::SlowLog(merge) => merge.sources().map(|reader| reader.skipped).sum(),
        }
    }
}

impl Iterator for Input {
    type Item = Result<Statement, TrafficError>;

    fn next(&mut self) -> Option<Self::Item> {
        match &mut self.source {
            Source::Capture(merge) => merge.next(),
            Source::SlowLog(merge) => merge.next(),
        }
    }
}
