//! Decides what happens to an established session when a node closes the connection or no longer answers.
//!
//! A TiDB server closes a connection without an error packet after KILL or `wait_timeout`. Then the session has to end.
//! The session may fail over only if the server itself has failed, so the module probes the server's port.

/// The node that has closed a connection of the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClosedBy {
    /// The session's node.
    Node,
    /// The target of the migration, after the module has logged in.
    Target,
}

/// How far the migration of the session is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MigrationStage {
    /// No migration runs.
    None,
    /// The module prepares the target, while the session still uses its node.
    Preparing,
    /// The module holds the client.
    Holding,
    /// The module holds the client, and the node had failed before the migration started.
    FailingOver,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Situation {
    pub(super) stage: MigrationStage,
    /// The node that is being probed.
    pub(super) probed: Option<ClosedBy>,
    /// The address of the session's node is known, so the node can be probed.
    pub(super) has_address: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LossEvent {
    /// The node has closed or reset the connection. `is_restorable`: the session is idle, and its states are known.
    NodeClosed { is_restorable: bool },
    /// The target of the migration has closed or reset the connection.
    TargetClosed,
    /// The probe of a node has ended. `is_there`: the node still runs.
    Probed { closed_by: ClosedBy, is_there: bool },
    /// The node no longer answers.
    NodeUnreachable,
}

/// How the session ends if no other node can take it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// The client's connection closes, as it would without a proxy.
    Close,
    /// The client gets an error that names the node.
    NameNode,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reaction {
    /// The session ends, since the node has closed its connection.
    End,
    /// Probes a node. The result of the probe decides.
    Probe(ClosedBy),
    /// The migration must not rely on the old node, which is being probed.
    DoubtOldNode,
    /// The migration continues without the old node, or fails over.
    LoseOldNode,
    /// The migration is aborted.
    LoseTarget,
    /// The session fails over with its kept states. If that is impossible, the session ends.
    FailOver(Ending),
}

/// The reactions to an event. Empty: a running probe or migration decides.
pub(super) fn react(event: LossEvent, situation: Situation) -> Vec<Reaction> {
    use ClosedBy::{Node, Target};
    use MigrationStage::{FailingOver, Holding, None as NoMigration, Preparing};

    let Situation { stage, probed, has_address } = situation;
    match (event, stage, probed) {
        (LossEvent::NodeClosed { .. }, FailingOver, _) | (LossEvent::NodeClosed { .. }, _, Some(Node)) => vec![],
        (LossEvent::NodeClosed { .. }, ..) if !has_address => vec![Reaction::End],
        (LossEvent::NodeClosed { .. }, Holding, Some(Target)) => {
            vec![Reaction::DoubtOldNode, Reaction::LoseTarget, Reaction::Probe(Node)]
        }
        (LossEvent::NodeClosed { .. }, Holding, None) => vec![Reaction::DoubtOldNode, Reaction::Probe(Node)],
        (LossEvent::NodeClosed { is_restorable: true }, NoMigration | Preparing, _) => vec![Reaction::Probe(Node)],
        (LossEvent::NodeClosed { is_restorable: false }, NoMigration | Preparing, _) => vec![Reaction::End],

        (LossEvent::TargetClosed, _, None) => vec![Reaction::Probe(Target)],
        (LossEvent::TargetClosed, _, Some(_)) => vec![Reaction::LoseTarget],

        (LossEvent::Probed { is_there: true, .. }, _, _) => vec![Reaction::End],
        (LossEvent::Probed { closed_by: Node, .. }, Holding | FailingOver, _) => vec![Reaction::LoseOldNode],
        (LossEvent::Probed { closed_by: Node, .. }, NoMigration | Preparing, _) => {
            vec![Reaction::FailOver(Ending::Close)]
        }
        (LossEvent::Probed { closed_by: Target, .. }, Holding | FailingOver, _) => vec![Reaction::LoseTarget],
        (LossEvent::Probed { closed_by: Target, .. }, NoMigration | Preparing, _) => vec![],

        (LossEvent::NodeUnreachable, Holding | FailingOver, _) => vec![Reaction::LoseOldNode],
        (LossEvent::NodeUnreachable, NoMigration | Preparing, Some(_)) => vec![],
        (LossEvent::NodeUnreachable, NoMigration | Preparing, None) => vec![Reaction::FailOver(Ending::NameNode)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL_STAGES: [MigrationStage; 4] =
        [MigrationStage::None, MigrationStage::Preparing, MigrationStage::Holding, MigrationStage::FailingOver];
    const ALL_PROBED: [Option<ClosedBy>; 3] = [None, Some(ClosedBy::Node), Some(ClosedBy::Target)];
    const ALL_EVENTS: [LossEvent; 8] = [
        LossEvent::NodeClosed { is_restorable: true },
        LossEvent::NodeClosed { is_restorable: false },
        LossEvent::TargetClosed,
        LossEvent::Probed { closed_by: ClosedBy::Node, is_there: true },
        LossEvent::Probed { closed_by: ClosedBy::Node, is_there: false },
        LossEvent::Probed { closed_by: ClosedBy::Target, is_there: true },
        LossEvent::Probed { closed_by: ClosedBy::Target, is_there: false },
        LossEvent::NodeUnreachable,
    ];

    fn situations() -> impl Iterator<Item = Situation> {
        ALL_STAGES.into_iter().flat_map(|stage| {
            ALL_PROBED.into_iter().flat_map(move |probed| {
                [true, false].into_iter().map(move |has_address| Situation { stage, probed, has_address })
            })
        })
    }

    fn is_held(situation: Situation) -> bool {
        matches!(situation.stage, MigrationStage::Holding | MigrationStage::FailingOver)
    }

    /// Checks rules that hold for all events and situations.
    fn check(event: LossEvent, situation: Situation, reactions: &[Reaction]) {
        let case = format!("{event:?} in {situation:?}: {reactions:?}");
        let is_there = matches!(event, LossEvent::Probed { is_there: true, .. });
        let is_gone = matches!(event, LossEvent::Probed { is_there: false, .. } | LossEvent::NodeUnreachable);
        let is_closed = matches!(event, LossEvent::NodeClosed { .. });
        assert!(!is_there || reactions == [Reaction::End], "KILL must end the session: {case}");
        for reaction in reactions {
            let is_permitted = match reaction {
                Reaction::End => is_there || is_closed,
                Reaction::Probe(ClosedBy::Node) => {
                    is_closed && situation.probed != Some(ClosedBy::Node) && situation.has_address
                }
                Reaction::Probe(ClosedBy::Target) => event == LossEvent::TargetClosed && situation.probed.is_none(),
                Reaction::DoubtOldNode => is_closed && is_held(situation),
                Reaction::LoseOldNode => is_gone && is_held(situation),
                Reaction::LoseTarget => situation.probed.is_some() || is_gone && is_held(situation),
                Reaction::FailOver(ending) => {
                    let is_named = *ending == Ending::NameNode;
                    is_gone && !is_held(situation) && is_named == (event == LossEvent::NodeUnreachable)
                }
            };
            assert!(is_permitted, "{case}");
        }
        let has_pending_decision = situation.probed.is_some()
            || situation.stage == MigrationStage::FailingOver
            || event == LossEvent::Probed { closed_by: ClosedBy::Target, is_there: false };
        assert!(!reactions.is_empty() || has_pending_decision, "nothing decides: {case}");
    }

    #[test]
    fn each_event_gets_only_permitted_reactions_and_some_part_decides() {
        for event in ALL_EVENTS {
            for situation in situations() {
                check(event, situation, &react(event, situation));
            }
        }
    }

    #[test]
    fn node_that_closes_while_the_client_is_not_held_is_probed_only_for_a_restorable_session() {
        for stage in [MigrationStage::None, MigrationStage::Preparing] {
            for (is_restorable, has_address, expected) in [
                (true, true, Reaction::Probe(ClosedBy::Node)),
                (false, true, Reaction::End),
                (true, false, Reaction::End),
            ] {
                let situation = Situation { stage, probed: None, has_address };
                assert_eq!(react(LossEvent::NodeClosed { is_restorable }, situation), [expected]);
            }
        }
    }

    #[test]
    fn old_node_that_closes_while_the_client_is_held_is_doubted_and_probed_once() {
        for (probed, expected) in [
            (None, &[Reaction::DoubtOldNode, Reaction::Probe(ClosedBy::Node)][..]),
            (Some(ClosedBy::Node), &[]),
            (Some(ClosedBy::Target), &[Reaction::DoubtOldNode, Reaction::LoseTarget, Reaction::Probe(ClosedBy::Node)]),
        ] {
            let situation = Situation { stage: MigrationStage::Holding, probed, has_address: true };
            assert_eq!(react(LossEvent::NodeClosed { is_restorable: false }, situation), expected);
        }
    }

    #[test]
    fn session_leaves_a_lost_node_by_its_running_migration_or_by_a_failover() {
        let lost = [LossEvent::NodeUnreachable, LossEvent::Probed { closed_by: ClosedBy::Node, is_there: false }];
        for event in lost {
            for stage in ALL_STAGES {
                let situation = Situation { stage, probed: None, has_address: true };
                let reactions = react(event, situation);
                if is_held(situation) {
                    assert_eq!(reactions, [Reaction::LoseOldNode]);
                } else {
                    assert!(matches!(reactions[..], [Reaction::FailOver(_)]), "{reactions:?}");
                }
            }
        }
    }

    #[test]
    fn lost_target_aborts_only_a_migration_that_holds_the_client() {
        let lost = LossEvent::Probed { closed_by: ClosedBy::Target, is_there: false };
        for situation in situations() {
            let expected: &[Reaction] = if is_held(situation) { &[Reaction::LoseTarget] } else { &[] };
            assert_eq!(react(lost, situation), expected, "{situation:?}");
        }
    }
}
