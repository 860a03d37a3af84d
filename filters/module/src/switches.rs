//! Parts of the module that an operator can switch off while Envoy runs, if a part seems to have a bug.
//!
//! A part is off if the control plane ([`crate::live_config`]) or Envoy's runtime switches it off. The runtime works
//! without a control plane: `POST /runtime_modify?tidevoy.offload=false` at Envoy's admin port.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::worker::WorkerContext;
use crate::{migration_scheduler, wakers};

/// The keys of Envoy's runtime.
const OFFLOAD_KEY: &str = "tidevoy.offload";
const MIGRATION_KEY: &str = "tidevoy.migration";

/// Which parts are on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Switches {
    /// The module handles the events of established connections instead of Envoy, and forwards their bytes directly.
    pub(crate) offload: bool,
    /// Sessions migrate, and fail over when their node is gone.
    pub(crate) migration: bool,
}

impl Switches {
    const ALL_ON: Self = Self { offload: true, migration: true };

    /// A part is on only if it is on in both.
    fn and(self, other: Self) -> Self {
        Self { offload: self.offload && other.offload, migration: self.migration && other.migration }
    }
}

/// The switches of each source.
struct Sources {
    control_plane: Switches,
    runtime: Switches,
}

static SOURCES: Mutex<Sources> = Mutex::new(Sources { control_plane: Switches::ALL_ON, runtime: Switches::ALL_ON });

// The result of both sources, for the workers.
static OFFLOAD: AtomicBool = AtomicBool::new(true);
static MIGRATION: AtomicBool = AtomicBool::new(true);

/// The switches that a worker has applied to its sessions.
pub(crate) struct AppliedSwitches(Cell<Switches>);

impl Default for AppliedSwitches {
    fn default() -> Self {
        Self(Cell::new(Switches::ALL_ON))
    }
}

/// Whether the module may handle the events of established connections. Called for each read, so it must be cheap.
pub(crate) fn is_offload_on() -> bool {
    OFFLOAD.load(Ordering::Relaxed)
}

/// Whether sessions may begin to migrate.
pub(crate) fn is_migration_on() -> bool {
    MIGRATION.load(Ordering::Relaxed)
}

fn sources() -> MutexGuard<'static, Sources> {
    // Nothing panics while the lock is held.
    SOURCES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn current() -> Switches {
    Switches { offload: is_offload_on(), migration: is_migration_on() }
}

/// Each part with each source, and whether this source has switched the part off.
pub(crate) fn switched_off() -> [(&'static str, &'static str, bool); 4] {
    let sources = sources();
    let (control_plane, runtime) = (sources.control_plane, sources.runtime);
    [
        ("offload", "control_plane", !control_plane.offload),
        ("offload", "runtime", !runtime.offload),
        ("migration", "control_plane", !control_plane.migration),
        ("migration", "runtime", !runtime.migration),
    ]
}

/// Sets the switches of the control plane.
pub(crate) fn set_published(published: Switches) {
    change(|sources| sources.control_plane = published);
}

/// Reads the switches of Envoy's runtime. Called at each tick of Envoy's main thread.
pub(crate) fn read_runtime() {
    let is_on = |key| envoy_abi::runtime::boolean(key, true);
    let runtime = Switches { offload: is_on(OFFLOAD_KEY), migration: is_on(MIGRATION_KEY) };
    change(|sources| sources.runtime = runtime);
}

fn change(set: impl FnOnce(&mut Sources)) {
    let (before, now) = {
        let mut sources = sources();
        set(&mut sources);
        let (before, now) = (current(), sources.control_plane.and(sources.runtime));
        OFFLOAD.store(now.offload, Ordering::Relaxed);
        MIGRATION.store(now.migration, Ordering::Relaxed);
        (before, now)
    };
    if before == now {
        return;
    }
    for (part, was_on, is_on) in
        [("offload", before.offload, now.offload), ("migration", before.migration, now.migration)]
    {
        if was_on != is_on {
            envoy_abi::log!(Warn, "{part} is switched {}", if is_on { "on" } else { "off" });
        }
    }
    wakers::wake_all();
}

/// Applies changed switches to the sessions of a worker.
pub(crate) fn apply(worker: &WorkerContext) {
    let now = current();
    let before = worker.applied_switches.0.replace(now);
    if before.offload && !now.offload {
        worker.sessions.for_each(|session| session.return_to_envoy_if_switched_off());
    }
    if before.migration != now.migration {
        migration_scheduler::on_nodes_changed(worker);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_is_off_if_any_source_has_switched_it_off() {
        let on = Switches::ALL_ON;
        let (no_offload, no_migration) = (Switches { offload: false, ..on }, Switches { migration: false, ..on });
        assert_eq!(on.and(on), on);
        assert_eq!(on.and(no_offload), no_offload);
        assert_eq!(no_migration.and(on), no_migration);
        assert_eq!(no_offload.and(no_migration), Switches { offload: false, migration: false });
    }
}
