//! Says what a replay would do, without connecting.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;
use traffic_files::TrafficError;

use crate::input::Input;
use crate::options::RunOptions;
use crate::selection::{Choice, choose, was_refused};
use crate::session_state::{Plan, SessionState};
use crate::skip::SkipReason;

#[derive(Debug, Default, Serialize)]
pub(crate) struct DryRun {
    records: u64,
    /// What would be replayed.
    statements: u64,
    /// Those of them that change nothing but their session.
    reads: u64,
    sessions: u64,
    skipped: BTreeMap<SkipReason, u64>,
    dropped_in_capture: u64,
    /// The times of the first and the last record, in nanoseconds since 1970.
    first_ns: Option<i64>,
    last_ns: Option<i64>,
}

pub(crate) fn run(options: &RunOptions) -> Result<DryRun, TrafficError> {
    let mut input = Input::open(&options.input)?;
    let mut found = DryRun::default();
    // Two states per session: of a replay of reads only, and of a replay of everything.
    let mut sessions: HashMap<u64, [SessionState; 2]> = HashMap::new();
    for statement in input.by_ref() {
        let statement = statement?;
        let record = &statement.record;
        found.records += 1;
        found.first_ns = Some(found.first_ns.map_or(record.time_ns, |first| first.min(record.time_ns)));
        found.last_ns = Some(found.last_ns.map_or(record.time_ns, |last| last.max(record.time_ns)));
        let choice = choose(&statement, &options.selection);
        if choice != Choice::Replay {
            *found.skipped.entry(SkipReason::Filtered).or_default() += 1;
        }
        if choice == Choice::Ignore {
            continue;
        }
        if choice == Choice::Replay && was_refused(&statement) {
            *found.skipped.entry(SkipReason::NeverReplayed).or_default() += 1;
            continue;
        }
        let [reading, writing] = sessions.entry(record.connection).or_insert_with(|| {
            found.sessions += 1;
            Default::default()
        });
        if choice == Choice::Replay {
            let is_read = !matches!(reading.plan(record, true), Plan::Skip(_));
            match writing.plan(record, false) {
                Plan::Skip(reason) => *found.skipped.entry(reason).or_default() += 1,
                _ if options.selection.reads_only && !is_read => {
                    *found.skipped.entry(SkipReason::MayWrite).or_default() += 1;
                }
                _ => {
                    found.statements += 1;
                    found.reads += u64::from(is_read);
                }
            }
        }
        if record.is_success {
            reading.learn(record, record.prepared_id, true);
            writing.learn(record, record.prepared_id, true);
        }
    }
    found.dropped_in_capture = input.dropped();
    if input.incomplete() > 0 {
        found.skipped.insert(SkipReason::Incomplete, input.incomplete());
    }
    Ok(found)
}

impl DryRun {
    /// For people.
    pub(crate) fn text(&self) -> String {
        let seconds = match (self.first_ns, self.last_ns) {
            (Some(first), Some(last)) => (last - first) as f64 / 1e9,
            _ => 0.0,
        };
        let time = |time_ns: Option<i64>| time_ns.map_or_else(|| "-".to_owned(), rfc3339);
        let mut lines = vec![
            format!("{} records in {} sessions", self.records, self.sessions),
            format!("from {} to {}: {seconds:.1} s", time(self.first_ns), time(self.last_ns)),
            format!("{} would be replayed, {} of them reads", self.statements, self.reads),
        ];
        lines.extend(self.skipped.iter().map(|(reason, count)| format!("{count} skipped {reason}")));
        if self.dropped_in_capture > 0 {
            lines.push(format!("{} records are missing in the capture", self.dropped_in_capture));
        }
        lines.join("\n")
    }
}

fn rfc3339(time_ns: i64) -> String {
    let mut text = Vec::new();
    traffic_files::push_rfc3339(&mut text, time_ns);
    String::from_utf8_lossy(&text).into_owned()
}
