//! What is counted, told to Envoy once a second as labelled metrics; its stats sink takes them to the control plane.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use abi::extension::{Counter, Extension, Gauge, Metrics};

use crate::config::VERSION;
use crate::node::{self, BUCKET_NAMES, ConnectFailure, Count, Counts, ERRORS, KINDS, Node, PINNED, Standing};
use crate::deadlines;

/// Milliseconds between two looks at deadlines.
const TICK: u64 = 100;
/// Ticks between two reports.
const REPORT: u64 = 10;

pub(crate) struct Reporter {
    info: Gauge,
    sessions: Gauge,
    pinned: Gauge,
    logins: Counter,
    login_failures: Counter,
    connect_failures: Counter,
    commands: Counter,
    buckets: Counter,
    microseconds: Counter,
    errors: Counter,
    bytes: Counter,
    ticks: Cell<u64>,
    /// What was told last, by series.
    told: RefCell<HashMap<(String, usize, usize), u64>>,
}

impl Reporter {
    pub(crate) fn new(metrics: &mut Metrics) -> Result<Self, String> {
        Ok(Self {
            info: metrics.gauge("module_info", &["version"])?,
            sessions: metrics.gauge("sessions", &["node", "state"])?,
            pinned: metrics.gauge("sessions_pinned", &["node", "reason"])?,
            logins: metrics.counter("logins", &["node"])?,
            login_failures: metrics.counter("login_failures", &["node", "reason"])?,
            connect_failures: metrics.counter("connect_failures", &["node", "reason"])?,
            commands: metrics.counter("commands", &["node", "kind"])?,
            buckets: metrics.counter("command_seconds_bucket", &["node", "le"])?,
            microseconds: metrics.counter("command_microseconds", &["node"])?,
            errors: metrics.counter("errors", &["node", "class"])?,
            bytes: metrics.counter("bytes", &["node", "direction"])?,
            ticks: Cell::new(0),
            told: RefCell::default(),
        })
    }

    fn report(&self, metrics: &Metrics) {
        metrics.put(self.info, &[VERSION], 1);
        for node in node::all() {
            self.report_node(metrics, &node);
        }
    }

    fn report_node(&self, metrics: &Metrics, node: &Node) {
        let workers = node.counts();
        let name = node.name.as_str();
        let sum = |pick: &dyn Fn(&Counts) -> &Count| {
            workers.iter().fold(0_u64, |sum, counts| sum.wrapping_add(pick(counts).get()))
        };
        let gauge = |gauge, family, labels: &[&str], index, value| {
            if self.changed(name, family, index, value).is_some() {
                metrics.put(gauge, labels, value);
            }
        };
        let counter = |counter, family, labels: &[&str], index, value| {
            if let Some(more) = self.changed(name, family, index, value) {
                metrics.add(counter, labels, more);
            }
        };
        for (index, state) in Standing::NAMES.iter().enumerate() {
            gauge(self.sessions, 0, &[name, state], index, sum(&|counts| &counts.sessions[index]));
        }
        for (index, reason) in PINNED.iter().enumerate() {
            gauge(self.pinned, 1, &[name, reason], index, sum(&|counts| &counts.pinned[index]));
        }
        counter(self.logins, 2, &[name], 0, sum(&|counts| &counts.logins));
        for index in 0..=node::NODE_GONE {
            let value = sum(&|counts| &counts.login_failures[index]);
            counter(self.login_failures, 3, &[name, node::login_failure(index)], index, value);
        }
        for (index, reason) in ConnectFailure::NAMES.iter().enumerate() {
            let value = sum(&|counts| &counts.connect_failures[index]);
            counter(self.connect_failures, 4, &[name, reason], index, value);
        }
        for (index, kind) in KINDS.iter().enumerate() {
            counter(self.commands, 5, &[name, kind], index, sum(&|counts| &counts.commands[index]));
        }
        let mut below = 0_u64;
        for (index, end) in BUCKET_NAMES.iter().enumerate() {
            below = below.wrapping_add(sum(&|counts| &counts.latency[index]));
            counter(self.buckets, 6, &[name, end], index, below);
        }
        counter(self.microseconds, 7, &[name], 0, sum(&|counts| &counts.microseconds));
        for (index, class) in ERRORS.iter().enumerate() {
            counter(self.errors, 8, &[name, class], index, sum(&|counts| &counts.errors[index]));
        }
        counter(self.bytes, 9, &[name, "to_node"], 0, sum(&|counts| &counts.to_node));
        counter(self.bytes, 9, &[name, "to_client"], 1, sum(&|counts| &counts.to_client));
    }

    /// How much a series has grown since it was told last; None when it has not. Others may still be written to, so a value can be read
    /// a moment too small, never too large.
    fn changed(&self, node: &str, family: usize, index: usize, value: u64) -> Option<u64> {
        let mut told = self.told.borrow_mut();
        let before = told.entry((node.to_owned(), family, index)).or_insert(0);
        let more = value.wrapping_sub(*before);
        *before = value;
        (more != 0).then_some(more)
    }
}

impl Extension for Reporter {
    fn tick(&self, metrics: &Metrics) {
        deadlines::look();
        let ticks = self.ticks.get();
        self.ticks.set(ticks.wrapping_add(1));
        if ticks.is_multiple_of(REPORT) {
            self.report(metrics);
        }
    }

    fn interval(&self) -> u64 {
        TICK
    }
}
