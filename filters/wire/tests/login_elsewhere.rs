//! A login that goes on at another node, because the first one is full behind its greeting.

use wire::capability::Capabilities;
use wire::login::{Attempt, ClientTls, Compression, Login, Next, NodeTls, Output, PasswordKey, Progress, Rules};
use wire::packet::Header;

struct NoKey;

impl PasswordKey for NoKey {
    fn public_pem(&self) -> &[u8] {
        b"none"
    }

    fn decrypt(&self, _: &[u8]) -> Option<Vec<u8>> {
        None
    }
}

const OFFERED: Capabilities = Capabilities(0x0108_8a01);
const FULL: &[u8] = b"\xff\x10\x04#08004Too many connections";

fn packet(sequence: u8, payload: &[u8]) -> Vec<u8> {
    [&Header { length: payload.len(), sequence }.bytes()[..], payload].concat()
}

fn greeting(offered: Capabilities) -> Vec<u8> {
    let [a, b, c, d] = offered.0.to_le_bytes();
    let mut payload = b"\x0a8.0.11-TiDB-v8.5.3\0\x01\0\0\0saltsalt\0".to_vec();
    payload.extend([a, b, 46, 2, 0, c, d, 21]);
    payload.extend([0; 10]);
    payload.extend(b"moresaltmore\0mysql_native_password\0");
    packet(0, &payload)
}

fn response(claimed: Capabilities, plugin: &[u8]) -> Vec<u8> {
    let mut payload = claimed.0.to_le_bytes().to_vec();
    payload.resize(32, 0);
    payload.extend(b"anna\0\x04hash");
    payload.extend(plugin);
    packet(1, &payload)
}

/// A login whose first node has greeted and got the client's response.
fn begun(node_tls: NodeTls, offered: Capabilities, client: &[u8]) -> Login {
    let mut login = Login::new(Rules {
        client_tls: ClientTls::Disabled,
        node_tls,
        compression: Compression::Off,
        allow_cleartext_backend: true,
    });
    let mut out = Output::default();
    assert_eq!(login.node(&greeting(offered), &mut out).1, Progress::More);
    assert_eq!(login.client(client, &NoKey, &mut out).1, Progress::More);
    login
}

fn claimed() -> Capabilities {
    OFFERED.without(Capabilities::SSL)
}

fn plain() -> Login {
    begun(NodeTls::Disabled, claimed(), &response(claimed(), b"mysql_native_password\0"))
}

fn attempt() -> Attempt {
    plain().attempt_elsewhere().expect("it can be asked anew")
}

#[test]
fn the_client_is_asked_anew_and_the_login_goes_on() {
    let mut login = plain();
    assert!(login.is_full(&packet(2, FULL)));
    let mut attempt = login.attempt_elsewhere().expect("it can be asked anew");
    let Next::Send(sent) = attempt.take(&greeting(claimed())) else { panic!("no login") };
    assert_eq!(sent[3], 1);
    assert!(sent.ends_with(b"anna\0\0tidevoy_asks_anew\0"), "without the answer to another salt");
    let switch = packet(2, b"\xfemysql_native_password\0other salt, 20 byte\0");
    assert_eq!(attempt.take(&switch[..9]), Next::Wait);
    assert_eq!(attempt.take(&switch[9..]), Next::Answer(switch.clone()));
    login.goes_on_elsewhere();
    let mut out = Output::default();
    assert_eq!(login.node(&switch, &mut out), (switch.len(), Progress::More));
    assert_eq!(out.onward, switch);
    let answer = packet(3, b"another hash");
    let mut out = Output::default();
    assert_eq!(login.client(&answer, &NoKey, &mut out).1, Progress::More);
    assert_eq!(out.onward, answer);
    let ok = packet(4, &[0, 0, 0, 2, 0, 0, 0]);
    assert!(matches!(login.node(&ok, &mut Output::default()).1, Progress::Established(_)));
}

#[test]
fn with_tls_the_request_goes_first_and_nothing_may_come_before_tls_stands() {
    let login = begun(NodeTls::Required, OFFERED, &response(claimed(), b"mysql_native_password\0"));
    assert!(login.is_full(&packet(3, FULL)));
    let attempt = login.attempt_elsewhere().expect("it can be asked anew");
    let (mut one, mut other, mut another) = (attempt.clone(), attempt.clone(), attempt);
    assert_eq!(one.take(&greeting(OFFERED)), Next::StartTls(login.node_ssl_request().expect("TLS")));
    assert_eq!(one.clone().take(b"x"), Next::Invalid);
    assert_eq!(one.secured()[3], 2);
    assert_eq!(other.take(&greeting(claimed())), Next::Unfit, "no TLS there");
    assert_eq!(another.take(&[greeting(OFFERED), packet(1, b"\xfe")].concat()), Next::Invalid);
}

#[test]
fn a_node_that_cannot_take_it_is_told_by_its_reason() {
    let greets = |bytes: &[u8]| attempt().take(bytes);
    assert_eq!(greets(&packet(0, b"\xff\x10\x04Too many connections")), Next::Full);
    assert_eq!(greets(&packet(0, b"\xff\x1d\x04Server shutdown in progress")), Next::Error);
    assert_eq!(greets(b"HTTP/1.1 400 Bad Request\r\n\r\n"), Next::Invalid);
    assert_eq!(greets(&greeting(claimed().without(Capabilities::DEPRECATE_EOF))), Next::Unfit);
    let answers = |payload: &[u8]| {
        let mut attempt = attempt();
        attempt.take(&greeting(claimed()));
        attempt.take(&packet(2, payload))
    };
    assert_eq!(answers(FULL), Next::Full);
    let denied = b"\xff\x15\x04#28000Access denied";
    assert_eq!(answers(denied), Next::Answer(packet(2, denied)));
}

#[test]
fn only_the_answer_to_the_response_says_that_a_node_is_full() {
    let mut login = plain();
    assert!(!login.is_full(&packet(2, b"\xff\x15\x04#28000Access denied")));
    assert!(!login.is_full(&packet(2, FULL)[..9]), "not all of it is there");
    login.node(&packet(2, b"\xfemysql_native_password\0other salt, 20 byte\0"), &mut Output::default());
    assert!(!login.is_full(&packet(3, FULL)), "the client has answered to that salt");
}

#[test]
fn a_client_that_cannot_be_asked_anew_is_not() {
    let old = claimed().without(Capabilities::PLUGIN_AUTH);
    assert!(begun(NodeTls::Disabled, claimed(), &response(old, b"")).attempt_elsewhere().is_none());
    assert!(begun(NodeTls::Disabled, claimed(), &response(claimed(), b"")).attempt_elsewhere().is_none());
}
