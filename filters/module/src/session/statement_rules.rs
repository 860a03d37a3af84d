//! The rules for statements, applied to the requests of a session.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::iter;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use mysql_proto::command::Command;
use mysql_proto::error::answer_packet;
use mysql_proto::packet::packets;
use mysql_proto::request_reader::{MAX_HELD_BYTES, Request};
use sql_text::Digest;
use statement_rules::{
    Answer, Class, CommandKind, Exceeded, LimitKey, Outcome, Permit, RuleSet, StatementInfo, Verdict,
};

use super::requests::Decision;
use super::{Session, traffic::Traffic};
use crate::clock;
use crate::deadlines::{Deadline, DeadlineOwner};
use crate::panics::CloseAfterPanic;
use crate::rules::{self, ActiveRules};
use crate::statements::{SessionStatements, StatementCollector};

/// How long a statement waits until it is tried again, if nothing says when other statements end.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// The error of MySQL for an unknown prepared statement.
const UNKNOWN_STATEMENT: u16 = 1243;

/// What a session keeps for the rules.
#[derive(Default)]
pub(super) struct SessionRules {
    /// What the request that is about to pass uses of limits.
    permit: RefCell<Option<Permit>>,
    /// The rules want the request that is about to pass in the log.
    must_log: Cell<bool>,
    /// Since when the next request waits for a limit.
    waiting_since: Cell<Option<Instant>>,
    retry: RefCell<Option<Retry>>,
}

/// Tries a waiting request again.
struct Retry {
    _deadline: Deadline,
    _owner: Rc<RetryOwner>,
}

struct RetryOwner(Weak<Session>);

impl DeadlineOwner for RetryOwner {
    fn on_deadline(self: Rc<Self>) {
        if let Some(session) = self.0.upgrade() {
            session.continue_waiting_request();
        }
    }
}

impl CloseAfterPanic for RetryOwner {
    fn close_after_panic(&self) {
        if let Some(session) = self.0.upgrade() {
            session.close_after_panic();
        }
    }
}

impl Session {
    /// Whether the rules have to see a command.
    pub(super) fn is_judged(command: Command) -> bool {
        matches!(command, Command::Query | Command::Prepare | Command::Execute | Command::BulkExecute) && rules::is_on()
    }

    /// What the rules say about a request.
    pub(super) fn judge(self: &Rc<Self>, request: &Request<'_>) -> Decision {
        let Some(active) = rules::current() else { return Decision::Pass };
        let payload = request.payload();
        let verdict = {
            let traffic = self.traffic.borrow();
            let Some(traffic) = &*traffic else { return Decision::Pass };
            match self.verdict(&active, traffic, &payload) {
                Ok(verdict) => verdict,
                Err(answer) => return refuse(request, &answer),
            }
        };
        let is_first_try = self.rules.waiting_since.get().is_none();
        if is_first_try {
            active.count(&verdict.hits);
        }
        let is_prepare = payload.first() == Some(&(Command::Prepare as u8));
        let (text, limits) = match verdict.outcome {
            Outcome::Block(answer) => {
                if is_prepare {
                    self.with_traffic(|traffic| traffic.commands.statements.on_prepare_refused());
                }
                return refuse(request, &answer);
            }
            Outcome::Pass { text, limits } => (text, limits),
        };
        if let Err(decision) = self.acquire(&active, &limits, request) {
            return decision;
        }
        self.rules.must_log.set(verdict.must_log);
        match text {
            None => Decision::Pass,
            Some(text) => {
                let start = payload.len() - self.text_length(&payload);
                Decision::Change(packets(&[&payload[..start], &text].concat(), 0).into())
            }
        }
    }

    fn text_length(&self, payload: &[u8]) -> usize {
        self.with_traffic(|traffic| traffic.commands.statements.text(payload).map(<[u8]>::len))
            .flatten()
            .unwrap_or_default()
    }

    fn verdict(&self, active: &ActiveRules, traffic: &Traffic, payload: &[u8]) -> Result<Verdict, Answer> {
        let (rules, collector) = (&active.rules, &self.worker.statements);
        let statements = &traffic.commands.statements;
        let command = payload.first().map_or(Command::Other, |command| Command::from(*command));
        match command {
            Command::Query => {
                let text = statements.text(payload).ok_or_else(invalid_attributes)?;
                let mut parts = sql_text::statements(text);
                let first = Judged::new(rules, collector, parts.next().unwrap_or_default());
                let others = parts.map(|text| Judged::new(rules, collector, text)).collect::<Vec<_>>();
                if others.is_empty() {
                    return Ok(self.judge_statements(rules, statements, CommandKind::Query, &[first.info()]));
                }
                let infos = iter::once(&first).chain(&others).map(Judged::info).collect::<Vec<_>>();
                Ok(self.judge_statements(rules, statements, CommandKind::Query, &infos))
            }
            Command::Prepare => {
                let text = statements.text(payload).ok_or_else(invalid_attributes)?;
                let judged = Judged::new(rules, collector, Cow::Borrowed(text));
                Ok(self.judge_statements(rules, statements, CommandKind::Prepare, &[judged.info()]))
            }
            _ => {
                let prepared = statements.prepared(payload).ok_or_else(unknown_statement)?;
                let class = prepared.known.class(rules);
                let digest = &prepared.known.statement.digest;
                let info = StatementInfo { text: &prepared.text, digest, class: &class };
                Ok(self.judge_statements(rules, statements, CommandKind::Execute, &[info]))
            }
        }
    }

    fn judge_statements(
        &self,
        rules: &RuleSet,
        session: &SessionStatements,
        command: CommandKind,
        statements: &[StatementInfo<'_>],
    ) -> Verdict {
        let user = self.slots.user.borrow();
        let node = self.node.borrow();
        rules.judge(&statement_rules::Request {
            command,
            statements,
            user: user.as_deref().unwrap_or_default(),
            database: session.database(),
            client: self.addresses().map(|(client, _)| client.ip()),
            group: node.as_ref().map_or("", |assigned| &assigned.node.group),
        })
    }

    /// Counts a request towards limits.
    ///
    /// # Errors
    /// A limit is reached, so the request waits or is refused.
    fn acquire(
        self: &Rc<Self>,
        active: &ActiveRules,
        limits: &[LimitKey],
        request: &Request<'_>,
    ) -> Result<(), Decision> {
        if limits.is_empty() {
            self.rules.waiting_since.set(None);
            return Ok(());
        }
        match rules::limiter().acquire(&active.rules, limits, clock::now()) {
            Ok(permit) => {
                self.rules.waiting_since.set(None);
                self.rules.permit.replace(Some(permit));
                Ok(())
            }
            Err(Exceeded { answer, retry_after, wait, .. }) => {
                let since = self.rules.waiting_since.get().unwrap_or_else(Instant::now);
                let left = wait.saturating_sub(since.elapsed());
                if left.is_zero() {
                    self.rules.waiting_since.set(None);
                    return Err(refuse(request, &answer));
                }
                self.rules.waiting_since.set(Some(since));
                self.retry_after(retry_after.unwrap_or(RETRY_INTERVAL).min(left));
                Err(Decision::Wait)
            }
        }
    }

    fn retry_after(self: &Rc<Self>, time: Duration) {
        let owner = Rc::new(RetryOwner(Rc::downgrade(self)));
        let weak = Rc::downgrade(&owner);
        let deadline = Deadline::new(&self.worker.deadlines, time, &weak);
        self.rules.retry.replace(Some(Retry { _deadline: deadline, _owner: owner }));
    }

    /// Whether the rules want the request that passes now in the log.
    pub(super) fn take_must_log(&self) -> bool {
        self.rules.must_log.take()
    }

    /// What the request that passes now uses of limits.
    pub(super) fn take_permit(&self) -> Option<Permit> {
        self.rules.permit.take()
    }
}

/// The error before the session ends because of a statement that cannot be held.
pub(crate) fn statement_too_long() -> Vec<u8> {
    let text = format!(
        "Tidevoy: while rules for statements are in force, a statement may have up to {} MiB (operator: tidevoy rules)",
        MAX_HELD_BYTES / 1024 / 1024
    );
    answer_packet(1153, *b"08S01", &text, 1)
}

/// A statement that the rules judge.
struct Judged<'a> {
    text: Cow<'a, [u8]>,
    /// Any digest, if no rule depends on it.
    digest: Digest,
    class: Class,
}

impl<'a> Judged<'a> {
    fn new(rules: &RuleSet, collector: &StatementCollector, text: Cow<'a, [u8]>) -> Self {
        if !rules.needs_digest() {
            let class = rules.classify_text_only(&text);
            return Self { text, digest: Digest::default(), class };
        }
        let known = collector.identify(&text);
        Self { digest: known.statement.digest, class: known.class(rules), text }
    }

    fn info(&self) -> StatementInfo<'_> {
        StatementInfo { text: &self.text, digest: &self.digest, class: &self.class }
    }
}

fn refuse(request: &Request<'_>, answer: &Answer) -> Decision {
    Decision::Answer(answer_packet(answer.code, answer.state, &answer.message, request.response_sequence()))
}

fn unknown_statement() -> Answer {
    let message =
        "Tidevoy: the rules cannot check this prepared statement, since its text is not known; prepare it again";
    Answer { code: UNKNOWN_STATEMENT, state: *b"HY000", message: message.to_owned() }
}

fn invalid_attributes() -> Answer {
    let message = "Tidevoy: the rules cannot check this statement, since its query attributes are invalid";
    Answer { code: 1835, state: *b"HY000", message: message.to_owned() } // "Malformed communication packet"
}
