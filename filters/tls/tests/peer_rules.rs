//! Revoked certificates, and the configuration of revocation lists.

#![allow(clippy::unwrap_used)] // In a test, a panic is the report.

mod support;

use std::fs;
use std::path::Path;

use support::{Authority, Link, Pair, Valid};
use tls::{PeerRules, TlsAcceptor, TlsConnector, TlsError, Verify};

fn rules(crl: &Path) -> PeerRules<'_> {
    PeerRules { crl: Some(crl), ..PeerRules::default() }
}

fn failure_at_acceptor(acceptor: &TlsAcceptor, connector: &TlsConnector) -> String {
    Link::new(acceptor, connector).settle().expect_err("the handshake must fail").to_string()
}

/// The error at the module's end of a connection to a node.
fn failure_at_connector(acceptor: &TlsAcceptor, connector: &TlsConnector) -> String {
    let mut link = Link::new(acceptor, connector);
    link.settle().expect_err("the handshake must fail");
    link.client.receive(b"", &mut |_| {}).expect_err("it stays failed").to_string()
}

/// A [`TlsConnector`] that plays a client with a certificate.
fn client(ca: &Authority, pair: &Pair) -> TlsConnector {
    TlsConnector::load(Some(&ca.ca), Verify::Full, Some(pair.paths()), PeerRules::default()).unwrap()
}

#[test]
fn revoked_client_certificate_is_rejected_after_a_refresh() {
    let ca = Authority::new();
    let server = ca.issue("server", &["localhost"], Valid::Now);
    let [good, bad] = ["good", "bad"].map(|name| ca.issue(name, &["client"], Valid::Now));
    let crl = ca.revoke("crl.pem", &[]);
    let acceptor = TlsAcceptor::load(&server.cert, &server.key, Some(&ca.ca), rules(&crl)).unwrap();
    // `resumes` offers its ticket in its second connection, which must not bypass the revocation.
    let resumes = client(&ca, &bad);
    for connector in [&client(&ca, &good), &client(&ca, &bad), &resumes] {
        Link::new(&acceptor, connector).assert_works();
    }
    ca.revoke("crl.pem", &[&bad]);
    assert!(acceptor.refresh().unwrap());
    Link::new(&acceptor, &client(&ca, &good)).assert_works();
    for connector in [&client(&ca, &bad), &resumes] {
        let text = failure_at_acceptor(&acceptor, connector);
        assert!(text.contains("is in tls.client.crl"), "{text}");
    }
}

#[test]
fn revoked_node_certificate_is_rejected_with_and_without_a_name_check() {
    let ca = Authority::new();
    let [good, bad] = ["good", "bad"].map(|name| ca.issue(name, &["localhost"], Valid::Now));
    let crl = ca.revoke("crl.pem", &[&bad]);
    for verify in [Verify::Full, Verify::Ca] {
        let connector = TlsConnector::load(Some(&ca.ca), verify, None, rules(&crl)).unwrap();
        Link::new(&good.acceptor(None).unwrap(), &connector).assert_works();
        let text = failure_at_connector(&bad.acceptor(None).unwrap(), &connector);
        assert!(text.contains("is in tls.backend.crl"), "{text}");
    }
    let other_name = ca.issue("elsewhere", &["elsewhere.test"], Valid::Now);
    let connector = TlsConnector::load(Some(&ca.ca), Verify::Ca, None, rules(&crl)).unwrap();
    Link::new(&other_name.acceptor(None).unwrap(), &connector).assert_works();
    // The list of files has two more between the CA and the revocation list: the connector's certificate and its key.
    let mine = ca.issue("mine", &["client"], Valid::Now);
    let connector = TlsConnector::load(Some(&ca.ca), Verify::Full, Some(mine.paths()), rules(&crl)).unwrap();
    Link::new(&good.acceptor(Some(&ca.ca)).unwrap(), &connector).assert_works();
}

#[test]
fn certificate_of_a_ca_without_a_revocation_list_is_rejected() {
    let (ca, other) = (Authority::new(), Authority::new());
    let crl = other.revoke("crl.pem", &[]);
    let connector = TlsConnector::load(Some(&ca.ca), Verify::Full, None, rules(&crl)).unwrap();
    let text = failure_at_connector(&ca.acceptor(), &connector);
    assert!(text.contains("tls.backend.crl needs a list of each CA"), "{text}");
}

#[test]
fn unusable_revocation_lists_are_rejected_and_the_old_one_stays() {
    let ca = Authority::new();
    let server = ca.issue("server", &["localhost"], Valid::Now);
    let load = |crl: &Path| TlsAcceptor::load(&server.cert, &server.key, Some(&ca.ca), rules(crl));
    let missing = ca.path("missing.pem");
    assert!(matches!(load(&missing), Err(TlsError::Read { path, .. }) if path == missing));
    for (text, expected) in [
        ("no list", "has no revocation list"),
        ("-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n", "cannot be used"),
        ("-----BEGIN X509 CRL-----\n", "not valid PEM"),
    ] {
        let crl = ca.path("bad.pem");
        fs::write(&crl, text).unwrap();
        let error = load(&crl).err().unwrap().to_string();
        assert!(error.contains(expected) && error.contains("bad.pem"), "{error}");
        let error = TlsConnector::load(Some(&ca.ca), Verify::Ca, None, rules(&crl)).err().unwrap().to_string();
        assert!(error.contains(expected) && error.contains("bad.pem"), "{error}");
    }
    let bad = ca.issue("bad", &["client"], Valid::Now);
    let crl = ca.revoke("crl.pem", &[&bad]);
    let acceptor = load(&crl).unwrap();
    fs::write(&crl, "no list").unwrap();
    assert!(acceptor.refresh().is_err());
    assert!(failure_at_acceptor(&acceptor, &client(&ca, &bad)).contains("tls.client.crl"));
}

#[test]
fn revocation_list_without_verification_is_rejected() {
    let ca = Authority::new();
    let server = ca.issue("server", &["localhost"], Valid::Now);
    let crl = ca.revoke("crl.pem", &[]);
    let error = TlsAcceptor::load(&server.cert, &server.key, None, rules(&crl)).err().unwrap();
    assert!(error.to_string().contains("certificates of the client are not verified"), "{error}");
    let error = TlsConnector::load(None, Verify::None, None, rules(&crl)).err().unwrap();
    assert!(error.to_string().contains("certificates of the TiDB server are not verified"), "{error}");
}
