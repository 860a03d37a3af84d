//! A greeting: the capabilities to offer (4 bytes), then the payload.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mysql_proto::capability::Capabilities;
use mysql_proto::greeting::Greeting;

/// The capabilities that the proxy may change.
const CHANGED: Capabilities = Capabilities::SSL.with(Capabilities::COMPRESS).with(Capabilities::ZSTD_COMPRESSION);

/// Returns the payload with `capabilities`.
fn offer(greeting: &Greeting, payload: &[u8], capabilities: Capabilities) -> Vec<u8> {
    let mut changed = payload.to_vec();
    greeting.offer(&mut changed, capabilities);
    assert_eq!(changed.len(), payload.len());
    let differences = changed.iter().zip(payload).filter(|(a, b)| a != b).count();
    assert!(differences <= 5, "{differences} bytes were changed");
    let mut again = changed.clone();
    greeting.offer(&mut again, capabilities);
    assert_eq!(again, changed, "a second edit changes the result");
    changed
}

fuzz_target!(|input: &[u8]| {
    let Some((wanted, payload)) = input.split_first_chunk() else { return };
    let wanted = Capabilities(u32::from_le_bytes(*wanted));
    let Some(greeting) = Greeting::parse(payload) else { return };
    assert!(payload.get(greeting.plugin.clone()).is_some_and(|name| !name.contains(&0)));
    assert!((8..=20).contains(&greeting.salt.len()));
    offer(&greeting, payload, wanted);
    // With the changes that a login makes, the greeting's other fields stay the same.
    let capabilities = greeting.capabilities.without(CHANGED).with(wanted.and(CHANGED));
    let changed = offer(&greeting, payload, capabilities);
    let read = Greeting::parse(&changed).expect("still a greeting");
    assert_eq!((&read.salt, &read.plugin), (&greeting.salt, &greeting.plugin));
    let recorded = if read.capabilities.0 >> 16 == 0 { Capabilities(capabilities.0 & 0xffff) } else { capabilities };
    assert_eq!(read.capabilities, recorded);
    assert_eq!(offer(&read, &changed, capabilities), changed);
});
