//! The load-balancing policy: one instance per worker, and one on the main thread.

use crate::guard::guarded;
use crate::module::{configured, destroyed, module};
use crate::sys::{self, Buffer, Envoy, Ours};

/// Creates the instances of one cluster.
pub trait PolicyFactory: Send + Sync {
    fn policy(&self) -> Box<dyn Policy>;
}

/// Chooses hosts for one worker.
pub trait Policy {
    /// Hosts were added or removed, or their health or weight has changed. Also called once at the start.
    fn hosts_changed(&self, hosts: &Hosts<'_>);
    /// Chooses a host for a connection. Returns its position among the healthy hosts; None: no host is available.
    fn choose(&self, hosts: &Hosts<'_>, context: Context<'_>) -> Option<Position>;
}

/// The position of a host among all hosts of its priority, or among the healthy ones. The two orders differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    pub priority: u32,
    pub index: usize,
}

/// The hosts of all priorities, for the duration of one hook.
///
/// Their metadata cannot be read safely: Envoy's main thread may replace it at any time, and Envoy returns pointers
/// into it that nothing keeps alive (`getHostMetadataValue` in Envoy's
/// `source/extensions/load_balancing_policies/dynamic_modules/abi_impl.cc`). An address is never replaced, and a weight
/// is an atomic number. Since Envoy 1.40 a change of several priorities is reported as one update
/// (github.com/envoyproxy/envoy/pull/46302). Before, a host that changed its priority was briefly in none.
pub struct Hosts<'a>(Envoy, core::marker::PhantomData<&'a ()>);

impl Hosts<'_> {
    /// The positions of all hosts, healthy or not, the lowest priority first.
    pub fn all(&self) -> impl Iterator<Item = Position> {
        // SAFETY: valid in this hook.
        self.positions(|priority| unsafe { sys::lb_hosts(self.0, priority) })
    }

    /// The positions of the healthy hosts, the lowest priority first.
    pub fn healthy(&self) -> impl Iterator<Item = Position> {
        // SAFETY: valid in this hook.
        self.positions(|priority| unsafe { sys::lb_healthy_hosts(self.0, priority) })
    }

    fn positions(&self, count: impl Fn(u32) -> usize) -> impl Iterator<Item = Position> {
        // SAFETY: valid in this hook.
        let priorities = u32::try_from(unsafe { sys::lb_priorities(self.0) }).unwrap_or_default();
        (0..priorities).flat_map(move |priority| (0..count(priority)).map(move |index| Position { priority, index }))
    }

    /// `ip:port` of a host, by its position among all hosts.
    #[must_use]
    pub fn address(&self, at: Position) -> Option<&str> {
        // SAFETY: valid in this hook; the text is the host's, which lives as long.
        self.text(|out| unsafe { sys::lb_address(self.0, at.priority, at.index, out) })
    }

    /// `ip:port` of a healthy host, by its position among the healthy hosts.
    #[must_use]
    pub fn healthy_address(&self, at: Position) -> Option<&str> {
        // SAFETY: as above.
        self.text(|out| unsafe { sys::lb_healthy_address(self.0, at.priority, at.index, out) })
    }

    /// The weight of a healthy host, 1 or more; 0 if there is no such host.
    #[must_use]
    pub fn healthy_weight(&self, at: Position) -> u32 {
        // SAFETY: valid in this hook.
        unsafe { sys::lb_healthy_weight(self.0, at.priority, at.index) }
    }

    fn text(&self, get: impl FnOnce(*mut Buffer) -> bool) -> Option<&str> {
        let mut out = Buffer::EMPTY;
        if !get(&mut out) {
            return None;
        }
        // SAFETY: filled by Envoy with bytes of the host, which lives longer than the hook.
        core::str::from_utf8(unsafe { out.bytes() }).ok()
    }
}

/// The connection that a host is chosen for, for the duration of one hook.
#[derive(Clone, Copy)]
pub struct Context<'a>(Envoy, core::marker::PhantomData<&'a ()>);

impl Context<'_> {
    /// The hash of the connection by the proxy's `hash_policy`; None without such a policy.
    #[must_use]
    pub fn hash(self) -> Option<u64> {
        let mut hash = 0;
        // SAFETY: valid in this hook, checked for null.
        (!self.0.is_null() && unsafe { sys::lb_context_hash(self.0, &mut hash) }).then_some(hash)
    }
}

type PolicyFactoryHandle = Box<dyn PolicyFactory>;
type HeldPolicy = Box<dyn Policy>;

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_lb_config_new(_: Envoy, name: Buffer, config: Buffer) -> Ours {
    // SAFETY: both live until this hook returns.
    let (name, config) = unsafe { (name.text(), config.bytes()) };
    configured("load-balancing policy", &name, || module()?.policy(&name, config))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_lb_config_destroy(factory: Ours) {
    // SAFETY: created by the hook above; Envoy destroys it once.
    unsafe { destroyed::<PolicyFactoryHandle>("load-balancing policy", factory) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_lb_new(factory: Ours, envoy: Envoy) -> Ours {
    // SAFETY: the factory lives as long as its instances.
    let factory = unsafe { &*factory.cast::<PolicyFactoryHandle>() };
    guarded("lb_new", core::ptr::null(), || {
        let policy = factory.policy();
        policy.hosts_changed(&Hosts(envoy, core::marker::PhantomData));
        Box::into_raw(Box::new(policy)).cast_const().cast()
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_lb_choose_host(
    envoy: Envoy,
    ours: Ours,
    context: Envoy,
    priority: *mut u32,
    index: *mut u32,
) -> bool {
    // SAFETY: Envoy passes what `new` returned.
    let policy = unsafe { &*ours.cast::<HeldPolicy>() };
    let hosts = Hosts(envoy, core::marker::PhantomData);
    let chosen = guarded("lb_choose_host", None, || policy.choose(&hosts, Context(context, core::marker::PhantomData)));
    match chosen.and_then(|at| Some((at.priority, u32::try_from(at.index).ok()?))) {
        Some((chosen_priority, chosen_index)) => {
            // SAFETY: Envoy provides the memory for both results.
            unsafe {
                priority.write(chosen_priority);
                index.write(chosen_index);
            }
            true
        }
        None => false,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_lb_on_host_membership_update(
    envoy: Envoy,
    ours: Ours,
    _: usize,
    _: usize,
) {
    // SAFETY: Envoy passes what `new` returned.
    let policy = unsafe { &*ours.cast::<HeldPolicy>() };
    guarded("lb_on_host_membership_update", (), || {
        policy.hosts_changed(&Hosts(envoy, core::marker::PhantomData));
    });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_lb_destroy(ours: Ours) {
    // SAFETY: Envoy destroys it once.
    unsafe { destroyed::<HeldPolicy>("load-balancing policy", ours) }
}
