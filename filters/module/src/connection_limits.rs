//! Limits of client connections over all Envoys together, by network, by user and in all.
//!
//! The control plane divides each limit into quotas, one for each Envoy process, and sends them in the live
//! configuration. This module counts the connections of this process under each rule and refuses those above the
//! quota. The reporter sends the counts to the control plane, which then adapts the quotas. Without a control plane the
//! last quotas stay.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, PoisonError, RwLock};
use std::time::Duration;

use ipnet::IpNet;
use mysql_proto::error::ProxyError;

use crate::address_table::Rate;
use crate::config::LimitConfig;
use crate::worker::WorkerContext;
use crate::{clock, telemetry};

/// The name of the rule for the connections of all clients. The control plane reserves it.
const TOTAL: &str = "total";
/// How long after a refusal this Envoy reports that it needs a larger quota.
const DEMAND_DURATION: Duration = Duration::from_secs(5);
/// Time between two log lines about the refusals of one rule.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// All rules. A published value never changes.
pub(crate) type Rules = Arc<[Rule]>;

static CURRENT: LazyLock<RwLock<Rules>> = LazyLock::new(|| RwLock::new(Rules::from([])));

/// How often a rule was added, removed, or given another user or network.
static DEFINITIONS: AtomicU64 = AtomicU64::new(0);

/// Which connections a rule counts.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Definition {
    name: String,
    /// None: those of all users.
    user: Option<Vec<u8>>,
    /// None: those from all networks.
    network: Option<IpNet>,
}

/// A limit, and the part of it that this process may use.
#[derive(Debug)]
pub(crate) struct Rule {
    definition: Definition,
    /// Over all Envoys; 0: no limit.
    limit: u64,
    /// None: no limit.
    quota: Option<u64>,
    /// Over all Envoys, per second.
    rate_limit: f64,
    rate: Option<Rate>,
    usage: Arc<Usage>,
}

/// What this process uses of a limit. It stays when the limit changes.
#[derive(Debug, Default)]
struct Usage {
    connections: AtomicU64,
    refusals: AtomicU64,
    /// The state of the rate.
    new_connections: AtomicU64,
    /// When the quota last refused a connection, in milliseconds of the clock; 0: never.
    over_quota_at: AtomicU64,
    /// When a refusal was last logged, in milliseconds of the clock; 0: never.
    logged_at: AtomicU64,
}

/// A refused connection: the error, and its text for the client.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) error: ProxyError,
    pub(crate) text: String,
    /// A line for Envoy's log. None: the refusals of this rule were logged recently.
    pub(crate) log: Option<String>,
}

/// A connection that counts under a rule as long as this value exists.
#[derive(Debug)]
pub(crate) struct RuleSlot(Arc<Usage>);

impl Drop for RuleSlot {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What the reporter reports about a rule.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RuleReport {
    pub(crate) name: String,
    pub(crate) connections: u64,
    pub(crate) quota: Option<u64>,
    /// Whether the quota has refused a connection recently.
    pub(crate) is_over_quota: bool,
    pub(crate) refusals: u64,
}

impl Rule {
    fn new(config: &LimitConfig, instance: &str, before: &[Self]) -> Self {
        let definition = Definition {
            name: config.rule.clone(),
            user: config.user.as_ref().map(|user| user.as_bytes().to_vec()),
            network: config.network,
        };
        let same = before.iter().find(|rule| rule.definition == definition);
        let usage = same.map(|rule| Arc::clone(&rule.usage)).unwrap_or_default();
        let rate = Rate::with_short_burst(config.rate);
        if let Some(rate) = rate {
            rate.take_over(&usage.new_connections, microseconds_now());
        }
        Self {
            limit: config.limit,
            quota: (config.limit > 0).then(|| config.quotas.get(instance).copied().unwrap_or(config.unlisted)),
            rate_limit: config.rate_limit,
            rate,
            usage,
            definition,
        }
    }

    fn has_user(&self) -> bool {
        self.definition.user.is_some()
    }

    /// Whether the connection of a client counts. `user` is None before its login.
    fn fits(&self, address: Option<IpAddr>, user: Option<&[u8]>) -> bool {
        let Definition { user: of_user, network, .. } = &self.definition;
        of_user.as_deref().is_none_or(|of_user| user == Some(of_user))
            && network.is_none_or(|network| {
                address.is_some_and(|address| network.contains(&address) || network.contains(&address.to_canonical()))
            })
    }

    fn try_take_slot(&self) -> Result<RuleSlot, Refusal> {
        let quota = self.quota.unwrap_or(u64::MAX);
        let increment = |connections| (connections < quota).then_some(connections + 1);
        match self.usage.connections.fetch_update(Ordering::Relaxed, Ordering::Relaxed, increment) {
            Ok(_) => Ok(RuleSlot(Arc::clone(&self.usage))),
            Err(_) => {
                self.usage.over_quota_at.store(milliseconds(clock::now()), Ordering::Relaxed);
                let error = match &self.definition {
                    Definition { user: Some(_), .. } => ProxyError::UserLimit,
                    Definition { name, network: None, .. } if name == TOTAL => ProxyError::FleetLimit,
                    _ => ProxyError::NetworkLimit,
                };
                Err(self.refuse(error, &self.limit.to_string()))
            }
        }
    }

    /// Counts a new connection towards the rate.
    fn try_take_rate(&self) -> Result<(), Refusal> {
        if self.rate.is_none_or(|rate| rate.try_take(&self.usage.new_connections, microseconds_now())) {
            return Ok(());
        }
        let error = if self.has_user() { ProxyError::UserConnectionRate } else { ProxyError::ConnectionRate };
        Err(self.refuse(error, &self.rate_limit.to_string()))
    }

    /// Takes back a connection that was counted towards the rate.
    fn give_back_rate(&self) {
        if let Some(rate) = self.rate {
            rate.give_back(&self.usage.new_connections);
        }
    }

    fn refuse(&self, error: ProxyError, limit: &str) -> Refusal {
        self.usage.refusals.fetch_add(1, Ordering::Relaxed);
        let name = &self.definition.name;
        let log = self.usage.must_log(clock::now()).then(|| {
            let quota = self.quota.map_or(String::new(), |quota| format!("; quota of this Envoy {quota}"));
            let reason = error.name();
            format!("clients are refused by the rule {name} (limit {limit} over all Envoys{quota}; reason {reason})")
        });
        let user = self.definition.user.as_deref().unwrap_or_default();
        Refusal { error, text: error.limit_text(name, limit, user), log }
    }

    fn report(&self, now: Duration) -> RuleReport {
        let over_quota_at = self.usage.over_quota_at.load(Ordering::Relaxed);
        RuleReport {
            name: self.definition.name.clone(),
            connections: self.usage.connections.load(Ordering::Relaxed),
            quota: self.quota,
            is_over_quota: over_quota_at > 0 && milliseconds(now) < over_quota_at + milliseconds(DEMAND_DURATION),
            refusals: self.usage.refusals.load(Ordering::Relaxed),
        }
    }
}

impl Usage {
    /// Whether a refusal must be logged now. At most one is logged in [`LOG_INTERVAL`].
    fn must_log(&self, now: Duration) -> bool {
        let before = self.logged_at.load(Ordering::Relaxed);
        let is_due = before == 0 || milliseconds(now) >= before + milliseconds(LOG_INTERVAL);
        is_due
            && self.logged_at.compare_exchange(before, milliseconds(now), Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

fn microseconds_now() -> u64 {
    u64::try_from(clock::now().as_micros()).unwrap_or(u64::MAX / 2)
}

/// At least 1, since 0 stands for never.
fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1)
}

/// The rules that count a client before its login: those without a user.
pub(crate) fn take_slots_of_address(rules: &[Rule], address: Option<IpAddr>) -> Result<Vec<RuleSlot>, Refusal> {
    let fitting = || rules.iter().filter(|rule| !rule.has_user() && rule.fits(address, None));
    let slots = fitting().map(Rule::try_take_slot).collect::<Result<_, _>>()?;
    take_rates(fitting())?;
    Ok(slots)
}

/// Counts a new connection towards the rates of all these rules, or of none: a connection that one rule refuses must not
/// use up the rates of others.
fn take_rates<'a>(rules: impl Iterator<Item = &'a Rule>) -> Result<(), Refusal> {
    let mut taken = Vec::new();
    for rule in rules {
        if let Err(refusal) = rule.try_take_rate() {
            taken.into_iter().for_each(Rule::give_back_rate);
            return Err(refusal);
        }
        taken.push(rule);
    }
    Ok(())
}

/// The rules of the user of a client. `is_new`: the connection counts towards the rates.
pub(crate) fn take_slots_of_user(
    rules: &[Rule],
    address: Option<IpAddr>,
    user: &[u8],
    is_new: bool,
) -> Result<Vec<RuleSlot>, Refusal> {
    let fitting = || rules.iter().filter(|rule| rule.has_user() && rule.fits(address, Some(user)));
    let slots = fitting().map(Rule::try_take_slot).collect::<Result<_, _>>()?;
    if is_new {
        take_rates(fitting())?;
    }
    Ok(slots)
}

/// The slots of a client under these rules, whatever the quotas are. Keeps those of `held` that fit.
pub(crate) fn recount(
    rules: &[Rule],
    address: Option<IpAddr>,
    user: Option<&[u8]>,
    held: Vec<RuleSlot>,
) -> Vec<RuleSlot> {
    let mut held = held;
    let slot = |rule: &Rule| match held.iter().position(|slot| Arc::ptr_eq(&slot.0, &rule.usage)) {
        Some(at) => held.swap_remove(at),
        None => {
            rule.usage.connections.fetch_add(1, Ordering::Relaxed);
            RuleSlot(Arc::clone(&rule.usage))
        }
    };
    rules.iter().filter(|rule| rule.fits(address, user)).map(slot).collect()
}

/// Publishes the rules. Called on Envoy's main thread.
pub(crate) fn publish(configs: &[LimitConfig]) {
    let mut current = CURRENT.write().unwrap_or_else(PoisonError::into_inner);
    let rules: Rules = configs.iter().map(|config| Rule::new(config, telemetry::instance(), &current)).collect();
    let definitions = |rules: &[Rule]| rules.iter().map(|rule| rule.definition.clone()).collect::<Vec<_>>();
    let is_changed = definitions(&rules) != definitions(&current);
    *current = rules;
    drop(current);
    if is_changed {
        DEFINITIONS.fetch_add(1, Ordering::Release);
    }
}

/// The rules for connections that begin now.
pub(crate) fn rules() -> Rules {
    Arc::clone(&CURRENT.read().unwrap_or_else(PoisonError::into_inner))
}

/// Counts the sessions of a worker under changed rules, so that also older sessions count. None of them ends.
pub(crate) fn apply(worker: &WorkerContext) {
    let definitions = DEFINITIONS.load(Ordering::Acquire);
    if worker.applied_limits.replace(definitions) != definitions {
        let rules = rules();
        worker.sessions.for_each(|session| session.recount_limits(&rules));
    }
}

/// What the reporter reports.
pub(crate) fn report() -> Vec<RuleReport> {
    let now = clock::now();
    rules().iter().map(|rule| rule.report(now)).collect()
}

#[cfg(test)]
mod tests;
