//! Memory of an idle connection. Alone in its process, because it measures all memory of the process.

#![allow(clippy::unwrap_used)] // In a test, a panic is the report.

mod support;

use std::fs;

use support::{Authority, Link, Valid};
use tls::{Stream, Verify};

const CONNECTIONS: usize = 500;
/// For rustls' state, the cipher's key schedules and, at one end, the peer's certificate. A single record buffer that
/// is not released would exceed this limit.
const LIMIT: usize = 16 * 1024;

/// Bytes of anonymous memory in use, from the page counts of proc(5).
fn resident() -> usize {
    let text = fs::read_to_string("/proc/self/statm").unwrap();
    let pages: Vec<usize> = text.split_whitespace().map(|count| count.parse().unwrap()).collect();
    (pages[1] - pages[2]) * 4096
}

#[test]
fn idle_connection_takes_little_memory() {
    let ca = Authority::new();
    let server = ca.issue("server", &["localhost"], Valid::Now).acceptor(None).unwrap();
    let node = ca.connector(Verify::Full);
    let connection = || {
        let mut link = Link::new(&server, &node);
        link.settle().unwrap();
        link.client.send(&[1; 50_000]);
        link.server.send(&[2; 60_000]);
        link.settle().unwrap();
        assert_eq!((link.at_server.len(), link.at_client.len()), (50_000, 60_000));
        // The header of an incomplete record.
        link.client.send(&[3; 100]);
        support::carry(&mut link.client, 5, &mut link.server, &mut link.at_server).map(drop).unwrap();
        let rest = link.client.outgoing().len();
        link.client.sent(rest);
        (link.server, link.client)
    };
    let warm: Vec<_> = (0..50).map(|_| connection()).collect();
    drop(warm);
    for (name, keep) in
        [("to a client", (|pair| pair.0) as fn((Stream, Stream)) -> Stream), ("to a node", |pair| pair.1)]
    {
        let before = resident();
        let kept: Vec<Stream> = (0..CONNECTIONS).map(|_| keep(connection())).collect();
        let each = resident().saturating_sub(before) / kept.len();
        println!("a connection {name}: {each} bytes");
        assert!(each < LIMIT, "a connection {name} costs {each} bytes");
        std::mem::forget(kept); // Freed memory would hide the cost of the next kind.
    }
}
