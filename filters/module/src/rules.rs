//! The rules for statements that are in force in this process, and what they have counted.
//!
//! The control plane sends them in the live configuration. Rules that cannot be used change nothing: those before stay
//! in force, and the control plane gets the reason.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, RwLock};

use statement_rules::{Hit, Limiter, RuleConfig, RuleSet};

/// The rules in force. They never change; a change replaces them as a whole.
pub(crate) struct ActiveRules {
    pub(crate) rules: RuleSet,
    hits: Vec<Arc<HitCounts>>,
}

/// How often a rule applied since the last report: with effect, and without. It stays when other rules change.
#[derive(Debug, Default)]
struct HitCounts([AtomicU64; 2]);

/// None: no rule is in force.
static CURRENT: RwLock<Option<Arc<ActiveRules>>> = RwLock::new(None);

/// Whether rules are in force, so that workers need no lock to know.
static IS_ON: AtomicBool = AtomicBool::new(false);

/// Whether rules do more than count and log.
static MUST_ENFORCE: AtomicBool = AtomicBool::new(false);

/// What this process uses of the limits of all rules.
static LIMITER: LazyLock<Limiter> = LazyLock::new(Limiter::default);

/// What the control plane sent last, in order to do nothing for a configuration that changes only nodes.
static PUBLISHED: Mutex<Vec<serde_json::Value>> = Mutex::new(Vec::new());

impl ActiveRules {
    fn new(rules: RuleSet, before: Option<&Self>) -> Self {
        let known: HashMap<&str, &Arc<HitCounts>> =
            before.into_iter().flat_map(|before| before.names().zip(&before.hits)).collect();
        let hits_of = |rule| known.get(rules.name(rule)).map(|hits| Arc::clone(hits)).unwrap_or_default();
        let hits = (0..rules.len()).map(hits_of).collect();
        Self { rules, hits }
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        (0..self.rules.len()).map(|rule| self.rules.name(rule))
    }

    /// Counts the rules that apply to a request.
    pub(crate) fn count(&self, hits: &[Hit]) {
        for hit in hits {
            self.hits[hit.rule].0[usize::from(hit.is_dry_run)].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The names of all rules, and how often each applied since the last call: with effect, and without.
    pub(crate) fn take_hits(&self) -> impl Iterator<Item = (&str, [u64; 2])> {
        let take = |hits: &Arc<HitCounts>| [0, 1].map(|index: usize| hits.0[index].swap(0, Ordering::Relaxed));
        self.names().zip(self.hits.iter().map(take))
    }
}

/// Whether rules are in force. Called for each request, so it must be cheap.
pub(crate) fn is_on() -> bool {
    IS_ON.load(Ordering::Relaxed)
}

/// Whether rules do more than count and log, so that no statement may be unknown to them.
pub(crate) fn must_enforce() -> bool {
    MUST_ENFORCE.load(Ordering::Relaxed)
}

/// The rules in force. None: there are none.
pub(crate) fn current() -> Option<Arc<ActiveRules>> {
    if !is_on() {
        return None;
    }
    CURRENT.read().unwrap_or_else(PoisonError::into_inner).clone()
}

/// What this process uses of the limits.
pub(crate) fn limiter() -> &'static Limiter {
    &LIMITER
}

/// Applies published rules. Called on Envoy's main thread.
pub(crate) fn configure(configs: Vec<serde_json::Value>) {
    if envoy_abi::module::validating() {
        return;
    }
    let mut published = PUBLISHED.lock().unwrap_or_else(PoisonError::into_inner);
    if *published == configs {
        return;
    }
    match read(&configs) {
        Ok(rules) => {
            let before = current();
            let active = (!rules.is_empty()).then(|| Arc::new(ActiveRules::new(rules, before.as_deref())));
            let is_on = active.is_some();
            let must_enforce = active.as_ref().is_some_and(|active| active.rules.must_enforce());
            // The old rules are dropped after the lock is released.
            let _before = {
                let mut current = CURRENT.write().unwrap_or_else(PoisonError::into_inner);
                IS_ON.store(is_on, Ordering::Relaxed);
                MUST_ENFORCE.store(must_enforce, Ordering::Relaxed);
                std::mem::replace(&mut *current, active)
            };
        }
        Err(reason) => {
            let reason = format!("{reason}; the previous rules stay in force");
            envoy_abi::log!(Error, "the rules for statements cannot be used: {reason}");
            envoy_abi::module::report_rejected("rules", reason);
        }
    }
    *published = configs;
}

fn read(configs: &[serde_json::Value]) -> Result<RuleSet, String> {
    let configs = configs.iter().map(|config| serde_json::from_value::<RuleConfig>(config.clone()));
    let configs = configs.collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())?;
    RuleSet::new(configs).map_err(|errors| errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(json: &str) -> Result<RuleSet, String> {
        read(&serde_json::from_str::<Vec<serde_json::Value>>(json).expect("JSON"))
    }

    #[test]
    fn errors_name_the_rule() {
        let error = rules(r#"[{"name": "a", "log": true}, {"name": "b", "pattern": "(", "log": true}]"#);
        assert_eq!(error.err().as_deref(), Some("rule b: pattern: unclosed group"));
        let error = rules(r#"[{"name": "a", "new_key": true}]"#).err().unwrap_or_default();
        assert!(error.contains("new_key"), "{error}");
    }

    #[test]
    fn counts_of_a_rule_stay_when_other_rules_change() {
        let one = rules(r#"[{"name": "a", "log": true}]"#).expect("rules");
        let active = ActiveRules::new(one, None);
        active.count(&[Hit { rule: 0, is_dry_run: false }, Hit { rule: 0, is_dry_run: true }]);
        let both = rules(r#"[{"name": "b", "log": true}, {"name": "a", "log": true}]"#).expect("rules");
        let later = ActiveRules::new(both, Some(&active));
        later.count(&[Hit { rule: 1, is_dry_run: true }]);
        assert_eq!(later.take_hits().collect::<Vec<_>>(), [("b", [0, 0]), ("a", [1, 2])]);
        assert_eq!(later.take_hits().collect::<Vec<_>>(), [("b", [0, 0]), ("a", [0, 0])]);
    }
}
