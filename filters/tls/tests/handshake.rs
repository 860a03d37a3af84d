//! Which handshakes succeed, which fail, and the error texts. Both ends are in memory.

#![allow(clippy::unwrap_used)] // A panic fails the test.

mod support;

use std::fs;

use support::{Authority, Link, Valid, openssl};
use tls::{PeerRules, ReceiveResult, TlsAcceptor, TlsConnector, Verify};

fn failure(acceptor: &TlsAcceptor, connector: &TlsConnector, name: &str) -> String {
    let client = connector.connect(name).unwrap();
    let mut link = Link { server: acceptor.accept(), client, at_server: vec![], at_client: vec![] };
    let error = link.settle().expect_err("the handshake must fail").to_string();
    // The failing end sent an alert, so both ends have failed, and report that again.
    assert!(link.server.receive(b"", &mut |_| {}).is_err());
    assert!(link.client.receive(b"", &mut |_| {}).is_err());
    error
}

#[test]
fn both_ends_send_before_and_after_the_handshake() {
    let ca = Authority::new();
    let mut link = Link::new(&ca.acceptor(), &ca.connector(Verify::Full));
    link.client.send(b"early ");
    link.server.send(b"early too ");
    link.client.send(b"and more");
    link.settle().unwrap();
    assert_eq!(link.at_server, b"early and more");
    assert_eq!(link.at_client, b"early too ");
    link.assert_works();
}

#[test]
fn close_is_reported_after_all_data() {
    let ca = Authority::new();
    let mut link = Link::new(&ca.acceptor(), &ca.connector(Verify::Full));
    link.assert_works();
    link.at_client.clear();
    link.server.send(b"the final data");
    link.server.finish();
    link.server.send(b"never sent");
    link.server.finish();
    let received = support::carry(&mut link.server, usize::MAX, &mut link.client, &mut link.at_client);
    assert_eq!(received.unwrap(), ReceiveResult::Closed);
    assert_eq!(link.at_client, b"the final data");
    // The other direction is still open, and closes as well.
    link.at_server.clear();
    link.client.send(b"an answer");
    link.client.finish();
    assert!(!link.client.outgoing().is_empty());
    link.settle().unwrap();
    assert_eq!(link.at_server, b"an answer");
    assert!(link.server.outgoing().is_empty() && link.client.outgoing().is_empty());
}

#[test]
fn names_and_addresses_are_verified_according_to_the_mode() {
    let ca = Authority::new();
    let names = ["tidb-0.tidb.svc", "*.example.com", "10.1.2.3", "fd00::7"];
    let server = ca.issue("node", &names, Valid::Now).acceptor(None).unwrap();
    let full = ca.connector(Verify::Full);
    for good in ["tidb-0.tidb.svc", "TiDB-0.tidb.svc", "a.example.com", "10.1.2.3", "fd00::7", "[fd00::7]"] {
        let mut link = Link::new(&server, &full);
        link.client = full.connect(good).unwrap();
        link.assert_works();
    }
    for bad in ["tidb-1.tidb.svc", "a.b.example.com", "10.1.2.4", "fd00::8"] {
        let text = failure(&server, &full, bad);
        assert!(text.contains("tls.backend.verify to ca") || text.contains("BadCertificate"), "{text}");
        for loose in [Verify::Ca, Verify::None] {
            let node = ca.connector(loose);
            let mut link = Link::new(&server, &node);
            link.client = node.connect(bad).unwrap();
            link.assert_works();
        }
    }
    for none in ["", "no name", "a..b", "[10.1.2", "fd00::7%eth0"] {
        assert!(full.connect(none).is_err_and(|error| error.to_string().contains("neither a DNS name")));
    }
}

#[test]
fn unknown_ca_and_wrong_validity_are_rejected() {
    let (ca, other) = (Authority::new(), Authority::new());
    for verify in [Verify::Full, Verify::Ca] {
        for (valid, authority) in [(Valid::Past, &ca), (Valid::Future, &ca), (Valid::Now, &other)] {
            let server = authority.issue("bad", &["localhost"], valid).acceptor(None).unwrap();
            failure(&server, &ca.connector(verify), "localhost");
            Link::new(&server, &ca.connector(Verify::None)).assert_works();
        }
    }
}

#[test]
fn rejecting_end_reports_the_reason_and_sends_an_alert() {
    let (ca, other) = (Authority::new(), Authority::new());
    let expired = ca.issue("expired", &["localhost"], Valid::Past).acceptor(None).unwrap();
    for (server, expected) in
        [(&expired, "renew the TiDB server's certificate"), (&other.acceptor(), "set tls.backend.ca")]
    {
        let mut link = Link::new(server, &ca.connector(Verify::Full));
        let hello = support::carry(&mut link.client, usize::MAX, &mut link.server, &mut link.at_server);
        assert_eq!(hello.unwrap(), ReceiveResult::Open);
        let error = support::carry(&mut link.server, usize::MAX, &mut link.client, &mut link.at_client);
        let text = error.unwrap_err().to_string();
        assert!(text.contains(expected), "{text}");
        assert!(!link.client.outgoing().is_empty(), "the alert");
        let error = support::carry(&mut link.client, usize::MAX, &mut link.server, &mut link.at_server);
        let text = error.unwrap_err().to_string();
        assert!(text.contains("the client does not accept the certificate in tls.client.cert"), "{text}");
        assert!(link.server.outgoing().is_empty(), "an alert is not answered");
    }
}

#[test]
fn clients_need_a_certificate_of_the_client_ca() {
    let (ca, other) = (Authority::new(), Authority::new());
    let server = ca.issue("server", &["localhost"], Valid::Now).acceptor(Some(&ca.ca)).unwrap();
    let mine = ca.issue("mine", &["client"], Valid::Now);
    let node = TlsConnector::load(Some(&ca.ca), Verify::Full, Some(mine.paths()), PeerRules::default()).unwrap();
    // The second connection resumes the session of the first.
    for _ in 0..2 {
        Link::new(&server, &node).assert_works();
    }
    let text = failure(&server, &ca.connector(Verify::Full), "localhost");
    assert!(text.contains("must present a certificate"), "{text}");
    for (pair, expected) in [
        (other.issue("theirs", &["client"], Valid::Now), "tls.client.client_ca"),
        (ca.issue("old", &["client"], Valid::Past), "issue the client's certificate again"),
    ] {
        let node = TlsConnector::load(Some(&ca.ca), Verify::Full, Some(pair.paths()), PeerRules::default()).unwrap();
        let text = failure(&server, &node, "localhost");
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn every_kind_of_key_works_in_every_encoding() {
    let ca = Authority::new();
    let rsa = ["genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", "rsa8"];
    openssl(&rsa, ca.directory.path());
    openssl(&["rsa", "-in", "rsa8", "-traditional", "-out", "rsa1"], ca.directory.path());
    for curve in ["prime256v1", "secp384r1", "secp521r1"] {
        // This command's file begins with a block of parameters.
        openssl(&["ecparam", "-genkey", "-name", curve, "-out", &format!("{curve}-sec1")], ca.directory.path());
        let to8 = ["pkcs8", "-topk8", "-nocrypt", "-in", &format!("{curve}-sec1"), "-out", &format!("{curve}-8")];
        openssl(&to8, ca.directory.path());
    }
    openssl(&["genpkey", "-algorithm", "ed25519", "-out", "ed25519"], ca.directory.path());
    let keys = [
        ("rsa8", "BEGIN PRIVATE KEY"),
        ("rsa1", "BEGIN RSA PRIVATE KEY"),
        ("prime256v1-sec1", "BEGIN EC PRIVATE KEY"),
        ("prime256v1-8", "BEGIN PRIVATE KEY"),
        ("secp384r1-sec1", "BEGIN EC PRIVATE KEY"),
        ("secp384r1-8", "BEGIN PRIVATE KEY"),
        ("secp521r1-sec1", "BEGIN EC PRIVATE KEY"),
        ("secp521r1-8", "BEGIN PRIVATE KEY"),
        ("ed25519", "BEGIN PRIVATE KEY"),
    ];
    for (key, block) in keys {
        let path = ca.path(key);
        assert!(fs::read_to_string(&path).unwrap().contains(block));
        openssl(&["req", "-x509", "-new", "-key", key, "-subj", "/CN=x", "-out", "cert"], ca.directory.path());
        let server = TlsAcceptor::load(&ca.path("cert"), &path, Some(&ca.path("cert")), PeerRules::default()).unwrap();
        let node = TlsConnector::load(None, Verify::None, None, PeerRules::default()).unwrap();
        // The server requires a client's certificate, and `node` has none.
        assert!(failure(&server, &node, "localhost").contains("certificate"));
        let server = TlsAcceptor::load(&ca.path("cert"), &path, None, PeerRules::default()).unwrap();
        Link::new(&server, &node).assert_works();
        TlsConnector::load(None, Verify::None, Some((&ca.path("cert"), &path)), PeerRules::default()).unwrap();
    }
}

#[test]
fn errors_name_the_unusable_file() {
    let ca = Authority::new();
    let good = ca.issue("good", &["localhost"], Valid::Now);
    let other = ca.issue("other", &["localhost"], Valid::Now);
    let file = |name: &str, text: &str| {
        fs::write(ca.path(name), text).unwrap();
        ca.path(name)
    };
    openssl(&["genrsa", "-out", "short.key", "1024"], ca.directory.path());
    openssl(&["req", "-x509", "-new", "-key", "short.key", "-subj", "/CN=x", "-out", "short.pem"], ca.directory.path());
    let locked = ["genpkey", "-algorithm", "ed25519", "-aes256", "-pass", "pass:x", "-out", "locked.key"];
    openssl(&locked, ca.directory.path());
    let empty = file("empty", "");
    let torn = file("torn", &fs::read_to_string(&good.key).unwrap()[..80]);
    let secret = "MIIsecretsecret!!";
    let spoilt = file("spoilt", &format!("-----BEGIN PRIVATE KEY-----\n{secret}\n-----END PRIVATE KEY-----\n"));
    let no_key = file("nokey", "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n");
    let no_cert = file("nocert", "-----BEGIN CERTIFICATE-----\nc2VjcmV0\n-----END CERTIFICATE-----\n");
    let cases = [
        (ca.path("absent"), good.key.clone(), "absent", "cannot read"),
        (good.cert.clone(), ca.path("absent"), "absent", "cannot read"),
        (empty.clone(), good.key.clone(), "empty", "has no certificate"),
        (no_cert, good.key.clone(), "nocert", "issue it again"),
        (good.cert.clone(), empty, "empty", "has no private key"),
        (good.cert.clone(), good.cert.clone(), "good.pem", "has no private key"),
        (good.cert.clone(), ca.path("locked.key"), "locked.key", "without a passphrase"),
        (good.cert.clone(), torn, "torn", "no END line"),
        (good.cert.clone(), spoilt, "spoilt", "not base64"),
        (good.cert.clone(), no_key, "nokey", "must be RSA of 2048"),
        (ca.path("short.pem"), ca.path("short.key"), "short.key", "must be RSA of 2048"),
        (good.cert.clone(), other.key, "other.key", "does not belong to the first certificate"),
    ];
    for (cert, key, name, expected) in cases {
        let errors = [
            TlsAcceptor::load(&cert, &key, None, PeerRules::default()).err().unwrap(),
            TlsConnector::load(Some(&ca.ca), Verify::Full, Some((&cert, &key)), PeerRules::default()).err().unwrap(),
        ];
        for error in errors {
            let text = format!("{error} {error:?}");
            assert!(text.contains(name) && text.contains(expected), "{text}");
            assert!(!text.contains("secret") && !text.contains("c2VjcmV0"), "{text}");
        }
    }
    let text = TlsAcceptor::load(&good.cert, &good.key, Some(&ca.path("empty")), PeerRules::default())
        .err()
        .unwrap()
        .to_string();
    assert!(text.contains("empty has no certificate"), "{text}");
    let text =
        TlsConnector::load(Some(&ca.path("empty")), Verify::Ca, None, PeerRules::default()).err().unwrap().to_string();
    assert!(text.contains("empty has no certificate"), "{text}");
}

#[test]
fn without_a_ca_the_certificates_of_the_system_are_used() {
    let ca = Authority::new();
    let node =
        TlsConnector::load(None, Verify::Full, None, PeerRules::default()).expect("ca-certificates are installed");
    failure(&ca.acceptor(), &node, "localhost");
}

#[test]
fn bytes_other_than_tls_are_rejected_with_an_alert() {
    let ca = Authority::new();
    let acceptor = ca.acceptor();
    for garbage in [&b"GET / HTTP/1.0\r\n\r\n"[..], &[0; 64], &[0xff; 70_000]] {
        let mut server = acceptor.accept();
        let text = server.receive(garbage, &mut |_| {}).unwrap_err().to_string();
        assert!(text.contains("the received bytes are not TLS"), "{text}");
        assert_eq!(server.outgoing().first(), Some(&21), "an alert record");
        server.send(b"dropped");
        server.finish();
        let length = server.outgoing().len();
        server.sent(length);
        assert!(server.outgoing().is_empty());
    }
}
