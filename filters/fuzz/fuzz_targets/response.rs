//! A client's response: length of replacement authentication data (2 bytes), that data, then the payload.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mysql_proto::capability::Capabilities;
use mysql_proto::handshake_response::{self, HEAD, HandshakeResponse};
use mysql_proto::packet::{HEADER, Header};

fuzz_target!(|input: &[u8]| {
    let Some((length, rest)) = input.split_first_chunk() else { return };
    let length = usize::from(u16::from_le_bytes(*length));
    let (auth, payload) = rest.split_at(length.min(rest.len()));
    let claimed = handshake_response::capabilities(payload);
    if let Some(response) = HandshakeResponse::parse(payload, claimed) {
        check_auth(payload, claimed, &response, auth);
    }
    if let Some(head) = payload.first_chunk::<HEAD>() {
        check_claim(payload, claimed.with(Capabilities::SSL));
        check_claim(payload, claimed.without(Capabilities::SSL).without(Capabilities::COMPRESS));
        let request = handshake_response::ssl_request(*head, claimed);
        assert_eq!(Header::parse(&request), Some(Header { length: HEAD, sequence: 1 }));
        assert_eq!(handshake_response::capabilities(&request[HEADER..]), claimed.with(Capabilities::SSL));
    }
});

/// Checks that only the authentication data changes.
fn check_auth(payload: &[u8], claimed: Capabilities, response: &HandshakeResponse, auth: &[u8]) {
    let before = &payload[response.auth.clone()];
    let plugin = response.plugin.clone().map(|at| &payload[at]);
    let same = response.with_auth(payload, before).expect("the original data fits");
    let read = HandshakeResponse::parse(&same, claimed).expect("still a response");
    assert_eq!(&same[read.auth.clone()], before);
    assert_eq!(read.with_auth(&same, before).as_ref(), Some(&same), "a second edit changes the result");
    let Some(changed) = response.with_auth(payload, auth) else {
        assert!(auth.len() > 255, "up to 255 bytes fit in every encoding");
        return;
    };
    assert!(changed.len() <= payload.len() + auth.len() + 3);
    let read = HandshakeResponse::parse(&changed, claimed).expect("still a response");
    let now = &changed[read.auth.clone()];
    // Data that ends with NUL cannot contain one.
    let cut = now.len() < auth.len() && auth.starts_with(now) && auth[now.len()] == 0;
    assert!(now == auth || cut, "{now:?} instead of {auth:?}");
    if !cut {
        assert_eq!(read.plugin.clone().map(|at| &changed[at]), plugin);
        assert_eq!(read.with_auth(&changed, auth).as_ref(), Some(&changed), "a second edit changes the result");
    }
}

fn check_claim(payload: &[u8], capabilities: Capabilities) {
    let mut changed = payload.to_vec();
    handshake_response::set_capabilities(&mut changed, capabilities);
    assert_eq!(changed.len(), payload.len());
    assert_eq!(handshake_response::capabilities(&changed), capabilities);
    let differences = changed.iter().zip(payload).skip(4).filter(|(a, b)| a != b).count();
    assert!(differences <= 1, "{differences} bytes were changed");
    let mut again = changed.clone();
    handshake_response::set_capabilities(&mut again, capabilities);
    assert_eq!(again, changed, "a second edit changes the result");
}
