//! The messages of the command channel, as in `controlplane/sessions/commands.proto`.

use prost::{Message, Oneof};

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PollRequest {
    #[prost(string, tag = "1")]
    pub(crate) instance: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PollResponse {
    #[prost(message, repeated, tag = "1")]
    pub(crate) commands: Vec<CommandMessage>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct CommandMessage {
    #[prost(fixed64, tag = "1")]
    pub(crate) id: u64,
    #[prost(string, tag = "2")]
    pub(crate) instance: String,
    #[prost(oneof = "CommandContent", tags = "3, 4, 5")]
    pub(crate) content: Option<CommandContent>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum CommandContent {
    #[prost(message, tag = "3")]
    List(ListSessions),
    #[prost(message, tag = "4")]
    Find(FindSessions),
    #[prost(message, tag = "5")]
    End(EndSession),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ListSessions {
    #[prost(string, tag = "1")]
    pub(crate) user: String,
    #[prost(string, tag = "2")]
    pub(crate) node: String,
    #[prost(string, tag = "3")]
    pub(crate) client: String,
    #[prost(uint32, tag = "4")]
    pub(crate) limit: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct FindSessions {
    #[prost(uint64, tag = "1")]
    pub(crate) id: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct EndSession {
    #[prost(uint64, tag = "1")]
    pub(crate) connection: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ReportRequest {
    #[prost(string, tag = "1")]
    pub(crate) instance: String,
    #[prost(message, repeated, tag = "2")]
    pub(crate) results: Vec<ResultMessage>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ResultMessage {
    #[prost(fixed64, tag = "1")]
    pub(crate) command: u64,
    #[prost(bool, tag = "2")]
    pub(crate) is_incomplete: bool,
    #[prost(message, repeated, tag = "3")]
    pub(crate) sessions: Vec<SessionMessage>,
    #[prost(uint64, tag = "4")]
    pub(crate) total: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct SessionMessage {
    #[prost(uint64, tag = "1")]
    pub(crate) connection: u64,
    #[prost(uint32, tag = "2")]
    pub(crate) id: u32,
    #[prost(uint32, tag = "3")]
    pub(crate) node_id: u32,
    #[prost(string, tag = "4")]
    pub(crate) client: String,
    #[prost(string, tag = "5")]
    pub(crate) user: String,
    #[prost(string, tag = "6")]
    pub(crate) database: String,
    #[prost(string, tag = "7")]
    pub(crate) node: String,
    #[prost(string, tag = "8")]
    pub(crate) state: String,
    #[prost(uint64, tag = "9")]
    pub(crate) milliseconds_in_state: u64,
    #[prost(uint64, optional, tag = "10")]
    pub(crate) milliseconds_logged_in: Option<u64>,
    #[prost(uint32, tag = "11")]
    pub(crate) moves: u32,
    #[prost(bytes = "vec", tag = "12")]
    pub(crate) digest: Vec<u8>,
    #[prost(string, tag = "13")]
    pub(crate) text: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ResolveRequest {
    #[prost(string, tag = "1")]
    pub(crate) instance: String,
    #[prost(uint64, tag = "2")]
    pub(crate) id: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ResolveResponse {
    #[prost(uint32, tag = "1")]
    pub(crate) node_id: u32,
    #[prost(string, tag = "2")]
    pub(crate) refusal: String,
}
