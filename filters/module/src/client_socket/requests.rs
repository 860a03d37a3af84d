//! Passes the requests of an established session on to the node, or answers them instead.

use std::mem;
use std::rc::Rc;

use envoy_abi::socket::Io;
use mysql_proto::change_user::CHANGE_USER;
use mysql_proto::command::Command;
use mysql_proto::error::ProxyError;
use mysql_proto::packet::HEADER;
use mysql_proto::request_reader::{Found, Request};
use mysql_proto::secret::SecretBytes;

use super::ClientConn;
use crate::conn::ReadStep;
use crate::session::{Decision, Event, Session};

impl ClientConn {
    pub(super) fn pass_to_node(&self, session: &Rc<Session>, bytes: &[u8], passed: &mut usize) -> ReadStep {
        if session.try_finish_at_ping(bytes) {
            return ReadStep::Yield;
        }
        if session.must_end_opaque() {
            return ReadStep::Close;
        }
        let joined = session.join_client_bytes(bytes);
        let input = joined.as_deref().unwrap_or(bytes);
        let mut rest = input;
        // The range of `input` to forward, with one write.
        let mut to_forward = 0..0;
        while !rest.is_empty() {
            let found = session.next_request(&mut rest);
            let behind = input.len() - rest.len();
            let step = match found {
                None => self.track(session, &[], false),
                Some(Found::Bytes(bytes)) => {
                    to_forward.end += bytes.len();
                    self.track(session, bytes, false)
                }
                Some(Found::Observed(bytes, request)) => {
                    to_forward.end += bytes.len();
                    self.track(session, bytes, false).inspect(|()| session.on_request(&request))
                }
                Some(Found::Held(request)) => match (session.decide(&request), &request) {
                    (Decision::Pass, Request::Received(_)) => {
                        to_forward.end += request.len();
                        self.track_request(session, &request)
                    }
                    (decision, _) => {
                        self.conn.forward(&input[mem::replace(&mut to_forward, behind..behind)], passed);
                        self.apply(session, decision, &request, rest, passed)
                    }
                },
                // The reader refuses no other command: COM_CHANGE_USER has a limit of its own.
                Some(Found::Refused) => Err(self.reject_command(session, ProxyError::AttributesTooLarge)),
                Some(Found::TooLong { command, response_sequence }) => {
                    self.conn.forward(&input[mem::replace(&mut to_forward, behind..behind)], passed);
                    self.answer_too_long(session, command.into(), response_sequence)
                }
            };
            if let Err(step) = step {
                return step;
            }
        }
        self.conn.forward(&input[to_forward], passed);
        ReadStep::Continue
    }

    /// Applies a decision about a held request. `rest`: the bytes that follow the request.
    fn apply(
        &self,
        session: &Rc<Session>,
        decision: Decision,
        request: &Request<'_>,
        rest: &[u8],
        passed: &mut usize,
    ) -> Result<(), ReadStep> {
        let changed;
        let to_forward = match decision {
            Decision::Pass => request,
            Decision::Change(packets) => {
                changed = Request::Collected(packets);
                &changed
            }
            Decision::Reject(why) => return Err(self.reject_command(session, why)),
            Decision::Answer(answer) if session.may_answer() => return self.answer(session, &answer),
            Decision::Answer(answer) => {
                session.hold_answer(answer);
                return Err(self.hold(session, request, rest));
            }
            Decision::Wait => {
                session.hold_until_decision();
                return Err(self.hold(session, request, rest));
            }
            Decision::WaitForResponses => {
                session.hold_until_responses();
                return Err(self.hold(session, request, rest));
            }
        };
        self.track_request(session, to_forward)?;
        self.conn.forward(to_forward, passed);
        Ok(())
    }

    /// Answers a request that is too long to be held. If other responses come first, the session ends: an error would
    /// have to wait, but its request was dropped.
    fn answer_too_long(&self, session: &Rc<Session>, command: Command, sequence: u8) -> Result<(), ReadStep> {
        if !session.may_answer() {
            return Err(ReadStep::Close);
        }
        self.answer(session, &session.refuse_too_long(command, sequence))
    }

    /// Answers a request instead of a node.
    fn answer(&self, session: &Rc<Session>, packet: &[u8]) -> Result<(), ReadStep> {
        let sent = self.conn.write_or_queue(packet);
        session.on_answered();
        if sent == Io::Broken { Err(ReadStep::Close) } else { Ok(()) }
    }

    /// Keeps a request and the bytes that follow it until the session is no longer held.
    fn hold(&self, session: &Session, request: &[u8], rest: &[u8]) -> ReadStep {
        let mut input = SecretBytes::with_capacity(request.len() + rest.len());
        input.extend_from_slice(request);
        input.extend_from_slice(rest);
        session.count_held_bytes(input.len());
        self.held_input.replace(input);
        ReadStep::Wait
    }

    /// Tracks a whole request.
    fn track_request(&self, session: &Rc<Session>, request: &Request<'_>) -> Result<(), ReadStep> {
        self.track(session, request, request.get(HEADER) == Some(&CHANGE_USER))?;
        session.on_request(request);
        Ok(())
    }

    /// Tracks bytes of the client that are about to be forwarded. `is_checked`: see [`Session::on_client_bytes`].
    fn track(&self, session: &Rc<Session>, bytes: &[u8], is_checked: bool) -> Result<(), ReadStep> {
        session.watch_transactions(bytes);
        session.on_client_bytes(bytes, is_checked).map_err(|why| match why {
            Some(why) => self.reject_command(session, why),
            None => ReadStep::Close,
        })?;
        // What the client expects next is not known then, so it gets no error.
        if session.must_end_opaque() { Err(ReadStep::Close) } else { Ok(()) }
    }

    /// Answers the client's command with an error, and ends the session.
    fn reject_command(&self, session: &Rc<Session>, why: ProxyError) -> ReadStep {
        if self.conn.has_unsent() {
            return ReadStep::Close; // the error would overtake unsent bytes of the node
        }
        let _ = self.conn.write_or_queue(&session.command_error_packet(why));
        self.is_rejected.set(true);
        self.conn.finish();
        session.handle(Event::CommandRefused(why));
        ReadStep::Yield
    }
}
