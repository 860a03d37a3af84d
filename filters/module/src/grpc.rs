//! gRPC's frame around the message of a unary call.

use prost::Message;

/// The cluster of the control planes in the bootstrap.
pub(crate) const CONTROL_PLANE_CLUSTER: &str = "tidevoy_control_plane";

/// Bytes of the header of a gRPC message: a flag for compression, and the length
/// (<https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md>, `Length-Prefixed-Message`).
const HEADER_BYTES: usize = 5;

/// The body of a gRPC request with one message.
pub(crate) fn framed(message: &impl Message) -> Vec<u8> {
    let length = message.encoded_len();
    let mut body = Vec::with_capacity(HEADER_BYTES + length);
    body.push(0);
    body.extend(u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes());
    body.extend(message.encode_to_vec());
    body
}

/// The message of a gRPC response. None: the body has no message, or an invalid one.
pub(crate) fn unframed<M: Message + Default>(body: &[u8]) -> Option<M> {
    let (header, message) = body.split_at_checked(HEADER_BYTES)?;
    let length = u32::from_be_bytes(header[1..].try_into().ok()?);
    (header[0] == 0 && usize::try_from(length) == Ok(message.len())).then(|| M::decode(message).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, PartialEq, Message)]
    struct ReportResponse {
        #[prost(uint64, tag = "1")]
        sequence: u64,
    }

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
