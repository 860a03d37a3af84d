//! Unary gRPC calls to the control plane, which Envoy itself sends.

use std::time::Duration;

use envoy_abi::http_callout::{HttpClient, HttpRequest, SendError};
use prost::Message;

/// The cluster of the control planes in the bootstrap.
const CONTROL_PLANE_CLUSTER: &str = "tidevoy_control_plane";

/// Codes of gRPC (<https://github.com/grpc/grpc/blob/master/doc/statuscodes.md>).
pub(crate) const INVALID_ARGUMENT: &str = "3";
pub(crate) const UNIMPLEMENTED: &str = "12";
pub(crate) const UNAVAILABLE: &str = "14";

/// A method of the control plane.
pub(crate) struct Method {
    pub(crate) path: &'static str,
    /// How long a call may take.
    pub(crate) timeout: Duration,
}

impl Method {
    /// Calls the method with a [`framed`] message. See [`HttpClient::post`].
    pub(crate) fn call(&self, http: &HttpClient, tag: u64, body: &[u8]) -> Result<(), SendError> {
        let timeout = format!("{}m", self.timeout.as_millis());
        http.post(
            tag,
            &HttpRequest {
                cluster: CONTROL_PLANE_CLUSTER,
                host: CONTROL_PLANE_CLUSTER,
                path: self.path,
                headers: &[("content-type", "application/grpc"), ("te", "trailers"), ("grpc-timeout", &timeout)],
                body,
                timeout: self.timeout,
            },
        )
    }
}

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

/// Returns the message in the body of a gRPC response; None if the body does not hold exactly one valid message.
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
