//! The nodes of the process, and those of each worker. A node is kept as long as it is in use.
//!
//! Sessions, hosts and connection attempts of a worker use its [`WorkerNode`]. When the last of them drops it, its
//! counts are added to the [`SharedNode`]. When no worker uses the shared node any more, the reporter removes it and
//! reports its counts for the last time. If the node returns, its counts start from zero. Envoy's counters still go on
//! from their old values, since the module adds only the increases.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use super::{Counts, SharedNode, WorkerNode};

/// By name.
type SharedNodes = HashMap<String, Arc<SharedNode>>;

static NODES: LazyLock<Mutex<SharedNodes>> = LazyLock::new(Mutex::default);

fn nodes() -> MutexGuard<'static, SharedNodes> {
    NODES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All nodes.
pub(crate) fn all_nodes() -> Vec<Arc<SharedNode>> {
    nodes().values().cloned().collect()
}

/// Removes and returns the nodes that no worker uses and that are not ejected.
pub(crate) fn take_unused_nodes() -> Vec<Arc<SharedNode>> {
    // While the lock is held, no worker can begin to use a node that only this map refers to.
    let is_unused = |node: &Arc<SharedNode>| Arc::strong_count(node) == 1 && node.ejected_until().is_none();
    let mut nodes = nodes();
    let unused: Vec<Arc<SharedNode>> = nodes.values().filter(|node| is_unused(node)).cloned().collect();
    for node in &unused {
        nodes.remove(&node.name);
    }
    unused
}

/// The nodes of one worker, by group and name.
#[derive(Debug)]
pub(crate) struct WorkerNodes {
    this: Weak<WorkerNodes>,
    groups: RefCell<HashMap<String, HashMap<String, Weak<WorkerNode>>>>,
    /// Sessions without a node are counted for a node with an empty name, which is always in use.
    no_node: (Arc<SharedNode>, Arc<Counts>),
}

impl WorkerNodes {
    pub(crate) fn new() -> Rc<Self> {
        let no_node = shared_node("");
        let counts = no_node.add_counts();
        Rc::new_cyclic(|this| Self { this: Weak::clone(this), groups: RefCell::default(), no_node: (no_node, counts) })
    }

    /// The counters of sessions that have no node.
    pub(crate) fn no_node(&self) -> &Counts {
        &self.no_node.1
    }

    /// The node of that name in a group. Creates the node if it does not exist.
    pub(crate) fn get(&self, group: &str, name: &str) -> Rc<WorkerNode> {
        let found = self.groups.borrow().get(group).and_then(|nodes| nodes.get(name)?.upgrade());
        found.unwrap_or_else(|| {
            let node = self.create(group, name);
            let mut groups = self.groups.borrow_mut();
            groups.entry(group.to_owned()).or_default().insert(name.to_owned(), Rc::downgrade(&node));
            node
        })
    }

    fn create(&self, group: &str, name: &str) -> Rc<WorkerNode> {
        let shared = shared_node(name);
        Rc::new(WorkerNode {
            nodes: Weak::clone(&self.this),
            group: group.to_owned(),
            counts: shared.add_counts(),
            shared,
            is_marked_draining: Cell::new(false),
            shutdown_announced_at: Cell::new(None),
            must_close_sessions: Cell::new(false),
            version: Cell::new(None),
            has_surplus: Cell::new(false),
        })
    }

    /// Removes a node that is being dropped.
    fn remove(&self, group: &str, name: &str) {
        let mut groups = self.groups.borrow_mut();
        if let Some(nodes) = groups.get_mut(group) {
            nodes.remove(name);
            if nodes.is_empty() {
                groups.remove(group);
            }
        }
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.groups.borrow().values().map(HashMap::len).sum()
    }
}

impl Drop for WorkerNode {
    fn drop(&mut self) {
        self.shared.retire_counts(&self.counts);
        if let Some(nodes) = self.nodes.upgrade() {
            nodes.remove(&self.group, &self.shared.name);
        }
    }
}

fn shared_node(name: &str) -> Arc<SharedNode> {
    let mut nodes = nodes();
    if let Some(node) = nodes.get(name) {
        return Arc::clone(node);
    }
    let node = Arc::new(SharedNode { name: name.to_owned(), ..SharedNode::default() });
    nodes.insert(name.to_owned(), Arc::clone(&node));
    node
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ejection::EjectReason;

    /// Tests share the process, so each has its own node names. Only the holder of this lock may take unused nodes.
    static TAKING: Mutex<()> = Mutex::new(());

    fn registered_names(prefix: &str) -> Vec<String> {
        let mut names: Vec<String> = all_nodes().iter().map(|node| node.name.clone()).collect();
        names.retain(|name| name.starts_with(prefix));
        names.sort();
        names
    }

    fn logins(node: &SharedNode) -> u64 {
        node.counts().iter().map(|counts| counts.logins.get()).sum()
    }

    #[test]
    fn unused_nodes_are_removed_from_all_maps() {
        let _taking = TAKING.lock();
        let worker = WorkerNodes::new();
        let stays: Vec<_> = (0..10).map(|index| worker.get("many", &format!("many-stays-{index}"))).collect();
        for index in 0..10_000 {
            let node = worker.get("many", &format!("many-{index}"));
            node.counts.logins.add(1);
            drop(node);
            if index % 100 == 0 {
                take_unused_nodes();
            }
        }
        take_unused_nodes();
        assert_eq!((worker.len(), registered_names("many-").len()), (10, 10));
        drop(stays);
        take_unused_nodes();
        assert_eq!((worker.len(), worker.groups.borrow().len(), registered_names("many-").len()), (0, 0, 0));
    }

    #[test]
    fn node_is_kept_while_a_worker_uses_it_or_it_is_ejected() {
        let _taking = TAKING.lock();
        let (one, other) = (WorkerNodes::new(), WorkerNodes::new());
        let (on_one, on_other) = (one.get("kept", "kept-a"), other.get("kept", "kept-a"));
        assert!(Rc::ptr_eq(&on_one, &one.get("kept", "kept-a")));
        assert!(!Rc::ptr_eq(&on_one, &one.get("other", "kept-a")));
        on_one.shared.eject(EjectReason::Connect, Duration::from_secs(60));
        drop(on_one);
        take_unused_nodes();
        assert_eq!(registered_names("kept-"), ["kept-a"], "the other worker uses the node");
        drop(on_other);
        take_unused_nodes();
        assert_eq!(registered_names("kept-"), ["kept-a"], "the node is ejected");
        one.get("kept", "kept-a").shared.end_ejection();
        assert!(take_unused_nodes().iter().any(|node| node.name == "kept-a"));
        assert!(registered_names("kept-").is_empty());
    }

    #[test]
    fn counts_of_dropped_nodes_are_reported_once_and_in_full() {
        let _taking = TAKING.lock();
        let (one, other) = (WorkerNodes::new(), WorkerNodes::new());
        let (on_one, on_other) = (one.get("counted", "counted-a"), other.get("counted", "counted-a"));
        on_one.counts.logins.add(2);
        on_other.counts.logins.add(3);
        let shared = Arc::clone(&on_one.shared);
        let before = shared.counts();
        drop(on_one);
        assert_eq!((logins(&shared), shared.counts().len()), (5, 2));
        let seen: u64 = before.iter().map(|counts| counts.logins.get()).sum();
        assert_eq!(seen, 5, "a reader that has begun before the drop sees the same counts");
        drop((on_other, shared));
        let returned = one.get("counted", "counted-a");
        returned.counts.logins.add(1);
        assert_eq!((logins(&returned.shared), returned.shared.counts().len()), (6, 2));
        drop(returned);
        let taken = take_unused_nodes();
        let taken = taken.iter().find(|node| node.name == "counted-a").expect("an unused node");
        assert_eq!(logins(taken), 6);
        assert_eq!(logins(&one.get("counted", "counted-a").shared), 0, "the returned node counts from zero");
    }

    #[test]
    fn sessions_without_a_node_are_counted_for_a_node_with_an_empty_name() {
        let _taking = TAKING.lock();
        let worker = WorkerNodes::new();
        worker.no_node().logins.add(1);
        take_unused_nodes();
        assert!(all_nodes().iter().any(|node| node.name.is_empty() && logins(node) >= 1));
    }
}
