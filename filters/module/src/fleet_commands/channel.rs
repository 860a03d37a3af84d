//! The calls to the control plane, on Envoy's main thread: one that waits for commands is always open, others bring
//! results or ask about a KILL.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use envoy_abi::http_callout::{HttpClient, HttpResponse};

use super::jobs::{self, Job};
use super::kills::{self, KillAnswer, PendingKill};
use super::messages::{CommandMessage, PollRequest, PollResponse, ResolveRequest, ResolveResponse, ResultMessage};
use super::recent::RecentIds;
use super::reports::{Report, ReportQueue, may_succeed_later};
use super::wake_main;
use crate::grpc::{Method, UNAVAILABLE, UNIMPLEMENTED, framed, unframed};
use crate::{telemetry, wakers};

/// The control plane answers a poll within 30 s.
const POLL: Method = Method { path: "/tidevoy.commands.v1.Commands/Poll", timeout: Duration::from_secs(40) };
const REPORT: Method = Method { path: "/tidevoy.commands.v1.Commands/Report", timeout: Duration::from_secs(1) };
/// The control plane answers within 2 s. Sessions that it has found do not migrate for 3 s.
const RESOLVE: Method = Method { path: "/tidevoy.commands.v1.Commands/Resolve", timeout: Duration::from_millis(2500) };
/// The time between a poll that has failed and the next one.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// The same if the control plane is older than this service.
const UNIMPLEMENTED_RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// Tags of the calls. Those of other calls of the module are lower.
const POLL_TAG: u64 = 1;
const FIRST_TAG: u64 = 2;

const UNREACHABLE: &str = "Tidevoy: the session of this KILL was not looked for, since no control plane has answered; \
                           try again, or KILL the id in the process list on a direct connection to TiDB";

/// A call without a response.
enum OpenCall {
    Report(Report),
    Resolve(Arc<PendingKill>),
}

/// The calls of this Envoy. All methods run on Envoy's main thread.
#[derive(Default)]
pub(crate) struct CommandChannel {
    is_polling: Cell<bool>,
    poll_at: Cell<Duration>,
    next_tag: Cell<u64>,
    calls: RefCell<HashMap<u64, OpenCall>>,
    /// Reports to be sent: Envoy does not allow a call within the hook for responses.
    reports: RefCell<ReportQueue>,
    commands: RefCell<Vec<CommandMessage>>,
    recent: RefCell<RecentIds>,
}

impl CommandChannel {
    /// Whether it has sent the call with this tag.
    pub(crate) fn owns(tag: u64) -> bool {
        tag >= POLL_TAG
    }

    /// Does what is due. Called when the main thread is woken, and periodically.
    pub(crate) fn run(&self, now: Duration, http: &HttpClient) {
        self.start_jobs(now);
        let results = jobs::take_results(wakers::workers, now);
        if !results.is_empty() {
            self.reports.borrow_mut().add(results, now);
        }
        let reports = self.reports.borrow_mut().take_due(now);
        for report in reports {
            self.send(OpenCall::Report(report), now, http);
        }
        for kill in kills::take_unsent() {
            self.send(OpenCall::Resolve(kill), now, http);
        }
        if !self.is_polling.get() && now >= self.poll_at.get() {
            self.poll(now, http);
        }
    }

    fn start_jobs(&self, now: Duration) {
        let commands = self.commands.take();
        if commands.is_empty() {
            return;
        }
        let workers = wakers::workers();
        let mut refused = Vec::new();
        for command in commands {
            let (id, Some(content)) = (command.id, command.content) else { continue };
            let is_ours = command.instance.is_empty() || command.instance == telemetry::instance();
            if is_ours && self.recent.borrow_mut().add(id) && !jobs::add(Job::new(id, content, workers.clone(), now)) {
                refused.push(ResultMessage { command: id, is_incomplete: true, ..ResultMessage::default() });
            }
        }
        if !refused.is_empty() {
            self.reports.borrow_mut().add(refused, now);
        }
        wakers::wake_all();
    }

    fn poll(&self, now: Duration, http: &HttpClient) {
        self.is_polling.set(true);
        self.poll_at.set(now + RETRY_INTERVAL);
        let message = PollRequest { instance: telemetry::instance().to_owned() };
        if POLL.call(http, POLL_TAG, &framed(&message)).is_err() {
            self.is_polling.set(false);
        }
    }

    fn send(&self, call: OpenCall, now: Duration, http: &HttpClient) {
        let tag = FIRST_TAG + self.next_tag.get();
        self.next_tag.set(self.next_tag.get() + 1);
        let (method, body) = match &call {
            OpenCall::Report(report) => (&REPORT, framed(&report.message)),
            OpenCall::Resolve(kill) => {
                (&RESOLVE, framed(&ResolveRequest { instance: telemetry::instance().to_owned(), id: kill.id }))
            }
        };
        // The response may arrive while the call is being sent.
        self.calls.borrow_mut().insert(tag, call);
        if let Err(error) = method.call(http, tag, &body) {
            self.on_failure(tag, now, error.is_unknown_cluster());
        }
    }

    /// Applies a response. Calls that follow are sent when the main thread is woken.
    pub(crate) fn on_response(&self, tag: u64, now: Duration, response: Option<&HttpResponse>) {
        let response = response.filter(|response| response.header(":status") == Some("200"));
        if tag == POLL_TAG {
            self.on_poll_response(now, response);
        } else if let Some(response) = response {
            self.on_call_response(tag, now, response);
        } else {
            self.on_failure(tag, now, false);
        }
        wake_main();
    }

    fn on_poll_response(&self, now: Duration, response: Option<&HttpResponse>) {
        self.is_polling.set(false);
        let polled = response.and_then(|response| unframed::<PollResponse>(&response.body));
        let is_unimplemented = response.is_some_and(|response| response.header("grpc-status") == Some(UNIMPLEMENTED));
        match polled {
            Some(polled) => {
                self.poll_at.set(now);
                self.commands.borrow_mut().extend(polled.commands);
            }
            None if is_unimplemented => self.poll_at.set(now + UNIMPLEMENTED_RETRY_INTERVAL),
            None => self.poll_at.set(now + RETRY_INTERVAL),
        }
    }

    fn on_call_response(&self, tag: u64, now: Duration, response: &HttpResponse) {
        match self.calls.borrow_mut().remove(&tag) {
            Some(OpenCall::Resolve(kill)) => {
                let resolved = unframed::<ResolveResponse>(&response.body);
                answer(&kill, resolved.map_or_else(|| KillAnswer::Refused(reason(response)), KillAnswer::from));
            }
            Some(OpenCall::Report(report)) if may_succeed_later(response) => {
                self.reports.borrow_mut().retry(report, now);
            }
            Some(OpenCall::Report(_)) | None => {}
        }
    }

    fn on_failure(&self, tag: u64, now: Duration, has_no_control_plane: bool) {
        match self.calls.borrow_mut().remove(&tag) {
            // Without a control plane, no other Envoy belongs to this one.
            Some(OpenCall::Resolve(kill)) if has_no_control_plane => answer(&kill, KillAnswer::Unchanged),
            Some(OpenCall::Resolve(kill)) => answer(&kill, KillAnswer::Refused(UNREACHABLE.to_owned())),
            Some(OpenCall::Report(report)) if !has_no_control_plane => self.reports.borrow_mut().retry(report, now),
            Some(OpenCall::Report(_)) | None => {}
        }
    }
}

fn answer(kill: &PendingKill, answer: KillAnswer) {
    kill.set_answer(answer);
    wakers::wake_all();
}

/// Why the session of a KILL was not looked for.
fn reason(response: &HttpResponse) -> String {
    match (response.header("grpc-message"), response.header("grpc-status")) {
        (Some(message), None | Some(UNAVAILABLE)) => format!("{UNREACHABLE} ({message})"),
        (Some(message), _) => {
            format!("Tidevoy: the control plane could not look for the session of this KILL: {message}")
        }
        (None, _) => UNREACHABLE.to_owned(),
    }
}
