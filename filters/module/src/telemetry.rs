//! The reporter: reports all counts to Envoy once a second, as labelled metrics. Envoy's stats sink sends them to the
//! control plane.

mod capture_gauges;
mod log_counters;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::LazyLock;
use std::time::Duration;

use envoy_abi::extension::{Counter, Extension, Gauge, MainWaker, Metrics};
use envoy_abi::http_callout::{HttpClient, HttpResponse};

use crate::config::VERSION;
use crate::ejection::EjectReason;
use crate::envoy_drain::DrainController;
use crate::fleet_commands::channel::CommandChannel;
use crate::node::{
    self, BUCKET_NAMES, ConnectFailure, Count, Counts, ERRORS, KINDS, LoginFailure, MIGRATION_RESULTS, PINNED,
    SessionState, SharedNode,
};
use crate::sentinels::Sentinels;
use crate::statements::report::StatementReporter;
use crate::{
    capture, clock, connection_limits, deadlines, envoy_drain, filter, fleet_commands, line_log, live_settings,
    login_log, readiness, refresh, rules, statement_log, states_memory, switches, wakers,
};
use capture_gauges::CaptureGauges;
use log_counters::LogCounters;

/// Milliseconds between two ticks.
const TICK_MILLISECONDS: u64 = 100;
/// Milliseconds until the next tick if a worker was due at this one.
const TURN_MILLISECONDS: u64 = 2;
/// Time between two reports.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// The maximum length of the error text of a rejected configuration, which is a label.
const MAX_TEXT_CHARACTERS: usize = 300;

/// Distinguishes this Envoy process from all others.
static INSTANCE: LazyLock<String> = LazyLock::new(|| format!("{:016x}", RandomState::new().build_hasher().finish()));

/// The name of this Envoy process, which the control plane uses in quotas.
pub(crate) fn instance() -> &'static str {
    &INSTANCE
}

/// Reports the counts. Its timer is the module's timer on Envoy's main thread: each tick also wakes workers, reads the
/// runtime switches, and lets the sentinels observe their nodes.
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
    migrations: Counter,
    migration_buckets: Counter,
    migration_microseconds: Counter,
    config_refusals: Counter,
    switched_off: Gauge,
    ejected_since: Gauge,
    states_bytes: Gauge,
    clients: Gauge,
    drain_phase: Gauge,
    has_ended: Gauge,
    drain: DrainController,
    login_log: LogCounters,
    statement_log: LogCounters,
    capture: CaptureGauges,
    limit_connections: Gauge,
    limit_quota: Gauge,
    limit_over_quota: Gauge,
    limit_refusals: Counter,
    rule_hits: Counter,
    /// The reported refusals of each rule.
    reported_refusals: RefCell<HashMap<String, u64>>,
    sentinels: Sentinels,
    statements: StatementReporter,
    commands_channel: CommandChannel,
    /// Whether a worker was due at the last tick.
    has_woken_worker: Cell<bool>,
    reported_at: Cell<Option<Duration>>,
    /// For each node, the last reported value of each series, in order.
    reported: RefCell<HashMap<String, Vec<u64>>>,
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
            migrations: metrics.counter("migrations", &["node", "result", "reason"])?,
            migration_buckets: metrics.counter("migration_seconds_bucket", &["node", "le"])?,
            migration_microseconds: metrics.counter("migration_microseconds", &["node"])?,
            config_refusals: metrics.counter("config_refusals", &["extension", "text"])?,
            switched_off: metrics.gauge("switched_off", &["part", "by"])?,
            ejected_since: metrics.gauge("ejected_since", &["node", "reason"])?,
            states_bytes: metrics.gauge("states_bytes", &[])?,
            clients: metrics.gauge("clients", &[])?,
            drain_phase: metrics.gauge("drain_phase", &[])?,
            has_ended: metrics.gauge("has_ended", &[])?,
            drain: DrainController::default(),
            login_log: LogCounters::new(metrics, "login_log")?,
            statement_log: LogCounters::new(metrics, "statement_log")?,
            capture: CaptureGauges::new(metrics)?,
            limit_connections: metrics.gauge("limit_connections", &["rule"])?,
            limit_quota: metrics.gauge("limit_quota", &["rule"])?,
            limit_over_quota: metrics.gauge("limit_over_quota", &["rule"])?,
            limit_refusals: metrics.counter("limit_refusals", &["rule"])?,
            rule_hits: metrics.counter("rule_hits", &["rule", "dry_run"])?,
            reported_refusals: RefCell::default(),
            sentinels: Sentinels::default(),
            statements: StatementReporter::new(metrics)?,
            commands_channel: CommandChannel::default(),
            has_woken_worker: Cell::new(false),
            reported_at: Cell::new(None),
            reported: RefCell::default(),
        })
    }

    fn report(&self, metrics: &Metrics) {
        metrics.put(self.info, &[VERSION, instance()], 1);
        metrics.put(self.states_bytes, &[], states_memory::used() as u64);
        self.login_log.report(metrics, login_log::is_on(), login_log::LOG.counts());
        self.statement_log.report(metrics, statement_log::is_on(), statement_log::LOG.counts());
        self.capture.report(metrics);
        for (part, by, is_off) in switches::switched_off() {
            metrics.put(self.switched_off, &[part, by], u64::from(is_off));
        }
        for refused in envoy_abi::module::take_rejected_configs() {
            let text: String = refused.reason.chars().take(MAX_TEXT_CHARACTERS).collect();
            metrics.add(self.config_refusals, &[&refused.name, &text], 1);
        }
        self.report_limits(metrics);
        self.report_rule_hits(metrics);
        for node in node::take_unused_nodes() {
            self.report_node(metrics, &node);
            self.reported.borrow_mut().remove(&node.name);
        }
        for node in node::all_nodes() {
            self.report_node(metrics, &node);
        }
    }

    fn report_limits(&self, metrics: &Metrics) {
        let rules = connection_limits::report();
        let mut reported = self.reported_refusals.borrow_mut();
        reported.retain(|name, _| {
            let is_rule = rules.iter().any(|rule| rule.name == *name);
            if !is_rule {
                for gauge in [self.limit_connections, self.limit_quota, self.limit_over_quota] {
                    metrics.put(gauge, &[name], 0);
                }
            }
            is_rule
        });
        for rule in rules {
            let name = rule.name.as_str();
            let before = reported.get(name).copied().unwrap_or_default();
            metrics.put(self.limit_connections, &[name], rule.connections);
            metrics.put(self.limit_quota, &[name], rule.quota.unwrap_or_default());
            metrics.put(self.limit_over_quota, &[name], u64::from(rule.is_over_quota));
            // A rule with another user or network counts from zero again.
            let increase = rule.refusals.checked_sub(before).unwrap_or(rule.refusals);
            metrics.add(self.limit_refusals, &[name], increase);
            reported.insert(rule.name, rule.refusals);
        }
    }

    /// Reports zeros, too, as soon as a rule is in force: a series that begins with another value shows no increase.
    fn report_rule_hits(&self, metrics: &Metrics) {
        let Some(active) = rules::current() else { return };
        for (rule, [with_effect, dry_run]) in active.take_hits() {
            metrics.add(self.rule_hits, &[rule, "false"], with_effect);
            metrics.add(self.rule_hits, &[rule, "true"], dry_run);
        }
    }

    fn report_node(&self, metrics: &Metrics, node: &SharedNode) {
        let workers = node.counts();
        let name = node.name.as_str();
        let sum = |pick: &dyn Fn(&Counts) -> &Count| {
            workers.iter().fold(0_u64, |sum, counts| sum.wrapping_add(pick(counts).get()))
        };
        let mut reported =
            ReportedValues { values: self.reported.borrow_mut().remove(name).unwrap_or_default(), next: 0 };
        let gauge = |reported: &mut ReportedValues, gauge, labels: &[&str], value| {
            if reported.update(value).is_some() {
                metrics.put(gauge, labels, value);
            }
        };
        let counter = |reported: &mut ReportedValues, counter, labels: &[&str], value| {
            if let Some(increase) = reported.update(value) {
                metrics.add(counter, labels, increase);
            }
        };
        for (index, state) in SessionState::NAMES.iter().enumerate() {
            gauge(&mut reported, self.sessions, &[name, state], sum(&|counts| &counts.sessions[index]));
        }
        for (index, reason) in PINNED.iter().enumerate() {
            gauge(&mut reported, self.pinned, &[name, reason], sum(&|counts| &counts.pinned[index]));
        }
        counter(&mut reported, self.logins, &[name], sum(&|counts| &counts.logins));
        for failure in LoginFailure::all() {
            let value = sum(&|counts| &counts.login_failures[failure.index()]);
            counter(&mut reported, self.login_failures, &[name, failure.name()], value);
        }
        for (index, reason) in ConnectFailure::NAMES.iter().enumerate() {
            let value = sum(&|counts| &counts.connect_failures[index]);
            counter(&mut reported, self.connect_failures, &[name, reason], value);
        }
        for (index, kind) in KINDS.iter().enumerate() {
            counter(&mut reported, self.commands, &[name, kind], sum(&|counts| &counts.commands[index]));
        }
        let mut cumulative = 0_u64;
        for (index, end) in BUCKET_NAMES.iter().enumerate() {
            cumulative = cumulative.wrapping_add(sum(&|counts| &counts.latency[index]));
            counter(&mut reported, self.buckets, &[name, end], cumulative);
        }
        counter(&mut reported, self.microseconds, &[name], sum(&|counts| &counts.command_microseconds));
        for (index, class) in ERRORS.iter().enumerate() {
            counter(&mut reported, self.errors, &[name, class], sum(&|counts| &counts.errors[index]));
        }
        counter(&mut reported, self.bytes, &[name, "to_node"], sum(&|counts| &counts.bytes_to_node));
        counter(&mut reported, self.bytes, &[name, "to_client"], sum(&|counts| &counts.bytes_to_client));
        for (index, (result, reason)) in MIGRATION_RESULTS.iter().enumerate() {
            counter(&mut reported, self.migrations, &[name, result, reason], sum(&|counts| &counts.migrations[index]));
        }
        let mut cumulative = 0_u64;
        for (index, end) in BUCKET_NAMES.iter().enumerate() {
            cumulative = cumulative.wrapping_add(sum(&|counts| &counts.migration_latency[index]));
            counter(&mut reported, self.migration_buckets, &[name, end], cumulative);
        }
        counter(&mut reported, self.migration_microseconds, &[name], sum(&|counts| &counts.migration_microseconds));
        let ejected = node.ejection_details();
        for reason in EjectReason::ALL {
            let since = ejected.filter(|ejected| ejected.reason == reason).map_or(0, |ejected| ejected.since_unix());
            gauge(&mut reported, self.ejected_since, &[name, reason.name()], since);
        }
        self.reported.borrow_mut().insert(node.name.clone(), reported.values);
    }
}

/// The last reported value of each series of one node, in order.
struct ReportedValues {
    values: Vec<u64>,
    next: usize,
}

impl ReportedValues {
    /// Sets the value of the next series. Returns the increase, which wraps for a gauge that has decreased. None: the
    /// value has not changed.
    fn update(&mut self, value: u64) -> Option<u64> {
        if self.next == self.values.len() {
            self.values.push(0);
        }
        let increase = value.wrapping_sub(self.values[self.next]);
        self.values[self.next] = value;
        self.next += 1;
        (increase != 0).then_some(increase)
    }
}

impl Extension for Reporter {
    fn tick(&self, metrics: &Metrics, http: &HttpClient) {
        self.has_woken_worker.set(wakers::wake_due(deadlines::now()));
        switches::read_runtime();
        self.sentinels.tick();
        let now = clock::now();
        self.drain.tick(now);
        self.statements.tick(now, metrics, http);
        self.commands_channel.run(now, http);
        metrics.put(self.drain_phase, &[], envoy_drain::phase() as u64);
        let clients = filter::client_count();
        metrics.put(self.clients, &[], clients);
        // Closed ports stay closed, so this Envoy never has a client again: no drain of a node has to wait for it.
        metrics.put(self.has_ended, &[], u64::from(readiness::has_closed_ports() && clients == 0));
        if self.reported_at.get().is_none_or(|at| now >= at + REPORT_INTERVAL) {
            self.reported_at.set(Some(now));
            live_settings::retry();
            capture::end_if_due();
            self.report(metrics);
            readiness::set_heap_full(readiness::is_probed() && metrics.gauge_value(readiness::HEAP_FULL_GAUGE) > 0);
        }
    }

    fn on_initialized(&self, waker: MainWaker) {
        fleet_commands::set_main_waker(Some(waker));
    }

    fn on_woken(&self, http: &HttpClient) {
        self.commands_channel.run(clock::now(), http);
    }

    fn on_response(&self, tag: u64, response: Option<HttpResponse>) {
        if CommandChannel::owns(tag) {
            self.commands_channel.on_response(tag, clock::now(), response.as_ref());
        } else {
            self.statements.on_response(response.as_ref());
        }
    }

    fn on_drain_started(&self) {
        readiness::on_drain_started();
    }

    fn interval(&self) -> u64 {
        if self.has_woken_worker.get() { TURN_MILLISECONDS } else { TICK_MILLISECONDS }
    }

    fn shutdown(&self) {
        fleet_commands::set_main_waker(None);
        self.sentinels.stop();
        line_log::stop(&[&login_log::LOG, &statement_log::LOG]);
        capture::shut_down();
        refresh::stop_all();
    }
}
