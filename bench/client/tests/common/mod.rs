//! A server that follows a script, on a port of its own. It lets everybody in.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use mysql_proto::packet::Header;

const OK: &[u8] = b"\0\0\0\x02\0\0\0";
const EOF: &[u8] = b"\xfe\0\0\x02\0";

/// What is wrong with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// Every tenth result set is one of another session.
    Foreign,
    /// The last row is missing.
    Loses,
    /// Commands have no answers.
    Silent,
    /// Commands get an error.
    Refuses,
    /// There is no login for anybody.
    Full,
    /// The first connection ends with its first command.
    Drops,
    /// A packet behind each response.
    Talks,
}

/// Starts one, which lives as long as the test.
pub(crate) fn start(fault: Fault) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let results = Arc::new(AtomicU64::new(0));
    thread::spawn(move || {
        for (number, client) in listener.incoming().enumerate() {
            let (client, results) = (client.expect("a client"), Arc::clone(&results));
            thread::spawn(move || match serve(client, fault, number, &results) {
                Ok(()) => {}
                Err(error) if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) => {}
                Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
                Err(error) => panic!("{error}"),
            });
        }
    });
    address
}

fn serve(mut client: TcpStream, fault: Fault, number: usize, results: &AtomicU64) -> std::io::Result<()> {
    client.set_nodelay(true)?;
    if fault == Fault::Full {
        return client.write_all(&packets(0, &[b"\xff\x10\x04Too many connections"]));
    }
    let mut greeting = b"\x0a8.0.11-scripted\0\x07\0\0\0abcdefgh\0".to_vec();
    greeting.extend([0x01, 0x82, 45, 2, 0, 0x08, 0, 21]);
    greeting.extend([0; 10]);
    greeting.extend(b"ijklmnopqrst\0mysql_native_password\0");
    client.write_all(&packets(0, &[&greeting]))?;
    receive(&mut client)?;
    client.write_all(&packets(2, &[OK]))?;
    loop {
        let command = receive(&mut client)?;
        let mut answer = match (command[0], fault) {
            (0x01, _) => return Ok(()),
            (_, Fault::Drops) if number == 0 => return Ok(()),
            (_, Fault::Silent) => Vec::new(),
            (_, Fault::Refuses) => packets(1, &[b"\xff\x7a\x04#42S02No such table"]),
            (0x03, _) if command[1..].starts_with(b"select") => {
                let statement = String::from_utf8_lossy(&command[1..]);
                let foreign = fault == Fault::Foreign && results.fetch_add(1, Ordering::Relaxed) % 10 == 9;
                let (column, mut rows) = result(&statement, foreign);
                if fault == Fault::Loses {
                    rows.pop();
                }
                let mut payloads: Vec<&[u8]> = vec![b"\x01", &column, EOF];
                payloads.extend(rows.iter().map(Vec::as_slice));
                payloads.push(EOF);
                packets(1, &payloads)
            }
            _ => packets(1, &[OK]),
        };
        if fault == Fault::Talks {
            answer.extend(packets(1, &[b"\xff\x1d\x04#08S01Server shutdown in progress"]));
        }
        // All at once: what comes with an answer cannot be taken for that to the next command.
        client.write_all(&answer)?;
    }
}

/// The column's definition and the rows of `select 1` and of what `nonce` and `slow` ask.
fn result(statement: &str, foreign: bool) -> (Vec<u8>, Vec<Vec<u8>>) {
    let count: usize = statement.rsplit_once("seq_1_to_").map_or(1, |(_, count)| count.parse().expect("a number"));
    if statement.starts_with("select rpad") {
        let rows = (1..=count).map(|number| text(format!("{:x<1024}", format!("{number}-")).as_bytes())).collect();
        return (b"\x03def".to_vec(), rows);
    }
    let Some(nonce) = statement.split('\'').nth(1) else { return (b"\x03def".to_vec(), vec![text(b"1")]) };
    let times: usize = statement
        .split_once("', ")
        .map_or(1, |(_, rest)| rest.split(')').next().expect("a bracket").parse().expect("a number"));
    let other = format!("s{:08x}{}", 0xffff_ffff_u32, &nonce[9..]);
    let value = if foreign { &other } else { nonce };
    ([b"\x03def".to_vec(), nonce.as_bytes().to_vec()].concat(), vec![text(value.repeat(times).as_bytes()); count])
}

fn text(value: &[u8]) -> Vec<u8> {
    let mut row = Vec::new();
    mysql_proto::lenenc::write(&mut row, value.len() as u64);
    row.extend(value);
    row
}

/// Packets, whose sequence numbers count on from `first`.
fn packets(first: u8, payloads: &[&[u8]]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut sequence = first;
    for payload in payloads {
        bytes.extend(Header { length: payload.len(), sequence }.bytes());
        bytes.extend(*payload);
        sequence = sequence.wrapping_add(1);
    }
    bytes
}

fn receive(client: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut header = [0; 4];
    client.read_exact(&mut header)?;
    let mut payload = vec![0; Header::parse(&header).expect("a header").length];
    client.read_exact(&mut payload)?;
    Ok(payload)
}
