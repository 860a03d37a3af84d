//! HTTP requests of the bootstrap extension, which Envoy sends to one of its clusters.

use core::cell::{Cell, RefCell};
use core::time::Duration;
use std::collections::HashMap;

use crate::sys::{self, Buffer, Envoy, HttpHeader};

/// Sends requests, on the main thread. Envoy cancels those that are left when it stops.
pub struct HttpClient {
    config: Envoy,
    /// The tags of the requests without a response, by Envoy's ids.
    tags: RefCell<HashMap<u64, u64>>,
    /// The tag of the request that is being sent, whose id is not known yet.
    sending: Cell<Option<u64>>,
}

/// A `POST` request.
#[derive(Debug, Clone, Copy)]
pub struct HttpRequest<'a> {
    /// The name of Envoy's cluster.
    pub cluster: &'a str,
    pub host: &'a str,
    pub path: &'a str,
    pub headers: &'a [(&'a str, &'a str)],
    pub body: &'a [u8],
    /// Envoy answers with status 504 after this time.
    pub timeout: Duration,
}

/// A response, without its trailers: Envoy does not pass them to modules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpResponse {
    headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl HttpResponse {
    /// `headers`: names in lower case, and values. The status is the header `:status`.
    #[must_use]
    pub fn new(headers: Vec<(String, String)>, body: Vec<u8>) -> Self {
        Self { headers, body }
    }

    /// The first header with this name.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// A copy of Envoy's response. None: the request has failed.
    ///
    /// # Safety
    /// The arguments are those of Envoy's hook, which has not returned.
    pub(crate) unsafe fn copy(
        result: u32,
        headers: (*const HttpHeader, usize),
        chunks: (*const Buffer, usize),
    ) -> Option<Self> {
        if result != sys::CALLOUT_SUCCESS {
            return None;
        }
        // SAFETY: arrays of Envoy that live until the hook returns.
        let (headers, chunks) = unsafe { (slice(headers.0, headers.1), slice(chunks.0, chunks.1)) };
        // SAFETY: as above, for the bytes that they point to.
        let text = |buffer: Buffer| unsafe { buffer.text() };
        let headers = headers.iter().map(|header| (text(header.name), text(header.value))).collect();
        // SAFETY: as above.
        let body = chunks.iter().flat_map(|chunk| unsafe { chunk.bytes() }).copied().collect();
        Some(Self { headers, body })
    }
}

impl HttpClient {
    pub(crate) fn new(config: Envoy) -> Self {
        Self { config, tags: RefCell::default(), sending: Cell::new(None) }
    }

    /// Removes a request whose response has arrived, and returns its tag. None: it was removed before.
    pub(crate) fn take_tag(&self, id: u64) -> Option<u64> {
        let known = self.tags.borrow_mut().remove(&id);
        known.or_else(|| self.sending.take())
    }

    /// Sends a request. [`crate::extension::Extension::on_response`] gets its response: later, or before this function
    /// returns, because Envoy itself answers some requests at once, for example if no host of the cluster is healthy.
    /// Then the result may be an error, too. It must not be called within `on_response`. `tag`: what `on_response` gets.
    pub fn post(&self, tag: u64, request: &HttpRequest<'_>) -> Result<(), SendError> {
        let fixed = [(":method", "POST"), (":path", request.path), ("host", request.host)];
        let headers: Vec<HttpHeader> = fixed
            .iter()
            .chain(request.headers)
            .map(|(name, value)| HttpHeader { name: Buffer::of(name.as_bytes()), value: Buffer::of(value.as_bytes()) })
            .collect();
        let mut id = 0;
        self.sending.set(Some(tag));
        // SAFETY: the configuration lives, this is the main thread, and Envoy copies headers and body.
        let result = unsafe {
            sys::extension_http_callout(
                self.config,
                &raw mut id,
                Buffer::of(request.cluster.as_bytes()),
                headers.as_ptr(),
                headers.len(),
                Buffer::of(request.body),
                u64::try_from(request.timeout.as_millis()).unwrap_or(u64::MAX),
            )
        };
        if result != sys::CALLOUT_SUCCESS {
            self.sending.set(None);
            return Err(SendError(result));
        }
        if let Some(tag) = self.sending.take() {
            self.tags.borrow_mut().insert(id, tag);
        }
        Ok(())
    }
}

/// Envoy did not send the request. Contains Envoy's `envoy_dynamic_module_type_http_callout_init_result`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendError(u32);

impl SendError {
    /// Whether the bootstrap configuration has no such cluster.
    #[must_use]
    pub const fn is_unknown_cluster(self) -> bool {
        self.0 == 2
    }
}

impl core::fmt::Display for SendError {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let reason = match self.0 {
            1 => "a header is missing",
            2 => "Envoy has no such cluster",
            4 => "no host of the cluster can be reached",
            _ => "unknown reason",
        };
        write!(formatter, "{reason} ({})", self.0)
    }
}

/// # Safety
/// An array of Envoy that lives as long as `'a`; it may be null if it is empty.
unsafe fn slice<'a, T>(start: *const T, length: usize) -> &'a [T] {
    if start.is_null() || length == 0 {
        return &[];
    }
    // SAFETY: not null, and the caller vouches for the elements.
    unsafe { core::slice::from_raw_parts(start, length) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(result: u32, headers: &[HttpHeader], chunks: &[Buffer]) -> Option<HttpResponse> {
        // SAFETY: slices that live longer than the call.
        unsafe { HttpResponse::copy(result, (headers.as_ptr(), headers.len()), (chunks.as_ptr(), chunks.len())) }
    }

    #[test]
    fn a_response_is_copied_with_all_chunks() {
        let header = HttpHeader { name: Buffer::of(b":status"), value: Buffer::of(b"200") };
        let response = copy(0, &[header], &[Buffer::of(b"ab"), Buffer::EMPTY, Buffer::of(b"c")]).expect("a response");
        assert_eq!((response.header(":status"), response.header("grpc-status")), (Some("200"), None));
        assert_eq!(response.body, b"abc");
    }

    #[test]
    fn a_failed_request_has_no_response() {
        // SAFETY: null arrays are empty.
        let response = unsafe { HttpResponse::copy(1, (core::ptr::null(), 0), (core::ptr::null(), 0)) };
        assert_eq!(response, None);
    }
}
