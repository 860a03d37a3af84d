//! A login: the rules (1 byte), then a conversation (see `fuzz::script`).

#![no_main]

use fuzz::parties::{KEY, PEM};
use fuzz::script::{self, Cut, RAW};
use libfuzzer_sys::fuzz_target;
use mysql_proto::error::ProxyError;
use mysql_proto::handshake_response;
use mysql_proto::login::{ClientTls, Compression, Login, NodeTls, Output, Progress, Rules};
use mysql_proto::packet::{HEADER, Header};

fn rules(byte: u8) -> Rules {
    Rules {
        client_tls: [ClientTls::Disabled, ClientTls::Optional, ClientTls::Required, ClientTls::Optional]
            [usize::from(byte & 3)],
        node_tls: [NodeTls::Disabled, NodeTls::Preferred, NodeTls::Required, NodeTls::Preferred]
            [usize::from(byte >> 2 & 3)],
        compression: if byte & 16 == 0 { Compression::Off } else { Compression::Passthrough },
        allow_cleartext_backend: byte & 32 != 0,
    }
}

fn is_end(progress: Progress) -> bool {
    !matches!(progress, Progress::More | Progress::StartClientTls)
}

/// Collects the packets of one direction.
#[derive(Debug, Default)]
struct Packets {
    begun: Vec<u8>,
}

impl Packets {
    /// Returns the packets that end within `bytes`.
    fn take(&mut self, bytes: &[u8]) -> Vec<Vec<u8>> {
        self.begun.extend(bytes);
        let mut whole = Vec::new();
        while let Some(header) = Header::parse(&self.begun) {
            if self.begun.len() < HEADER + header.length {
                break;
            }
            let rest = self.begun.split_off(HEADER + header.length);
            whole.push(std::mem::replace(&mut self.begun, rest));
        }
        whole
    }
}

/// The outcome of a login.
#[derive(Debug, Default, PartialEq)]
struct LoginTrace {
    to_client: Vec<u8>,
    to_node: Vec<u8>,
    ssl_request: Option<[u8; 36]>,
    progress: Vec<Progress>,
    taken: Vec<usize>,
}

/// A login whose steps are checked.
struct LoginExchange {
    login: Login,
    trace: LoginTrace,
    end: Option<Progress>,
    /// Number of bytes taken so far.
    taken: usize,
}

impl LoginExchange {
    fn new(rules: Rules) -> Self {
        Self { login: Login::new(rules), trace: LoginTrace::default(), end: None, taken: 0 }
    }

    /// Passes bytes to the login. Returns how many were taken, and the output.
    fn step(&mut self, from_node: bool, bytes: &[u8]) -> (usize, Output) {
        let mut out = Output::default();
        let (taken, progress) = if from_node {
            self.login.on_node_bytes(bytes, &mut out)
        } else {
            self.login.on_client_bytes(bytes, KEY, &mut out)
        };
        assert!(taken <= bytes.len(), "takes at most the bytes that it gets");
        self.taken += taken;
        if let Some(end) = self.end {
            assert_eq!((taken, progress), (0, end), "the login continues after its end");
            assert!(out.onward.is_empty() && out.back.is_empty(), "the login writes after its end");
            return (taken, out);
        }
        match progress {
            Progress::More => assert_eq!(taken, bytes.len(), "all bytes are taken before more are awaited"),
            Progress::StartClientTls => assert!(!from_node),
            Progress::Established(_) | Progress::Denied(_) => assert!(from_node),
            Progress::Rejected(why) => {
                let written = if from_node { &out.onward } else { &out.back };
                assert!([true, false].iter().any(|&state| {
                    let packet = why.packet(0, state);
                    written.len() >= packet.len() && written.ends_with(&packet[HEADER..])
                }));
            }
        }
        assert!(!from_node || out.back.is_empty(), "a node gets an answer to its bytes");
        self.end = is_end(progress).then_some(progress);
        if progress != Progress::More {
            self.trace.progress.push(progress);
        }
        if from_node {
            self.trace.to_client.extend(&*out.onward);
        } else {
            self.trace.to_node.extend(&*out.onward);
            self.trace.to_client.extend(&*out.back);
        }
        let ssl_request = self.login.node_ssl_request();
        assert!(self.trace.ssl_request.is_none() || self.trace.ssl_request == ssl_request);
        self.trace.ssl_request = ssl_request;
        if !from_node && ssl_request.is_some() {
            self.login.on_node_tls_started();
        }
        // Each packet is forwarded, or answered with the key, and at the end with an error. One NUL may be added.
        let limit = self.taken + (self.taken / HEADER + 1) * (HEADER + 1 + PEM + 1) + 600;
        assert!(self.trace.to_client.len() + self.trace.to_node.len() <= limit, "the login writes too much");
        (taken, out)
    }

    /// Sends all bytes of one side, split by `cut`. Bytes after an SSLRequest are sent again.
    fn send(&mut self, from_node: bool, bytes: &[u8], cut: Cut) {
        let mut all = 0;
        cut.each(bytes, |mut piece| {
            loop {
                let before = self.trace.progress.len();
                let (taken, _) = self.step(from_node, piece);
                all += taken;
                piece = &piece[taken..];
                let paused = self.end.is_none() && self.trace.progress.len() > before;
                if !paused || piece.is_empty() {
                    break;
                }
            }
        });
        self.trace.taken.push(all);
        let error_packet = self.login.error_packet(ProxyError::LoginTooSlow);
        assert_eq!(Header::parse(&error_packet).map(|header| HEADER + header.length), Some(error_packet.len()));
    }
}

/// Plays the entries of `input` with the expected sequence numbers. Returns the bytes sent.
///
/// This function counts the sequence numbers of both connections independently of the login, and checks them.
fn write_down(rules: Rules, input: &[u8]) -> Vec<(bool, Vec<u8>)> {
    let mut exchange = LoginExchange::new(rules);
    let mut wire: Vec<(bool, Vec<u8>)> = Vec::new();
    let (mut client_next, mut node_next, mut to_node_yet) = (0_u8, 0_u8, false);
    let (mut from_client, mut from_node) = (Packets::default(), Packets::default());
    for entry in script::entries(input) {
        let packet = entry.packet(if entry.from_node() { node_next } else { client_next });
        for byte in packet.chunks(1) {
            let (taken, out) = exchange.step(entry.from_node(), byte);
            let mut to_client = Packets::default();
            let mut to_node = Packets::default();
            if entry.from_node() {
                node_next = node_next.wrapping_add(from_node.take(&byte[..taken]).len() as u8);
            } else {
                client_next = client_next.wrapping_add(from_client.take(&byte[..taken]).len() as u8);
                for packet in to_node.take(&out.onward) {
                    if !to_node_yet && exchange.trace.ssl_request.is_some() {
                        node_next = node_next.wrapping_add(1);
                    }
                    to_node_yet = true;
                    assert_eq!(packet[3], node_next, "the node's sequence numbers");
                    node_next = node_next.wrapping_add(1);
                }
            }
            for packet in to_client.take(if entry.from_node() { &out.onward } else { &out.back }) {
                // An error may interrupt a packet of the client.
                assert!(packet[3] == client_next || packet.get(HEADER) == Some(&0xff), "the client's sequence numbers");
                client_next = packet[3].wrapping_add(1);
            }
            assert!(to_client.begun.is_empty() && to_node.begun.is_empty(), "part of a packet was sent");
        }
        match wire.last_mut() {
            Some((last, bytes)) if *last == entry.from_node() && entry.kind & RAW == 0 => bytes.extend(packet),
            _ => wire.push((entry.from_node(), packet)),
        }
    }
    wire
}

fn play(rules: Rules, wire: &[(bool, Vec<u8>)], cut: Cut) -> LoginTrace {
    let mut exchange = LoginExchange::new(rules);
    wire.iter().for_each(|(from_node, bytes)| exchange.send(*from_node, bytes, cut));
    exchange.trace
}

/// The memory of a login is limited by the bytes received, and by the maximum packet sizes.
fn check_memory(rules: Rules, wire: &[(bool, Vec<u8>)]) {
    let before = fuzz::held();
    let mut login = Login::new(rules);
    let mut received = 0;
    for (from_node, bytes) in wire {
        for piece in bytes.chunks(100) {
            let mut out = Output::default();
            let (_, progress) = if *from_node {
                login.on_node_bytes(piece, &mut out)
            } else {
                login.on_client_bytes(piece, KEY, &mut out)
            };
            drop(out);
            if !*from_node && login.node_ssl_request().is_some() {
                login.on_node_tls_started();
            }
            if matches!(progress, Progress::Established(_)) {
                drop(login.take_response());
            }
            received += piece.len();
            let held = fuzz::held() - before;
            assert!(
                held <= 2 * received + 1024 && held <= 4 * (handshake_response::MAX_RESPONSE_BYTES + 1024),
                "{held} bytes held of {received}"
            );
            assert!(!is_end(progress) || held == 0, "a finished login holds {held} bytes");
        }
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((&first, rest)) = input.split_first() else { return };
    let rules = rules(first);
    let wire = write_down(rules, rest);
    let whole = play(rules, &wire, Cut::Whole);
    for cut in script::cuts(input) {
        assert_eq!(play(rules, &wire, cut), whole, "cut by {cut:?}");
    }
    check_memory(rules, &wire);
});
