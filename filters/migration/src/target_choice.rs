//! Chooses the node that a session migrates to.

use crate::rate_limit::MigrationBackoff;

/// A node that may be the target.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetCandidate {
    /// `ip:port`
    pub endpoint: String,
    pub version: Release,
    /// The node's share of the sessions; 0: the node receives none.
    pub weight: u32,
    /// Sessions that the node has received since its weight was set, including those that are migrating to it.
    pub sessions: u64,
    /// A random offset, above 0 and at most 1. Without it all Envoys would begin with the same node.
    pub turn_offset: f64,
    /// The node itself has more sessions than its share.
    pub has_surplus: bool,
    /// Nodes of a lower priority value are preferred.
    pub priority: u32,
}

impl TargetCandidate {
    /// The sessions per weight, which must be above 0.
    fn load(&self) -> f64 {
        (self.sessions as f64 + self.turn_offset) / f64::from(self.weight)
    }
}

/// A TiDB release in comparable form: `8.5.3` of `8.0.11-TiDB-v8.5.3-alpha`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Hash)]
pub struct Release {
    major: u32,
    minor: u32,
    patch: u32,
}

impl Release {
    /// Parses the name of a release, or the version in a TiDB server's greeting. None for other text.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let release = text.rsplit_once("TiDB-").map_or(text, |(_, release)| release).trim_start_matches('v');
        let mut numbers = release.splitn(3, '.').map(|part| {
            let digits = part.find(|letter: char| !letter.is_ascii_digit()).map_or(part, |end| &part[..end]);
            digits.parse().ok()
        });
        Some(Self { major: numbers.next()??, minor: numbers.next()??, patch: numbers.next()?? })
    }
}

/// The index of the target for a session on a node of the release `from`; None if no candidate is usable.
///
/// An older release may not understand the states, so a node that is known to be older is not usable, and nodes of
/// unknown release come last. Otherwise the order is: nodes that did not just fail, the lowest priority, nodes without
/// a surplus, the lowest load. The load counts only new sessions, because weights already account for the existing
/// ones.
#[must_use]
pub fn choose_target(candidates: &[TargetCandidate], from: Release, backoff: &MigrationBackoff) -> Option<usize> {
    let usable = candidates.iter().enumerate().filter(|(_, candidate)| {
        candidate.weight > 0 && (candidate.version == Release::default() || candidate.version >= from)
    });
    usable
        .min_by(|(_, a), (_, b)| {
            let order = |node: &TargetCandidate| {
                (node.version < from, backoff.has_failed_at(&node.endpoint), node.priority, node.has_surplus)
            };
            order(a).cmp(&order(b)).then_with(|| a.load().total_cmp(&b.load()))
        })
        .map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn node(endpoint: &str, version: &str, weight: u32, sessions: u64) -> TargetCandidate {
        TargetCandidate {
            endpoint: endpoint.to_owned(),
            version: Release::parse(version).expect("a version"),
            weight,
            sessions,
            turn_offset: 1.0,
            has_surplus: false,
            priority: 0,
        }
    }

    fn chosen(candidates: &[TargetCandidate], from: &str, backoff: &MigrationBackoff) -> Option<usize> {
        choose_target(candidates, Release::parse(from).expect("a version"), backoff)
    }

    #[test]
    fn releases_are_compared_by_number() {
        assert_eq!(Release::parse("v8.5.3"), Release::parse("8.0.11-TiDB-v8.5.3"));
        assert_eq!(Release::parse("v8.5.3-alpha-12-gabc"), Release::parse("8.5.3"));
        assert!(Release::parse("v8.10.0") > Release::parse("v8.9.9"));
        for nonsense in ["", "v8", "8.5", "8.x.1", "None"] {
            assert_eq!(Release::parse(nonsense), None, "{nonsense}");
        }
    }

    #[test]
    fn node_with_the_fewest_new_sessions_per_weight_is_chosen() {
        let nodes = [node("a", "8.5.3", 100, 10), node("b", "8.5.3", 200, 12), node("c", "8.5.3", 0, 0)];
        assert_eq!(chosen(&nodes, "8.5.3", &MigrationBackoff::default()), Some(1));
        assert_eq!(chosen(&nodes[2..], "8.5.3", &MigrationBackoff::default()), None);
        assert_eq!(chosen(&[], "8.5.3", &MigrationBackoff::default()), None);
    }

    #[test]
    fn turn_offset_decides_between_nodes_of_equal_load() {
        let mut nodes = [node("a", "8.5.3", 100, 0), node("b", "8.5.3", 100, 0), node("c", "8.5.3", 101, 1)];
        nodes[1].turn_offset = 0.5;
        nodes[2].turn_offset = 0.1;
        assert_eq!(chosen(&nodes, "8.5.3", &MigrationBackoff::default()), Some(1));
        nodes[1].sessions = 1;
        assert_eq!(chosen(&nodes, "8.5.3", &MigrationBackoff::default()), Some(0));
    }

    #[test]
    fn node_of_the_lowest_priority_that_has_not_failed_is_chosen() {
        let mut nodes = [node("near", "8.5.3", 1, 50), node("far", "8.5.3", 100, 0), node("backup", "8.5.3", 100, 0)];
        nodes[1].priority = 1;
        nodes[2].priority = 2;
        assert_eq!(chosen(&nodes, "8.5.3", &MigrationBackoff::default()), Some(0));
        nodes[0].has_surplus = true;
        assert_eq!(chosen(&nodes, "8.5.3", &MigrationBackoff::default()), Some(0));
        let mut backoff = MigrationBackoff::default();
        backoff.record_failure(Some("near"), Duration::ZERO);
        assert_eq!(chosen(&nodes, "8.5.3", &backoff), Some(1));
        nodes[1].weight = 0;
        assert_eq!(chosen(&nodes, "8.5.3", &backoff), Some(2));
    }

    #[test]
    fn node_with_a_surplus_is_chosen_only_without_an_alternative() {
        let mut nodes = [node("a", "8.5.3", 100, 0), node("b", "8.5.3", 100, 50)];
        nodes[0].has_surplus = true;
        assert_eq!(chosen(&nodes, "8.5.3", &MigrationBackoff::default()), Some(1));
        assert_eq!(chosen(&nodes[..1], "8.5.3", &MigrationBackoff::default()), Some(0));
    }

    #[test]
    fn older_release_is_never_chosen() {
        let mut nodes = [node("old", "8.5.2", 100, 0), node("same", "8.5.3", 100, 50), node("new", "8.5.4", 100, 40)];
        assert_eq!(chosen(&nodes, "8.5.3", &MigrationBackoff::default()), Some(2));
        assert_eq!(chosen(&nodes[..1], "8.5.3", &MigrationBackoff::default()), None);
        nodes[0].version = Release::default();
        assert_eq!(chosen(&nodes, "8.5.3", &MigrationBackoff::default()), Some(2), "unknown release comes last");
        assert_eq!(chosen(&nodes[..1], "8.5.3", &MigrationBackoff::default()), Some(0), "unknown release is usable");
    }

    #[test]
    fn failed_node_is_chosen_only_without_an_alternative() {
        let mut nodes = [node("a", "8.5.3", 100, 0), node("b", "8.5.3", 100, 50), node("old", "8.5.2", 100, 0)];
        nodes[2].version = Release::default();
        let mut backoff = MigrationBackoff::default();
        backoff.record_failure(Some("a"), Duration::ZERO);
        assert_eq!(chosen(&nodes, "8.5.3", &backoff), Some(1));
        assert_eq!(chosen(&nodes[..1], "8.5.3", &backoff), Some(0));
    }
}
