//! Passwords that OpenSSL encrypted.

#![allow(clippy::unwrap_used)] // In a test, a panic is the report.

mod support;

use std::fs;

use mysql_proto::login::PasswordKey as _;
use support::{Authority, openssl};
use tls::RsaPasswordKey;

/// Encrypts `plain` by OpenSSL with the public key, as MySQL's clients do.
fn encrypted(ca: &Authority, key: &RsaPasswordKey, plain: &[u8]) -> Vec<u8> {
    fs::write(ca.path("public"), key.public_pem()).unwrap();
    fs::write(ca.path("plain"), plain).unwrap();
    let arguments = ["pkeyutl", "-encrypt", "-pubin", "-inkey", "public", "-in", "plain", "-pkeyopt"];
    let oaep = ["rsa_padding_mode:oaep", "-pkeyopt", "rsa_oaep_md:sha1"];
    openssl(&[&arguments[..], &oaep[..]].concat(), ca.directory.path()).stdout
}

fn assert_decrypts(ca: &Authority, key: &RsaPasswordKey) {
    for plain in [&b""[..], b"\0", b"a password\0", &[0xa5; 200]] {
        assert_eq!(key.decrypt(&encrypted(ca, key, plain)).unwrap(), plain);
    }
    let mut spoilt = encrypted(ca, key, b"a password");
    spoilt[7] ^= 1;
    for bad in [&b""[..], b"short", &spoilt, &[0xff; 256], &[0; 10_000]] {
        assert_eq!(key.decrypt(bad), None);
    }
}

#[test]
fn generated_key_decrypts_what_openssl_encrypts() {
    let (key, other) = (RsaPasswordKey::generate(), RsaPasswordKey::generate());
    let ca = Authority::new();
    assert_decrypts(&ca, &key);
    assert_ne!(key.public_pem(), other.public_pem());
    assert_eq!(other.decrypt(&encrypted(&ca, &key, b"a password")), None);
}

#[test]
fn key_is_loaded_from_pkcs8_and_pkcs1_files() {
    let ca = Authority::new();
    for bits in ["2048", "3072", "4096"] {
        openssl(&["genrsa", "-out", "pkcs8", bits], ca.directory.path());
        openssl(&["rsa", "-in", "pkcs8", "-traditional", "-out", "pkcs1"], ca.directory.path());
        let public = openssl(&["rsa", "-in", "pkcs8", "-pubout"], ca.directory.path()).stdout;
        for form in ["pkcs8", "pkcs1"] {
            let key = RsaPasswordKey::load(&ca.path(form)).unwrap();
            assert_eq!(key.public_pem(), public);
            assert_decrypts(&ca, &key);
        }
    }
}

#[test]
fn error_names_a_file_without_a_usable_rsa_key() {
    let ca = Authority::new();
    openssl(&["genrsa", "-out", "short", "1024"], ca.directory.path());
    openssl(&["ecparam", "-genkey", "-name", "prime256v1", "-out", "ec"], ca.directory.path());
    for name in ["short", "ec", "ca.pem", "absent"] {
        let text = RsaPasswordKey::load(&ca.path(name)).err().unwrap().to_string();
        assert!(text.contains(name), "{text}");
    }
}
