//! The messages of a report, as in `controlplane/observe/envoy_reports/statements.proto`, and gRPC's frame around them.

use prost::Message;

/// Bytes of the header of a gRPC message: a flag for compression, and the length
/// (<https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md>, `Length-Prefixed-Message`).
const HEADER_BYTES: usize = 5;

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

/// The body of a gRPC request with one message.
pub(super) fn framed(message: &impl Message) -> Vec<u8> {
    let length = message.encoded_len();
    let mut body = Vec::with_capacity(HEADER_BYTES + length);
    body.push(0);
    body.extend(u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes());
    body.extend(message.encode_to_vec());
    body
}

/// The message of a gRPC response. None: the body has no message, or an invalid one.
pub(super) fn unframed<M: Message + Default>(body: &[u8]) -> Option<M> {
    let (header, message) = body.split_at_checked(HEADER_BYTES)?;
    let length = u32::from_be_bytes(header[1..].try_into().ok()?);
    (header[0] == 0 && usize::try_from(length) == Ok(message.len())).then(|| M::decode(message).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_has_the_length_of_its_message() {
        let body = framed(&ReportResponse { sequence: 300 });
        assert_eq!(body, [0, 0, 0, 0, 3, 0x08, 0xac, 0x02]);
        assert_eq!(unframed(&body), Some(ReportResponse { sequence: 300 }));
    }

    #[test]
    fn an_invalid_body_is_no_message() {
        for body in [&b""[..], b"\0\0\0\0", b"\0\0\0\0\x01", b"\x01\0\0\0\0", b"\0\0\0\0\x01\xff", b"\0\0\0\0\0x"] {
            assert_eq!(unframed::<ReportResponse>(body), None, "{body:?}");
        }
        assert_eq!(unframed(b"\0\0\0\0\0"), Some(ReportResponse::default()));
    }
}
