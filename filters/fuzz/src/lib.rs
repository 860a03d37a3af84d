//! Shared by the fuzz targets: inputs that are conversations, ways to split them, tokens of statements, and a count of
//! memory.
//!
//! * [`script`] is the format of a conversation in a fuzzer's input.
//! * [`parties`] builds the messages of a login.
//! * [`tokens`] splits a statement.

pub mod script;
pub mod tokens;

// The scanner is included because it is private.
#[expect(dead_code, reason = "the crate uses the rest of it")]
#[path = "../../sql-text/src/scanner.rs"]
mod scanner;
/// Used by the included scanner.
#[expect(dead_code, reason = "the crate uses the rest of it")]
#[path = "../../sql-text/src/text.rs"]
mod text;

#[path = "../../mysql-proto/tests/login_parties/mod.rs"]
mod login_parties;

/// Messages of a login, built by the helpers of the login tests.
pub mod parties {
    use crate::login_parties as made;
    use mysql_proto::capability::Capabilities;
    use mysql_proto::login::PasswordKey;

    /// The key of the proxy.
    pub const KEY: &dyn PasswordKey = &made::TestKey;

    /// Length of the public key in bytes.
    pub const PEM: usize = made::PEM.len();

    /// The payloads of a login with `plugin`, each with whether the node sends it. `switched`: the client begins with
    /// another plugin, and the node switches.
    #[must_use]
    pub fn login(plugin: &str, client_tls: bool, node_tls: bool, switched: bool) -> Vec<(bool, Vec<u8>)> {
        let named = if switched { "mysql_native_password" } else { plugin };
        let mut packets = vec![(true, made::Server::TiDb.greeting(node_tls, named))];
        let mut claimed = made::CLIENT;
        if client_tls {
            claimed = claimed.with(Capabilities::SSL);
            packets.push((false, made::head(claimed)));
        }
        let hidden = made::hidden(made::SALT);
        let password = if client_tls { made::PASSWORD } else { &hidden };
        // A client without TLS requests the key from the proxy, which hides that the node has TLS.
        let requests_key = plugin == "sha256_password" && !client_tls && node_tls;
        let first = match plugin {
            "sha256_password" if !switched && requests_key => &[1],
            "sha256_password" if !switched => password,
            "mysql_clear_password" if !switched => made::PASSWORD,
            _ => &[7; 20],
        };
        packets.push((false, made::response(claimed, first, named)));
        if switched {
            packets.push((true, made::switch(plugin, made::SALT)));
            let clear = plugin == "mysql_clear_password";
            packets.push((false, if clear { made::PASSWORD.to_vec() } else { password.to_vec() }));
        }
        if requests_key && !switched {
            packets.push((false, hidden.clone()));
        }
        if matches!(plugin, "caching_sha2_password" | "tidb_sm3_password") {
            packets.push((true, vec![1, 4]));
            if !client_tls {
                packets.push((false, vec![2]));
            }
            packets.push((false, password.to_vec()));
        }
        packets.push((true, made::OK.to_vec()));
        packets
    }
}

use cap::Cap;
use std::alloc::System;

/// Counts the memory that Rust code allocates.
#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, usize::MAX);

/// Bytes of memory that are allocated now.
#[must_use]
pub fn held() -> usize {
    MEMORY.allocated()
}
