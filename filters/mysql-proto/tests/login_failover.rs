//! A login that continues at another node, because the node that greeted then reports that it is full (1040).

mod login_parties;

use login_parties::*;
use mysql_proto::capability::Capabilities;
use mysql_proto::login::{FailoverAction, Login, LoginAttempt, NodeTls, Output, Progress, Rules};

const PLUGIN: &str = "mysql_native_password";
const FULL: &[u8] = b"\xff\x10\x04#08004Too many connections";

fn greeting_packet(offered: Capabilities) -> Vec<u8> {
    frame(0, &greeting(offered, "8.0.11-TiDB-v8.5.3", 0, PLUGIN))
}

/// The capabilities of a node without TLS.
fn plain_offer() -> Capabilities {
    Server::TiDb.capabilities(false)
}

/// A login whose first node has sent its greeting and received the client's response.
fn login_awaiting_answer(node_tls: NodeTls, client: &[u8]) -> Login {
    let mut login = Login::new(Rules { node_tls, allow_cleartext_backend: true, ..RULES });
    let mut out = Output::default();
    let offered = Server::TiDb.capabilities(node_tls != NodeTls::Disabled);
    assert_eq!(login.on_node_bytes(&greeting_packet(offered), &mut out).1, Progress::More);
    assert_eq!(login.on_client_bytes(&frame(1, client), &TestKey, &mut out).1, Progress::More);
    login
}

fn plain() -> Login {
    login_awaiting_answer(NodeTls::Disabled, &response(CLIENT, b"hash", PLUGIN))
}

fn attempt() -> LoginAttempt {
    plain().failover_attempt().expect("the client can authenticate at another node")
}

#[test]
fn login_continues_at_another_node_with_its_own_salt() {
    let mut login = plain();
    assert!(login.is_full(&frame(2, FULL)));
    let mut attempt = login.failover_attempt().expect("the client can authenticate at another node");
    let FailoverAction::Send(sent) = attempt.receive(&greeting_packet(plain_offer())) else { panic!("no login") };
    assert_eq!(sent[3], 1);
    let expected = [&sent[..36], b"root\0\0tidevoy_asks_anew\0"].concat();
    assert!(sent.starts_with(&expected), "without the answer to the first salt");
    let switch = frame(2, &switch(PLUGIN, OTHER_SALT));
    assert_eq!(attempt.receive(&switch[..9]), FailoverAction::Wait);
    assert_eq!(attempt.receive(&switch[9..]), FailoverAction::Answer(switch.clone()));
    let mut out = Output::default();
    assert_eq!(login.on_node_bytes(&switch, &mut out), (switch.len(), Progress::More));
    assert_eq!(out.onward, switch);
    let answer = frame(3, b"another hash");
    let mut out = Output::default();
    assert_eq!(login.on_client_bytes(&answer, &TestKey, &mut out).1, Progress::More);
    assert_eq!(out.onward, answer);
    assert!(matches!(login.on_node_bytes(&frame(4, OK), &mut Output::default()).1, Progress::Established(_)));
}

#[test]
fn with_tls_the_ssl_request_is_sent_first_and_earlier_bytes_of_the_node_are_invalid() {
    let offered = Server::TiDb.capabilities(true);
    let login = login_awaiting_answer(NodeTls::Required, &response(CLIENT, b"hash", PLUGIN));
    assert!(login.is_full(&frame(3, FULL)));
    let attempt = login.failover_attempt().expect("the client can authenticate at another node");
    let (mut with_tls, mut without_tls, mut too_early) = (attempt.clone(), attempt.clone(), attempt);
    assert_eq!(
        with_tls.receive(&greeting_packet(offered)),
        FailoverAction::StartTls(login.node_ssl_request().expect("TLS"))
    );
    assert_eq!(with_tls.clone().receive(b"x"), FailoverAction::Invalid);
    assert_eq!(with_tls.on_tls_established()[3], 2);
    assert_eq!(without_tls.receive(&greeting_packet(plain_offer())), FailoverAction::MissingCapability, "no TLS");
    assert_eq!(too_early.receive(&[greeting_packet(offered), frame(1, b"\xfe")].concat()), FailoverAction::Invalid);
}

#[test]
fn failover_attempt_reports_why_a_node_cannot_take_the_login() {
    let to_greeting = |bytes: &[u8]| attempt().receive(bytes);
    assert_eq!(to_greeting(&frame(0, b"\xff\x10\x04Too many connections")), FailoverAction::Full);
    assert_eq!(to_greeting(&frame(0, b"\xff\x1d\x04Server shutdown in progress")), FailoverAction::Error);
    assert_eq!(to_greeting(b"HTTP/1.1 400 Bad Request\r\n\r\n"), FailoverAction::Invalid);
    assert_eq!(
        to_greeting(&greeting_packet(plain_offer().without(Capabilities::DEPRECATE_EOF))),
        FailoverAction::MissingCapability
    );
    let to_answer = |payload: &[u8]| {
        let mut attempt = attempt();
        attempt.receive(&greeting_packet(plain_offer()));
        attempt.receive(&frame(2, payload))
    };
    assert_eq!(to_answer(FULL), FailoverAction::Full);
    let denied = b"\xff\x15\x04#28000Access denied";
    assert_eq!(to_answer(denied), FailoverAction::Answer(frame(2, denied)));
}

#[test]
fn node_is_full_only_if_its_first_answer_says_so() {
    let mut login = plain();
    assert!(!login.is_full(&frame(2, b"\xff\x15\x04#28000Access denied")));
    assert!(!login.is_full(&frame(2, FULL)[..9]), "the packet is incomplete");
    login.on_node_bytes(&frame(2, &switch(PLUGIN, OTHER_SALT)), &mut Output::default());
    assert!(!login.is_full(&frame(3, FULL)), "the client has already authenticated with that node's salt");
}

#[test]
fn login_of_a_client_without_plugins_cannot_continue_at_another_node() {
    let claimed = CLIENT.without(Capabilities::CONNECT_ATTRS);
    for claimed in [claimed.without(Capabilities::PLUGIN_AUTH), claimed] {
        let response = [&head(claimed)[..], b"root\0\x04hash"].concat();
        assert!(login_awaiting_answer(NodeTls::Disabled, &response).failover_attempt().is_none());
    }
}
