//! Packets from the client during its login.

use super::password::{self, Plugin, SESSION_TOKEN_PLUGIN};
use super::{ClientTls, ExpectedPassword, Login, LoginStage, LoginStep, Output, PasswordKey, Progress, rejected};
use crate::capability::Capabilities;
use crate::error::ProxyError;
use crate::handshake_response::{self, HEAD, HandshakeResponse};
use crate::packet::Header;
use crate::secret::SecretBytes;

impl Login {
    /// Checks the header of a client's packet before the payload arrives.
    pub(super) fn check_client_header(&self, header: Header) -> LoginStep {
        if header.sequence != self.client_next {
            return rejected(ProxyError::BadPacket);
        }
        if header.length > handshake_response::MAX_RESPONSE_BYTES {
            return rejected(ProxyError::PacketTooLarge);
        }
        Ok(())
    }

    /// Processes a packet of the client.
    pub(super) fn on_client_packet(
        &mut self,
        payload: SecretBytes,
        key: &dyn PasswordKey,
        out: &mut Output,
    ) -> LoginStep {
        if self.stage == LoginStage::Response && self.held_response.is_none() {
            return self.on_first_client_packet(payload, key, out);
        }
        match self.expected_password {
            ExpectedPassword::No => self.send_to_node(&payload, out),
            ExpectedPassword::OrRequest(request) if payload == [request] => self.send_public_key(key, out),
            _ => {
                let password =
                    if password::is_password(&payload) { self.decrypt_password(key, &payload)? } else { payload };
                self.expected_password = ExpectedPassword::No;
                match self.held_response.take() {
                    Some((held, response)) => {
                        return self.forward_response(held, Some((&response, &password)), out);
                    }
                    None => self.send_to_node(&password, out),
                }
            }
        }
        Ok(())
    }

    /// Processes an SSLRequest or response.
    fn on_first_client_packet(&mut self, payload: SecretBytes, key: &dyn PasswordKey, out: &mut Output) -> LoginStep {
        let claimed = handshake_response::capabilities(&payload);
        // The capabilities of the client's first packet apply. Before protocol 4.1 the shortest response had 5 bytes.
        let old = !self.claimed.unwrap_or(claimed).has(Capabilities::PROTOCOL_41);
        if old && payload.len() >= 5 {
            return rejected(ProxyError::TooOld);
        }
        let Some(&head) = payload.first_chunk::<HEAD>() else {
            return rejected(ProxyError::BadPacket);
        };
        let tls_offered = self.offered.has(Capabilities::SSL);
        if payload.len() == HEAD && claimed.has(Capabilities::SSL) {
            if !tls_offered || self.client_head.is_some() {
                return rejected(ProxyError::BadPacket);
            }
            self.claimed = Some(claimed);
            self.client_head = Some(head);
            return Err(Progress::StartClientTls);
        }
        let claimed = *self.claimed.get_or_insert(claimed);
        let response = HandshakeResponse::parse(&payload, claimed);
        self.names = response.as_ref().map(|response| response.names(&payload));
        if self.client_head.is_none() && self.rules.client_tls == ClientTls::Required {
            return rejected(ProxyError::TlsRequired);
        }
        let Some(response) = response else {
            return rejected(ProxyError::BadPacket);
        };
        // Some clients (PHP's mysqlnd) compress after the OK packet if they asked for it, even if the server did not
        // offer it. The node would not understand their packets.
        let wanted = claimed.with(handshake_response::capabilities(&payload)).and(Capabilities::COMPRESSION);
        if !self.offered.has(wanted) {
            return rejected(ProxyError::CompressionNotOffered);
        }
        if response.plugin.clone().is_some_and(|name| payload[name] == *SESSION_TOKEN_PLUGIN) {
            return rejected(ProxyError::SessionTokenPlugin);
        }
        if claimed.has(Capabilities::CONNECT_ATTRS)
            && handshake_response::exceeds_attribute_limit(&payload[response.attributes.clone()])
        {
            return rejected(ProxyError::AttributesTooLarge);
        }
        match &response.plugin {
            Some(name) => self.plugin = Plugin::named(&payload[name.clone()]),
            // The plugin's name is missing although announced: the client uses the greeting's plugin.
            None if claimed.has(Capabilities::PLUGIN_AUTH) => {}
            None => self.plugin = Plugin::Hash,
        }
        let auth = &payload[response.auth.clone()];
        if password::is_password(auth) && self.plugin.sends_clear_text() {
            self.check_clear_text()?;
            if self.plugin == Plugin::Password && self.must_decrypt_passwords() {
                if auth == [password::KEY_FOR_PASSWORD] {
                    self.held_response = Some((payload, response));
                    self.send_public_key(key, out);
                    return Ok(());
                }
                let password = self.decrypt_password(key, auth)?;
                return self.forward_response(payload, Some((&response, &password)), out);
            }
        }
        self.forward_response(payload, None, out)
    }

    /// Sends the response to the node, with `auth` in place of its authentication data if given.
    fn forward_response(
        &mut self,
        payload: SecretBytes,
        auth: Option<(&HandshakeResponse, &[u8])>,
        out: &mut Output,
    ) -> LoginStep {
        let mut payload = match auth {
            Some((response, auth)) => {
                response.with_auth(&payload, auth).ok_or(Progress::Rejected(ProxyError::BadPacket))?
            }
            None => payload,
        };
        let Some(&head) = payload.first_chunk::<HEAD>() else {
            return rejected(ProxyError::BadPacket);
        };
        let claimed = self.claimed.unwrap_or_default();
        if self.node_tls {
            // Bytes that the node sends before TLS may be forged.
            if !self.from_node.is_empty() {
                return rejected(ProxyError::NodeTlsFailed);
            }
            self.node_tls_due = true;
            handshake_response::set_capabilities(&mut payload, claimed.with(Capabilities::SSL));
            self.ssl_request = Some(handshake_response::ssl_request(self.client_head.unwrap_or(head), claimed));
            self.node_next = 2;
        } else {
            handshake_response::set_capabilities(&mut payload, claimed.without(Capabilities::SSL));
        }
        let parsed = HandshakeResponse::parse(&payload, handshake_response::capabilities(&payload));
        self.response = parsed.and_then(|response| Some(response.with_auth(&payload, b"")?.to_vec()));
        self.stage = LoginStage::Auth;
        self.send_to_node(&payload, out);
        Ok(())
    }

    fn decrypt_password(&self, key: &dyn PasswordKey, encrypted: &[u8]) -> Result<SecretBytes, Progress> {
        key.check_limit().map_err(Progress::Rejected)?;
        password::decrypt_password(key, encrypted, &self.salt).ok_or(Progress::Rejected(ProxyError::PasswordUnreadable))
    }

    fn send_public_key(&mut self, key: &dyn PasswordKey, out: &mut Output) {
        let mut payload = vec![0x01];
        payload.extend(key.public_pem());
        self.send_to_client(&payload, &mut out.back);
        self.expected_password = ExpectedPassword::Yes;
    }
}
