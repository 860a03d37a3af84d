use super::*;

const HERE: &str = "00ff";

fn config(rule: &str, json: &str) -> LimitConfig {
    serde_json::from_str(&format!(r#"{{"rule":"{rule}"{json}}}"#)).expect("a limit")
}

fn rules(configs: &[LimitConfig], before: &[Rule]) -> Vec<Rule> {
    configs.iter().map(|config| Rule::new(config, HERE, before)).collect()
}

fn address(text: &str) -> Option<IpAddr> {
    Some(text.parse().expect("an address"))
}

fn connections(rules: &[Rule]) -> Vec<u64> {
    rules.iter().map(|rule| rule.usage.connections.load(Ordering::Relaxed)).collect()
}

#[test]
fn rule_counts_clients_whose_user_and_network_both_fit() {
    let all = rules(
        &[
            config(TOTAL, ""),
            config("network", r#","network":"10.1.0.0/16""#),
            config("user", r#","user":"report""#),
            config("both", r#","user":"report","network":"10.1.0.0/16""#),
        ],
        &[],
    );
    let fitting =
        |client: &str, user: Option<&[u8]>| all.iter().map(|rule| rule.fits(address(client), user)).collect::<Vec<_>>();
    assert_eq!(fitting("10.1.2.3", None), [true, true, false, false]);
    assert_eq!(fitting("::ffff:10.1.2.3", Some(b"report")), [true, true, true, true]);
    assert_eq!(fitting("10.2.2.3", Some(b"report")), [true, false, true, false]);
    // TiDB compares user names case-sensitively.
    assert_eq!(fitting("10.1.2.3", Some(b"Report")), [true, true, false, false]);
    assert_eq!(fitting("2001:db8::1", Some(b"")), [true, false, false, false]);
    assert!(!all[1].fits(None, None) && all[0].fits(None, None));
}

#[test]
fn quota_of_this_process_limits_connections_until_their_slots_are_dropped() {
    let own = config("total", r#","limit":20,"quotas":{"00ff":2,"0001":18},"unlisted":5"#);
    let all = rules(&[own], &[]);
    let client = address("10.0.0.1");
    let held = [1, 2].map(|_| take_slots_of_address(&all, client).expect("a slot"));
    let refused = take_slots_of_address(&all, client).expect_err("the quota is used up");
    assert_eq!(refused.error, ProxyError::FleetLimit);
    assert!(refused.text.contains("(20)"), "{}", refused.text);
    assert!(all[0].report(clock::now()).is_over_quota);
    assert!(!all[0].report(clock::now() + DEMAND_DURATION * 2).is_over_quota);
    drop(held);
    assert_eq!(all[0].report(clock::now()).connections, 0);
    assert!(take_slots_of_address(&all, client).is_ok());
    let unlisted = Rule::new(&config("total", r#","limit":20,"quotas":{"0001":18},"unlisted":5"#), HERE, &[]);
    assert_eq!(unlisted.quota, Some(5));
    assert_eq!(Rule::new(&config("total", r#","unlisted":5"#), HERE, &[]).quota, None);
}

#[test]
fn client_refused_by_one_rate_uses_up_no_other_rate() {
    let all = rules(
        &[
            config("a", r#","network":"0.0.0.0/0","rate_limit":2,"rate":2"#),
            config("b", r#","network":"10.0.0.0/8","rate_limit":1,"rate":1"#),
        ],
        &[],
    );
    let (flooding, other) = (address("10.0.0.1"), address("192.0.2.1"));
    assert!(take_slots_of_address(&all, flooding).is_ok());
    for _ in 0..100 {
        let refused = take_slots_of_address(&all, flooding).expect_err("the rate b is used up");
        assert_eq!(refused.error, ProxyError::ConnectionRate);
    }
    assert!(take_slots_of_address(&all, other).is_ok());
}

#[test]
fn raised_rate_applies_at_once() {
    let low = rules(&[config("a", r#","network":"0.0.0.0/0","rate_limit":0.01,"rate":0.01"#)], &[]);
    assert!(take_slots_of_address(&low, address("10.0.0.1")).is_ok());
    assert!(take_slots_of_address(&low, address("10.0.0.1")).is_err());
    let high = rules(&[config("a", r#","network":"0.0.0.0/0","rate_limit":1000,"rate":1000"#)], &low);
    let state = high[0].usage.new_connections.load(Ordering::Relaxed);
    assert!(state <= microseconds_now() + 1_000_000, "the next connection has to wait for at most a second");
}

#[test]
fn client_refused_by_one_rule_counts_under_no_rule() {
    let all = rules(
        &[
            config("a", r#","user":"report","limit":9,"unlisted":9"#),
            config("b", r#","user":"report","limit":1,"unlisted":1"#),
            config("c", r#","network":"10.0.0.0/8","limit":1,"unlisted":1"#),
        ],
        &[],
    );
    let client = address("10.0.0.1");
    let _held = take_slots_of_user(&all, client, b"report", true).expect("slots");
    let refused = take_slots_of_user(&all, client, b"report", true).expect_err("the quota is used up");
    assert_eq!(refused.error, ProxyError::UserLimit);
    assert!(refused.text.contains("user 'report' has exceeded the limit of connections 'b' (1)"), "{}", refused.text);
    assert_eq!(connections(&all), [1, 1, 0]);
    assert!(take_slots_of_user(&all, client, b"other", true).expect("no rule fits").is_empty());
    let _network = take_slots_of_address(&all, client).expect("a slot");
    assert_eq!(take_slots_of_address(&all, client).expect_err("used up").error, ProxyError::NetworkLimit);
}

#[test]
fn rate_allows_one_second_at_once_and_at_least_one_connection() {
    let all = rules(
        &[
            config("network", r#","network":"10.0.0.0/8","rate_limit":6,"rate":3"#),
            config("user", r#","user":"report","rate_limit":0.5,"rate":0.01"#),
        ],
        &[],
    );
    let client = address("10.0.0.1");
    let started = (0..20).filter(|_| take_slots_of_address(&all, client).is_ok()).count();
    assert!((3..=4).contains(&started), "{started}");
    let refused = take_slots_of_address(&all, client).expect_err("the rate is used up");
    assert_eq!(refused.error, ProxyError::ConnectionRate);
    assert!(refused.text.contains("(limit 'network': 6)"), "{}", refused.text);
    assert!(take_slots_of_user(&all, client, b"report", true).is_ok());
    let refused = take_slots_of_user(&all, client, b"report", true).expect_err("the rate is used up");
    assert_eq!(refused.error, ProxyError::UserConnectionRate);
    assert!(take_slots_of_user(&all, client, b"report", false).is_ok(), "a change of user is no new connection");
    assert_eq!(connections(&all), [0, 0]);
    assert!(!all[0].report(clock::now()).is_over_quota, "a larger quota would not help");
}

#[test]
fn changed_limit_keeps_the_counts_and_a_changed_definition_is_counted_again() {
    let before = rules(&[config("a", r#","network":"10.0.0.0/8","limit":9,"unlisted":9"#)], &[]);
    let client = address("10.0.0.1");
    let held: Vec<_> = (0..3).flat_map(|_| take_slots_of_address(&before, client).expect("a slot")).collect();
    let lowered = rules(&[config("a", r#","network":"10.0.0.0/8","limit":1,"unlisted":1"#)], &before);
    assert_eq!(connections(&lowered), [3]);
    assert!(take_slots_of_address(&lowered, client).is_err());
    let other = rules(&[config("a", r#","limit":1,"unlisted":1"#), config("u", r#","user":"x""#)], &lowered);
    assert_eq!(connections(&other), [0, 0]);
    let held = recount(&other, client, Some(b"x"), held);
    assert_eq!((connections(&before), connections(&other)), (vec![0], vec![1, 1]));
    let held = recount(&other, client, Some(b"y"), held);
    assert_eq!(connections(&other), [1, 0]);
    drop(held);
    assert_eq!(connections(&other), [0, 0]);
}

#[test]
fn refusals_of_a_rule_are_logged_once_a_minute() {
    let usage = Usage::default();
    let at = Duration::from_secs;
    let logged = [1, 2, 60, 61, 62, 121].map(|second| usage.must_log(at(second)));
    assert_eq!(logged, [true, false, false, true, false, true]);
}
