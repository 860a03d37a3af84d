//! INTERIM (replaced at the merge)
use statement_rules::{Hit, Limiter, RuleSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

pub(crate) struct ActiveRules {
    pub(crate) rules: RuleSet,
    pub(crate) limiter: Limiter,
}
impl ActiveRules {
    pub(crate) fn count(&self, _hits: &[Hit]) {}
}
static CURRENT: RwLock<Option<Arc<ActiveRules>>> = RwLock::new(None);
static IS_ON: AtomicBool = AtomicBool::new(false);
pub(crate) fn is_on() -> bool {
    IS_ON.load(Ordering::Relaxed)
}
pub(crate) fn current() -> Option<Arc<ActiveRules>> {
    if !is_on() {
        return None;
    }
    CURRENT.read().unwrap_or_else(PoisonError::into_inner).clone()
}
