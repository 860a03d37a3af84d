//! Cost of tracking: nanoseconds per packet of results with 10,000 rows, and per point select.
//!
//! `cargo run --release -p mysql-proto --example walk`

use mysql_proto::capability::Capabilities;
use mysql_proto::packet::Header;
use mysql_proto::tracker::{Tracker, TrackerState};
use std::hint::black_box;
use std::time::{Duration, Instant};

const ROWS: usize = 10_000;
const CAPABILITIES: Capabilities = Capabilities::PROTOCOL_41.with(Capabilities::DEPRECATE_EOF);

fn message(payload: &[u8]) -> Vec<u8> {
    [&Header { length: payload.len(), sequence: 1 }.bytes()[..], payload].concat()
}

/// A result with one column, and its number of packets.
fn result(rows: usize, size: usize) -> (Vec<u8>, usize) {
    let definition = message(b"\x03def\x01d\x01t\x01t\x01a\x01a\x0c\x21\0\x0b\0\0\0\x03\0\0\0\0\0");
    let row = message(&[&[(size - 1) as u8][..], &vec![b'x'; size - 1]].concat());
    let parts = [message(&[1]), definition, row.repeat(rows), message(b"\xfe\0\0\x02\0\0\0")];
    (parts.concat(), rows + 3)
}

/// The shortest of many passes: disturbances only make a pass longer.
fn fastest(passes: usize, pass: impl FnMut(usize) -> Duration) -> Duration {
    (0..passes).map(pass).min().unwrap_or_default()
}

fn main() {
    let query = message(b"\x03SELECT c FROM t");
    let mut tracker = Tracker::new(CAPABILITIES);
    println!("a tracker has {} bytes", size_of::<Tracker>());
    for size in [8, 40, 120, 250] {
        let (bytes, packets) = result(ROWS, size);
        for received in [4_096, 16_384, 65_536] {
            // As with a socket, the bytes were just written to a buffer that is reused.
            let mut buffer = vec![0; received];
            let time = fastest(300, |_| {
                tracker.on_client_bytes(&query, &mut ());
                let walk = |piece: &[u8]| {
                    let buffer = &mut buffer[..piece.len()];
                    buffer.copy_from_slice(piece);
                    let begin = Instant::now();
                    tracker.on_node_bytes(black_box(buffer), &mut ());
                    begin.elapsed()
                };
                let time = bytes.chunks(received).map(walk).sum();
                assert_eq!(tracker.state(), TrackerState::Idle);
                time
            });
            let each = time.as_nanos() as f64 / packets as f64;
            println!("{ROWS} rows of {size} bytes, read {received} bytes at a time: {each:.2} ns a packet");
        }
    }
    let (bytes, packets) = result(1, 120);
    let many: u32 = 10_000;
    let time = fastest(50, |_| {
        let begin = Instant::now();
        for _ in 0..many {
            tracker.on_client_bytes(black_box(&query), &mut ());
            tracker.on_node_bytes(black_box(&bytes), &mut ());
        }
        begin.elapsed()
    });
    println!("a point select ({} packets): {} ns", packets + 1, (time / many).as_nanos());
}
