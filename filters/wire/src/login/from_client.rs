//! What the client sends during its login.

use super::password::{self, Plugin};
use super::{ClientTls, Login, Output, Password, PasswordKey, Progress, Stage, Step, refused};
use crate::capability::Capabilities;
use crate::error::Refusal;
use crate::packet::Header;
use crate::response::{self, HEAD, Response};

impl Login {
    /// Judges a packet of the client before its payload is there.
    pub(super) fn client_header(&self, header: Header) -> Step {
        if header.sequence != self.client_next {
            return refused(Refusal::BadPacket);
        }
        if header.length > response::MOST {
            return refused(Refusal::PacketTooLarge);
        }
        Ok(())
    }

    /// Takes a packet of the client.
    pub(super) fn client_packet(&mut self, payload: Vec<u8>, key: &dyn PasswordKey, out: &mut Output) -> Step {
        if self.stage == Stage::Response && self.held.is_none() {
            return self.first_client_packet(payload, key, out);
        }
        match self.password {
            Password::No => self.tell_node(&payload, out),
            Password::OrRequest(request) if payload == [request] => self.give_key(key, out),
            _ => {
                let password = if password::holds_password(&payload) {
                    password::reveal(key, &payload, &self.salt).ok_or(Progress::Refused(Refusal::PasswordUnreadable))?
                } else {
                    payload
                };
                self.password = Password::No;
                match self.held.take() {
                    Some((held, response)) => {
                        return self.forward(held, Some((&response, &password)), out);
                    }
                    None => self.tell_node(&password, out),
                }
            }
        }
        Ok(())
    }

    /// SSLRequest or response.
    fn first_client_packet(&mut self, payload: Vec<u8>, key: &dyn PasswordKey, out: &mut Output) -> Step {
        let claimed = response::capabilities(&payload);
        // Judged by the first packet, as everything; before protocol 4.1 the shortest one had 5 bytes.
        let old = !self.claimed.unwrap_or(claimed).has(Capabilities::PROTOCOL_41);
        if old && payload.len() >= 5 {
            return refused(Refusal::TooOld);
        }
        let Some(&head) = payload.first_chunk::<HEAD>() else {
            return refused(Refusal::BadPacket);
        };
        let tls_offered = self.offered.has(Capabilities::SSL);
        if payload.len() == HEAD && claimed.has(Capabilities::SSL) {
            if !tls_offered || self.client_head.is_some() {
                return refused(Refusal::BadPacket);
            }
            self.claimed = Some(claimed);
            self.client_head = Some(head);
            return Err(Progress::StartClientTls);
        }
        let claimed = *self.claimed.get_or_insert(claimed);
        if self.client_head.is_none() && self.rules.client_tls == ClientTls::Required {
            return refused(Refusal::TlsRequired);
        }
        let Some(response) = Response::parse(&payload, claimed) else {
            return refused(Refusal::BadPacket);
        };
        // Some clients (PHP's mysqlnd) compress after the OK packet whenever they asked for it, even if the server has not
        // offered it. The node would not understand such packets.
        let wanted = claimed.with(response::capabilities(&payload)).and(Capabilities::ANY_COMPRESSION);
        if !self.offered.has(wanted) {
            return refused(Refusal::CompressionNotOffered);
        }
        match &response.plugin {
            Some(name) => self.plugin = Plugin::named(&payload[name.clone()]),
            // Not found where it should be: the greeting's, as of clients that do as they are told.
            None if claimed.has(Capabilities::PLUGIN_AUTH) => {}
            None => self.plugin = Plugin::Hash,
        }
        let auth = &payload[response.auth.clone()];
        if password::holds_password(auth) && self.plugin.tells_at_once() {
            self.forbid_clear_text()?;
            if self.plugin == Plugin::Password && self.reveals_passwords() {
                if auth == [password::KEY_FOR_PASSWORD] {
                    self.held = Some((payload, response));
                    self.give_key(key, out);
                    return Ok(());
                }
                let password =
                    password::reveal(key, auth, &self.salt).ok_or(Progress::Refused(Refusal::PasswordUnreadable))?;
                return self.forward(payload, Some((&response, &password)), out);
            }
        }
        self.forward(payload, None, out)
    }

    /// Sends the response to the node, with a password for its authentication data if one is given.
    fn forward(&mut self, payload: Vec<u8>, auth: Option<(&Response, &[u8])>, out: &mut Output) -> Step {
        let mut payload = match auth {
            Some((response, auth)) => {
                response.with_auth(&payload, auth).ok_or(Progress::Refused(Refusal::BadPacket))?
            }
            None => payload,
        };
        let Some(&head) = payload.first_chunk::<HEAD>() else {
            return refused(Refusal::BadPacket);
        };
        let claimed = self.claimed.unwrap_or_default();
        if self.node_tls {
            // What the node sends ahead of TLS may be forged.
            if !self.from_node.is_empty() {
                return refused(Refusal::NodeTlsFailed);
            }
            self.node_tls_due = true;
            response::claim(&mut payload, claimed.with(Capabilities::SSL));
            self.ssl_request = Some(response::ssl_request(self.client_head.unwrap_or(head), claimed));
            self.node_next = 2;
        } else {
            response::claim(&mut payload, claimed.without(Capabilities::SSL));
        }
        let parsed = Response::parse(&payload, response::capabilities(&payload));
        self.response = parsed.and_then(|response| response.with_auth(&payload, b""));
        self.stage = Stage::Auth;
        self.tell_node(&payload, out);
        Ok(())
    }

    fn give_key(&mut self, key: &dyn PasswordKey, out: &mut Output) {
        let mut payload = vec![0x01];
        payload.extend(key.public_pem());
        self.tell_client(&payload, &mut out.back);
        self.password = Password::Yes;
    }
}
