//! Connections with OpenSSL's programs, through real sockets.

#![allow(clippy::unwrap_used)] // In a test, a panic is the report.

mod support;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use support::{Authority, Valid};
use tls::{MinVersion, PeerRules, ReceiveResult, Stream, TlsAcceptor, TlsConnector, TlsError, Verify};

const VERSIONS: [&str; 2] = ["-tls1_2", "-tls1_3"];

/// Ends the process when dropped.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn spawn(arguments: &[&str], ca: &Authority) -> Program {
    let mut command = Command::new("openssl");
    command.args(arguments).current_dir(ca.directory.path());
    let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Program(pipes.spawn().unwrap())
}

/// Reads and writes until the peer closes or `handle` returns true.
fn pump(
    socket: &mut TcpStream,
    stream: &mut Stream,
    mut handle: impl FnMut(&mut Stream, &[u8]) -> bool,
) -> Result<(), TlsError> {
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut buffer = vec![0; 50_000];
    let write = |stream: &mut Stream, socket: &mut TcpStream| {
        while !stream.outgoing().is_empty() {
            let written = socket.write(stream.outgoing()).unwrap();
            stream.sent(written);
        }
    };
    write(stream, socket);
    loop {
        let bytes = socket.read(&mut buffer).expect("the peer answers in time");
        let mut plain = Vec::new();
        let received = stream.receive(&buffer[..bytes], &mut |piece| {
            plain.extend_from_slice(piece);
        });
        let enough = !plain.is_empty() && handle(stream, &plain);
        write(stream, socket);
        if received? == ReceiveResult::Closed || bytes == 0 || enough {
            return Ok(());
        }
    }
}

/// Runs an `openssl s_client` that sends `input`, until `length` bytes were echoed. Returns its output, and the result
/// of the server's end.
fn s_client(
    ca: &Authority,
    client_ca: bool,
    arguments: &[&str],
    input: &[u8],
    length: usize,
) -> (String, Result<(), TlsError>) {
    let pair = ca.issue("server", &["localhost", "127.0.0.1"], Valid::Now);
    let acceptor = pair.acceptor(client_ca.then_some(&*ca.ca)).unwrap();
    s_client_to(&acceptor, ca, arguments, input, length)
}

fn s_client_to(
    acceptor: &TlsAcceptor,
    ca: &Authority,
    arguments: &[&str],
    input: &[u8],
    length: usize,
) -> (String, Result<(), TlsError>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let common = ["s_client", "-connect", &address, "-CAfile", "ca.pem", "-verify_return_error"];
    let mut program = spawn(&[&common[..], arguments].concat(), ca);
    let (mut stdin, mut stdout) = (program.0.stdin.take().unwrap(), program.0.stdout.take().unwrap());
    let mut stderr = program.0.stderr.take().unwrap();
    thread::scope(|scope| {
        let out = scope.spawn(move || {
            let mut text = Vec::new();
            stdout.read_to_end(&mut text).unwrap();
            String::from_utf8_lossy(&text).into_owned()
        });
        let err = scope.spawn(move || {
            let mut text = Vec::new();
            stderr.read_to_end(&mut text).unwrap();
            String::from_utf8_lossy(&text).into_owned()
        });
        scope.spawn(move || {
            // In some tests the server rejects the client before it reads.
            let _ = stdin.write_all(input);
            program.0.wait().unwrap();
            drop(stdin);
        });
        let (mut socket, _) = listener.accept().unwrap();
        let mut stream = acceptor.accept();
        let mut echoed = 0;
        let outcome = pump(&mut socket, &mut stream, |stream, plain| {
            stream.send(plain);
            echoed += plain.len();
            if echoed >= length {
                stream.finish();
            }
            echoed >= length
        });
        drop(socket);
        (out.join().unwrap() + &err.join().unwrap(), outcome)
    })
}

/// Text of 1 MiB. `s_client` writes the text that it receives among lines of its own.
fn large() -> String {
    (0..131_072).map(|i| format!("{i:07}\n")).collect()
}

#[test]
fn s_client_connects_with_both_versions() {
    let ca = Authority::new();
    let sent = large();
    for version in VERSIONS {
        let arguments = [version, "-verify_hostname", "localhost", "-quiet", "-nocommands"];
        let (text, outcome) = s_client(&ca, false, &arguments, sent.as_bytes(), sent.len());
        outcome.unwrap();
        assert!(text.contains(&sent), "{}", &text[..text.len().min(2000)]);
    }
}

#[test]
fn s_client_may_update_its_keys() {
    let ca = Authority::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let acceptor = ca.acceptor();
    let mut program = spawn(&["s_client", "-connect", &address, "-tls1_3", "-CAfile", "ca.pem"], &ca);
    let mut stdin = program.0.stdin.take().unwrap();
    let (mut socket, _) = listener.accept().unwrap();
    let mut stream = acceptor.accept();
    // s_client looks for commands at the beginning of each read, so each line is sent after the previous one arrived.
    stdin.write_all(b"first line\n").unwrap();
    let mut seen = String::new();
    let outcome = pump(&mut socket, &mut stream, |stream, plain| {
        seen.push_str(std::str::from_utf8(plain).unwrap());
        stream.send(plain);
        if seen == "first line\n" {
            // A line with only `K` requests a key update of both sides.
            stdin.write_all(b"K\n").unwrap();
        }
        true
    });
    outcome.unwrap();
    let mut stdout = BufReader::new(program.0.stdout.take().unwrap());
    let mut stderr = BufReader::new(program.0.stderr.take().unwrap());
    await_line(&mut stderr, "KEYUPDATE");
    stdin.write_all(b"second line\n").unwrap();
    let outcome = pump(&mut socket, &mut stream, |stream, plain| {
        seen.push_str(std::str::from_utf8(plain).unwrap());
        stream.send(plain);
        true
    });
    outcome.unwrap();
    assert_eq!(seen, "first line\nsecond line\n");
    await_line(&mut stdout, "second line");
}

fn await_line(from: &mut impl BufRead, wanted: &str) -> String {
    loop {
        let mut line = String::new();
        assert!(from.read_line(&mut line).unwrap() > 0, "the output ended without `{wanted}`");
        if line.contains(wanted) {
            return line;
        }
    }
}

#[test]
fn s_client_needs_a_certificate_if_one_is_required() {
    let (ca, other) = (Authority::new(), Authority::new());
    ca.issue("mine", &["client"], Valid::Now);
    let theirs = other.issue("theirs", &["client"], Valid::Now);
    fs::copy(theirs.cert, ca.path("theirs.pem")).unwrap();
    fs::copy(theirs.key, ca.path("theirs.key")).unwrap();
    for version in VERSIONS {
        let common = [version, "-quiet", "-nocommands"];
        let with = |file: &str| {
            s_client(
                &ca,
                true,
                &[&common[..], &["-cert", &format!("{file}.pem"), "-key", &format!("{file}.key")]].concat(),
                b"hello\n",
                6,
            )
        };
        let (text, outcome) = with("mine");
        outcome.unwrap();
        assert!(text.contains("hello"), "{text}");
        let (text, outcome) = with("theirs");
        assert!(outcome.unwrap_err().to_string().contains("tls.client.client_ca"));
        assert!(text.contains("alert unknown ca"), "{text}");
        let (text, outcome) = s_client(&ca, true, &common, b"hello\n", 6);
        assert!(outcome.unwrap_err().to_string().contains("must present a certificate"));
        assert!(text.contains("alert"), "{text}");
    }
}

#[test]
fn old_versions_are_rejected_and_s_client_rejects_a_wrong_name() {
    let ca = Authority::new();
    for version in ["-tls1", "-tls1_1"] {
        let (text, outcome) = s_client(&ca, false, &[version, "-cipher", "ALL:@SECLEVEL=0"], b"", 1);
        assert!(outcome.unwrap_err().to_string().contains("must offer TLS 1.2"));
        assert!(text.contains("alert"), "{text}");
    }
    let (text, outcome) = s_client(&ca, false, &["-verify_hostname", "elsewhere"], b"", 1);
    assert!(text.contains("hostname mismatch"), "{text}");
    assert!(outcome.unwrap_err().to_string().contains("tls.client.cert"));
}

/// Runs an `openssl s_server`. Returns it with a connection to its port.
fn s_server(ca: &Authority, arguments: &[&str]) -> (Program, TcpStream) {
    let common = ["s_server", "-accept", "127.0.0.1:0", "-cert", "node.pem", "-key", "node.key"];
    let mut program = spawn(&[&common[..], arguments].concat(), ca);
    let mut stdout = BufReader::new(program.0.stdout.take().unwrap());
    let line = await_line(&mut stdout, "ACCEPT ");
    // The output is drained, because s_server would block when its pipe is full.
    thread::spawn(move || std::io::copy(&mut stdout, &mut std::io::sink()));
    let socket = TcpStream::connect(line.trim().trim_start_matches("ACCEPT ")).unwrap();
    (program, socket)
}

#[test]
fn both_versions_connect_to_s_server() {
    let ca = Authority::new();
    ca.issue("node", &["localhost", "127.0.0.1"], Valid::Now);
    fs::write(ca.path("large"), large()).unwrap();
    for version in VERSIONS {
        for name in ["localhost", "127.0.0.1"] {
            let (_program, mut socket) = s_server(&ca, &[version, "-WWW"]);
            let mut stream = ca.connector(Verify::Full).connect(name).unwrap();
            stream.send(b"GET /large HTTP/1.0\r\n\r\n");
            let mut received = Vec::new();
            pump(&mut socket, &mut stream, |_, plain| {
                received.extend_from_slice(plain);
                false
            })
            .unwrap();
            let text = String::from_utf8(received).unwrap();
            assert!(text.starts_with("HTTP/1.0 200") && text.ends_with(&large()));
        }
    }
}

#[test]
fn s_server_receives_the_configured_certificate() {
    let (ca, other) = (Authority::new(), Authority::new());
    ca.issue("node", &["localhost"], Valid::Now);
    let mine = ca.issue("mine", &["client"], Valid::Now);
    let theirs = other.issue("theirs", &["client"], Valid::Now);
    for version in VERSIONS {
        for (pair, good) in [(Some(mine.paths()), true), (Some(theirs.paths()), false), (None, false)] {
            let demand = [version, "-rev", "-Verify", "1", "-verify_return_error", "-CAfile", "ca.pem"];
            let (_program, mut socket) = s_server(&ca, &demand);
            let node = TlsConnector::load(Some(&ca.ca), Verify::Full, pair, PeerRules::default()).unwrap();
            let mut stream = node.connect("localhost").unwrap();
            stream.send(b"abc\n");
            let mut received = Vec::new();
            let outcome = pump(&mut socket, &mut stream, |_, plain| {
                received.extend_from_slice(plain);
                received.ends_with(b"\n")
            });
            if good {
                outcome.unwrap();
                assert_eq!(received, b"cba\n");
            } else {
                let text = outcome.unwrap_err().to_string();
                assert!(text.contains("tls.backend.cert") || text.contains("HandshakeFailure"), "{text}");
            }
        }
    }
}

const TLS13: PeerRules<'_> = PeerRules { min_version: MinVersion::Tls13, crl: None };

#[test]
fn s_client_below_the_minimum_version_is_rejected() {
    let ca = Authority::new();
    let pair = ca.issue("server", &["localhost", "127.0.0.1"], Valid::Now);
    let acceptor = TlsAcceptor::load(&pair.cert, &pair.key, None, TLS13).unwrap();
    let (_, outcome) = s_client_to(&acceptor, &ca, &["-tls1_3"], b"abc\n", 4);
    outcome.unwrap();
    let (text, outcome) = s_client_to(&acceptor, &ca, &["-tls1_2"], b"abc\n", 4);
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("tls.client.min_version"), "{error}");
    assert!(text.contains("protocol version"), "{text}");
}

#[test]
fn s_server_below_the_minimum_version_is_rejected() {
    let ca = Authority::new();
    ca.issue("node", &["localhost"], Valid::Now);
    for (version, good) in [("-tls1_3", true), ("-tls1_2", false)] {
        let (_program, mut socket) = s_server(&ca, &[version, "-rev"]);
        let node = TlsConnector::load(Some(&ca.ca), Verify::Full, None, TLS13).unwrap();
        let mut stream = node.connect("localhost").unwrap();
        stream.send(b"abc\n");
        let outcome = pump(&mut socket, &mut stream, |_, plain| plain.ends_with(b"\n"));
        if good {
            outcome.unwrap();
        } else {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("tls.backend.min_version"), "{error}");
        }
    }
}
