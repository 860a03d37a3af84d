use proptest::prelude::*;

use super::*;

fn renamed(sql: &str, names: &[(&str, &str)]) -> String {
    let names = TableNames::new(names.iter().copied()).expect("names");
    rename_tables(sql.as_bytes(), &names).map_or_else(|| "-".into(), |text| String::from_utf8_lossy(&text).into_owned())
}

#[test]
fn name_with_a_database_has_precedence() {
    for names in [[("orders", "a"), ("shop.orders", "b")], [("items", "a"), ("db.items", "b")]] {
        let table = names[0].0;
        let database = names[1].0;
        let sql = format!("select 1 from {table}, {database}");
        let (name, rest) = database.split_once('.').expect("a database");
        assert_eq!(rest, table);
        assert_eq!(renamed(&sql, &names), format!("select 1 from `a`, `{name}`.`b`"));
        let reversed = [names[1], names[0]];
        assert_eq!(renamed(&sql, &reversed), format!("select 1 from `a`, `{name}`.`b`"));
    }
}

#[test]
fn database_in_show_is_no_table() {
    assert_eq!(renamed("show tables from fields", &[("fields", "n")]), "-");
    assert_eq!(renamed("show fields from fields from fields", &[("fields", "n")]), "show fields from `n` from fields");
}

#[test]
fn comments_that_begin_or_end_within_a_name_stay_whole() {
    for (sql, expected) in [
        ("select 1 from shop/*! .t */ where a", "select 1 from `shop`.`n` where a"),
        ("/*! select 1 from shop */ .t where a", "select 1 from `shop`.`n` where a"),
        ("select 1 from shop /* c */ . -- d\n t, /* e */ t", "select 1 from `shop`.`n`, `n`"),
        ("select 1 from shop/*+ x() */.t", "select 1 from `shop`.`n`"),
        ("select /* c */ 1 from shop.t", "select /* c */ 1 from `shop`.`n`"),
    ] {
        assert_eq!(renamed(sql, &[("t", "n")]), expected);
    }
}

#[test]
fn tables_get_their_new_names_and_columns_stay() {
    let cases = [
        ("select t from t where t = 't'", "select t from `n` where t = 't'"),
        ("SELECT T.a, t.t FROM T", "SELECT `n`.a, `n`.t FROM `n`"),
        ("select * from `t` -- t\n", "select * from `n` -- t\n"),
        ("select t.* from a, t", "select `n`.* from a, `n`"),
        ("select 1 from a join t on t.id = a.t", "select 1 from a join `n` on `n`.id = a.t"),
        ("select 1 from a left join (t, b) on t = 1, t", "select 1 from a left join (`n`, b) on t = 1, `n`"),
        ("select t from t x where x.t = t", "select t from `n` x where x.t = t"),
        ("select t.a from t as t", "select t.a from `n` as t"),
        ("select t.a from u t", "-"),
        ("select a t from t order by a, t", "select a t from `n` order by a, t"),
        ("select a as t, t.b from t", "select a as t, `n`.b from `n`"),
        ("select t.a from t join (select 1) x on 1", "select `n`.a from `n` join (select 1) x on 1"),
        ("select t.a from t, (select 1) t", "select t.a from `n`, (select 1) t"),
        ("select 1 from t where a in (t, 2) group by a, t", "select 1 from `n` where a in (t, 2) group by a, t"),
        ("select a from b where c in (select t from t)", "select a from b where c in (select t from `n`)"),
        ("select shop.t.a from shop.t", "select `shop`.`n`.a from `shop`.`n`"),
        ("select 1 from t use index (t), t", "select 1 from `n` use index (t), `n`"),
        ("select trim(both 'x' from t) from t", "select trim(both 'x' from t) from `n`"),
        ("select extract(year from t), (select 1 from t)", "select extract(year from t), (select 1 from `n`)"),
        ("insert into t (t, a) values (t, 1)", "insert into `n` (t, a) values (t, 1)"),
        (
            "insert t values (1) on duplicate key update t = values(t)",
            "insert `n` values (1) on duplicate key update t = values(t)",
        ),
        ("insert low_priority ignore into t select * from t", "insert low_priority ignore into `n` select * from `n`"),
        ("select insert(t, 1, 2, t), replace(t, 1, 2) from t", "select insert(t, 1, 2, t), replace(t, 1, 2) from `n`"),
        ("replace into t set t = 1, t = 2", "replace into `n` set t = 1, t = 2"),
        ("update t set t = 1, a = t.a", "update `n` set t = 1, a = `n`.a"),
        ("update a, t set t.a = 1, t = 2", "update a, `n` set `n`.a = 1, t = 2"),
        ("delete from t where t = 1", "delete from `n` where t = 1"),
        ("delete t from t, a where t.a = 1", "delete `n` from `n`, a where `n`.a = 1"),
        ("select 1 from t for update of t", "select 1 from `n` for update of `n`"),
        ("truncate t", "truncate `n`"),
        ("truncate table t", "truncate table `n`"),
        ("drop table if exists a, t", "drop table if exists a, `n`"),
        (
            "create table if not exists t (t int, foreign key (t) references t (t))",
            "create table if not exists `n` (t int, foreign key (t) references `n` (t))",
        ),
        ("alter table t add column t int, drop column t", "alter table `n` add column t int, drop column t"),
        ("create index t on t (t)", "create index t on `n` (t)"),
        ("analyze table a, t", "analyze table a, `n`"),
        ("lock tables t read, a write", "lock tables `n` read, a write"),
        ("grant select on t to t", "grant select on `n` to t"),
        ("show columns from t from t", "show columns from `n` from t"),
        ("show tables from t", "-"),
        ("desc t", "desc `n`"),
        ("explain select * from t", "explain select * from `n`"),
        ("with t as (select 1) select t.a from t", "-"),
        ("with recursive t (a) as (select 1) select * from t", "-"),
        ("with c as (select * from t) select * from c", "with c as (select * from `n`) select * from c"),
        ("select 1 from t union select 2 from t", "select 1 from `n` union select 2 from `n`"),
        (
            "select * from json_table('[]', '$' columns (t int)) as a, t",
            "select * from json_table('[]', '$' columns (t int)) as a, `n`",
        ),
        ("select * from t()", "-"),
        ("select 't', \"t\" /* from t */ from a", "-"),
        ("select/*+ hash_join(t) */ 1 from/**/t", "select/*+ hash_join(t) */ 1 from/**/`n`"),
        ("select 1 from /*!t*/", "select 1 from /*!`n`*/"),
        ("load data infile 'x' into table t", "load data infile 'x' into table `n`"),
        ("select 1 into outfile 't' from t", "select 1 into outfile 't' from `n`"),
        ("select @t, @@t from a", "-"),
        ("select 1 from t`x`,`a`t join`t`", "select 1 from `n` `x`,`a`t join`n`"),
        ("select`a`t.b from t", "select`a` `n`.b from `n`"),
        ("", "-"),
    ];
    for (sql, expected) in cases {
        assert_eq!(renamed(sql, &[("t", "n")]), expected, "{sql}");
    }
}

#[test]
fn names_with_databases() {
    let cases = [
        ("select shop.t.a, t.b from shop.t", "select `archive`.`n`.a, `n`.b from `archive`.`n`"),
        ("select t.a from t", "-"),
        ("select t.a from other.t", "-"),
    ];
    for (sql, expected) in cases {
        assert_eq!(renamed(sql, &[("Shop.T", "archive.n")]), expected, "{sql}");
    }
    assert_eq!(renamed("select * from t", &[("t", "archive.`n``n`")]), "select * from `archive`.`n``n`");
    assert_eq!(renamed("select * from a, b", &[("a", "b"), ("b", "a")]), "select * from `b`, `a`");
}

#[test]
fn other_texts_are_no_names() {
    for text in ["", "a.b.c", "'a'", "a b", "a.", "1", "a;"] {
        assert_eq!(TableNames::new([("t", text)]), Err(text));
        assert_eq!(TableNames::new([(text, "t")]), Err(text));
    }
}

proptest! {
    #[test]
    fn only_names_change(words in prop::collection::vec("t|t\\.|,|\\(|\\)|from|select|join|on|as|'t'|`t`|\\.|update|;|[ab]", 0..20)) {
        let sql = words.join(" ");
        let names = TableNames::new([("t", "t")]).expect("names");
        if let Some(renamed) = rename_tables(sql.as_bytes(), &names) {
            let text = |sql: &[u8]| tokens(sql).into_iter().map(|token| token.lower).collect::<Vec<_>>();
            prop_assert_eq!(text(&renamed), text(sql.as_bytes()));
        }
    }
}
