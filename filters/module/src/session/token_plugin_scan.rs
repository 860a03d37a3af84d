//! Changes of user that a client sends before the responses to earlier commands. They do not reach the node whole, so they cannot
//! be read as commands; but they must not name the plugin with which only the module logs in.

use mysql_proto::login::SESSION_TOKEN_PLUGIN;
use mysql_proto::secret::SecretBytes;

/// Looks for the plugin's name in what the client sends from such a command on, until it is answered.
#[derive(Debug, Default)]
pub(crate) struct TokenPluginScan {
    is_active: bool,
    /// The last bytes, with which the name may begin.
    tail: SecretBytes,
}

impl TokenPluginScan {
    /// The next bytes of the client; `begins`: such a command begins in them. True: they hold the end of the name.
    pub(crate) fn push(&mut self, bytes: &[u8], begins: bool) -> bool {
        self.is_active |= begins;
        if !self.is_active {
            return false;
        }
        self.tail.extend_from_slice(bytes);
        let found = self.tail.windows(SESSION_TOKEN_PLUGIN.len()).any(|window| window == SESSION_TOKEN_PLUGIN);
        let surplus = self.tail.len().saturating_sub(SESSION_TOKEN_PLUGIN.len() - 1);
        self.tail.consume(surplus);
        found
    }

    /// The command is answered.
    pub(crate) fn stop(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMAND: &[u8] = b"\x2a\0\0\0\x11root\0\0\0\x2d\0tidb_session_token\0";

    #[test]
    fn the_name_is_found_however_it_is_cut() {
        for size in 1..=COMMAND.len() {
            let mut scan = TokenPluginScan::default();
            let mut pieces = COMMAND.chunks(size);
            let found_at_first = scan.push(pieces.next().expect("a piece"), true);
            assert!(found_at_first || pieces.any(|piece| scan.push(piece, false)), "{size}");
        }
    }

    #[test]
    fn nothing_is_looked_at_before_and_after_it() {
        let mut scan = TokenPluginScan::default();
        assert!(!scan.push(COMMAND, false));
        assert!(!scan.push(b"\x11root\0\0\0\x2d\0mysql_native_password\0tidb_session_", true));
        scan.stop();
        assert!(!scan.push(b"token", false));
        assert!(!scan.push(COMMAND, false));
    }
}
