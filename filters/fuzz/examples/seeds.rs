//! Writes seeds/<target>/: `cargo +nightly run --example seeds` in `filters/fuzz`.
//!
//! Most seeds are parts of the recorded conversations (`filters/mysql-proto/corpus`), one for each shape of a command
//! and its response. Logins with plugins that the recordings lack are built with the helpers of the login tests. Logins
//! with TLS come from both. Seeds that a fuzzer found stay; their names begin with `found-`.

use fuzz::parties;
use fuzz::script::{self, FULL, NODE, NUMBER, RAW};
use mysql_proto::capability::Capabilities;
use mysql_proto::greeting::Greeting;
use mysql_proto::handshake_response::{self, HEAD, HandshakeResponse};
use mysql_proto::packet::{HEADER, Header};
use std::collections::HashSet;
use std::fs;
use std::path::Path;

type Error = Box<dyn std::error::Error>;

/// How many bytes of each packet a seed of the target `tracker` keeps: more than a tracker reads.
const KEPT_BYTES: usize = 28;
/// How many packets at the beginning of an exchange such a seed keeps.
const KEPT_PACKETS: usize = 24;

/// A packet of a recording.
#[derive(Debug, Clone)]
struct Packet {
    from_node: bool,
    sequence: u8,
    payload: Vec<u8>,
}

/// The conversations of a corpus file as packets (format: `filters/mysql-proto/corpus/README.md`).
fn conversations(file: &[u8]) -> Vec<Vec<Packet>> {
    let mut all: Vec<Vec<Packet>> = Vec::new();
    let mut unparsed = [Vec::new(), Vec::new()];
    let mut rest = file;
    while let Some((&[kind, a, b, c, d], after)) = rest.split_first_chunk() {
        let (bytes, after) = after.split_at(after.len().min(u32::from_le_bytes([a, b, c, d]) as usize));
        rest = after;
        if kind == 0 {
            all.push(Vec::new());
            unparsed = [Vec::new(), Vec::new()];
        }
        if !matches!(kind, 1 | 2) {
            continue;
        }
        let unparsed: &mut Vec<u8> = &mut unparsed[usize::from(kind == 2)];
        unparsed.extend(bytes);
        while let Some(header) = Header::parse(unparsed).filter(|header| unparsed.len() >= HEADER + header.length) {
            let rest = unparsed.split_off(HEADER + header.length);
            let payload = std::mem::replace(unparsed, rest).split_off(HEADER);
            if let Some(packets) = all.last_mut() {
                packets.push(Packet { from_node: kind == 2, sequence: header.sequence, payload });
            }
        }
    }
    all
}

/// The shape of a packet; responses that differ only in their data have equal shapes.
fn shape(packet: &Packet) -> (bool, u8, usize) {
    let first = packet.payload.first().copied().unwrap_or(1);
    // First bytes with a meaning. Others are lengths or text.
    let first = if !packet.from_node || matches!(first, 0 | 1 | 0xfb..) { first } else { 2 };
    (packet.from_node, first, packet.payload.len().min(10))
}

/// The shapes of an exchange's packets, and whether the session uses DEPRECATE_EOF.
type Shape = (Vec<(bool, u8, usize)>, bool);

/// Adds seeds of one conversation: each command with its response, unless one of that shape was seen.
fn add_exchanges(packets: &[Packet], seeds: &mut Seeds, seen: &mut HashSet<Shape>) {
    let [greeting, login, ..] = packets else { return };
    let offered = Greeting::parse(&greeting.payload).map_or_else(Capabilities::default, |it| it.capabilities);
    let capabilities = handshake_response::capabilities(&login.payload).and(offered);
    let begins = |packet: &Packet| !packet.from_node && packet.sequence == 0;
    let Some(first) = packets.iter().position(begins) else { return };
    for exchange in packets[first..].chunk_by(|_, next| !begins(next)) {
        // Of a long exchange, the first packets and the last one suffice.
        let (front, back) = exchange.split_at(exchange.len().min(KEPT_PACKETS));
        let kept = || front.iter().chain(back.last());
        let mut shapes: Vec<_> = kept().map(shape).collect();
        shapes.dedup();
        if !seen.insert((shapes, capabilities.has(Capabilities::DEPRECATE_EOF))) {
            continue;
        }
        let mut seed = capabilities.0.to_le_bytes().to_vec();
        for packet in kept() {
            let bytes = &packet.payload[..packet.payload.len().min(KEPT_BYTES)];
            script::write(&mut seed, if packet.from_node { NODE } else { 0 }, bytes);
        }
        seeds.add(&format!("command-{:02x}", exchange[0].payload.first().unwrap_or(&0)), seed);
    }
}

/// A hash for the name, which stays the same as long as the seed does.
fn hash(seed: &[u8]) -> u32 {
    seed.iter().fold(2_166_136_261, |sum, &byte| (sum ^ u32::from(byte)).wrapping_mul(16_777_619))
}

struct Seeds {
    target: &'static str,
    seeds: Vec<(String, Vec<u8>)>,
}

impl Seeds {
    fn new(target: &'static str) -> Self {
        Self { target, seeds: Vec::new() }
    }

    fn add(&mut self, what: &str, seed: Vec<u8>) {
        let name = format!("{what}-{:08x}", hash(&seed));
        if !self.seeds.iter().any(|(there, _)| *there == name) {
            self.seeds.push((name, seed));
        }
    }

    /// Replaces the seeds that were generated before.
    fn write(&self, directory: &Path) -> Result<(), Error> {
        let directory = directory.join(self.target);
        fs::create_dir_all(&directory)?;
        for entry in fs::read_dir(&directory)? {
            let entry = entry?;
            if !entry.file_name().to_string_lossy().starts_with("found-") {
                fs::remove_file(entry.path())?;
            }
        }
        for (name, seed) in &self.seeds {
            fs::write(directory.join(name), seed)?;
        }
        let size = self.seeds.iter().map(|(_, seed)| seed.len()).sum::<usize>();
        println!("{}: {} seeds, {size} bytes", self.target, self.seeds.len());
        Ok(())
    }
}

/// The byte of rules for the target `login`: client TLS optional, node TLS preferred, clear text allowed.
const RULES: u8 = 1 | 1 << 2 | 1 << 5;

/// Adds the login of a conversation four times, with and without TLS on each side: the greeting offers TLS or not, and
/// the client sends an SSLRequest or not. Adds nothing if a login with the same capabilities was seen.
fn add_logins(packets: &[Packet], seeds: &mut Seeds, seen: &mut HashSet<Capabilities>) {
    let end = packets.iter().position(|packet| !packet.from_node && packet.sequence == 0).unwrap_or(packets.len());
    let [greeting, response, rest @ ..] = &packets[..end] else { return };
    if !seen.insert(handshake_response::capabilities(&response.payload)) {
        return;
    }
    for (client_tls, node_tls) in [(false, false), (true, false), (false, true), (true, true)] {
        let mut seed = vec![RULES];
        let mut offered = greeting.payload.clone();
        if let Some(read) = Greeting::parse(&offered) {
            let without = read.capabilities.without(Capabilities::SSL);
            read.offer(&mut offered, if node_tls { without.with(Capabilities::SSL) } else { without });
        }
        script::write(&mut seed, NODE, &offered);
        if let Some(head) = response.payload.first_chunk::<HEAD>().filter(|_| client_tls) {
            let request = handshake_response::ssl_request(*head, handshake_response::capabilities(head));
            script::write(&mut seed, 0, &request[HEADER..]);
        }
        for packet in std::iter::once(response).chain(rest) {
            script::write(&mut seed, if packet.from_node { NODE } else { 0 }, &packet.payload);
        }
        seeds.add("recorded", seed);
    }
}

/// Adds logins with plugins that the recorded logins do not use, with and without TLS on both sides.
fn add_plugins(seeds: &mut Seeds) {
    for plugin in ["caching_sha2_password", "sha256_password", "mysql_clear_password", "tidb_sm3_password", "parsec"] {
        for (client_tls, node_tls) in [(false, false), (true, false), (false, true), (true, true)] {
            for switched in [false, true] {
                let mut seed = vec![RULES];
                for (from_node, payload) in parties::login(plugin, client_tls, node_tls, switched) {
                    script::write(&mut seed, if from_node { NODE } else { 0 }, &payload);
                }
                seeds.add(plugin, seed);
            }
        }
    }
}

/// Statements for the targets `statement_texts` and `rules`.
const STATEMENTS: [&str; 24] = [
    "select a from t where b = 1",
    "SELECT * FROM t use index (a), s.t AS u WHERE u.id IN (1, 2, 'x') ORDER BY 1, -2 LIMIT 10; -- c",
    "/* a */ select /*+ HASH_JOIN(a,\n b) */ `a``b`.* from `t` # c\n, b",
    "/*!50000 delete */ from shop.users /*T![ttl] where id = 1 */ /*T![none] x */;",
    "select 1;;/* ; */ delete from`shop`.`users`where`id`=1;",
    "select 1 /*!; delete from*/ t where a = 'it''s \\' ' and b = \"x\" ; select now()",
    "prepare s from 'delete/**/from shop.users where id=1'",
    "PREPARE`s`FROM @`a b`",
    "use Shop; select @@global.x, @a, @'b c' from t",
    "KILL TIDB QUERY 17;",
    "kill 0x1",
    "insert into t values (_utf8'a', N'b', x'1f', b'01', 0x1f, 1e5, .5, 1., \\N, null, ?), (1, 2)",
    "update t, s.t set t.a = 1, s.t.b = 2 where a->>'$.x' <=> 1 and count (*) > count(*)",
    "with t as (select 1) select t.a from t join u on t.id = u.id",
    "create user root@localhost identified by 'x'",
    "grant select on t to root@localhost",
    "select *from users",
    "select .5from users",
    "select *,1e5from users",
    "select \\Nfrom users where id = 1",
    "drop/**/table t",
    "select straight_join t.a from t straight_join u limit 99 for update of t",
    "select \u{e4} from \u{c4}pfel where \u{a0} = '\u{1f600}'",
    "select 1 /* never ends",
];

/// Adds requests of all kinds.
fn add_requests(seeds: &mut Seeds) {
    let payloads = [&b"\x08obs"[..], b"\x03SELECT 1", b"\x02held", b"\x04held if even", b"\0", b"\xf7refused"];
    for (what, kind) in [("packet", 0), ("full", FULL), ("long", NODE | NUMBER), ("raw", RAW)] {
        for data in [0, 0x21] {
            let mut seed = vec![data];
            for payload in payloads {
                let bytes = if kind == RAW {
                    script::Entry { kind: 0, bytes: payload }.packet(0)
                } else {
                    payload.repeat(17)[..payload.len() + 16].to_vec()
                };
                script::write(&mut seed, kind, &bytes);
                script::write(&mut seed, 0, b"");
            }
            seeds.add(what, seed);
        }
    }
}

fn main() -> Result<(), Error> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = fs::read_dir(here.join("../mysql-proto/corpus"))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<_>, Error>>()?;
    files.retain(|path| path.extension().is_some_and(|ending| ending == "bin"));
    files.sort();
    let [mut tracker, mut framer, mut login] = ["tracker", "packet_framer", "login"].map(Seeds::new);
    let [mut first, mut greeting, mut response] = ["first_packet", "greeting", "response"].map(Seeds::new);
    let (mut exchanges, mut logins) = (HashSet::new(), HashSet::new());
    for file in files {
        for packets in conversations(&fs::read(file)?) {
            add_exchanges(&packets, &mut tracker, &mut exchanges);
            add_logins(&packets, &mut login, &mut logins);
        }
    }
    add_plugins(&mut login);
    for (_, seed) in &login.seeds {
        let mut entries = script::entries(&seed[1..]);
        let (Some(node), Some(client)) = (entries.next(), entries.find(|entry| entry.bytes.len() > HEAD)) else {
            continue;
        };
        first.add("greeting", node.packet(0));
        let wanted = Capabilities::SSL.0.to_le_bytes();
        greeting.add("greeting", [&wanted[..], node.bytes].concat());
        if HandshakeResponse::parse(client.bytes, handshake_response::capabilities(client.bytes)).is_some() {
            response.add("response", [b"\x06\0secret", client.bytes].concat());
        }
    }
    first.add("error", script::Entry { kind: NODE, bytes: b"\xff\x10\x04Too many connections" }.packet(0));
    for (what, kind) in [("packet", 0), ("raw", RAW), ("full", FULL)] {
        let mut seed = Vec::new();
        for bytes in [&b"\x03SELECT 1"[..], b"", b"\x02\0\0\0ab"] {
            script::write(&mut seed, kind, bytes);
        }
        framer.add(what, seed);
    }
    let [mut requests, mut texts, mut rules] = ["request_reader", "statement_texts", "rules"].map(Seeds::new);
    add_requests(&mut requests);
    for sql in STATEMENTS {
        texts.add("text", sql.as_bytes().to_vec());
        rules.add("text", [b"\0", sql.as_bytes()].concat());
    }
    for seeds in [tracker, framer, login, first, greeting, response, requests, texts, rules] {
        seeds.write(&here.join("seeds"))?;
    }
    Ok(())
}
