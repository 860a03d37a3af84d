//! Which statements only read. The decision is made on the normalized text, without a grammar, so it errs on the safe
//! side: a read may be taken for a statement that may write, but not the other way round.

use std::collections::HashSet;

use sql_text::{Normalizer, PreparedText, prepared_text};

/// What a replay must know about a statement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StatementKind {
    /// It changes nothing but its session.
    Read,
    MayWrite,
    /// It would end a session or a server that has nothing to do with the captured one.
    NeverReplayed,
    /// `PREPARE name FROM ...`; names are in lower case, as TiDB compares them.
    Prepare {
        name: Vec<u8>,
        is_read: bool,
    },
    Execute {
        name: Vec<u8>,
    },
    Deallocate {
        name: Vec<u8>,
    },
}

/// Which statements that the session prepared with `PREPARE` only read.
#[derive(Debug, Default)]
pub(crate) struct PreparedReads(HashSet<Vec<u8>>);

impl PreparedReads {
    /// Whether all statements of a text only read. Learns what the text prepares; a text that does not only read is
    /// left out as a whole, so what it would have prepared is not known any more.
    pub(crate) fn admit(&mut self, kinds: &[StatementKind]) -> bool {
        let mut are_reads = true;
        for kind in kinds {
            match kind {
                StatementKind::Read => {}
                StatementKind::MayWrite | StatementKind::NeverReplayed => are_reads = false,
                StatementKind::Prepare { name, is_read } => {
                    self.0.remove(name);
                    are_reads &= *is_read && self.0.insert(name.clone());
                }
                StatementKind::Execute { name } => are_reads &= self.0.contains(name),
                StatementKind::Deallocate { name } => {
                    self.0.remove(name);
                }
            }
        }
        if !are_reads {
            for kind in kinds {
                if let StatementKind::Prepare { name, .. } = kind {
                    self.0.remove(name);
                }
            }
        }
        are_reads
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

/// The statements of a text, in order.
pub(crate) fn statement_kinds(text: &[u8], normalizer: &mut Normalizer) -> Vec<StatementKind> {
    let mut kinds = kinds_as_written(text, normalizer);
    // With the SQL mode NO_BACKSLASH_ESCAPES, a string ends elsewhere.
    if text.contains(&b'\\') {
        let without_escapes = text.iter().map(|byte| if *byte == b'\\' { b'_' } else { *byte }).collect::<Vec<_>>();
        kinds.extend(kinds_as_written(&without_escapes, normalizer).into_iter().filter(is_no_read));
    }
    kinds
}

/// Whether a text may be prepared and executed by a replay of reads.
pub(crate) fn is_read(text: &[u8], normalizer: &mut Normalizer) -> bool {
    statement_kinds(text, normalizer).iter().all(|kind| *kind == StatementKind::Read)
}

fn is_no_read(kind: &StatementKind) -> bool {
    matches!(kind, StatementKind::MayWrite | StatementKind::NeverReplayed)
}

fn kinds_as_written(text: &[u8], normalizer: &mut Normalizer) -> Vec<StatementKind> {
    // A comment for TiDB, but a part of the statement for MariaDB.
    if text.windows(4).any(|bytes| bytes.eq_ignore_ascii_case(b"/*m!")) {
        return vec![StatementKind::MayWrite];
    }
    sql_text::statements(text).map(|statement| statement_kind(&statement, normalizer)).collect()
}

fn statement_kind(statement: &[u8], normalizer: &mut Normalizer) -> StatementKind {
    let normalized = normalizer.normalize(statement);
    let words = Words(normalized.split(|byte| *byte == b' ').filter(|word| !word.is_empty()).collect());
    let read_if = |is_read| if is_read { StatementKind::Read } else { StatementKind::MayWrite };
    let name = |index: usize| words.0.get(index).copied().unwrap_or_default().to_vec();
    match (words.first(), words.second()) {
        (b"", _) => StatementKind::Read,
        (b"kill" | b"shutdown" | b"restart", _) => StatementKind::NeverReplayed,
        (b"prepare", _) => {
            let name = name(1);
            let is_read = match prepared_text(statement) {
                Some(PreparedText::Literal { content, .. }) => is_read(&content, normalizer),
                _ => false,
            };
            StatementKind::Prepare { name, is_read }
        }
        (b"execute", _) => StatementKind::Execute { name: name(1) },
        (b"deallocate" | b"drop", b"prepare") => StatementKind::Deallocate { name: name(2) },
        (b"select" | b"table" | b"values" | b"(", _) => read_if(words.begin_query() && words.only_query()),
        (b"with", _) => read_if(words.only_query() && !words.change_rows()),
        (b"use" | b"begin" | b"commit" | b"rollback" | b"savepoint", _) => StatementKind::Read,
        (b"start", b"transaction") | (b"release", b"savepoint") => StatementKind::Read,
        // The condition of SHOW may call functions, and EXPLAIN runs subqueries and folds constants.
        (b"show", _) => read_if(words.only_query()),
        (b"explain" | b"desc" | b"describe", _) => read_if(!words.contain(b"analyze") && words.only_query()),
        (b"set", _) => read_if(words.only_query() && words.set_session()),
        _ => StatementKind::MayWrite,
    }
}

/// Functions that change something outside of the session.
const CHANGING_FUNCTIONS: [&[u8]; 5] = [b"get_lock", b"release_lock", b"release_all_locks", b"nextval", b"setval"];

/// Variables of the whole server that TiDB also sets without `GLOBAL` (pingcap/tidb
/// `pkg/sessionctx/variable/sysvar.go`, `ScopeInstance`; `pkg/executor/set.go`, `setSysVariable`).
const SERVER_VARIABLES: &str = "\
    ddl_slow_threshold max_connections plugin_audit_log_buffer_size plugin_audit_log_flush_interval plugin_dir \
    plugin_load tidb_check_mb4_value_in_utf8 tidb_config tidb_enable_collect_execution_info tidb_enable_ddl \
    tidb_enable_slow_log tidb_enable_stats_owner tidb_expensive_query_time_threshold \
    tidb_expensive_txn_time_threshold tidb_force_priority tidb_general_log tidb_log_file_max_days \
    tidb_mem_quota_binding_cache tidb_pprof_sql_cpu tidb_rc_read_check_ts tidb_record_plan_in_slow_log \
    tidb_schema_cache_size tidb_server_memory_limit tidb_server_memory_limit_gc_trigger tidb_service_scope \
    tidb_slow_log_threshold tidb_stats_cache_mem_quota tidb_stmt_summary_enable_persistent \
    tidb_stmt_summary_file_max_backups tidb_stmt_summary_file_max_days tidb_stmt_summary_file_max_size \
    tidb_stmt_summary_filename tidb_stmt_summary_max_stmt_count tidb_trace_event";

/// The tokens of a normalized statement. Names may contain spaces: then their parts are taken for words, which only
/// makes a read look like a statement that may write.
struct Words<'a>(Vec<&'a [u8]>);

impl Words<'_> {
    fn first(&self) -> &[u8] {
        self.0.first().copied().unwrap_or_default()
    }

    fn second(&self) -> &[u8] {
        self.0.get(1).copied().unwrap_or_default()
    }

    fn contain(&self, word: &[u8]) -> bool {
        self.0.contains(&word)
    }

    fn contain_pair(&self, first: &[u8], second: &[u8]) -> bool {
        self.0.windows(2).any(|pair| pair == [first, second])
    }

    /// Whether a query stands behind the parentheses at the beginning.
    fn begin_query(&self) -> bool {
        let first = self.0.iter().find(|word| **word != b"(");
        matches!(first, Some(&(b"select" | b"with" | b"table" | b"values")))
    }

    /// Whether the query, or the expressions, neither lock nor change anything.
    fn only_query(&self) -> bool {
        let changes = |word: &&[u8]| CHANGING_FUNCTIONS.contains(&unquoted(word));
        !self.contain(b"into")
            && !self.contain_pair(b"for", b"update")
            && !self.contain_pair(b"for", b"share")
            && !self.contain_pair(b"lock", b"in")
            && !self.contain_pair(b"value", b"for")
            && !self.0.iter().any(changes)
            && (self.first() != b"(" || !self.change_rows())
    }

    /// Whether a WITH may belong to a statement that changes rows. A function has a parenthesis behind its name.
    fn change_rows(&self) -> bool {
        let is_called = |index: usize| self.0.get(index + 1) == Some(&&b"("[..]);
        self.0
            .iter()
            .enumerate()
            .any(|(index, word)| matches!(*word, b"update" | b"delete" | b"insert" | b"replace") && !is_called(index))
    }

    /// Whether SET changes only the session.
    fn set_session(&self) -> bool {
        let has_wider_scope =
            |word: &&[u8]| [&b"global"[..], b"persist", b"instance"].iter().any(|scope| contains(word, scope));
        !matches!(self.second(), b"password" | b"config" | b"binding" | b"default" | b"")
            && !self.contain(b"password")
            && !self.0.iter().any(|word| has_wider_scope(word) || is_server_variable(word))
    }
}

/// Whether a word is the name of such a variable, with `@@`, `session.` or backticks, or without.
fn is_server_variable(word: &[u8]) -> bool {
    let name = word.rsplit(|byte| b"@.`".contains(byte)).find(|part| !part.is_empty()).unwrap_or_default();
    SERVER_VARIABLES.split_ascii_whitespace().any(|variable| variable.as_bytes() == name)
}

fn unquoted(word: &[u8]) -> &[u8] {
    word.strip_prefix(b"`").and_then(|word| word.strip_suffix(b"`")).unwrap_or(word)
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> bool {
        is_read(text.as_bytes(), &mut Normalizer::default())
    }

    #[test]
    fn reads_are_recognized() {
        for text in [
            "",
            "/* ping */",
            "select 1",
            "SELECT * FROM t WHERE `for` = 'into' AND note = 'for update'",
            "(select 1) union (select 2)",
            "((select 1))",
            "table t",
            "with a as (select 1) select replace(x, 'a', 'b'), insert(x, 1, 2, 'c') from a",
            "show variables like 'x'",
            "show grants for a",
            "show create table `into`",
            "explain select 1",
            "explain delete from t",
            "desc t",
            "use shop",
            "set names utf8mb4",
            "set @a = 1, @@session.sql_mode = ''",
            "set session transaction isolation level read committed",
            "SET SESSION_STATES '{\"x\":\"global\"}'",
            "begin",
            "start transaction with consistent snapshot",
            "commit",
            "rollback to savepoint a",
            "release savepoint a",
            "select substring('abc' from 1 for 2)",
            "select 1; select 2;",
            "select 'it\\'s', \"a\\\\\"",
            "select * from t use index for join (a)",
            "select is_free_lock('a')",
        ] {
            assert!(read(text), "{text}");
        }
    }

    #[test]
    fn all_else_may_write() {
        for text in [
            "insert into t values (1)",
            "select * from t for update",
            "select * from t for update nowait",
            "select * from t for share",
            "select * from t lock in share mode",
            "select 1 into @a",
            "select * from t into outfile '/tmp/x'",
            "(select * from t for update)",
            "(delete from t)",
            "select get_lock('a', 1)",
            "select GET_LOCK/**/('a', 1)",
            "select `release_all_locks`()",
            "select nextval(s)",
            "select next value for s",
            "select setval(s, 3)",
            "with a as (select 1) delete from t where id in (select * from a)",
            "with a as (select 1) update t set b = 1",
            "explain analyze delete from t",
            "desc analyze select 1",
            "explain select get_lock('a', 1)",
            "explain delete from t where a = (select nextval(s))",
            "desc select * from t where a = (select next value for s)",
            "show tables where nextval(s)",
            "show variables where get_lock('a', 1) = 1",
            "set global a = 1",
            "set @a = 1, global b = 2",
            "set @@global.a = 1",
            "set @@GLOBAL.a = 1",
            "set @@`global`.a = 1",
            "set persist a = 1",
            "set @@persist_only.a = 1",
            "set @@instance.a = 1",
            "set tidb_general_log = 1",
            "set tidb_check_mb4_value_in_utf8 = 0",
            "set session `tidb_slow_log_threshold` = 0",
            "set @@session.tidb_general_log = 1, @a = 2",
            "set password = 'x'",
            "set password for a = 'x'",
            "set config tikv `a` = 1",
            "set default role a to b",
            "set @a = get_lock('a', 1)",
            "set @a = (select nextval(s))",
            "start slave",
            "release x",
            "select 1; delete from t",
            "select 1 /*! into outfile 'x' */",
            "select 1 /*M! into outfile 'x' */",
            "/*!50000 delete */ from t",
            // With NO_BACKSLASH_ESCAPES, the string ends at the second quote.
            "select '\\'; delete from t; -- '",
            "select '\\' into outfile \"x\" -- '",
            "call p()",
            "do get_lock('a', 1)",
            "load data local infile 'x' into table t",
            "analyze table t",
            "trace select 1",
            "flush privileges",
        ] {
            assert!(!read(text), "{text}");
        }
    }

    #[test]
    fn statements_that_end_others_are_never_replayed() {
        for text in ["kill 1", "KILL QUERY 2", "/* a */ shutdown", "restart"] {
            let kinds = statement_kinds(text.as_bytes(), &mut Normalizer::default());
            assert_eq!(kinds, [StatementKind::NeverReplayed], "{text}");
        }
    }

    #[test]
    fn text_that_executes_a_prepared_read_is_a_read() {
        let mut names = PreparedReads::default();
        let mut normalizer = Normalizer::default();
        let mut admit =
            |names: &mut PreparedReads, text: &str| names.admit(&statement_kinds(text.as_bytes(), &mut normalizer));
        assert!(!admit(&mut names, "execute s"));
        assert!(admit(&mut names, "prepare S from 'select ?'"));
        assert!(admit(&mut names, "execute s using @a"));
        assert!(!admit(&mut names, "prepare s2 from 'delete from t'; execute s"));
        assert!(!admit(&mut names, "execute s2"));
        assert!(!admit(&mut names, "prepare s3 from @text"));
        assert!(!admit(&mut names, "execute s3"));
        assert!(admit(&mut names, "execute s; deallocate prepare s"));
        assert!(!admit(&mut names, "execute s"));
        assert!(!admit(&mut names, "execute immediate 'select 1'"));
        assert!(admit(&mut names, "prepare s from 'select 1'"));
        // The client meant another statement from here on.
        assert!(!admit(&mut names, "prepare s from 'delete from t'"));
        assert!(!admit(&mut names, "execute s"));
        assert!(admit(&mut names, "prepare s from 'select 1'"));
        names.clear();
        assert!(!admit(&mut names, "execute s"));
    }
}
