//! Which node a session migrates to.

use crate::rate_limit::MigrationBackoff;

/// A node that may be a target.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetCandidate {
    /// `ip:port`
    pub endpoint: String,
    pub version: Release,
    /// Its share of the sessions; 0: it is to get none.
    pub weight: u32,
    /// Sessions that it got since its weight is what it is, with those on their way to it.
    pub sessions: u64,
    /// The random position in its first turn, above 0 and at most 1. Otherwise all Envoys would begin with the same node.
    pub turn_offset: f64,
    /// It has more sessions than its share itself.
    pub has_surplus: bool,
    /// Nodes of a lower one are preferred.
    pub priority: u32,
}

impl TargetCandidate {
    /// What it would have for its weight with one session more, which is above 0.
    fn load(&self) -> f64 {
        (self.sessions as f64 + self.turn_offset) / f64::from(self.weight)
    }
}

/// A release, as far as it can be compared: `8.5.3` of `8.0.11-TiDB-v8.5.3-alpha`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Hash)]
pub struct Release {
    major: u32,
    minor: u32,
    patch: u32,
}

impl Release {
    /// Of a release's name, or of what a TiDB server says in its greeting; None when it is neither.
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

/// The position of the node that a session on a node of version `from` should move to; None when there is none.
///
/// States may not be understood by an older release than they come from, so a node that is known to be older gets none,
/// and one whose release is not known comes last. First come those that did not fail just now; of them those of the lowest
/// priority; of them those that have not too many; then the one that got least by weight. Weights are shares of the sessions
/// to come: who has fewest was counted in already.
#[must_use]
pub fn choose_target(candidates: &[TargetCandidate], from: Release, backoff: &MigrationBackoff) -> Option<usize> {
    let usable = candidates.iter().enumerate().filter(|(_, candidate)| {
        candidate.weight > 0 && (candidate.version == Release::default() || candidate.version >= from)
    });
    usable
        .min_by(|(_, a), (_, b)| {
            let order = |one: &TargetCandidate| {
                (one.version < from, backoff.has_failed_at(&one.endpoint), one.priority, one.has_surplus)
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
    fn versions_are_compared_by_their_numbers() {
        assert_eq!(Release::parse("v8.5.3"), Release::parse("8.0.11-TiDB-v8.5.3"));
        assert_eq!(Release::parse("v8.5.3-alpha-12-gabc"), Release::parse("8.5.3"));
        assert!(Release::parse("v8.10.0") > Release::parse("v8.9.9"));
        for nonsense in ["", "v8", "8.5", "8.x.1", "None"] {
            assert_eq!(Release::parse(nonsense), None, "{nonsense}");
        }
    }

    #[test]
    fn the_one_that_got_least_by_weight_is_chosen() {
        let nodes = [node("a", "8.5.3", 100, 10), node("b", "8.5.3", 200, 12), node("c", "8.5.3", 0, 0)];
        assert_eq!(chosen(&nodes, "8.5.3", &MigrationBackoff::default()), Some(1));
        assert_eq!(chosen(&nodes[2..], "8.5.3", &MigrationBackoff::default()), None);
        assert_eq!(chosen(&[], "8.5.3", &MigrationBackoff::default()), None);
    }

    #[test]
    fn the_first_turn_decides_among_those_that_got_as_many() {
        let mut nodes = [node("a", "8.5.3", 100, 0), node("b", "8.5.3", 100, 0), node("c", "8.5.3", 101, 1)];
        nodes[1].turn_offset = 0.5;
        nodes[2].turn_offset = 0.1;
        assert_eq!(chosen(&nodes, "8.5.3", &MigrationBackoff::default()), Some(1));
        nodes[1].sessions = 1;
        assert_eq!(chosen(&nodes, "8.5.3", &MigrationBackoff::default()), Some(0));
    }

    #[test]
    fn a_session_stays_near_while_it_can() {
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
    fn one_that_gives_takes_only_when_there_is_no_other() {
        let mut nodes = [node("a", "8.5.3", 100, 0), node("b", "8.5.3", 100, 50)];
        nodes[0].has_surplus = true;
        assert_eq!(chosen(&nodes, "8.5.3", &MigrationBackoff::default()), Some(1));
        assert_eq!(chosen(&nodes[..1], "8.5.3", &MigrationBackoff::default()), Some(0));
    }

    #[test]
    fn a_session_never_goes_to_an_older_release() {
        let mut nodes = [node("old", "8.5.2", 100, 0), node("same", "8.5.3", 100, 50), node("new", "8.5.4", 100, 40)];
        assert_eq!(chosen(&nodes, "8.5.3", &MigrationBackoff::default()), Some(2));
        assert_eq!(chosen(&nodes[..1], "8.5.3", &MigrationBackoff::default()), None);
        nodes[0].version = Release::default();
        assert_eq!(chosen(&nodes, "8.5.3", &MigrationBackoff::default()), Some(2), "who may be older comes last");
        assert_eq!(chosen(&nodes[..1], "8.5.3", &MigrationBackoff::default()), Some(0), "it is not known to be older");
    }

    #[test]
    fn one_that_has_just_failed_comes_after_the_others_of_its_kind() {
        let mut nodes = [node("a", "8.5.3", 100, 0), node("b", "8.5.3", 100, 50), node("old", "8.5.2", 100, 0)];
        nodes[2].version = Release::default();
        let mut backoff = MigrationBackoff::default();
        backoff.record_failure(Some("a"), Duration::ZERO);
        assert_eq!(chosen(&nodes, "8.5.3", &backoff), Some(1));
        assert_eq!(chosen(&nodes[..1], "8.5.3", &backoff), Some(0));
    }
}
