//! The load-balancing policy: the node with the fewest sessions for its weight, and none twice for one client.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use abi::policy::{Context, Hosts, Policy, PolicyFactory};

use crate::node::{self, Here};
use crate::worker;

pub(crate) struct Factory;

impl PolicyFactory for Factory {
    fn policy(&self) -> Box<dyn Policy> {
        Box::new(LeastSessions { healthy: RefCell::default(), turn: Cell::new(0) })
    }
}

/// A host that may be chosen; its position here is that among Envoy's healthy hosts.
struct Candidate {
    /// `ip:port`
    endpoint: String,
    weight: u32,
    here: Rc<Here>,
}

struct LeastSessions {
    healthy: RefCell<Vec<Candidate>>,
    /// Where the next search begins, so that equals take turns.
    turn: Cell<usize>,
}

impl Policy for LeastSessions {
    fn hosts_changed(&self, hosts: &Hosts<'_>) {
        let names: HashMap<&str, &str> = (0..hosts.count())
            .filter_map(|index| {
                let endpoint = hosts.address(index)?;
                Some((endpoint, hosts.metadata(index, "tidevoy", "address").unwrap_or(endpoint)))
            })
            .collect();
        let candidates = (0..hosts.healthy_count())
            .map(|index| {
                let endpoint = hosts.healthy_address(index).unwrap_or_default();
                Candidate {
                    endpoint: endpoint.to_owned(),
                    weight: hosts.healthy_weight(index),
                    here: node::here(names.get(endpoint).copied().unwrap_or(endpoint)),
                }
            })
            .collect();
        self.healthy.replace(candidates);
    }

    fn choose(&self, _: &Hosts<'_>, context: Context<'_>) -> Option<usize> {
        let session = worker::session_by_hash(context.hash()?)?;
        let healthy = self.healthy.borrow();
        let loads = healthy.iter().map(|candidate| {
            let usable = candidate.weight > 0 && !session.has_tried(&candidate.endpoint);
            usable.then(|| (candidate.here.node.sessions.load(Ordering::Relaxed), candidate.weight))
        });
        let chosen = least(loads, self.turn.get())?;
        self.turn.set(chosen + 1);
        let candidate = &healthy[chosen];
        session.try_node(&candidate.endpoint, &candidate.here);
        worker::set_connecting(session, Rc::clone(&candidate.here));
        Some(chosen)
    }
}

/// The position of the smallest (sessions + 1) / weight; of equals the first from `turn` on, then from the front.
///
/// None among `loads` stands for a node that may not be chosen; weights are 1 or more.
fn least(loads: impl Iterator<Item = Option<(u64, u32)>>, turn: usize) -> Option<usize> {
    let mut best: Option<(usize, u64, u32)> = None;
    for (index, load) in loads.enumerate() {
        let Some((sessions, weight)) = load else {
            continue;
        };
        let better = match best {
            None => true,
            Some((holder, fewest, its_weight)) => {
                let (ours, theirs) = (
                    (u128::from(sessions) + 1) * u128::from(its_weight),
                    (u128::from(fewest) + 1) * u128::from(weight),
                );
                ours < theirs || (ours == theirs && holder < turn && index >= turn)
            }
        };
        if better {
            best = Some((index, sessions, weight));
        }
    }
    best.map(|(index, ..)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pick(loads: &[Option<(u64, u32)>], turn: usize) -> Option<usize> {
        least(loads.iter().copied(), turn)
    }

    #[test]
    fn the_fewest_sessions_for_the_weight_wins() {
        assert_eq!(pick(&[Some((5, 100)), Some((4, 100)), Some((6, 100))], 0), Some(1));
        assert_eq!(pick(&[Some((5, 100)), Some((9, 200))], 0), Some(1));
        assert_eq!(pick(&[Some((5, 100)), Some((12, 200))], 0), Some(0));
    }

    #[test]
    fn equals_take_turns() {
        let level = [Some((3, 7)), Some((3, 7)), Some((3, 7))];
        assert_eq!([0, 1, 2, 3].map(|turn| pick(&level, turn)), [Some(0), Some(1), Some(2), Some(0)]);
    }

    #[test]
    fn what_may_not_be_chosen_is_not() {
        assert_eq!(pick(&[None, Some((9, 1)), None], 2), Some(1));
        assert_eq!(pick(&[None, None], 0), None);
        assert_eq!(pick(&[], 0), None);
    }

    #[test]
    fn nothing_overflows() {
        assert_eq!(pick(&[Some((u64::MAX, u32::MAX)), Some((u64::MAX - 1, u32::MAX))], 0), Some(1));
    }
}
