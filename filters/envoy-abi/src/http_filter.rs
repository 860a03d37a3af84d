//! The HTTP filter: answers every request that reaches it, and lets none pass.

use core::ptr;

use crate::guard::{guarded, unused_hooks};
use crate::module::{configured, destroyed, module};
use crate::sys::{self, Buffer, Envoy, HttpHeader, Ours};

/// Answers requests. Called on all workers, concurrently.
pub trait Responder: Send + Sync {
    /// Called for each request; its method, path and body do not matter.
    fn respond(&self) -> Response;
}

/// An HTTP response with a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    pub status: u32,
    pub body: String,
}

type ResponderHandle = Box<dyn Responder>;

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_config_new(_: Envoy, name: Buffer, config: Buffer) -> Ours {
    // SAFETY: both live until this hook returns.
    let (name, config) = unsafe { (name.text(), config.bytes()) };
    configured("HTTP filter", &name, || module()?.http_filter(&name, config))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_http_filter_config_destroy(responder: Ours) {
    // SAFETY: created by the hook above; Envoy destroys it once.
    unsafe { destroyed::<ResponderHandle>("HTTP filter", responder) }
}

/// A request has no state of its own, so the responder itself stands for its filter. It outlives its requests.
#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_new(responder: Ours, _: Envoy) -> Ours {
    responder
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_destroy(_: Ours) {}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_http_filter_request_headers(envoy: Envoy, ours: Ours, _: bool) -> u32 {
    // SAFETY: Envoy passes what `new` returned.
    let responder = unsafe { &*ours.cast::<ResponderHandle>() };
    let failed = Response { status: 500, body: "a bug: see Envoy's log\n".to_owned() };
    let response = guarded("http_filter_request_headers", failed, || responder.respond());
    // SAFETY: Envoy's own filter, in one of its hooks; Envoy copies the body. There are no headers and no details.
    unsafe {
        sys::http_send_response(
            envoy,
            response.status,
            ptr::null_mut::<HttpHeader>(),
            0,
            Buffer::of(response.body.as_bytes()),
            Buffer::EMPTY,
        );
    }
    sys::STOP_ITERATION
}

// Envoy rejects a module without these hooks. Those with a result let a request or a response continue.
unused_hooks! {
    envoy_dynamic_module_on_http_filter_request_body(Envoy, Ours, bool) -> u32;
    envoy_dynamic_module_on_http_filter_request_trailers(Envoy, Ours) -> u32;
    envoy_dynamic_module_on_http_filter_response_headers(Envoy, Ours, bool) -> u32;
    envoy_dynamic_module_on_http_filter_response_body(Envoy, Ours, bool) -> u32;
    envoy_dynamic_module_on_http_filter_response_trailers(Envoy, Ours) -> u32;
    envoy_dynamic_module_on_http_filter_stream_complete(Envoy, Ours);
    envoy_dynamic_module_on_http_filter_http_callout_done(
        Envoy, Ours, u64, u32, *const HttpHeader, usize, *const Buffer, usize
    );
    envoy_dynamic_module_on_http_filter_http_stream_headers(Envoy, Ours, u64, *const HttpHeader, usize, bool);
    envoy_dynamic_module_on_http_filter_http_stream_data(Envoy, Ours, u64, *const Buffer, usize, bool);
    envoy_dynamic_module_on_http_filter_http_stream_trailers(Envoy, Ours, u64, *const HttpHeader, usize);
    envoy_dynamic_module_on_http_filter_http_stream_complete(Envoy, Ours, u64);
    envoy_dynamic_module_on_http_filter_http_stream_reset(Envoy, Ours, u64, u32);
    envoy_dynamic_module_on_http_filter_scheduled(Envoy, Ours, u64);
    envoy_dynamic_module_on_http_filter_downstream_above_write_buffer_high_watermark(Envoy, Ours);
    envoy_dynamic_module_on_http_filter_downstream_below_write_buffer_low_watermark(Envoy, Ours);
}
