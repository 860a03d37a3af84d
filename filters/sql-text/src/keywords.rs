//! The words that TiDB's scanner takes for keywords (pingcap/tidb v8.5.3, `pkg/parser/misc.go`, `tokenMap` and
//! `btFuncTokenMap`). Digests contain keywords as they are, and names in backticks.

use std::sync::LazyLock;

/// Keywords wherever they stand, except beside a dot.
const WORDS: &str = "\
     account action add adddate admin advise after against ago algorithm all alter always analyze and any apply \
     approx_count_distinct approx_percentile array as asc ascii attribute attributes auto_id_cache auto_increment \
     auto_random auto_random_base avg avg_row_length backend background backup backups batch bdr begin bernoulli \
     between bigint binary binding binding_cache bindings binlog bit bit_and bit_or bit_xor blob block bool boolean \
     both bound br brief btree buckets builtins burstable by byte cache calibrate call cancel capture cardinality \
     cascade cascaded case cast causal chain change char character charset check checkpoint checksum \
     checksum_concurrency cipher cleanup client client_errors_summary close cluster clustered cmsketch coalesce \
     collate collation column column_format column_stats_usage columns comment commit committed compact compressed \
     compression compression_level compression_type concurrency config connection consistency consistent constraint \
     constraints context continue convert cooldown copy correlation cpu create cross csv_backslash_escape \
     csv_delimiter csv_header csv_not_null csv_null csv_separator csv_trim_last_separators curdate current \
     current_date current_role current_time current_timestamp current_user cursor curtime cycle data database \
     databases date date_add date_sub datetime day day_hour day_microsecond day_minute day_second ddl deallocate dec \
     decimal declare default defined definer delay_key_write delayed delete dependency depth desc describe digest \
     directory disable disabled discard disk distinct distinctrow div do dot double drop dry dryrun dual dump \
     duplicate duration dynamic else elseif enable enabled enclosed encryption encryption_keyfile encryption_method \
     end end_time enforced engine engines enum error errors escape escaped event events evolve exact except exchange \
     exclusive exec_elapsed execute exists exit expansion expire explain expr_pushdown_blacklist extended extract \
     failed_login_attempts false faults fetch fields file first fixed flashback float float4 float8 flush follower \
     follower_constraints followers following for force foreign format found from full full_backup_storage fulltext \
     function gc_ttl general generated get_format global grant grants group group_concat handler hash having help \
     high high_priority histogram histograms_in_flight history hnsw hosts hour hour_microsecond hour_minute \
     hour_second hypo identified if ignore ignore_stats ilike import imports in increment incremental index indexes \
     infile inner inout inplace insert insert_method instance instant int int1 int2 int3 int4 int8 integer internal \
     intersect interval into invisible invoker io io_read_bandwidth io_write_bandwidth ipc is isolation issuer \
     iterate job jobs join json json_arrayagg json_objectagg key key_block_size keys kill labels language last \
     last_backup lastval leader leader_constraints leading learner learner_constraints learners leave left less level \
     like limit linear lines list load load_stats local localtime localtimestamp location lock locked log logs long \
     longblob longtext low low_priority master match max max_connections_per_hour max_idxnum max_minutes \
     max_queries_per_hour max_rows max_updates_per_hour max_user_connections maxvalue mb medium mediumblob mediumint \
     mediumtext member memory merge metadata microsecond middleint min min_rows minute minute_microsecond \
     minute_second minvalue mod mode modify month names national natural nchar never next next_row_id nextval no \
     no_write_to_binlog nocache nocycle node_id node_state nodegroup nomaxvalue nominvalue nonclustered none not now \
     nowait null nulls numeric nvarchar of off offset oltp_read_only oltp_read_write oltp_write_only on on_duplicate \
     online only open opt_rule_blacklist optimistic optimize option optional optionally or order out outer outfile \
     pack_keys page parser partial partition partitioning partitions password password_lock_time pause per_db \
     per_table percent pessimistic placement plan plan_cache plugins point policy position pre_split_regions \
     preceding precision predicate prepare preserve primary primary_region priority privileges procedure process \
     processed_keys processlist profile profiles proxy purge quarter queries query query_limit quick range rate_limit \
     read real rebuild recent recommend recover recursive redundant references regexp region regions release reload \
     remove rename reorganize repair repeat repeatable replace replayer replica replicas replication require required \
     reset resource respect restart restore restored_ts restores restrict resume reuse reverse revoke right rlike \
     role rollback rollup routine row row_count row_format rows rtree ru ru_per_sec run running s3 samplerate samples \
     san savepoint schedule schema schemas second second_microsecond secondary secondary_engine secondary_load \
     secondary_unload security select send_credentials_to_tikv separator sequence serial serializable session \
     session_states set setval shard_row_id_bits share shared show shutdown signed similar simple skip \
     skip_schema_files slave slow smallint snapshot some source spatial split sql sql_big_result sql_buffer_result \
     sql_cache sql_calc_found_rows sql_no_cache sql_small_result sql_tsi_day sql_tsi_hour sql_tsi_minute \
     sql_tsi_month sql_tsi_quarter sql_tsi_second sql_tsi_week sql_tsi_year sqlexception sqlstate sqlwarning ssl \
     staleness start start_time start_ts starting statistics stats stats_auto_recalc stats_buckets stats_col_choice \
     stats_col_list stats_extended stats_healthy stats_histograms stats_locked stats_meta stats_options \
     stats_persistent stats_sample_pages stats_sample_rate stats_topn status std stddev stddev_pop stddev_samp stop \
     storage stored straight_join strict strict_format strong subdate subject subpartition subpartitions substr \
     substring sum super survival_preferences swaps switch_group switches system system_time table table_checksum \
     tables tablesample tablespace target task_types temporary temptable terminated text than then tidb \
     tidb_current_tso tidb_json tiflash tikv_importer time timestamp timestampadd timestampdiff tinyblob tinyint \
     tinytext tls to token_issuer tokudb_default tokudb_fast tokudb_lzma tokudb_quicklz tokudb_small tokudb_snappy \
     tokudb_uncompressed tokudb_zlib tokudb_zstd top topn tpcc tpch_10 trace traditional trailing transaction trigger \
     triggers trim true true_card_cost truncate tso ttl ttl_enable ttl_job_interval type unbounded uncommitted \
     undefined unicode union unique unknown unlimited unlock unset unsigned until until_ts update usage use user \
     using utc_date utc_time utc_timestamp utilization_limit validation value values var_pop var_samp varbinary \
     varchar varcharacter variables variance varying vector verbose view virtual visible voter voter_constraints \
     voters wait wait_tiflash_ready warnings watch week weight_string when where while width with with_sys_table \
     without workload write x509 xor year year_month zerofill";

/// Names of functions that are keywords only directly before a parenthesis.
const FUNCTIONS: [&str; 4] = ["count", "mid", "sysdate", "translate"];

const MAX_LENGTH: usize = 24;

/// The keywords of each length, sorted.
static BY_LENGTH: LazyLock<[Vec<&[u8]>; MAX_LENGTH + 1]> = LazyLock::new(|| {
    let mut by_length = [const { Vec::new() }; MAX_LENGTH + 1];
    for word in WORDS.split_ascii_whitespace() {
        by_length[word.len()].push(word.as_bytes());
    }
    by_length.iter_mut().for_each(|words| words.sort_unstable());
    by_length
});

/// Whether `word`, in lower case, is a keyword. `is_call`: a parenthesis follows directly.
pub(crate) fn is_keyword(word: &[u8], is_call: bool) -> bool {
    BY_LENGTH.get(word.len()).is_some_and(|words| words.binary_search(&word).is_ok())
        || is_call && FUNCTIONS.iter().any(|function| function.as_bytes() == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_word_is_a_keyword() {
        assert!(WORDS.split_ascii_whitespace().all(|word| is_keyword(word.as_bytes(), false)));
        assert!(!is_keyword(b"", false) && !is_keyword(b"selec", true) && !is_keyword(&[b'a'; 100], false));
    }

    #[test]
    fn function_is_a_keyword_only_before_a_parenthesis() {
        assert!(is_keyword(b"translate", true) && !is_keyword(b"translate", false));
    }
}
