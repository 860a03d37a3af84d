//! The cryptography provider of all connections.

use std::sync::{Arc, LazyLock};

use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::{CipherSuiteCommon, SupportedCipherSuite, Tls12CipherSuite};

/// Maximum records that one side may send in TLS 1.2 under one AES-GCM key.
///
/// TLS 1.3 can update its keys, TLS 1.2 cannot: rustls closes the connection after 2^24 records, which a busy session
/// with small responses sends within hours. The limit of rustls is for records of 16 KiB and an attacker's advantage of
/// 2^-60. With 2^32 records the advantage stays below 2^-43 (formula in draft-irtf-cfrg-aead-limits, section 5.1.1),
/// and a session with 10,000 records per second lives for five days.
const TLS12_RECORDS: u64 = 1 << 32;

static TLS12: LazyLock<Vec<Tls12CipherSuite>> = LazyLock::new(|| {
    let suites = aws_lc_rs::DEFAULT_CIPHER_SUITES.iter();
    suites
        .filter_map(|suite| match suite {
            SupportedCipherSuite::Tls12(suite) => Some(with_limit(suite, TLS12_RECORDS)),
            SupportedCipherSuite::Tls13(_) => None,
        })
        .collect()
});

fn with_limit(suite: &Tls12CipherSuite, records: u64) -> Tls12CipherSuite {
    Tls12CipherSuite {
        common: CipherSuiteCommon {
            suite: suite.common.suite,
            hash_provider: suite.common.hash_provider,
            confidentiality_limit: suite.common.confidentiality_limit.max(records),
        },
        prf_provider: suite.prf_provider,
        kx: suite.kx,
        sign: suite.sign,
        aead_alg: suite.aead_alg,
    }
}

/// The provider of aws-lc-rs with its default suites and order, but with [`TLS12_RECORDS`] as limit.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
        let tls13 = aws_lc_rs::DEFAULT_CIPHER_SUITES.iter().copied().filter(|suite| suite.tls13().is_some());
        let cipher_suites = tls13.chain(TLS12.iter().map(SupportedCipherSuite::Tls12)).collect();
        Arc::new(CryptoProvider { cipher_suites, ..aws_lc_rs::default_provider() })
    });
    Arc::clone(&PROVIDER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_record_limit_of_tls_1_2_differs_from_the_default() {
        let limits = |suite: &SupportedCipherSuite| match suite {
            SupportedCipherSuite::Tls12(suite) => suite.common.confidentiality_limit,
            SupportedCipherSuite::Tls13(suite) => suite.common.confidentiality_limit,
        };
        let ours = provider();
        assert_eq!(ours.cipher_suites, aws_lc_rs::DEFAULT_CIPHER_SUITES);
        for (ours, default) in ours.cipher_suites.iter().zip(aws_lc_rs::DEFAULT_CIPHER_SUITES) {
            if ours.tls13().is_some() {
                assert_eq!(limits(ours), limits(default));
            } else {
                assert!(limits(ours) >= TLS12_RECORDS);
            }
        }
    }
}
