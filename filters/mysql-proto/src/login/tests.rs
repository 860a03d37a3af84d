//! Memory that a login holds. `tests/login_*.rs` test its behaviour.

use super::*;
use crate::secret::SecretBytes;
use proptest::prelude::*;

struct NoKey;

impl PasswordKey for NoKey {
    fn public_pem(&self) -> &[u8] {
        b"none"
    }

    fn decrypt(&self, _: &[u8]) -> Option<SecretBytes> {
        None
    }
}

/// A greeting of a server with or without TLS. With TLS the client's `sha256_password` response is held back.
fn greeting(tls: bool) -> Vec<u8> {
    let low = if tls { [0x01, 0x8a] } else { [0x01, 0x82] };
    let mut payload = b"\x0a8.0\0\x01\0\0\0abcdefgh\0".to_vec();
    payload.extend(low);
    payload.extend([46, 2, 0, 0x08, 0, 21]);
    payload.extend([0; 10]);
    payload.extend(b"ijklmnopqrst\0sha256_password\0");
    packet(0, &payload)
}

fn packet(sequence: u8, payload: &[u8]) -> Vec<u8> {
    let length = payload.len();
    let mut packet = Header { length, sequence }.bytes().to_vec();
    packet.extend(payload);
    packet
}

/// A response of the maximum size that requests the key of `sha256_password`.
fn largest_response() -> Vec<u8> {
    let mut payload = [0x00, 0x82, 0x08, 0].to_vec();
    payload.resize(HEAD, 0);
    payload.extend(b"root\0\x01\x01sha256_password\0");
    payload.resize(handshake_response::MAX_RESPONSE_BYTES, 0);
    packet(1, &payload)
}

#[test]
fn login_allocates_nothing_for_bytes_not_yet_received() {
    let mut login = Login::new(RULES);
    let mut out = Output::default();
    login.on_node_bytes(&greeting(false), &mut out);
    login.on_client_bytes(&largest_response()[..4], &NoKey, &mut out);
    assert!(login.held_bytes() < 1024, "{}", login.held_bytes());
}

#[test]
fn debug_output_hides_bytes_for_the_node() {
    let mut out = Output::default();
    out.onward.extend_from_slice(b"secret");
    let shown = format!("{out:?}");
    assert!(!shown.contains("secret") && !shown.contains("115, 101"), "{shown}");
}

#[test]
fn largest_login_holds_at_most_two_client_packets() {
    let mut login = Login::new(RULES);
    let mut out = Output::default();
    login.on_node_bytes(&greeting(true), &mut out);
    for piece in largest_response().chunks(1000) {
        assert_eq!(login.on_client_bytes(piece, &NoKey, &mut out), (piece.len(), Progress::More));
    }
    assert!(login.held_response.is_some() && login.held_bytes() >= handshake_response::MAX_RESPONSE_BYTES);
    let next = packet(3, &vec![5; handshake_response::MAX_RESPONSE_BYTES]);
    for piece in next[..next.len() - 1].chunks(1000) {
        assert_eq!(login.on_client_bytes(piece, &NoKey, &mut out), (piece.len(), Progress::More));
        // A growing buffer has at most twice the capacity that it needs.
        assert!(login.held_bytes() <= 2 * 2 * (handshake_response::MAX_RESPONSE_BYTES + 1024));
    }
    let (_, progress) = login.on_client_bytes(&[5], &NoKey, &mut out);
    assert_eq!(progress, Progress::Rejected(ProxyError::PasswordUnreadable));
    assert_eq!(login.held_bytes(), 0, "a finished login holds no memory");
}

const RULES: Rules = Rules {
    client_tls: ClientTls::Optional,
    node_tls: NodeTls::Preferred,
    compression: Compression::Off,
    allow_cleartext_backend: false,
};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn held_memory_is_bounded_by_the_bytes_received(
        sizes in prop::collection::vec(1_usize..3000, 1..20),
        is_node_sending: bool,
        next in prop::collection::vec(any::<u8>(), 1..3000),
    ) {
        let mut login = Login::new(RULES);
        let mut out = Output::default();
        login.on_node_bytes(&greeting(true), &mut out);
        let mut received = 0;
        let response = largest_response();
        let whole = [&response[..], &packet(3, &next)].concat();
        let mut rest = &whole[..];
        for size in sizes.into_iter().cycle() {
            let (piece, behind) = rest.split_at(size.min(rest.len()));
            rest = behind;
            received += piece.len();
            login.on_client_bytes(piece, &NoKey, &mut out);
            if is_node_sending {
                received += 1;
                login.on_node_bytes(&[0], &mut out);
            }
            let held = login.held_bytes();
            prop_assert!(held <= 2 * received + 1024, "{held} bytes after {received}");
            if rest.is_empty() {
                break;
            }
            let is_collecting = !is_node_sending || received < 4;
            prop_assert!(!is_collecting || held >= piece.len().min(received), "{held} bytes after {received}");
        }
    }
}
