//! Scans changes of user that a client sends before it has the responses to earlier commands. The module does not
//! collect such commands, so it cannot parse them. But they must not name the plugin with which only the module logs
//! in.

use mysql_proto::login::SESSION_TOKEN_PLUGIN;
use mysql_proto::secret::SecretBytes;

/// Searches the client's bytes for the plugin's name, from such a command on until the node has answered the command.
#[derive(Debug, Default)]
pub(crate) struct TokenPluginScan {
    is_active: bool,
    /// The last bytes, which may be the begin of the name.
    tail: SecretBytes,
}

impl TokenPluginScan {
    /// Scans the next bytes of the client. `begins`: such a command begins in these bytes. True: the name was found.
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

    /// The node has answered the command.
    pub(crate) fn stop(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMAND: &[u8] = b"\x2a\0\0\0\x11root\0\0\0\x2d\0tidb_session_token\0";

    #[test]
    fn plugin_name_is_found_wherever_the_bytes_are_split() {
        for size in 1..=COMMAND.len() {
            let mut scan = TokenPluginScan::default();
            let mut pieces = COMMAND.chunks(size);
            let found_at_first = scan.push(pieces.next().expect("the first piece"), true);
            assert!(found_at_first || pieces.any(|piece| scan.push(piece, false)), "{size}");
        }
    }

    #[test]
    fn bytes_outside_a_change_of_user_are_not_scanned() {
        let mut scan = TokenPluginScan::default();
        assert!(!scan.push(COMMAND, false));
        assert!(!scan.push(b"\x11root\0\0\0\x2d\0mysql_native_password\0tidb_session_", true));
        scan.stop();
        assert!(!scan.push(b"token", false));
        assert!(!scan.push(COMMAND, false));
    }
}
