//! The rules for statements, applied to the requests of a session.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::iter;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mysql_proto::command::Command;
use mysql_proto::error::answer_packet;
use mysql_proto::packet::{MAX_PAYLOAD, packets};
use mysql_proto::request_reader::{MAX_HELD_BYTES, Request, RequestStart};
use sql_text::Digest;
use statement_rules::{Answer, Class, CommandKind, Exceeded, Outcome, Permit, RuleSet, StatementInfo, Verdict};

use super::requests::Decision;
use super::{Session, traffic::Traffic};
use crate::clock;
use crate::deadlines::Deadline;
use crate::held_memory;
use crate::rules::{self, ActiveRules};
use crate::statements::{MAX_STATEMENTS, SessionStatements, StatementCollector};

/// How long a statement waits until it is tried again, if nothing says when other statements end: longer and longer, since
/// it is judged again.
const FIRST_RETRY: Duration = Duration::from_millis(10);
const LONGEST_RETRY: Duration = Duration::from_millis(200);

/// The errors of MySQL for an unknown prepared statement, a malformed packet, and a packet that is too long. Their state is
/// HY000, since connection pools take 08S01 for a lost connection.
const UNKNOWN_STATEMENT: u16 = 1243;
const MALFORMED_PACKET: u16 = 1835;
const PACKET_TOO_LONG: u16 = 1153;

/// What a session keeps for the rules.
#[derive(Default)]
pub(super) struct SessionRules {
    /// The place under a limit that the next forwarded request holds.
    permit: RefCell<Option<Permit>>,
    /// The rules want the request that is about to pass in the log.
    must_log: Cell<bool>,
    /// None: the next request does not wait for a limit.
    wait: RefCell<Option<LimitWait>>,
}

/// How long a request has waited for a limit, and when it is tried again.
struct LimitWait {
    since: Instant,
    /// When it is tried again.
    retry: Deadline,
    judged: Judged,
}

/// What rules have said about a request.
struct Judged {
    active: Arc<ActiveRules>,
    verdict: Verdict,
    /// Where the text begins in the payload.
    text_start: usize,
}

impl Session {
    /// Whether the rules have to see a request. Those that only count and log do not hold very long ones.
    pub(super) fn is_judged(start: RequestStart<'_>) -> bool {
        let command = Command::from(start.command);
        matches!(command, Command::Query | Command::Prepare | Command::Execute | Command::BulkExecute)
            && rules::is_on()
            && (start.length < MAX_PAYLOAD || rules::must_enforce())
    }

    /// What the rules say about a request.
    pub(super) fn judge(self: &Rc<Self>, request: &Request<'_>) -> Decision {
        let Some(active) = rules::current() else { return Decision::Pass };
        let waited = self.rules.wait.take();
        let since = waited.as_ref().map(|wait| wait.since);
        let judged = match waited {
            // Nothing that the verdict depends on changes while the request waits, except the rules.
            Some(wait) if Arc::ptr_eq(&wait.judged.active, &active) => wait.judged,
            _ => match self.apply_rules(&active, request) {
                Ok(judged) => judged,
                Err(decision) => return decision,
            },
        };
        if since.is_none() {
            active.count(&judged.verdict.hits);
        }
        self.follow_verdict(judged, since, request)
    }

    /// # Errors
    /// The rules cannot judge the request, or not yet.
    fn apply_rules(&self, active: &Arc<ActiveRules>, request: &Request<'_>) -> Result<Judged, Decision> {
        let judged = {
            let traffic = self.traffic.borrow();
            let Some(traffic) = &*traffic else { return Err(Decision::Pass) };
            if active.rules.has_databases() && traffic.commands.statements.may_change_database() {
                return Err(Decision::WaitForResponses);
            }
            self.verdict(active, traffic, &request.payload())
        };
        match judged {
            Ok((verdict, text_start)) => Ok(Judged { active: Arc::clone(active), verdict, text_start }),
            Err(answer) if active.rules.must_enforce() => Err(self.refuse_request(request, &answer)),
            Err(_) => Err(Decision::Pass),
        }
    }

    /// `since`: since when the request has waited for a limit.
    fn follow_verdict(self: &Rc<Self>, judged: Judged, since: Option<Instant>, request: &Request<'_>) -> Decision {
        let (text, limits) = match &judged.verdict.outcome {
            Outcome::Block(answer) => return self.refuse_request(request, answer),
            Outcome::Pass { text, limits } => (text, limits),
        };
        if !limits.is_empty() {
            match rules::limiter().acquire(&judged.active.rules, limits, clock::now()) {
                Ok(permit) => drop(self.rules.permit.replace(Some(permit))),
                Err(exceeded) => return self.wait_for_limit(exceeded, judged, since, request),
            }
        }
        self.rules.must_log.set(judged.verdict.must_log);
        match text {
            None => Decision::Pass,
            Some(text) => {
                let payload = request.payload();
                Decision::Change(packets(&[&payload[..judged.text_start], text].concat(), 0).into())
            }
        }
    }

    fn wait_for_limit(
        self: &Rc<Self>,
        Exceeded { answer, retry_after, wait, .. }: Exceeded,
        judged: Judged,
        since: Option<Instant>,
        request: &Request<'_>,
    ) -> Decision {
        let since = since.unwrap_or_else(Instant::now);
        let left = wait.saturating_sub(since.elapsed());
        if left.is_zero() {
            return self.refuse_request(request, &answer);
        }
        let after = retry_after.unwrap_or((since.elapsed() / 4).clamp(FIRST_RETRY, LONGEST_RETRY)).min(left);
        let retry = Deadline::new(&self.worker.deadlines, after, &Rc::downgrade(self));
        self.rules.wait.replace(Some(LimitWait { since, retry, judged }));
        Decision::Wait
    }

    fn refuse_request(&self, request: &Request<'_>, answer: &Answer) -> Decision {
        self.on_refused(request.command());
        Decision::Answer(answer_packet(answer.code, answer.state, &answer.message, request.response_sequence()))
    }

    /// The error for a statement that is too long to be held. `sequence`: of the response.
    pub(crate) fn refuse_too_long(&self, command: Command, sequence: u8) -> Vec<u8> {
        self.on_refused(Some(command));
        let text = format!(
            "Tidevoy: while rules for statements are in force, a statement may have up to {} MiB, and those that one \
             Envoy holds {} MiB together (operator: statements.max_held_bytes)",
            MAX_HELD_BYTES >> 20,
            held_memory::limit() >> 20
        );
        answer_packet(PACKET_TOO_LONG, *b"HY000", &text, sequence)
    }

    fn on_refused(&self, command: Option<Command>) {
        if command == Some(Command::Prepare) {
            self.with_traffic(|traffic| traffic.commands.statements.on_prepare_refused());
        }
    }

    /// The verdict, and where the text begins in the payload.
    ///
    /// # Errors
    /// The rules cannot judge the request.
    fn verdict(&self, active: &ActiveRules, traffic: &Traffic, payload: &[u8]) -> Result<(Verdict, usize), Answer> {
        let (rules, collector) = (&active.rules, &self.worker.statements);
        let statements = &traffic.commands.statements;
        let command = payload.first().map_or(Command::Other, |command| Command::from(*command));
        let kind = match command {
            Command::Query => CommandKind::Query,
            Command::Prepare => CommandKind::Prepare,
            _ => {
                let prepared = statements.prepared(payload).ok_or_else(unknown_statement)?;
                let class = prepared.known.class(rules);
                let digest = &prepared.known.statement.digest;
                let info = StatementInfo { text: &prepared.text, digest, class: &class };
                return Ok((self.judge_statements(rules, statements, CommandKind::Execute, &[info]), 0));
            }
        };
        let range = statements.text_range(payload).ok_or_else(invalid_attributes)?;
        let mut parts = sql_text::statements(&payload[range.clone()]);
        let first = Classified::new(rules, collector, parts.next().unwrap_or_default());
        let others =
            parts.by_ref().take(MAX_STATEMENTS).map(|text| Classified::new(rules, collector, text)).collect::<Vec<_>>();
        let verdict = if others.is_empty() {
            self.judge_statements(rules, statements, kind, &[first.info()])
        } else if others.len() == MAX_STATEMENTS {
            return Err(too_many_statements());
        } else {
            let infos = iter::once(&first).chain(&others).map(Classified::info).collect::<Vec<_>>();
            self.judge_statements(rules, statements, kind, &infos)
        };
        Ok((verdict, range.start))
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

    /// Tries the request again that waits for a limit, if it is time to.
    pub(super) fn retry_waiting_request(&self) {
        if self.rules.wait.borrow().as_ref().is_some_and(|wait| wait.retry.has_passed()) {
            self.decide_again();
        }
    }

    /// The request no longer waits.
    pub(super) fn stop_waiting_for_limit(&self) {
        self.rules.wait.take();
    }

    /// The request is not forwarded.
    pub(super) fn release_permit(&self) {
        self.rules.permit.take();
        self.rules.must_log.set(false);
    }

    /// Whether the rules put the request that is forwarded now into the statement log.
    pub(super) fn take_must_log(&self) -> bool {
        self.rules.must_log.take()
    }

    /// The place under a limit that the request holds that is forwarded now.
    pub(super) fn take_permit(&self) -> Option<Permit> {
        self.rules.permit.take()
    }
}

/// A statement that the rules judge.
struct Classified<'a> {
    text: Cow<'a, [u8]>,
    /// All zeros if no rule depends on it.
    digest: Digest,
    class: Class,
}

impl<'a> Classified<'a> {
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

fn unknown_statement() -> Answer {
    let message =
        "Tidevoy: the rules cannot check this prepared statement, since its text is not known; prepare it again";
    Answer { code: UNKNOWN_STATEMENT, state: *b"HY000", message: message.to_owned() }
}

fn too_many_statements() -> Answer {
    let message = format!(
        "Tidevoy: while rules for statements are in force, a text may have up to {MAX_STATEMENTS} statements (operator: \
         tidevoy rules)"
    );
    Answer { code: PACKET_TOO_LONG, state: *b"HY000", message }
}

fn invalid_attributes() -> Answer {
    let message = "Tidevoy: the rules cannot check this statement, since its query attributes are invalid";
    Answer { code: MALFORMED_PACKET, state: *b"HY000", message: message.to_owned() }
}
