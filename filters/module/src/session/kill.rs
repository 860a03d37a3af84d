//! KILL statements and COM_PROCESS_KILL: clients know the connection id of their first node, and the session may be at
//! another node by now. So these requests are held until the control plane has answered which session they mean, and
//! are forwarded with the present id of that session.

use std::rc::Rc;

use mysql_proto::command::Command;
use mysql_proto::error::answer_packet;
use mysql_proto::packet::packets;
use mysql_proto::query::{NO_ATTRIBUTES, known_text, text_range};
use mysql_proto::request_reader::{Interest, Request, RequestStart};

use super::Session;
use super::requests::Decision;
use crate::fleet_commands::{self, KillAnswer};

/// The longest request that may be a KILL. Longer texts pass unchanged.
const MAX_KILL_BYTES: usize = 4096;
/// The payload of COM_PROCESS_KILL: the command, and the id in 4 bytes.
const PROCESS_KILL_BYTES: usize = 5;
/// ER_UNKNOWN_ERROR, for a KILL that the module does not pass on.
const UNKNOWN_ERROR: u16 = 1105;

/// What a request kills, and the payload around its id.
#[derive(Debug, PartialEq, Eq)]
struct KillRequest {
    id: u64,
    /// The payload before and after the id.
    before: Vec<u8>,
    after: Vec<u8>,
    /// TiDB does not know the command, so it always becomes a statement.
    is_process_kill: bool,
}

impl KillRequest {
    /// None: the request is no KILL.
    fn parse(payload: &[u8], has_attributes: bool) -> Option<Self> {
        let (&command, content) = payload.split_first()?;
        if Command::from(command) == Command::ProcessKill {
            let id = u32::from_le_bytes(content.try_into().ok()?);
            let attributes = if has_attributes { NO_ATTRIBUTES } else { &[] };
            let before = [&[Command::Query as u8], attributes, b"KILL "].concat();
            return Some(Self { id: id.into(), before, after: Vec::new(), is_process_kill: true });
        }
        let range = text_range(payload, has_attributes).filter(|_| Command::from(command) == Command::Query)?;
        let text = &payload[range.clone()];
        let kill = sql_text::may_begin_with(text, b"kill").then(|| sql_text::kill(text))??;
        let start = range.start;
        let before = payload[..start + kill.id_range.start].to_vec();
        let after = payload[start + kill.id_range.end..].to_vec();
        Some(Self { id: kill.id, before, after, is_process_kill: false })
    }

    /// The packet of the request with this id.
    fn with_id(&self, id: u64) -> Vec<u8> {
        let payload = [&*self.before, id.to_string().as_bytes(), &*self.after].concat();
        packets(&payload, 0)
    }

    /// `sequence`: of the response to the client.
    fn decide(&self, answer: KillAnswer, sequence: u8) -> Decision {
        match answer {
            KillAnswer::Unchanged if self.is_process_kill => Decision::Change(self.with_id(self.id).into()),
            KillAnswer::Unchanged => Decision::Pass,
            KillAnswer::NodeId(id) => Decision::Change(self.with_id(id.into()).into()),
            KillAnswer::Refused(why) => Decision::Answer(answer_packet(UNKNOWN_ERROR, *b"HY000", &why, sequence)),
        }
    }
}

/// How a request that may be a KILL is treated. None: it is none.
pub(super) fn interest(start: RequestStart<'_>, has_attributes: bool) -> Option<Interest> {
    let is_kill = match Command::from(start.command) {
        Command::ProcessKill => start.length == PROCESS_KILL_BYTES,
        Command::Query if start.length > MAX_KILL_BYTES => false,
        Command::Query => {
            known_text(start.content, has_attributes).is_none_or(|text| sql_text::may_begin_with(text, b"kill"))
        }
        _ => false,
    };
    is_kill.then_some(Interest::Hold)
}

impl Session {
    /// COM_PROCESS_KILL as a statement, for the rules. None: the request is none.
    pub(super) fn kill_statement(&self, request: &Request<'_>) -> Option<Request<'static>> {
        let kill = KillRequest::parse(&request.payload(), self.has_query_attributes())?;
        Some(Request::Collected(kill.with_id(kill.id).into()))
    }

    /// Decides about a held request that may be a KILL.
    pub(super) fn decide_kill(self: &Rc<Self>, request: &Request<'_>) -> Decision {
        let has_attributes = self.has_query_attributes();
        let Some(kill) = KillRequest::parse(&request.payload(), has_attributes) else { return Decision::Pass };
        let answer = match self.requests.take_kill_answer() {
            Some(answer) => answer,
            None => match fleet_commands::ask(kill.id) {
                Ok(Some(pending)) => {
                    self.worker.kills.add(self, pending);
                    return Decision::Wait;
                }
                // Envoy starts or stops, so no other session can be reached anyway.
                Ok(None) => KillAnswer::Unchanged,
                Err(why) => KillAnswer::Refused(why),
            },
        };
        kill.decide(answer, request.response_sequence())
    }

    /// Continues with the held KILL as the control plane has answered.
    pub(crate) fn on_kill_answer(&self, answer: KillAnswer) {
        self.requests.set_kill_answer(answer);
        self.decide_again();
    }
}

#[cfg(test)]
mod tests {
    use mysql_proto::packet::HEADER;

    use super::*;

    fn passed(kill: &KillRequest, answer: KillAnswer) -> Vec<u8> {
        match kill.decide(answer, 1) {
            Decision::Change(packets) => packets[HEADER..].to_vec(),
            Decision::Pass => b"unchanged".to_vec(),
            Decision::Answer(packet) => packet,
            Decision::Wait | Decision::WaitForResponses | Decision::Reject(_) => panic!("the request is decided"),
        }
    }

    #[test]
    fn kill_passes_with_the_id_of_the_session_at_its_node() {
        for (payload, has_attributes, expected) in [
            (&b"\x03KILL 5"[..], false, &b"\x03KILL 77"[..]),
            (b"\x03/* a */ kill query 5; ", false, b"\x03/* a */ kill query 77; "),
            (b"\x03\0\x01KILL TIDB 5", true, b"\x03\0\x01KILL TIDB 77"),
            (b"\x0c\x05\0\0\0", false, b"\x03KILL 77"),
            (b"\x0c\x05\0\0\0", true, b"\x03\0\x01KILL 77"),
        ] {
            let kill = KillRequest::parse(payload, has_attributes).expect("a KILL");
            assert_eq!(kill.id, 5);
            assert_eq!(passed(&kill, KillAnswer::NodeId(77)), expected);
            let unchanged = passed(&kill, KillAnswer::Unchanged);
            match payload[0] {
                0x0c => assert!(unchanged.ends_with(b"KILL 5")), // TiDB does not know the command
                _ => assert_eq!(unchanged, b"unchanged"),
            }
        }
    }

    #[test]
    fn packet_of_a_changed_kill_has_its_length() {
        let kill = KillRequest::parse(b"\x03KILL 5", false).expect("a KILL");
        assert_eq!(kill.with_id(1234), b"\x0a\0\0\0\x03KILL 1234");
    }

    #[test]
    fn refused_kill_is_answered_with_an_error() {
        let kill = KillRequest::parse(b"\x03KILL 5", false).expect("a KILL");
        let packet = passed(&kill, KillAnswer::Refused("why".to_owned()));
        assert_eq!(packet, b"\x0c\0\0\x01\xff\x51\x04#HY000why");
    }

    #[test]
    fn other_requests_are_no_kill() {
        for payload in [&b"\x03select 1"[..], b"\x03kill 1; select 1", b"\x16kill 1", b"\x0c\x05\0\0", b"\x01", b""] {
            assert_eq!(KillRequest::parse(payload, false), None, "{payload:?}");
        }
    }

    #[test]
    fn only_requests_that_may_be_a_kill_are_held() {
        let held = |command: u8, length: usize, content: &[u8], has_attributes: bool| {
            interest(RequestStart { command, length, content, is_first: true }, has_attributes).is_some()
        };
        assert!(held(0x03, 8, b"kill 12", false) && held(0x03, 8, b"", false) && held(0x03, 30, b"/* a", false));
        assert!(!held(0x03, 9, b"select 1", false) && !held(0x03, MAX_KILL_BYTES + 1, b"kill", false));
        assert!(held(0x03, 9, b"\0\x01kil", true) && held(0x03, 9, b"\x01\x01", true) && held(0x03, 9, b"\0", true));
        assert!(!held(0x03, 9, b"\0\x01select 1", true));
        assert!(held(0x0c, 5, b"", false) && !held(0x0c, 4, b"", false) && !held(0x16, 7, b"kill 1", false));
    }
}
