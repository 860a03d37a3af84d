//! The responses of the server, packet by packet, without I/O.
//!
//! They are tracked and counted as by the module that has captured the statements, so that results are comparable.

use mysql_proto::capability::Capabilities;
use mysql_proto::command::Command;
use mysql_proto::packet::packets;
use mysql_proto::tracker::{CommandObserver, CommandOutcome, ResultSize, Tracker, TrackerState};
use traffic_files::response::ResponseContent;

/// What the caller does next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ResponseStep {
    /// Read the next packet.
    Read,
    /// The server asks for a file (LOAD DATA LOCAL). Send this empty one, then read the next packet.
    SendEmptyFile(Vec<u8>),
    Done,
}

/// The server has sent something that is no response to the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the server's response is not MySQL's protocol")]
pub(crate) struct InvalidResponse;

/// The response to one command.
#[derive(Default)]
pub(crate) struct Response {
    pub(crate) content: ResponseContent,
    /// The id of the statement that COM_STMT_PREPARE has prepared.
    pub(crate) prepared_id: Option<u32>,
    /// The status flags at its end. None: it is not complete, has failed, or the command has no response.
    pub(crate) status: Option<u16>,
    /// None: it is not complete.
    outcome: Option<CommandOutcome>,
}

impl Response {
    /// The server's error. 0: none.
    pub(crate) fn error(&self) -> u16 {
        if let Some(CommandOutcome::Error(code)) = self.outcome { code } else { 0 }
    }

    /// None: there was no result set, or an error.
    pub(crate) fn checksum(&self) -> Option<u64> {
        self.content.checksum(self.error())
    }
}

impl CommandObserver for Response {
    fn wants_rows(&self) -> bool {
        true
    }

    fn on_row_bytes(&mut self, bytes: &[u8]) {
        self.content.on_row_bytes(bytes);
    }

    fn on_prepared(&mut self, statement: u32) {
        self.prepared_id = Some(statement);
    }

    fn on_result_ended(&mut self, _: CommandOutcome, size: ResultSize, _: bool) {
        self.content.on_result_ended(size);
    }

    fn on_command_ended(&mut self, _: Command, outcome: CommandOutcome) {
        self.outcome = Some(outcome);
    }
}

/// Follows the commands of a connection, one at a time.
pub(crate) struct CommandResponses(Tracker);

impl CommandResponses {
    pub(crate) fn new(capabilities: Capabilities) -> Self {
        Self(Tracker::new(capabilities))
    }

    /// The client sends a command. Returns whether a response follows.
    pub(crate) fn on_request(&mut self, packets: &[u8], response: &mut Response) -> bool {
        self.0.on_client_bytes(packets, response);
        response.outcome.is_none()
    }

    /// Handles a packet of the server, with its header.
    pub(crate) fn receive(
        &mut self,
        sequence: u8,
        packet: &[u8],
        response: &mut Response,
    ) -> Result<ResponseStep, InvalidResponse> {
        self.0.on_node_bytes(packet, response);
        if let Some(outcome) = response.outcome {
            response.status = (outcome == CommandOutcome::Ok).then(|| self.0.status());
            return Ok(ResponseStep::Done);
        }
        if self.0.state() == TrackerState::Opaque {
            return Err(InvalidResponse);
        }
        if self.0.expects_command() {
            return Ok(ResponseStep::Read);
        }
        let empty = packets(b"", sequence.wrapping_add(1));
        self.0.on_client_bytes(&empty, response);
        Ok(ResponseStep::SendEmptyFile(empty))
    }
}

#[cfg(test)]
mod tests;
