//! The result does not depend on how bytes are split.

#![allow(clippy::unwrap_used)] // In a test, a panic is the report.

mod support;

use proptest::prelude::*;
use support::{Authority, Link, carry};
use tls::{PeerRules, Stream, TlsAcceptor, TlsConnector, Verify};

/// A repeating list of sizes. One of them is always large, or a megabyte would take minutes.
fn splits() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![1..8_usize, 1..600_usize, 1..20_000_usize, Just(200_000)], 1..12).prop_map(
        |mut splits| {
            splits.push(30_000);
            splits
        },
    )
}

fn sizes() -> impl Strategy<Value = Vec<usize>> {
    let size = prop_oneof![0..4_usize, 0..3000_usize, 16_300..16_500_usize, 0..(1_usize << 20)];
    prop::collection::vec(size, 1..4)
}

fn bytes(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|i| (i * 31 + i / 251 + seed) as u8).collect()
}

fn drain(link: &mut Link, splits: &mut impl Iterator<Item = usize>) {
    while !(link.server.outgoing().is_empty() && link.client.outgoing().is_empty()) {
        let taken = splits.next().expect("the list repeats");
        let one = carry(&mut link.client, taken, &mut link.server, &mut link.at_server);
        let other = carry(&mut link.server, taken, &mut link.client, &mut link.at_client);
        assert!(one.is_ok() && other.is_ok());
    }
}

fn sides() -> (TlsAcceptor, TlsConnector) {
    let ca = Authority::new();
    let server = ca.issue("server", &["localhost"], support::Valid::Now).acceptor(Some(&ca.ca)).unwrap();
    let pair = ca.issue("client", &["client"], support::Valid::Now);
    (server, TlsConnector::load(Some(&ca.ca), Verify::Full, Some(pair.paths()), PeerRules::default()).unwrap())
}

#[test]
fn connection_works_with_single_bytes() {
    let (server, node) = sides();
    let mut link = Link::new(&server, &node);
    let sent = bytes(40_000, 0);
    link.client.send(&sent);
    drain(&mut link, &mut std::iter::repeat(1));
    link.server.send(&sent);
    drain(&mut link, &mut std::iter::repeat(1));
    assert!(link.at_server == sent && link.at_client == sent);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn connection_does_not_depend_on_splitting(splits in splits(), to_server in sizes(), to_client in sizes()) {
        let (server, node) = sides();
        let mut link = Link::new(&server, &node);
        let mut splits = splits.into_iter().cycle();
        let (mut sent_up, mut sent_down) = (Vec::new(), Vec::new());
        // The first round sends before the handshake; later rounds send while records of the other direction are
        // incomplete.
        for round in 0..to_server.len().max(to_client.len()) {
            if let Some(size) = to_server.get(round) {
                let piece = bytes(*size, round);
                link.client.send(&piece);
                sent_up.extend(piece);
            }
            for _ in 0..3 {
                let taken = splits.next().expect("the list repeats");
                let received = carry(&mut link.client, taken, &mut link.server, &mut link.at_server);
                prop_assert!(received.is_ok());
            }
            if let Some(size) = to_client.get(round) {
                let piece = bytes(*size, round + 7);
                link.server.send(&piece);
                sent_down.extend(piece);
            }
        }
        drain(&mut link, &mut splits);
        prop_assert!(link.at_server == sent_up);
        prop_assert!(link.at_client == sent_down);
        link.server.finish();
        drain(&mut link, &mut splits);
        let received = link.client.receive(b"", &mut |_| {});
        prop_assert_eq!(received.unwrap(), tls::ReceiveResult::Closed);
    }

    #[test]
    fn damage_never_gives_plaintext(position in any::<prop::sample::Index>(), bit in 0..8_u32, splits in splits()) {
        let ca = Authority::new();
        let mut link = Link::new(&ca.acceptor(), &ca.connector(Verify::Full));
        link.settle().unwrap();
        let sent = bytes(50_000, 1);
        link.client.send(&sent);
        let mut spoilt = link.client.outgoing().to_vec();
        spoilt[position.index(sent.len())] ^= 1 << bit;
        let mut splits = splits.into_iter().cycle();
        let mut rest = &spoilt[..];
        while !rest.is_empty() {
            let taken = splits.next().expect("the list repeats").min(rest.len());
            let at_server = &mut link.at_server;
            let _ = link.server.receive(&rest[..taken], &mut |piece| at_server.extend_from_slice(piece));
            rest = &rest[taken..];
        }
        prop_assert!(link.at_server.len() < sent.len());
        prop_assert!(sent.starts_with(&link.at_server));
    }

    #[test]
    fn garbage_in_a_handshake_does_no_harm(garbage in prop::collection::vec(any::<u8>(), 0..2000), after in 0..3000_usize, splits in splits()) {
        let ca = Authority::new();
        let link = Link::new(&ca.acceptor(), &ca.connector(Verify::Full));
        let (mut server, mut client) = (link.server, link.client);
        let mut splits = splits.into_iter().cycle();
        let (mut passed, mut ignored) = (0, Vec::new());
        while passed < after && !(client.outgoing().is_empty() && server.outgoing().is_empty()) {
            let taken = splits.next().expect("the list repeats").min(after - passed);
            passed += taken;
            let _ = carry(&mut client, taken, &mut server, &mut ignored);
            let _ = carry(&mut server, taken, &mut client, &mut ignored);
        }
        for end in [&mut server, &mut client] {
            spoil(end, &garbage, splits.next().expect("the list repeats"));
        }
        prop_assert!(ignored.is_empty());
    }
}

fn spoil(end: &mut Stream, garbage: &[u8], split: usize) {
    for piece in garbage.chunks(split) {
        let _ = end.receive(piece, &mut |plain| {
            assert!(plain.is_empty(), "the peer did not encrypt the garbage");
        });
    }
    end.send(b"dropped or kept");
    end.finish();
    let _ = end.receive(garbage, &mut |plain| assert!(plain.is_empty()));
}
