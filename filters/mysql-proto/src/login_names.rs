//! The names that a client logs in with.

/// Names are cut after this many bytes. A valid name is shorter: TiDB allows 32 characters for a user and 64 for a
/// database (docs.pingcap.com, "TiDB Limitations"), each of at most 4 bytes.
pub const MAX_NAME_BYTES: usize = 256;

/// The user and the database of a login, as the client has sent them: any bytes. There is no `Debug`, because the names
/// are confidential.
#[derive(Clone, PartialEq, Eq)]
pub struct LoginNames {
    user: Box<[u8]>,
    database: Box<[u8]>,
}

impl LoginNames {
    #[must_use]
    pub fn new(user: &[u8], database: &[u8]) -> Self {
        let cut = |name: &[u8]| name[..name.len().min(MAX_NAME_BYTES)].into();
        Self { user: cut(user), database: cut(database) }
    }

    #[must_use]
    pub fn user(&self) -> &[u8] {
        &self.user
    }

    /// Empty if the client has named none.
    #[must_use]
    pub fn database(&self) -> &[u8] {
        &self.database
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_are_cut() {
        let (valid, long) = ([b'd'; MAX_NAME_BYTES], [b'u'; 2 * MAX_NAME_BYTES]);
        let names = LoginNames::new(&long, &valid);
        assert_eq!((names.user(), names.database()), (&long[..MAX_NAME_BYTES], &valid[..]));
    }
}
