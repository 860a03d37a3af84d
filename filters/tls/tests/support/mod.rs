//! Certificates of a test CA, and connections between two streams in memory.

#![allow(dead_code)] // Each test binary uses a part of it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SanType, SerialNumber, date_time_ymd,
};
use tempfile::TempDir;
use tls::{PeerRules, ReceiveResult, Stream, TlsAcceptor, TlsConnector, TlsError, Verify};

/// A directory with a CA, and the certificates that it issues.
pub(crate) struct Authority {
    pub(crate) directory: TempDir,
    pub(crate) ca: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate and its key, in files.
#[derive(Clone)]
pub(crate) struct Pair {
    pub(crate) cert: PathBuf,
    pub(crate) key: PathBuf,
}

/// When a certificate is valid.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Valid {
    Now,
    Past,
    Future,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages =
            vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate().unwrap();
        let directory = TempDir::new().unwrap();
        // Each CA has its own name. A certificate of a CA with an equal name would fail for another reason: its
        // signature.
        let name = format!("CA in {}", directory.path().display());
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        let ca = directory.path().join("ca.pem");
        fs::write(&ca, params.self_signed(&key).unwrap().pem()).unwrap();
        Self { directory, ca, issuer: Issuer::new(params, key) }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The PEM texts of a certificate for these names (DNS or IP), and of its key.
    pub(crate) fn issue_text(&self, names: &[&str], valid: Valid) -> (String, String) {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.subject_alt_names = names
            .iter()
            .map(|name| match name.parse() {
                Ok(ip) => SanType::IpAddress(ip),
                Err(_) => SanType::DnsName((*name).try_into().unwrap()),
            })
            .collect();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.not_before = date_time_ymd(if valid == Valid::Future { 2200 } else { 2000 }, 1, 1);
        params.not_after = date_time_ymd(if valid == Valid::Past { 2001 } else { 2300 }, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        (certificate.pem(), key.serialize_pem())
    }

    /// Like [`Self::issue_text`], but in files whose names begin with `file`.
    pub(crate) fn issue(&self, file: &str, names: &[&str], valid: Valid) -> Pair {
        let (cert, key) = self.issue_text(names, valid);
        let pair = Pair { cert: self.path(&format!("{file}.pem")), key: self.path(&format!("{file}.key")) };
        fs::write(&pair.cert, cert).unwrap();
        fs::write(&pair.key, key).unwrap();
        pair
    }

    /// Writes a revocation list of this CA with these certificates to `file`.
    pub(crate) fn revoke(&self, file: &str, revoked: &[&Pair]) -> PathBuf {
        let revoked = revoked.iter().map(|pair| RevokedCertParams {
            serial_number: serial_number(&pair.cert),
            revocation_time: date_time_ymd(2020, 1, 1),
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2020, 1, 1),
            next_update: date_time_ymd(2021, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let path = self.path(file);
        fs::write(&path, list.signed_by(&self.issuer).unwrap().pem().unwrap()).unwrap();
        path
    }

    /// Accepts clients, with a certificate for `localhost`.
    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        self.issue("server", &["localhost"], Valid::Now).acceptor(None).unwrap()
    }

    /// Connects to nodes, and trusts this CA.
    pub(crate) fn connector(&self, verify: Verify) -> TlsConnector {
        TlsConnector::load(Some(&self.ca), verify, None, PeerRules::default()).unwrap()
    }
}

impl Pair {
    pub(crate) fn acceptor(&self, client_ca: Option<&Path>) -> Result<TlsAcceptor, TlsError> {
        TlsAcceptor::load(&self.cert, &self.key, client_ca, PeerRules::default())
    }

    pub(crate) fn paths(&self) -> (&Path, &Path) {
        (&self.cert, &self.key)
    }
}

fn serial_number(cert: &Path) -> SerialNumber {
    let output = openssl(&["x509", "-noout", "-serial", "-in", cert.to_str().unwrap()], Path::new("."));
    let text = String::from_utf8(output.stdout).unwrap();
    let digits = text.trim().strip_prefix("serial=").unwrap().as_bytes();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    SerialNumber::from_slice(&digits.chunks(2).map(byte).collect::<Vec<_>>())
}

/// Two ends, and the bytes that each has received.
pub(crate) struct Link {
    pub(crate) server: Stream,
    pub(crate) client: Stream,
    pub(crate) at_server: Vec<u8>,
    pub(crate) at_client: Vec<u8>,
}

impl Link {
    pub(crate) fn new(server: &TlsAcceptor, client: &TlsConnector) -> Self {
        let client = client.connect("localhost").unwrap();
        Self { server: server.accept(), client, at_server: Vec::new(), at_client: Vec::new() }
    }

    /// Transfers bytes until there are none left. Returns the first error of the server's end, or else of the client's.
    pub(crate) fn settle(&mut self) -> Result<(), TlsError> {
        let mut outcome = Ok(());
        while !(self.server.outgoing().is_empty() && self.client.outgoing().is_empty()) {
            let to_client = carry(&mut self.server, usize::MAX, &mut self.client, &mut self.at_client);
            let to_server = carry(&mut self.client, usize::MAX, &mut self.server, &mut self.at_server);
            outcome = outcome.and(to_server.map(drop)).and(to_client.map(drop));
        }
        outcome
    }

    /// Asserts that both ends can send to each other.
    pub(crate) fn assert_works(&mut self) {
        self.at_server.clear();
        self.at_client.clear();
        self.client.send(b"from the client");
        self.server.send(b"from the server");
        self.settle().unwrap();
        assert_eq!((&self.at_server[..], &self.at_client[..]), (&b"from the client"[..], &b"from the server"[..]));
        assert!(!self.server.is_handshaking() && !self.client.is_handshaking());
    }
}

/// Transfers at most `bytes` bytes from one end to the other.
pub(crate) fn carry(
    from: &mut Stream,
    bytes: usize,
    to: &mut Stream,
    plain: &mut Vec<u8>,
) -> Result<ReceiveResult, TlsError> {
    let bytes = bytes.min(from.outgoing().len());
    let received = to.receive(&from.outgoing()[..bytes], &mut |piece| {
        plain.extend_from_slice(piece);
    });
    from.sent(bytes);
    received
}

/// Runs a command, which must succeed.
pub(crate) fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

pub(crate) fn openssl(arguments: &[&str], directory: &Path) -> Output {
    run(Command::new("openssl").args(arguments).current_dir(directory))
}
