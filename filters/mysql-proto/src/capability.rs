//! Capability bits of the greeting and the handshake response.

/// A set of capability bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Capabilities(pub u32);

impl Capabilities {
    pub const CONNECT_WITH_DB: Self = Self(1 << 3);
    pub const COMPRESS: Self = Self(1 << 5);
    pub const LOCAL_FILES: Self = Self(1 << 7);
    pub const PROTOCOL_41: Self = Self(1 << 9);
    pub const SSL: Self = Self(1 << 11);
    pub const TRANSACTIONS: Self = Self(1 << 13);
    pub const SECURE_CONNECTION: Self = Self(1 << 15);
    pub const MULTI_STATEMENTS: Self = Self(1 << 16);
    pub const MULTI_RESULTS: Self = Self(1 << 17);
    pub const PS_MULTI_RESULTS: Self = Self(1 << 18);
    pub const PLUGIN_AUTH: Self = Self(1 << 19);
    pub const CONNECT_ATTRS: Self = Self(1 << 20);
    pub const PLUGIN_AUTH_LENENC_DATA: Self = Self(1 << 21);
    pub const SESSION_TRACK: Self = Self(1 << 23);
    pub const DEPRECATE_EOF: Self = Self(1 << 24);
    pub const OPTIONAL_RESULTSET_METADATA: Self = Self(1 << 25);
    pub const ZSTD_COMPRESSION: Self = Self(1 << 26);
    pub const QUERY_ATTRIBUTES: Self = Self(1 << 27);
    /// Both kinds of the compressed protocol.
    pub const COMPRESSION: Self = Self::COMPRESS.with(Self::ZSTD_COMPRESSION);

    /// The capabilities that a server understands if it offers `self`. TiDB understands two more, offered or not
    /// (`pkg/parser/mysql/const.go`, `pkg/server/conn.go`).
    #[must_use]
    pub const fn understood(self) -> Self {
        self.with(Self::CONNECT_ATTRS).with(Self::PLUGIN_AUTH_LENENC_DATA)
    }

    /// Whether all bits of `other` are set.
    #[must_use]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The union of both sets.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// This set without the bits of `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The intersection of both sets.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}
