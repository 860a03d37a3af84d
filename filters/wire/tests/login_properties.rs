//! What holds for every login, however its bytes come and whatever they are.

mod login_parties;

use login_parties::*;
use proptest::prelude::*;
use wire::capability::Capabilities;
use wire::login::{ClientTls, Compression, FirstPacket, Login, NodeTls, Output, Progress, Rules, first_packet};

/// Bytes of one side: of the client, or of the node.
#[derive(Debug, Clone)]
struct Said {
    client: bool,
    bytes: Vec<u8>,
}

/// What a login made of what was said.
#[derive(Debug, Default, PartialEq)]
struct Heard {
    to_client: Vec<u8>,
    to_node: Vec<u8>,
    ssl_request: Option<[u8; 36]>,
    progress: Vec<Progress>,
    taken: Vec<usize>,
}

/// Plays `script`, each entry cut as `cut` says: it gets the bytes that are left and says how many come next.
fn play(rules: Rules, script: &[Said], mut cut: impl FnMut(usize) -> usize) -> Heard {
    let mut login = Login::new(rules);
    let mut heard = Heard::default();
    for said in script {
        let mut rest = said.bytes.as_slice();
        loop {
            let count = cut(rest.len()).clamp(1.min(rest.len()), rest.len());
            let mut out = Output::default();
            let (taken, progress) = if said.client {
                login.client(&rest[..count], &Key, &mut out)
            } else {
                login.node(&rest[..count], &mut out)
            };
            assert!(taken <= count, "no more is taken than came");
            rest = &rest[taken..];
            if said.client {
                heard.to_node.extend(out.onward);
                heard.to_client.extend(out.back);
            } else {
                heard.to_client.extend(out.onward);
                assert!(out.back.is_empty());
            }
            heard.ssl_request = heard.ssl_request.or(login.node_ssl_request());
            match progress {
                Progress::More => {
                    assert_eq!(taken, count);
                    if rest.is_empty() {
                        break;
                    }
                }
                Progress::StartClientTls => {
                    // What follows is decrypted, here by doing nothing.
                    heard.progress.push(progress);
                    if rest.is_empty() {
                        break;
                    }
                }
                _ => {
                    heard.progress.push(progress);
                    break;
                }
            }
        }
        heard.taken.push(said.bytes.len() - rest.len());
    }
    heard
}

/// A login that goes well, or as the rules have it: the client's TLS, the node's, and the plugin are chosen.
fn script(server: Server, client_tls: bool, node_tls: bool, plugin: usize) -> Vec<Said> {
    let plugin =
        ["mysql_native_password", "caching_sha2_password", "sha256_password", "mysql_clear_password", "parsec"][plugin];
    let mut client_next = 1;
    let mut node_next = 1 + u8::from(node_tls);
    let mut script = vec![Said { client: false, bytes: frame(0, &server.greeting(node_tls, plugin)) }];
    let mut claimed = CLIENT;
    let mut first = Vec::new();
    if client_tls {
        claimed = claimed.with(Capabilities::SSL);
        first = frame(1, &head(claimed));
        client_next = 2;
    }
    let asks = plugin == "sha256_password" && !client_tls;
    first.extend(frame(client_next, &response(claimed, if asks { &[1] } else { &[7; 20] }, plugin)));
    client_next += 1;
    script.push(Said { client: true, bytes: first });
    let client = |script: &mut Vec<Said>, payload: &[u8], at: u8| {
        script.push(Said { client: true, bytes: frame(at, payload) });
    };
    if asks && node_tls {
        client(&mut script, &hidden(SALT), client_next + 1);
        client_next += 2;
    }
    if plugin == "caching_sha2_password" {
        script.push(Said { client: false, bytes: frame(node_next + 1, &[1, 4]) });
        node_next += 2;
        if client_tls {
            client(&mut script, PASSWORD, client_next + 1);
        } else {
            client(&mut script, &[2], client_next + 1);
            client(&mut script, &hidden(SALT), client_next + 3);
        }
    }
    script.push(Said { client: false, bytes: [frame(node_next + 1, OK), b"behind".to_vec()].concat() });
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
    ) -> Vec<Said> {
        script(server, client_tls, node_tls, plugin)
    }
}

fn said() -> impl Strategy<Value = Said> {
    let packet =
        (any::<u8>(), 0..6u8, prop::collection::vec(any::<u8>(), 0..80)).prop_map(|(first, sequence, mut payload)| {
            payload.insert(0, first);
            frame(sequence, &payload)
        });
    let bytes = prop_oneof![packet, prop::collection::vec(any::<u8>(), 0..80)];
    (any::<bool>(), bytes).prop_map(|(client, bytes)| Said { client, bytes })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_cut_gives_the_same(
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
    fn a_changed_byte_gives_the_same_in_any_cut_and_never_panics(
        rules in rules(),
        mut script in scripts(),
        at: prop::sample::Index,
        offset: prop::sample::Index,
        byte: u8,
    ) {
        let said = at.get(&script).bytes.len();
        let at = at.index(script.len());
        script[at].bytes[offset.index(said)] = byte;
        let whole = play(rules, &script, |left| left);
        prop_assert_eq!(&play(rules, &script, |_| 1), &whole);
    }

    #[test]
    fn arbitrary_bytes_end_in_nothing_worse_than_a_refusal(
        rules in rules(),
        greeted: bool,
        mut script in prop::collection::vec(said(), 0..12),
    ) {
        if greeted {
            script.insert(0, Said { client: false, bytes: frame(0, &Server::TiDb.greeting(true, "dialog")) });
        }
        let whole = play(rules, &script, |left| left);
        prop_assert_eq!(&play(rules, &script, |_| 1), &whole);
    }

    #[test]
    fn a_first_packet_never_changes_its_mind(
        bytes in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..40),
            said().prop_map(|said| said.bytes),
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

/// The scripts above reach their ends: else the properties would say nothing about them.
#[test]
fn the_scripts_are_whole_logins() {
    for server in Server::ALL {
        for client_tls in [false, true] {
            for node_tls in [false, true] {
                for plugin in 0..5 {
                    let rules = Rules { allow_cleartext_backend: true, ..RULES };
                    let script = script(server, client_tls, node_tls, plugin);
                    let heard = play(rules, &script, |left| left);
                    // Without TLS on both sides MySQL's server would give its key, which the script leaves out.
                    let last = heard.progress.last();
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
