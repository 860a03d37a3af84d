//! The statements that one worker knows, and their statistics.

use std::borrow::Cow;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use sql_text::Normalizer;
use statement_rules::{Class, RuleSet};

use super::rows::Statement;
use super::shared::Shared;
use super::window::{self, Execution, WorkerWindow};
use crate::capture::Secrecy;
use crate::node::SharedNode;

/// A statement that the worker knows.
#[derive(Debug)]
pub(crate) struct KnownStatement {
    pub(crate) statement: Arc<Statement>,
    pub(crate) secrecy: Secrecy,
    /// The whole normalized text.
    normalized: Box<[u8]>,
    /// What the rules say about it. None: nobody has asked.
    class: RefCell<Option<Class>>,
}

impl KnownStatement {
    fn new(normalized: &[u8]) -> Rc<Self> {
        let statement = Statement::new(normalized);
        Rc::new(Self {
            secrecy: Secrecy::of(&statement.text),
            statement: Arc::new(statement),
            normalized: normalized.into(),
            class: RefCell::default(),
        })
    }

    /// What these rules say about the statement.
    pub(crate) fn class(&self, rules: &RuleSet) -> Class {
        let mut known = self.class.borrow_mut();
        match &*known {
            Some(class) if rules.is_current(class) => class.clone(),
            _ => known.insert(rules.classify(&self.normalized, &self.statement.digest)).clone(),
        }
    }
}

/// A statement that a client has prepared.
#[derive(Debug)]
pub(crate) struct PreparedStatement {
    /// Without semicolons, if the client has prepared exactly one statement.
    pub(crate) text: Arc<[u8]>,
    pub(crate) known: Rc<KnownStatement>,
    /// The database that it selects. None: it is no `USE`.
    pub(crate) database: Option<Box<[u8]>>,
}

/// Identifies statements, and collects their statistics.
pub(crate) struct StatementCollector {
    normalizer: RefCell<Normalizer>,
    /// By normalized text.
    statements: RefCell<Shared<Rc<KnownStatement>>>,
    /// By text, as the client has sent it.
    prepared: RefCell<Shared<Rc<PreparedStatement>>>,
    users: RefCell<Shared<Arc<str>>>,
    window: Arc<Mutex<WorkerWindow>>,
}

impl Default for StatementCollector {
    fn default() -> Self {
        Self {
            normalizer: RefCell::default(),
            statements: RefCell::new(Shared::new(|known| {
                Rc::strong_count(known) > 1 || Arc::strong_count(&known.statement) > 1
            })),
            prepared: RefCell::new(Shared::new(|prepared| Rc::strong_count(prepared) > 1)),
            users: RefCell::new(Shared::new(|user| Arc::strong_count(user) > 1)),
            window: window::add_worker(),
        }
    }
}

impl StatementCollector {
    /// The statement with this text. Equal statements are mostly the same object.
    pub(crate) fn identify(&self, text: &[u8]) -> Rc<KnownStatement> {
        let mut normalizer = self.normalizer.borrow_mut();
        let normalized = normalizer.normalize(text);
        let mut shared = self.statements.borrow_mut();
        shared.get(normalized).unwrap_or_else(|| {
            let statement = KnownStatement::new(normalized);
            shared.add(normalized, &statement);
            statement
        })
    }

    /// The prepared statement with this text. Sessions that prepare the same text mostly share the object.
    pub(crate) fn prepare(&self, text: &[u8]) -> Rc<PreparedStatement> {
        if let Some(prepared) = self.prepared.borrow().get(text) {
            return prepared;
        }
        // TiDB ignores empty statements, and refuses more than one.
        let mut statements = sql_text::statements(text);
        let single = statements.next().filter(|_| statements.next().is_none()).unwrap_or(Cow::Borrowed(text));
        let prepared = Rc::new(PreparedStatement {
            text: (*single).into(),
            known: self.identify(&single),
            database: sql_text::used_database(&single).map(Vec::into_boxed_slice),
        });
        self.prepared.borrow_mut().add(text, &prepared);
        prepared
    }

    /// The user of this name. Equal users are mostly the same object.
    pub(super) fn user(&self, name: &[u8]) -> Arc<str> {
        let mut shared = self.users.borrow_mut();
        shared.get(name).unwrap_or_else(|| {
            let user = Arc::from(String::from_utf8_lossy(name));
            shared.add(name, &user);
            user
        })
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
    use super::super::shared::MAX_OBJECTS;
    use super::*;

    #[test]
    fn equal_statements_and_users_are_the_same_object_while_somebody_uses_them() {
        let collector = StatementCollector::default();
        let one = collector.identify(b"SELECT 1");
        assert!(Rc::ptr_eq(&one, &collector.identify(b"select  2 -- comment")));
        let prepared = collector.prepare(b"select ?");
        assert!(Rc::ptr_eq(&prepared.known, &one));
        let user = collector.user(b"app");
        for number in 0..2 * MAX_OBJECTS {
            collector.identify(format!("select a{number}").as_bytes());
            collector.prepare(format!("select b{number}").as_bytes());
            collector.user(number.to_string().as_bytes());
        }
        assert!(Rc::ptr_eq(&one, &collector.identify(b"select 3")));
        assert!(Rc::ptr_eq(&prepared, &collector.prepare(b"select ?")));
        assert!(Arc::ptr_eq(&user, &collector.user(b"app")));
    }
}
