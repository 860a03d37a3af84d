//! The messages of a report, as in `controlplane/observe/envoy_reports/statements.proto`.

use prost::Message;

pub(super) use crate::grpc::{framed, unframed};

#[derive(Clone, PartialEq, Message)]
pub(super) struct ReportRequest {
    #[prost(string, tag = "1")]
    pub(super) instance: String,
    #[prost(uint64, tag = "2")]
    pub(super) sequence: u64,
    #[prost(uint32, tag = "3")]
    pub(super) milliseconds: u32,
    #[prost(message, repeated, tag = "4")]
    pub(super) statements: Vec<StatementMessage>,
    #[prost(message, repeated, tag = "5")]
    pub(super) rows: Vec<RowMessage>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct StatementMessage {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) digest: Vec<u8>,
    #[prost(string, tag = "2")]
    pub(super) text: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RowMessage {
    #[prost(uint32, tag = "1")]
    pub(super) statement: u32,
    #[prost(string, tag = "2")]
    pub(super) user: String,
    #[prost(string, tag = "3")]
    pub(super) node: String,
    #[prost(uint64, tag = "4")]
    pub(super) count: u64,
    #[prost(uint64, tag = "5")]
    pub(super) errors: u64,
    #[prost(uint64, tag = "6")]
    pub(super) rows: u64,
    #[prost(uint64, tag = "7")]
    pub(super) request_bytes: u64,
    #[prost(uint64, tag = "8")]
    pub(super) response_bytes: u64,
    #[prost(uint64, tag = "9")]
    pub(super) microseconds: u64,
    #[prost(uint64, tag = "10")]
    pub(super) max_microseconds: u64,
    #[prost(uint64, repeated, tag = "11")]
    pub(super) latency: Vec<u64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ReportResponse {
    #[prost(uint64, tag = "1")]
    pub(super) sequence: u64,
}
