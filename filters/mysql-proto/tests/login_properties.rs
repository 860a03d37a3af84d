//! Properties of every login, however its bytes are split and whatever they are.

mod login_parties;

use login_parties::*;
use mysql_proto::capability::Capabilities;
use mysql_proto::login::{ClientTls, Compression, FirstPacket, Login, NodeTls, Output, Progress, Rules, first_packet};
use proptest::prelude::*;

/// Bytes of the client or of the node.
#[derive(Debug, Clone)]
struct ScriptedPacket {
    client: bool,
    bytes: Vec<u8>,
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

/// Plays `script`. `cut` gets the number of bytes left in an entry and returns how many to pass next.
fn play(rules: Rules, script: &[ScriptedPacket], mut cut: impl FnMut(usize) -> usize) -> LoginTrace {
    let mut login = Login::new(rules);
    let mut trace = LoginTrace::default();
    for packets in script {
        let mut rest = packets.bytes.as_slice();
        loop {
            let count = cut(rest.len()).clamp(1.min(rest.len()), rest.len());
            let mut out = Output::default();
            let (taken, progress) = if packets.client {
                login.on_client_bytes(&rest[..count], &TestKey, &mut out)
            } else {
                login.on_node_bytes(&rest[..count], &mut out)
            };
            assert!(taken <= count, "takes at most the bytes that it gets");
            rest = &rest[taken..];
            if packets.client {
                trace.to_node.extend(out.onward.iter());
                trace.to_client.extend(out.back.iter());
            } else {
                trace.to_client.extend(out.onward.iter());
                assert!(out.back.is_empty());
            }
            trace.ssl_request = trace.ssl_request.or(login.node_ssl_request());
            if packets.client && login.node_ssl_request().is_some() {
                login.on_node_tls_started();
            }
            match progress {
                Progress::More => {
                    assert_eq!(taken, count);
                    if rest.is_empty() {
                        break;
                    }
                }
                Progress::StartClientTls => {
                    // The following bytes are "decrypted" as they are.
                    trace.progress.push(progress);
                    if rest.is_empty() {
                        break;
                    }
                }
                _ => {
                    trace.progress.push(progress);
                    break;
                }
            }
        }
        trace.taken.push(packets.bytes.len() - rest.len());
    }
    trace
}

/// A login with the given TLS and plugin that succeeds, unless the rules reject it.
fn script(server: Server, client_tls: bool, node_tls: bool, plugin: usize) -> Vec<ScriptedPacket> {
    let plugin =
        ["mysql_native_password", "caching_sha2_password", "sha256_password", "mysql_clear_password", "parsec"][plugin];
    let mut client_next = 1;
    let mut node_next = 1 + u8::from(node_tls);
    let mut script = vec![ScriptedPacket { client: false, bytes: frame(0, &server.greeting(node_tls, plugin)) }];
    let mut claimed = CLIENT;
    let mut first = Vec::new();
    if client_tls {
        claimed = claimed.with(Capabilities::SSL);
        first = frame(1, &head(claimed));
        client_next = 2;
    }
    let requests_key = plugin == "sha256_password" && !client_tls;
    first.extend(frame(client_next, &response(claimed, if requests_key { &[1] } else { &[7; 20] }, plugin)));
    client_next += 1;
    script.push(ScriptedPacket { client: true, bytes: first });
    let client = |script: &mut Vec<ScriptedPacket>, payload: &[u8], at: u8| {
        script.push(ScriptedPacket { client: true, bytes: frame(at, payload) });
    };
    if requests_key && node_tls {
        client(&mut script, &hidden(SALT), client_next + 1);
        client_next += 2;
    }
    if plugin == "caching_sha2_password" {
        script.push(ScriptedPacket { client: false, bytes: frame(node_next + 1, &[1, 4]) });
        node_next += 2;
        if client_tls {
            client(&mut script, PASSWORD, client_next + 1);
        } else {
            client(&mut script, &[2], client_next + 1);
            client(&mut script, &hidden(SALT), client_next + 3);
        }
    }
    script.push(ScriptedPacket { client: false, bytes: [frame(node_next + 1, OK), b"behind".to_vec()].concat() });
    script
}

prop_compose! {
    fn rules()(
        client_tls in prop::sample::select(vec![ClientTls::Disabled, ClientTls::Optional, ClientTls::Required]),
        node_tls in prop::sample::select(vec![NodeTls::Disabled, NodeTls::Preferred, NodeTls::Required]),
        compression in prop::sample::select(vec![Compression::Off, Compression::Passthrough]),
        allow_cleartext_backend: bool,
    ) -> Rules {
        Rules { client_tls, node_tls, compression, allow_cleartext_backend }
    }
}

prop_compose! {
    fn scripts()(
        server in prop::sample::select(Server::ALL.to_vec()),
        client_tls: bool,
        node_tls: bool,
        plugin in 0..5usize,
    ) -> Vec<ScriptedPacket> {
        script(server, client_tls, node_tls, plugin)
    }
}

fn scripted_packet() -> impl Strategy<Value = ScriptedPacket> {
    let packet =
        (any::<u8>(), 0..6u8, prop::collection::vec(any::<u8>(), 0..80)).prop_map(|(first, sequence, mut payload)| {
            payload.insert(0, first);
            frame(sequence, &payload)
        });
    let bytes = prop_oneof![packet, prop::collection::vec(any::<u8>(), 0..80)];
    (any::<bool>(), bytes).prop_map(|(client, bytes)| ScriptedPacket { client, bytes })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn login_does_not_depend_on_splitting(
        rules in rules(),
        script in scripts(),
        cuts in prop::collection::vec(1..60usize, 1..40),
    ) {
        let whole = play(rules, &script, |left| left);
        prop_assert_eq!(&play(rules, &script, |_| 1), &whole);
        let mut cuts = cuts.iter().cycle().copied();
        prop_assert_eq!(&play(rules, &script, |_| cuts.next().unwrap_or(1)), &whole);
    }

    #[test]
    fn damaged_login_does_not_panic_or_depend_on_splitting(
        rules in rules(),
        mut script in scripts(),
        at: prop::sample::Index,
        offset: prop::sample::Index,
        byte: u8,
    ) {
        let packets = at.get(&script).bytes.len();
        let at = at.index(script.len());
        script[at].bytes[offset.index(packets)] = byte;
        let whole = play(rules, &script, |left| left);
        prop_assert_eq!(&play(rules, &script, |_| 1), &whole);
    }

    #[test]
    fn arbitrary_bytes_do_not_panic_or_depend_on_splitting(
        rules in rules(),
        greeted: bool,
        mut script in prop::collection::vec(scripted_packet(), 0..12),
    ) {
        if greeted {
            script.insert(0, ScriptedPacket { client: false, bytes: frame(0, &Server::TiDb.greeting(true, "dialog")) });
        }
        let whole = play(rules, &script, |left| left);
        prop_assert_eq!(&play(rules, &script, |_| 1), &whole);
    }

    #[test]
    fn classification_of_a_first_packet_is_final(
        bytes in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..40),
            scripted_packet().prop_map(|packets| packets.bytes),
            Just(frame(0, &Server::TiDb.greeting(false, "x"))),
        ],
    ) {
        let last = first_packet(&bytes);
        for end in 0..bytes.len() {
            let earlier = first_packet(&bytes[..end]);
            prop_assert!(earlier == FirstPacket::Incomplete || earlier == last);
        }
    }
}

/// When a node, or an attacker in its place, sends bytes that TLS does not protect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EarlyDataTiming {
    /// Before the client's response.
    BehindGreeting,
    /// Between the client's response and the start of TLS.
    BehindResponse,
}

/// Plays a login up to the start of TLS with the node, with `early` sent before; `piece`: bytes at a time. Returns the
/// client's bytes, and how the login ended.
fn play_early(
    rules: Rules,
    script: &[ScriptedPacket],
    early: &[u8],
    when: EarlyDataTiming,
    piece: usize,
) -> (Vec<u8>, Option<Progress>) {
    let mut login = Login::new(rules);
    let mut to_client = Vec::new();
    let mut send = |login: &mut Login, client: bool, mut bytes: &[u8]| {
        while !bytes.is_empty() {
            let mut out = Output::default();
            let part = &bytes[..piece.min(bytes.len())];
            let (taken, progress) = if client {
                login.on_client_bytes(part, &TestKey, &mut out)
            } else {
                login.on_node_bytes(part, &mut out)
            };
            to_client.extend(if client { out.back.iter() } else { out.onward.iter() });
            bytes = &bytes[taken..];
            if !matches!(progress, Progress::More | Progress::StartClientTls) {
                return Some(progress);
            }
        }
        None
    };
    let mut end = None;
    for packets in script.iter().take_while(|packets| packets.client || packets.bytes[3] == 0) {
        end = end.or_else(|| send(&mut login, packets.client, &packets.bytes));
        if !packets.client && when == EarlyDataTiming::BehindGreeting {
            end = end.or_else(|| send(&mut login, false, early));
        }
        if login.node_ssl_request().is_some() {
            break;
        }
    }
    if when == EarlyDataTiming::BehindResponse {
        end = end.or_else(|| send(&mut login, false, early));
    }
    assert!(end.is_some() || login.node_ssl_request().is_some(), "the login ended before TLS");
    (to_client, end)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Otherwise the bytes would be joined with those that TLS decrypted, and trusted like them.
    #[test]
    fn bytes_of_the_node_before_tls_end_the_login(
        server in prop::sample::select(Server::ALL.to_vec()),
        client_tls: bool,
        plugin in 0..5usize,
        early in prop_oneof![
            prop::collection::vec(any::<u8>(), 1..80),
            // The beginning of a switch to a plugin with which the client sends its password.
            (1..26usize).prop_map(|length| frame(2, b"\xfemysql_clear_password\0")[..length].to_vec()),
            (any::<u8>(), 0..4u8).prop_map(|(first, sequence)| frame(sequence, &[first, 1, 2, 3])),
        ],
        when in prop::sample::select(vec![EarlyDataTiming::BehindGreeting, EarlyDataTiming::BehindResponse]),
        piece in 1..100usize,
    ) {
        let rules = Rules { node_tls: NodeTls::Preferred, allow_cleartext_backend: true, ..RULES };
        let script = script(server, client_tls, true, plugin);
        let (honest, end) = play_early(rules, &script, b"", when, piece);
        prop_assert_eq!(end, None);
        let (to_client, end) = play_early(rules, &script, &early, when, piece);
        match end {
            Some(Progress::Rejected(_)) => {}
            // An error may come at any time before the client's response. It also ends the login.
            Some(Progress::Denied(_)) => prop_assert!(when == EarlyDataTiming::BehindGreeting && early[4] == 0xff),
            _ => prop_assert!(false, "the login continued: {end:?}"),
        }
        // The client gets the greeting, the key if it requested one, and an error.
        let common = honest.len().min(to_client.len());
        let rest = to_client.strip_prefix(&honest[..]).or_else(|| to_client.get(common.min(greeting_length(&honest))..));
        prop_assert!(rest.is_some_and(|rest| rest.get(4) == Some(&0xff)), "{to_client:?}");
    }

    /// Bytes after an SSLRequest are left for TLS, whatever they are.
    #[test]
    fn bytes_after_an_ssl_request_are_not_read_as_a_login(
        server in prop::sample::select(Server::ALL.to_vec()),
        node_tls: bool,
        plugin in 0..5usize,
        behind in prop::collection::vec(any::<u8>(), 0..80),
        piece in 1..200usize,
    ) {
        let rules = Rules { allow_cleartext_backend: true, ..RULES };
        let script = script(server, true, node_tls, plugin);
        let [greeting, packets] = &script[..2] else { unreachable!("a script begins so") };
        let (request, response) = packets.bytes.split_at(36);
        let plain = [request, &behind].concat();
        let mut login = Login::new(rules);
        login.on_node_bytes(&greeting.bytes, &mut Output::default());
        let mut out = Output::default();
        let mut all = 0;
        let mut progress = Progress::More;
        while progress == Progress::More {
            let (taken, now) = login.on_client_bytes(&plain[all..plain.len().min(all + piece)], &TestKey, &mut out);
            (all, progress) = (all + taken, now);
        }
        prop_assert_eq!((all, progress), (request.len(), Progress::StartClientTls));
        prop_assert!(out.onward.is_empty() && out.back.is_empty());
        // Only the bytes that TLS decrypts count.
        let mut honest = Login::new(rules);
        honest.on_node_bytes(&greeting.bytes, &mut Output::default());
        honest.on_client_bytes(request, &TestKey, &mut Output::default());
        let mut expected = Output::default();
        prop_assert_eq!(login.on_client_bytes(response, &TestKey, &mut out), honest.on_client_bytes(response, &TestKey, &mut expected));
        prop_assert_eq!((out.onward, out.back), (expected.onward, expected.back));
    }
}

/// Length of the first packet, header included.
fn greeting_length(bytes: &[u8]) -> usize {
    4 + usize::from(bytes[0]) + 256 * usize::from(bytes[1])
}

/// Checks that the scripts reach their ends. Otherwise the properties would prove nothing.
#[test]
fn scripts_are_complete_logins() {
    for server in Server::ALL {
        for client_tls in [false, true] {
            for node_tls in [false, true] {
                for plugin in 0..5 {
                    let rules = Rules { allow_cleartext_backend: true, ..RULES };
                    let script = script(server, client_tls, node_tls, plugin);
                    let trace = play(rules, &script, |left| left);
                    // Without TLS on both sides MySQL's server would send its key, which the script leaves out.
                    let last = trace.progress.last();
                    let plain = !client_tls && !node_tls && plugin == 1;
                    assert!(
                        plain || matches!(last, Some(Progress::Established(_))),
                        "{server:?} {client_tls} {node_tls} {plugin}: {last:?}"
                    );
                }
            }
        }
    }
}
