//! Which node a session moves to.

use crate::pace::Patience;

/// A node that may be moved to.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// `ip:port`
    pub endpoint: String,
    pub version: Version,
    /// Its share of the sessions; 0: it is to get none.
    pub weight: u32,
    /// Sessions that it got since its weight is what it is, with those on their way to it.
    pub sessions: u64,
    /// Where in its first turn it stands, above 0 and at most 1: at random, or all Envoys would begin with the same node.
    pub phase: f64,
    /// It has too many itself.
    pub gives: bool,
    /// Nodes of a lower one are preferred.
    pub priority: u32,
}

impl Candidate {
    /// What it would have for its weight with one session more, which is above 0.
    fn load(&self) -> f64 {
        (self.sessions as f64 + self.phase) / f64::from(self.weight)
    }
}

/// A release, as far as it can be compared: `8.5.3` of `8.0.11-TiDB-v8.5.3-alpha`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Hash)]
pub struct Version {
    major: u32,
    minor: u32,
    patch: u32,
}

impl Version {
    /// Of a release's name, or of what a TiDB server says in its greeting; None when it is neither.
    #[must_use]
    pub fn of(text: &str) -> Option<Self> {
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
pub fn target(candidates: &[Candidate], from: Version, patience: &Patience) -> Option<usize> {
    let usable = candidates.iter().enumerate().filter(|(_, candidate)| {
        candidate.weight > 0 && (candidate.version == Version::default() || candidate.version >= from)
    });
    usable
        .min_by(|(_, a), (_, b)| {
            let order = |one: &Candidate| (one.version < from, patience.avoids(&one.endpoint), one.priority, one.gives);
            order(a).cmp(&order(b)).then_with(|| a.load().total_cmp(&b.load()))
        })
        .map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn node(endpoint: &str, version: &str, weight: u32, sessions: u64) -> Candidate {
        Candidate {
            endpoint: endpoint.to_owned(),
            version: Version::of(version).expect("a version"),
            weight,
            sessions,
            phase: 1.0,
            gives: false,
            priority: 0,
        }
    }

    fn chosen(candidates: &[Candidate], from: &str, patience: &Patience) -> Option<usize> {
        target(candidates, Version::of(from).expect("a version"), patience)
    }

    #[test]
    fn versions_are_compared_by_their_numbers() {
        assert_eq!(Version::of("v8.5.3"), Version::of("8.0.11-TiDB-v8.5.3"));
        assert_eq!(Version::of("v8.5.3-alpha-12-gabc"), Version::of("8.5.3"));
        assert!(Version::of("v8.10.0") > Version::of("v8.9.9"));
        for nonsense in ["", "v8", "8.5", "8.x.1", "None"] {
            assert_eq!(Version::of(nonsense), None, "{nonsense}");
        }
    }

    #[test]
    fn the_one_that_got_least_by_weight_is_chosen() {
        let nodes = [node("a", "8.5.3", 100, 10), node("b", "8.5.3", 200, 12), node("c", "8.5.3", 0, 0)];
        assert_eq!(chosen(&nodes, "8.5.3", &Patience::default()), Some(1));
        assert_eq!(chosen(&nodes[2..], "8.5.3", &Patience::default()), None);
        assert_eq!(chosen(&[], "8.5.3", &Patience::default()), None);
    }

    #[test]
    fn the_first_turn_decides_among_those_that_got_as_many() {
        let mut nodes = [node("a", "8.5.3", 100, 0), node("b", "8.5.3", 100, 0), node("c", "8.5.3", 101, 1)];
        nodes[1].phase = 0.5;
        nodes[2].phase = 0.1;
        assert_eq!(chosen(&nodes, "8.5.3", &Patience::default()), Some(1));
        nodes[1].sessions = 1;
        assert_eq!(chosen(&nodes, "8.5.3", &Patience::default()), Some(0));
    }

    #[test]
    fn a_session_stays_near_while_it_can() {
        let mut nodes = [node("near", "8.5.3", 1, 50), node("far", "8.5.3", 100, 0), node("backup", "8.5.3", 100, 0)];
        nodes[1].priority = 1;
        nodes[2].priority = 2;
        assert_eq!(chosen(&nodes, "8.5.3", &Patience::default()), Some(0));
        nodes[0].gives = true;
        assert_eq!(chosen(&nodes, "8.5.3", &Patience::default()), Some(0));
        let mut patience = Patience::default();
        patience.failed(Some("near"), Duration::ZERO);
        assert_eq!(chosen(&nodes, "8.5.3", &patience), Some(1));
        nodes[1].weight = 0;
        assert_eq!(chosen(&nodes, "8.5.3", &patience), Some(2));
    }

    #[test]
    fn one_that_gives_takes_only_when_there_is_no_other() {
        let mut nodes = [node("a", "8.5.3", 100, 0), node("b", "8.5.3", 100, 50)];
        nodes[0].gives = true;
        assert_eq!(chosen(&nodes, "8.5.3", &Patience::default()), Some(1));
        assert_eq!(chosen(&nodes[..1], "8.5.3", &Patience::default()), Some(0));
    }

    #[test]
    fn a_session_never_goes_to_an_older_release() {
        let mut nodes = [node("old", "8.5.2", 100, 0), node("same", "8.5.3", 100, 50), node("new", "8.5.4", 100, 40)];
        assert_eq!(chosen(&nodes, "8.5.3", &Patience::default()), Some(2));
        assert_eq!(chosen(&nodes[..1], "8.5.3", &Patience::default()), None);
        nodes[0].version = Version::default();
        assert_eq!(chosen(&nodes, "8.5.3", &Patience::default()), Some(2), "who may be older comes last");
        assert_eq!(chosen(&nodes[..1], "8.5.3", &Patience::default()), Some(0), "nobody knows that it is older");
    }

    #[test]
    fn one_that_has_just_failed_comes_after_the_others_of_its_kind() {
        let mut nodes = [node("a", "8.5.3", 100, 0), node("b", "8.5.3", 100, 50), node("old", "8.5.2", 100, 0)];
        nodes[2].version = Version::default();
        let mut patience = Patience::default();
        patience.failed(Some("a"), Duration::ZERO);
        assert_eq!(chosen(&nodes, "8.5.3", &patience), Some(1));
        assert_eq!(chosen(&nodes[..1], "8.5.3", &patience), Some(0));
    }
}
