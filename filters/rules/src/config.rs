//! Rules as the control plane sends them.

use std::collections::BTreeMap;

use serde::Deserialize;

/// A rule. All given conditions must hold; of a condition with several values, one of them.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RuleConfig {
    /// Letters, digits, `_` and `-`.
    pub name: String,
    /// False: the rule has no effect, and counts nothing.
    #[serde(default = "yes")]
    pub enabled: bool,
    /// The rule counts the statements that it fits, and changes nothing.
    pub dry_run: bool,
    /// Whether the rules behind this one apply, too. None: only if the action is `log`.
    #[serde(rename = "continue")]
    pub continues: Option<bool>,
    /// Digests of statements, in hexadecimal.
    pub digest: Vec<String>,
    /// A regular expression for the text without comments.
    pub pattern: Option<String>,
    /// A regular expression for the normalized text.
    pub normalized: Option<String>,
    /// Empty: those that suit the action.
    pub commands: Vec<CommandKind>,
    pub user: Vec<String>,
    pub database: Vec<String>,
    /// Networks of clients.
    pub client: Vec<String>,
    /// Groups of nodes.
    pub group: Vec<String>,
    pub block: Option<BlockConfig>,
    pub limit: Option<LimitConfig>,
    pub rewrite: Option<RewriteConfig>,
    /// The statement log contains the statement in any case.
    pub log: bool,
}

/// How a client runs a statement.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CommandKind {
    /// As text: `COM_QUERY`.
    #[default]
    Query,
    /// It prepares the statement: `COM_STMT_PREPARE`.
    Prepare,
    /// It executes the prepared statement: `COM_STMT_EXECUTE`.
    Execute,
}

/// The client gets an error.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BlockConfig {
    /// None: a text that names the rule.
    pub message: Option<String>,
    /// The error code.
    pub code: Option<u16>,
}

/// Statements above a limit get an error. Each process of Envoy has the limit for itself.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LimitConfig {
    /// Statements per second.
    pub per_second: Option<f64>,
    /// Statements that run at the same time.
    pub concurrent: Option<u32>,
    /// What has a limit of its own. Empty: all statements share one limit.
    pub by: Vec<LimitScope>,
    /// Clients whose addresses begin with the same bits share a limit. None: each address has its own.
    pub client_prefix: Option<u8>,
    /// Seconds for which a statement may wait.
    pub wait: f64,
}

/// What has a limit of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LimitScope {
    User,
    Digest,
    Client,
}

/// The node gets another text. Exactly one of the keys is given.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RewriteConfig {
    /// Stands for what the pattern matches; `$1` is its first group.
    pub replace: Option<String>,
    /// The whole text.
    pub text: Option<String>,
    /// New names of tables.
    pub tables: BTreeMap<String, String>,
}

fn yes() -> bool {
    true
}
