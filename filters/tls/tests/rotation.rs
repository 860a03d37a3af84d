//! Certificate files change while connections exist.

#![allow(clippy::unwrap_used)] // In a test, a panic is the report.

mod support;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use support::{Authority, Link, Valid};
use tls::{PeerRules, TlsAcceptor, TlsConnector, TlsError, Verify};

/// Replaces a file atomically under the same name.
fn replace(path: &Path, text: &str) {
    let next = path.with_extension("next");
    fs::write(&next, text).unwrap();
    fs::rename(&next, path).unwrap();
}

/// Whether a connection for this name gets a certificate for it.
fn serves(acceptor: &TlsAcceptor, ca: &Authority, name: &str) -> bool {
    let node = ca.connector(Verify::Full);
    let mut link = Link::new(acceptor, &node);
    link.client = node.connect(name).unwrap();
    link.settle().is_ok()
}

#[test]
fn rotations_under_load_do_not_disturb_connections() {
    let ca = Authority::new();
    let pair = ca.issue("server", &["localhost"], Valid::Now);
    let acceptor = pair.acceptor(None).unwrap();
    let node = ca.connector(Verify::Full);
    let mut old = Link::new(&acceptor, &node);
    old.assert_works();
    let mut halfway = Link::new(&acceptor, &node);
    support::carry(&mut halfway.client, 100, &mut halfway.server, &mut halfway.at_server).map(drop).unwrap();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut connections = 0;
                    while !done.load(Ordering::Relaxed) {
                        let mut link = Link::new(&acceptor, &node);
                        link.assert_works();
                        link.assert_works();
                        connections += 1;
                    }
                    connections
                })
            })
            .collect();
        for round in 0..100 {
            let name = format!("round-{round}");
            let (cert, key) = ca.issue_text(&["localhost", &name], Valid::Now);
            replace(&pair.cert, &cert);
            // Between the two renames the files do not match. That is reported once, and the old pair stays in use.
            assert!(matches!(acceptor.refresh(), Err(TlsError::Mismatch { .. })));
            assert!(!acceptor.refresh().unwrap());
            replace(&pair.key, &key);
            assert!(acceptor.refresh().unwrap());
            assert!(!acceptor.refresh().unwrap());
            assert!(serves(&acceptor, &ca, &name));
            old.assert_works();
        }
        done.store(true, Ordering::Relaxed);
        for worker in workers {
            assert!(worker.join().unwrap() > 0);
        }
    });
    halfway.assert_works();
}

#[test]
fn replaced_directory_link_is_noticed() {
    // Kubernetes mounts a secret like this: the files are links to `..data/x`, and the link `..data` is replaced.
    let ca = Authority::new();
    let version = |name: &str| {
        let (cert, key) = ca.issue_text(&["localhost", name], Valid::Now);
        fs::create_dir(ca.path(name)).unwrap();
        fs::write(ca.path(name).join("tls.crt"), cert).unwrap();
        fs::write(ca.path(name).join("tls.key"), key).unwrap();
        symlink(name, ca.path("..next")).unwrap();
        fs::rename(ca.path("..next"), ca.path("..data")).unwrap();
    };
    version("first");
    for file in ["tls.crt", "tls.key"] {
        symlink(Path::new("..data").join(file), ca.path(file)).unwrap();
    }
    let acceptor = TlsAcceptor::load(&ca.path("tls.crt"), &ca.path("tls.key"), None, PeerRules::default()).unwrap();
    assert!(serves(&acceptor, &ca, "first") && !serves(&acceptor, &ca, "second"));
    version("second");
    assert!(acceptor.refresh().unwrap());
    assert!(serves(&acceptor, &ca, "second") && !serves(&acceptor, &ca, "first"));
}

#[test]
fn error_is_reported_once_and_the_old_certificate_stays() {
    let ca = Authority::new();
    let pair = ca.issue("server", &["localhost"], Valid::Now);
    let (cert, key) = (fs::read_to_string(&pair.cert).unwrap(), fs::read_to_string(&pair.key).unwrap());
    let acceptor = pair.acceptor(None).unwrap();
    let half = &cert[..cert.len() / 2];
    for bad in ["", half, "no certificate"] {
        for _ in 0..2 {
            fs::write(&pair.cert, bad).unwrap();
            acceptor.refresh().expect_err("the bad content is new, or follows a good one");
            for _ in 0..3 {
                assert!(!acceptor.refresh().unwrap());
                // The same content is written again.
                replace(&pair.cert, bad);
            }
            assert!(serves(&acceptor, &ca, "localhost"));
            fs::write(&pair.cert, &cert).unwrap();
            assert!(!acceptor.refresh().unwrap(), "the current content is back");
        }
    }
    fs::remove_file(&pair.key).unwrap();
    assert!(matches!(acceptor.refresh(), Err(TlsError::Read { path, .. }) if path == pair.key));
    assert!(!acceptor.refresh().unwrap());
    fs::write(&pair.key, &key).unwrap();
    assert!(!acceptor.refresh().unwrap());
    assert!(serves(&acceptor, &ca, "localhost"));
}

#[test]
fn replaced_client_ca_rejects_old_certificates_and_tickets() {
    let (old, new) = (Authority::new(), Authority::new());
    let bundle = old.path("clients.pem");
    fs::copy(&old.ca, &bundle).unwrap();
    let acceptor = old.issue("server", &["localhost"], Valid::Now).acceptor(Some(&bundle)).unwrap();
    let node_of = |ca: &Authority| {
        let pair = ca.issue("client", &["client"], Valid::Now);
        TlsConnector::load(Some(&old.ca), Verify::Full, Some(pair.paths()), PeerRules::default()).unwrap()
    };
    let (of_old, of_new) = (node_of(&old), node_of(&new));
    Link::new(&acceptor, &of_old).assert_works();
    assert!(Link::new(&acceptor, &of_new).settle().is_err());
    replace(&bundle, &fs::read_to_string(&new.ca).unwrap());
    assert!(acceptor.refresh().unwrap());
    // Its session ticket is rejected, too.
    assert!(Link::new(&acceptor, &of_old).settle().is_err());
    Link::new(&acceptor, &of_new).assert_works();
}

#[test]
fn ca_and_pair_for_nodes_are_reloaded() {
    let (old, new) = (Authority::new(), Authority::new());
    let ca = old.path("nodes.pem");
    fs::copy(&old.ca, &ca).unwrap();
    let pair = old.issue("client", &["client"], Valid::Now);
    let node = TlsConnector::load(Some(&ca), Verify::Full, Some(pair.paths()), PeerRules::default()).unwrap();
    let server = |authority: &Authority| {
        authority.issue("server", &["localhost"], Valid::Now).acceptor(Some(&authority.ca)).unwrap()
    };
    let (old_server, new_server) = (server(&old), server(&new));
    let mut established = Link::new(&old_server, &node);
    established.assert_works();
    assert!(Link::new(&new_server, &node).settle().is_err());
    replace(&ca, &fs::read_to_string(&new.ca).unwrap());
    assert!(node.refresh().unwrap());
    assert!(Link::new(&new_server, &node).settle().is_err(), "the pair is still the old one");
    let (cert, key) = new.issue_text(&["client"], Valid::Now);
    replace(&pair.cert, &cert);
    replace(&pair.key, &key);
    assert!(node.refresh().unwrap());
    Link::new(&new_server, &node).assert_works();
    assert!(Link::new(&old_server, &node).settle().is_err());
    established.assert_works();
}

#[test]
fn change_with_equal_size_and_modification_time_is_noticed() {
    let ca = Authority::new();
    let pair = ca.issue("server", &["localhost"], Valid::Now);
    for path in [&pair.cert, &pair.key] {
        touch(path, "2001-01-01");
    }
    let acceptor = pair.acceptor(None).unwrap();
    assert!(!acceptor.refresh().unwrap());
    let size = fs::metadata(&pair.cert).unwrap().len() as usize;
    fs::write(&pair.cert, "x".repeat(size)).unwrap();
    touch(&pair.cert, "2001-01-01");
    // Size, modification time and inode are equal. Only the change time differs.
    acceptor.refresh().expect_err("the file has no certificate");
}

fn touch(path: &Path, date: &str) {
    support::run(std::process::Command::new("touch").arg("-d").arg(date).arg(path));
}
