//! Packets from the node during a login.

use super::password::{self, Plugin, SESSION_TOKEN_PLUGIN};
use super::{ClientTls, ExpectedPassword, Login, LoginStage, LoginStep, NodeTls, Output, Progress, Side, rejected};
use crate::capability::Capabilities;
use crate::error::{self, ProxyError};
use crate::greeting::Greeting;
use crate::secret::SecretBytes;

impl Login {
    /// Processes a packet of the node; `in_order`: whether it has the expected sequence number.
    pub(super) fn on_node_packet(&mut self, mut payload: SecretBytes, in_order: bool, out: &mut Output) -> LoginStep {
        // An error may come at any time, and its sequence number is not reliable.
        if payload.first() == Some(&0xff) {
            let code = error::code(&payload).ok_or(Progress::Rejected(ProxyError::NodeProtocol))?;
            self.client_next = self.next_client_sequence();
            self.send_to_client(&payload, &mut out.onward);
            return Err(Progress::Denied(code));
        }
        if self.stage == LoginStage::Response && self.node_tls {
            return rejected(ProxyError::NodeTlsFailed);
        }
        if !in_order {
            return rejected(ProxyError::NodeProtocol);
        }
        match self.stage {
            LoginStage::Greeting => self.on_greeting(&mut payload)?,
            LoginStage::Auth => match self.on_auth_packet(&payload) {
                Err(progress @ Progress::Established(_)) => {
                    self.send_to_client(&payload, &mut out.onward);
                    return Err(progress);
                }
                step => step?,
            },
            LoginStage::Response | LoginStage::Finished(_) => return rejected(ProxyError::NodeProtocol),
        }
        self.send_to_client(&payload, &mut out.onward);
        Ok(())
    }

    /// Applies the greeting to the login, and edits it for the client.
    fn on_greeting(&mut self, payload: &mut [u8]) -> LoginStep {
        let Some(greeting) = Greeting::parse(payload) else {
            return rejected(ProxyError::NodeProtocol);
        };
        let node_offers = greeting.capabilities;
        let node_has_tls = node_offers.has(Capabilities::SSL);
        if self.rules.node_tls == NodeTls::Required && !node_has_tls {
            return rejected(ProxyError::NodeWithoutTls);
        }
        self.node_tls = node_has_tls && self.rules.node_tls != NodeTls::Disabled;
        self.offered = self.filter_compression(node_offers.without(Capabilities::SSL));
        if self.rules.client_tls != ClientTls::Disabled {
            self.offered = self.offered.with(Capabilities::SSL);
        }
        greeting.offer(payload, self.offered);
        self.plugin = Plugin::named(&payload[greeting.plugin]);
        self.salt = greeting.salt;
        self.stage = LoginStage::Response;
        self.turn = Side::Client;
        Ok(())
    }

    /// Processes what the node sends between the client's response and OK.
    fn on_auth_packet(&mut self, payload: &[u8]) -> LoginStep {
        self.expected_password = ExpectedPassword::No;
        self.turn = Side::Client;
        let sha2 = self.plugin == Plugin::HashThenPassword;
        match payload {
            [0x00, ..] => Err(Progress::Established(self.claimed.unwrap_or_default().and(self.offered))),
            // One byte without a name: the switch to the passwords from before protocol 4.1.
            [0xfe] => {
                self.plugin = Plugin::Hash;
                Ok(())
            }
            [0xfe, switch @ ..] => self.on_auth_switch(switch),
            // The hash was enough: the node sends OK next, and the client sends nothing.
            [0x01, 0x03] if sha2 => {
                self.turn = Side::Node;
                Ok(())
            }
            [0x01, 0x04] if sha2 => {
                self.check_clear_text()?;
                if self.must_decrypt_passwords() {
                    self.expected_password = ExpectedPassword::OrRequest(password::KEY_FOR_HASH_THEN_PASSWORD);
                }
                Ok(())
            }
            [] | [0x01, ..] => Ok(()),
            _ if self.plugin.may_send_bare_data() => Ok(()),
            _ => rejected(ProxyError::NodeProtocol),
        }
    }

    /// The node switches to another plugin: its name, NUL, and its salt, usually with a NUL.
    fn on_auth_switch(&mut self, switch: &[u8]) -> LoginStep {
        let mut parts = switch.splitn(2, |&byte| byte == 0);
        let name = parts.next().unwrap_or_default();
        if name == SESSION_TOKEN_PLUGIN {
            return rejected(ProxyError::SessionTokenPlugin);
        }
        self.plugin = Plugin::named(name);
        let salt = parts.next().unwrap_or_default();
        self.salt = salt.strip_suffix(&[0]).unwrap_or(salt).to_vec();
        if self.plugin.sends_clear_text() {
            self.check_clear_text()?;
        }
        if self.plugin == Plugin::Password && self.must_decrypt_passwords() {
            self.expected_password = ExpectedPassword::OrRequest(password::KEY_FOR_PASSWORD);
        }
        Ok(())
    }
}
