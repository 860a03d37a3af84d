//! A login that goes on at another node, because the first one greets and then answers that it is full.

mod login_parties;

use login_parties::*;
use wire::capability::Capabilities;
use wire::login::{Attempt, Login, Next, NodeTls, Output, Progress, Rules};

const PLUGIN: &str = "mysql_native_password";
const FULL: &[u8] = b"\xff\x10\x04#08004Too many connections";

fn greets(offered: Capabilities) -> Vec<u8> {
    frame(0, &greeting(offered, "8.0.11-TiDB-v8.5.3", 0, PLUGIN))
}

/// What the nodes offer.
fn plain_offer() -> Capabilities {
    Server::TiDb.capabilities(false)
}

/// A login whose first node has greeted and got the client's response.
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
    let begins = [&sent[..36], b"root\0\0tidevoy_asks_anew\0"].concat();
    assert!(sent.starts_with(&begins), "without the answer to the first salt");
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
fn with_tls_the_request_goes_first_and_nothing_may_come_before_tls_stands() {
    let offered = Server::TiDb.capabilities(true);
    let login = begun(NodeTls::Required, &response(CLIENT, b"hash", PLUGIN));
    assert!(login.is_full(&frame(3, FULL)));
    let attempt = login.attempt_elsewhere().expect("the client can answer another greeting");
    let (mut one, mut other, mut another) = (attempt.clone(), attempt.clone(), attempt);
    assert_eq!(one.take(&greets(offered)), Next::StartTls(login.node_ssl_request().expect("TLS")));
    assert_eq!(one.clone().take(b"x"), Next::Invalid);
    assert_eq!(one.secured()[3], 2);
    assert_eq!(other.take(&greets(plain_offer())), Next::Unfit, "no TLS there");
    assert_eq!(another.take(&[greets(offered), frame(1, b"\xfe")].concat()), Next::Invalid);
}

#[test]
fn a_node_that_cannot_take_it_is_known_by_its_reason() {
    let greets_so = |bytes: &[u8]| attempt().take(bytes);
    assert_eq!(greets_so(&frame(0, b"\xff\x10\x04Too many connections")), Next::Full);
    assert_eq!(greets_so(&frame(0, b"\xff\x1d\x04Server shutdown in progress")), Next::Error);
    assert_eq!(greets_so(b"HTTP/1.1 400 Bad Request\r\n\r\n"), Next::Invalid);
    assert_eq!(greets_so(&greets(plain_offer().without(Capabilities::DEPRECATE_EOF))), Next::Unfit);
    let answers = |payload: &[u8]| {
        let mut attempt = attempt();
        attempt.take(&greets(plain_offer()));
        attempt.take(&frame(2, payload))
    };
    assert_eq!(answers(FULL), Next::Full);
    let denied = b"\xff\x15\x04#28000Access denied";
    assert_eq!(answers(denied), Next::Answer(frame(2, denied)));
}

#[test]
fn only_the_answer_to_the_response_says_that_a_node_is_full() {
    let mut login = plain();
    assert!(!login.is_full(&frame(2, b"\xff\x15\x04#28000Access denied")));
    assert!(!login.is_full(&frame(2, FULL)[..9]), "not all of it is there");
    login.node(&frame(2, &switch(PLUGIN, OTHER_SALT)), &mut Output::default());
    assert!(!login.is_full(&frame(3, FULL)), "the client has answered to that salt");
}

#[test]
fn a_client_without_plugins_cannot_answer_another_greeting() {
    let claimed = CLIENT.without(Capabilities::CONNECT_ATTRS);
    for claimed in [claimed.without(Capabilities::PLUGIN_AUTH), claimed] {
        let response = [&head(claimed)[..], b"root\0\x04hash"].concat();
        assert!(begun(NodeTls::Disabled, &response).attempt_elsewhere().is_none());
    }
}
