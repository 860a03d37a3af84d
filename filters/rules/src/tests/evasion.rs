//! Other ways to write a statement evade no rule.

use super::*;

#[test]
fn comments_spacing_case_and_quoting_do_not_matter() {
    let rules =
        rules(r#"[{"name": "r", "pattern": "delete from shop\\.users where id = 1", "block": {"message": "x"}}]"#);
    for sql in [
        "delete from shop.users where id = 1",
        "DELETE FROM Shop.Users WHERE ID=1",
        "delete\t from\n shop . users\r\nwhere id =1;",
        "/* a */delete/**/from/* b */shop/**/./**/users/**/where/**/id/**/=/**/1/* c */;;",
        "-- delete\ndelete # from\nfrom shop.users where -- x\n id = 1 -- y",
        "delete from `shop`.`users` where `id`=1",
        "delete from`shop`.`users`where`id`=1",
        "/*!50000 delete */ from shop.users /*! where id = 1 */",
        "/*!delete*//*!from*//*!shop*/./*!users*/where/*!id*/=/*!1*/",
        "/*T! delete from */ shop.users /*T![ttl] where id = 1 */",
        "explain analyze delete from shop.users where id = 1",
        "select 1; delete from shop.users where id = 1",
        "select 1;;/* ; */; delete from shop.users where id = 1;",
        "select 1 /*!; delete from*/ shop.users where id = 1",
        "select 1 /*T! ; delete */ from shop.users /*! where id = 1; select 2 */",
        "prepare s from 'delete  from shop.users where id=1'",
        "PREPARE`s`FROM'delete/**/from shop.users where id=1'",
        "/*!prepare*/ s from 'delete/**/from `shop`.`users` where id=1'",
        "prepare s from 'delete from shop.us\\ers where id = \\1'",
        "delete from shop.user\u{17f} where id = 1",
        "prepare s from @text",
        "prepare s from @'a b'",
        "delete from shop.users where id = 1\0",
        "delete from shop.users where id = 1 and x = 'no end",
    ] {
        let verdict = CLIENT.judge(&rules, sql.as_bytes());
        assert!(matches!(verdict.outcome, Outcome::Block(_)), "{sql}");
    }
    for sql in [
        "delete from shop.users where id = 2",
        "select 1 -- delete from shop.users where id = 1",
        "select 1 /* delete from shop.users where id = 1 */",
        "select 1 /*T![no_such_feature] delete from shop.users where id = 1 */",
    ] {
        assert_eq!(outcome(&CLIENT.judge(&rules, sql.as_bytes())), "pass", "{sql}");
    }
}

#[test]
fn missing_spaces_do_not_matter() {
    let rules = rules(
        r#"[{"name": "a", "pattern": "select .* from users", "block": {"message": "x"}},
            {"name": "b", "pattern": "select \\S+\\s+from secrets", "block": {"message": "x"}},
            {"name": "c", "pattern": "to root@localhost", "block": {"message": "x"}},
            {"name": "d", "pattern": " for update", "block": {"message": "x"}},
            {"name": "e", "pattern": "\\binto outfile\\b", "block": {"message": "x"}}]"#,
    );
    for sql in [
        "select * from users",
        "select *from users",
        "select 'a'from users",
        "select .5from users",
        "select 1e5from users",
        "select 1.from users",
        "select \\Nfrom users",
        "select b'1'from users",
        "select *from secrets",
        "select 1e5from secrets",
        "grant all on t to root @localhost",
        "grant all on t to root@ localhost",
        "grant all on t to`root`@`localhost`",
        "select (1)for update",
        "select .5into outfile 'a'",
    ] {
        assert_eq!(outcome(&CLIENT.judge(&rules, sql.as_bytes())), "block x", "{sql}");
    }
    for sql in
        ["select afrom users", "select * fromusers", "select 1 from t where xfor update", "select t1into outfile"]
    {
        assert_eq!(outcome(&CLIENT.judge(&rules, sql.as_bytes())), "pass", "{sql}");
    }
}

#[test]
fn patterns_at_the_end_see_no_semicolon() {
    let rules = rules(r#"[{"name": "r", "pattern": "^delete from users$", "block": {"message": "x"}}]"#);
    for sql in ["delete from users", "delete from users;", " delete from users ; -- a", "delete from users /*+ a */"] {
        assert_eq!(outcome(&CLIENT.judge(&rules, sql.as_bytes())), "block x", "{sql}");
    }
}

#[test]
fn hints_are_visible() {
    let rules = rules(r#"[{"name": "r", "pattern": "read_from_storage", "block": {"message": "x"}}]"#);
    let outcome_of = |sql: &str| outcome(&CLIENT.judge(&rules, sql.as_bytes()));
    assert_eq!(outcome_of("select /*+ READ_FROM_STORAGE(tiflash[t]) */ 1"), "block x");
    assert_eq!(outcome_of("select /* READ_FROM_STORAGE(tiflash[t]) */ 1"), "pass");
}

#[test]
fn digest_is_the_same_for_other_literals_and_comments() {
    let json = format!(
        r#"[{{"name": "r", "digest": ["{}"], "block": {{"message": "x"}}}}]"#,
        digest_of("select a from t where b = 1")
    );
    let rules = rules(&json);
    for sql in [
        "SELECT a FROM t WHERE b = 'x'",
        "select/**/a from`t`where b=2;",
        "prepare s from 'select a from t where b = ?'",
        "select 1 /*!; select a*/ from t where b = 2",
    ] {
        assert_eq!(outcome(&CLIENT.judge(&rules, sql.as_bytes())), "block x", "{sql}");
    }
}
