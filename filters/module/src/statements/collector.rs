//! The statements that one worker knows, and their statistics.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use sql_text::Normalizer;

use super::rows::Statement;
use super::window::{self, Execution, WorkerWindow};
use crate::node::SharedNode;

/// Statements and users whose objects are shared. If there are more, those that nobody uses are forgotten.
const MAX_KNOWN: usize = 5000;

/// Identifies statements, and collects their statistics.
pub(crate) struct StatementCollector {
    normalizer: RefCell<Normalizer>,
    /// By normalized text.
    statements: RefCell<HashMap<Box<[u8]>, Arc<Statement>>>,
    users: RefCell<HashSet<Arc<str>>>,
    window: Arc<Mutex<WorkerWindow>>,
}

impl Default for StatementCollector {
    fn default() -> Self {
        Self {
            normalizer: RefCell::default(),
            statements: RefCell::default(),
            users: RefCell::default(),
            window: window::add_worker(),
        }
    }
}

impl StatementCollector {
    /// The statement with this text. Equal statements are mostly the same object.
    pub(super) fn identify(&self, text: &[u8]) -> Arc<Statement> {
        let mut normalizer = self.normalizer.borrow_mut();
        let normalized = normalizer.normalize(text);
        let mut known = self.statements.borrow_mut();
        if let Some(statement) = known.get(normalized) {
            return Arc::clone(statement);
        }
        if known.len() >= MAX_KNOWN {
            known.retain(|_, statement| Arc::strong_count(statement) > 1);
        }
        let statement = Arc::new(Statement::new(normalized));
        if known.len() < MAX_KNOWN {
            known.insert(normalized.into(), Arc::clone(&statement));
        }
        statement
    }

    /// The user of this name. Equal users are mostly the same object.
    pub(super) fn user(&self, name: &[u8]) -> Arc<str> {
        let name = String::from_utf8_lossy(name);
        let mut known = self.users.borrow_mut();
        if let Some(user) = known.get(&*name) {
            return Arc::clone(user);
        }
        if known.len() >= MAX_KNOWN {
            known.retain(|user| Arc::strong_count(user) > 1);
        }
        let user = Arc::<str>::from(name);
        if known.len() < MAX_KNOWN {
            known.insert(Arc::clone(&user));
        }
        user
    }

    #[cfg(test)]
    pub(super) fn take_rows(&self) -> Vec<super::rows::StatementRow> {
        let limits = super::rows::RowLimits { rows: usize::MAX, bytes: usize::MAX };
        super::rows::merge(window::lock(&self.window).take(), limits)
    }

    pub(super) fn record(
        &self,
        statement: Option<&Arc<Statement>>,
        user: &Arc<str>,
        node: &Arc<SharedNode>,
        execution: &Execution,
    ) {
        window::lock(&self.window).record(statement, user, node, execution);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_statements_and_users_are_the_same_object_until_nobody_uses_them() {
        let collector = StatementCollector::default();
        let one = collector.identify(b"SELECT 1");
        assert!(Arc::ptr_eq(&one, &collector.identify(b"select  2 -- comment")));
        let user = collector.user(b"app");
        for number in 0..2 * MAX_KNOWN {
            collector.identify(format!("select a{number}").as_bytes());
            collector.user(number.to_string().as_bytes());
        }
        assert!(collector.statements.borrow().len() <= MAX_KNOWN && collector.users.borrow().len() <= MAX_KNOWN);
        assert!(Arc::ptr_eq(&one, &collector.identify(b"select 3")));
        assert!(Arc::ptr_eq(&user, &collector.user(b"app")));
    }
}
