//! What is counted, told to Envoy once a second as labelled metrics; its stats sink takes them to the control plane.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::LazyLock;

use abi::extension::{Counter, Extension, Gauge, Metrics};

use crate::config::VERSION;
use crate::ejection::EjectReason;
use crate::node::{self, BUCKET_NAMES, ConnectFailure, Count, Counts, ERRORS, KINDS, MOVES, Node, PINNED, Standing};
use crate::sentinels::Sentinels;
use crate::{deadlines, states_memory};

/// Milliseconds between two looks at deadlines.
const TICK: u64 = 100;
/// Ticks between two reports.
const REPORT: u64 = 10;

/// Characters of a refusal's text that are told; it is a label.
const LONGEST_TEXT: usize = 300;

/// Tells this Envoy process from all others.
static INSTANCE: LazyLock<String> = LazyLock::new(|| format!("{:016x}", RandomState::new().build_hasher().finish()));

/// The name of this Envoy process, by which the control plane says what it asks of it.
pub(crate) fn instance() -> &'static str {
    &INSTANCE
}

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
    moves: Counter,
    move_buckets: Counter,
    move_microseconds: Counter,
    config_refusals: Counter,
    ejected_since: Gauge,
    states_bytes: Gauge,
    sentinels: Sentinels,
    ticks: Cell<u64>,
    /// What was told last: the values of all series of a node, in their order.
    told: RefCell<HashMap<String, Vec<u64>>>,
}

impl Reporter {
    pub(crate) fn new(metrics: &mut Metrics) -> Result<Self, String> {
        Ok(Self {
            info: metrics.gauge("module_info", &["version", "instance"])?,
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
            moves: metrics.counter("migrations", &["node", "result", "reason"])?,
            move_buckets: metrics.counter("migration_seconds_bucket", &["node", "le"])?,
            move_microseconds: metrics.counter("migration_microseconds", &["node"])?,
            config_refusals: metrics.counter("config_refusals", &["extension", "text"])?,
            ejected_since: metrics.gauge("ejected_since", &["node", "reason"])?,
            states_bytes: metrics.gauge("states_bytes", &[])?,
            sentinels: Sentinels::default(),
            ticks: Cell::new(0),
            told: RefCell::default(),
        })
    }

    fn report(&self, metrics: &Metrics) {
        metrics.put(self.info, &[VERSION, instance()], 1);
        metrics.put(self.states_bytes, &[], states_memory::used() as u64);
        for refused in abi::module::take_refused() {
            let text: String = refused.reason.chars().take(LONGEST_TEXT).collect();
            metrics.add(self.config_refusals, &[&refused.name, &text], 1);
        }
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
        let mut told = Told { values: self.told.borrow_mut().remove(name).unwrap_or_default(), next: 0 };
        let gauge = |told: &mut Told, gauge, labels: &[&str], value| {
            if told.grown(value).is_some() {
                metrics.put(gauge, labels, value);
            }
        };
        let counter = |told: &mut Told, counter, labels: &[&str], value| {
            if let Some(more) = told.grown(value) {
                metrics.add(counter, labels, more);
            }
        };
        for (index, state) in Standing::NAMES.iter().enumerate() {
            gauge(&mut told, self.sessions, &[name, state], sum(&|counts| &counts.sessions[index]));
        }
        for (index, reason) in PINNED.iter().enumerate() {
            gauge(&mut told, self.pinned, &[name, reason], sum(&|counts| &counts.pinned[index]));
        }
        counter(&mut told, self.logins, &[name], sum(&|counts| &counts.logins));
        for index in 0..node::LOGIN_FAILURES {
            let value = sum(&|counts| &counts.login_failures[index]);
            counter(&mut told, self.login_failures, &[name, node::login_failure(index)], value);
        }
        for (index, reason) in ConnectFailure::NAMES.iter().enumerate() {
            let value = sum(&|counts| &counts.connect_failures[index]);
            counter(&mut told, self.connect_failures, &[name, reason], value);
        }
        for (index, kind) in KINDS.iter().enumerate() {
            counter(&mut told, self.commands, &[name, kind], sum(&|counts| &counts.commands[index]));
        }
        let mut below = 0_u64;
        for (index, end) in BUCKET_NAMES.iter().enumerate() {
            below = below.wrapping_add(sum(&|counts| &counts.latency[index]));
            counter(&mut told, self.buckets, &[name, end], below);
        }
        counter(&mut told, self.microseconds, &[name], sum(&|counts| &counts.microseconds));
        for (index, class) in ERRORS.iter().enumerate() {
            counter(&mut told, self.errors, &[name, class], sum(&|counts| &counts.errors[index]));
        }
        counter(&mut told, self.bytes, &[name, "to_node"], sum(&|counts| &counts.to_node));
        counter(&mut told, self.bytes, &[name, "to_client"], sum(&|counts| &counts.to_client));
        for (index, (result, reason)) in MOVES.iter().enumerate() {
            counter(&mut told, self.moves, &[name, result, reason], sum(&|counts| &counts.moves[index]));
        }
        let mut below = 0_u64;
        for (index, end) in BUCKET_NAMES.iter().enumerate() {
            below = below.wrapping_add(sum(&|counts| &counts.move_latency[index]));
            counter(&mut told, self.move_buckets, &[name, end], below);
        }
        counter(&mut told, self.move_microseconds, &[name], sum(&|counts| &counts.move_microseconds));
        let ejected = node.ejected();
        for reason in EjectReason::ALL {
            let since = ejected.filter(|ejected| ejected.reason == reason).map_or(0, |ejected| ejected.since_unix());
            gauge(&mut told, self.ejected_since, &[name, reason.name()], since);
        }
        self.told.borrow_mut().insert(node.name.clone(), told.values);
    }
}

/// The values of one node that were told last, walked through in their order.
struct Told {
    values: Vec<u64>,
    next: usize,
}

impl Told {
    /// How much the next series has grown (a gauge may wrap); None when it has not.
    fn grown(&mut self, value: u64) -> Option<u64> {
        if self.next == self.values.len() {
            self.values.push(0);
        }
        let more = value.wrapping_sub(self.values[self.next]);
        self.values[self.next] = value;
        self.next += 1;
        (more != 0).then_some(more)
    }
}

impl Extension for Reporter {
    fn tick(&self, metrics: &Metrics) {
        deadlines::look();
        self.sentinels.tick();
        let ticks = self.ticks.get();
        self.ticks.set(ticks.wrapping_add(1));
        if ticks % REPORT == 0 {
            self.report(metrics);
        }
    }

    fn interval(&self) -> u64 {
        TICK
    }

    fn shutdown(&self) {
        self.sentinels.stop();
    }
}
