//! A login that continues at another node, because the first one sends its greeting and then says that it is full (1040).

mod login_parties;

use login_parties::*;
use wire::capability::Capabilities;
use wire::login::{Attempt, Login, Next, NodeTls, Output, Progress, Rules};

const PLUGIN: &str = "mysql_native_password";
const FULL: &[u8] = b"\xff\x10\x04#08004Too many connections";

fn greets(offered: Capabilities) -> Vec<u8> {
    frame(0, &greeting(offered, "8.0.11-TiDB-v8.5.3", 0, PLUGIN))
}

/// What a node without TLS offers.
fn plain_offer() -> Capabilities {
    Server::TiDb.capabilities(false)
}

/// A login whose first node has sent its greeting and received the client's response.
fn begun(node_tls: NodeTls, client: &[u8]) -> Login {
    let mut login = Login::new(Rules { node_tls, allow_cleartext_backend: true, ..RULES });
    let mut out = Output::default();
    let offered = Server::TiDb.capabilities(node_tls != NodeTls::Disabled);
    assert_eq!(login.node(&greets(offered), &mut out).1, Progress::More);
    assert_eq!(login.client(&frame(1, client), &Key, &mut out).1, Progress::More);
    login
}

fn plain() -> Login {
    begun(NodeTls::Disabled, &response(CLIENT, b"hash", PLUGIN))
}

fn attempt() -> Attempt {
    plain().attempt_elsewhere().expect("the client can answer another greeting")
}

#[test]
fn the_client_answers_another_salt_and_the_login_goes_on() {
    let mut login = plain();
    assert!(login.is_full(&frame(2, FULL)));
    let mut attempt = login.attempt_elsewhere().expect("the client can answer another greeting");
    let Next::Send(sent) = attempt.take(&greets(plain_offer())) else { panic!("no login") };
    assert_eq!(sent[3], 1);
    let expected = [&sent[..36], b"root\0\0tidevoy_asks_anew\0"].concat();
    assert!(sent.starts_with(&expected), "without the answer to the first salt");
    let switch = frame(2, &switch(PLUGIN, OTHER_SALT));
    assert_eq!(attempt.take(&switch[..9]), Next::Wait);
    assert_eq!(attempt.take(&switch[9..]), Next::Answer(switch.clone()));
    login.goes_on_elsewhere();
    let mut out = Output::default();
    assert_eq!(login.node(&switch, &mut out), (switch.len(), Progress::More));
    assert_eq!(out.onward, switch);
    let answer = frame(3, b"another hash");
    let mut out = Output::default();
    assert_eq!(login.client(&answer, &Key, &mut out).1, Progress::More);
    assert_eq!(out.onward, answer);
    assert!(matches!(login.node(&frame(4, OK), &mut Output::default()).1, Progress::Established(_)));
}

#[test]
fn with_tls_the_ssl_request_goes_first_and_the_node_sends_nothing_before_the_handshake() {
    let offered = Server::TiDb.capabilities(true);
    let login = begun(NodeTls::Required, &response(CLIENT, b"hash", PLUGIN));
    assert!(login.is_full(&frame(3, FULL)));
    let attempt = login.attempt_elsewhere().expect("the client can answer another greeting");
    let (mut with_tls, mut without_tls, mut too_early) = (attempt.clone(), attempt.clone(), attempt);
    assert_eq!(with_tls.take(&greets(offered)), Next::StartTls(login.node_ssl_request().expect("TLS")));
    assert_eq!(with_tls.clone().take(b"x"), Next::Invalid);
    assert_eq!(with_tls.secured()[3], 2);
    assert_eq!(without_tls.take(&greets(plain_offer())), Next::Unfit, "no TLS there");
    assert_eq!(too_early.take(&[greets(offered), frame(1, b"\xfe")].concat()), Next::Invalid);
}

#[test]
fn each_reason_why_a_node_cannot_take_the_login_is_distinguished() {
    let to_greeting = |bytes: &[u8]| attempt().take(bytes);
    assert_eq!(to_greeting(&frame(0, b"\xff\x10\x04Too many connections")), Next::Full);
    assert_eq!(to_greeting(&frame(0, b"\xff\x1d\x04Server shutdown in progress")), Next::Error);
    assert_eq!(to_greeting(b"HTTP/1.1 400 Bad Request\r\n\r\n"), Next::Invalid);
    assert_eq!(to_greeting(&greets(plain_offer().without(Capabilities::DEPRECATE_EOF))), Next::Unfit);
    let to_answer = |payload: &[u8]| {
        let mut attempt = attempt();
        attempt.take(&greets(plain_offer()));
        attempt.take(&frame(2, payload))
    };
    assert_eq!(to_answer(FULL), Next::Full);
    let denied = b"\xff\x15\x04#28000Access denied";
    assert_eq!(to_answer(denied), Next::Answer(frame(2, denied)));
}

#[test]
fn only_the_first_answer_to_the_login_says_that_a_node_is_full() {
    let mut login = plain();
    assert!(!login.is_full(&frame(2, b"\xff\x15\x04#28000Access denied")));
    assert!(!login.is_full(&frame(2, FULL)[..9]), "not all of it is there");
    login.node(&frame(2, &switch(PLUGIN, OTHER_SALT)), &mut Output::default());
    assert!(!login.is_full(&frame(3, FULL)), "the client already knows the salt of that node");
}

#[test]
fn a_client_without_plugins_cannot_answer_another_greeting() {
    let claimed = CLIENT.without(Capabilities::CONNECT_ATTRS);
    for claimed in [claimed.without(Capabilities::PLUGIN_AUTH), claimed] {
        let response = [&head(claimed)[..], b"root\0\x04hash"].concat();
        assert!(begun(NodeTls::Disabled, &response).attempt_elsewhere().is_none());
    }
}
