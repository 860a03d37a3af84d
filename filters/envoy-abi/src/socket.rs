//! Transport sockets, which read and write the bytes of one connection.

use core::cell::Cell;
use std::os::fd::BorrowedFd;
use std::rc::Rc;

use crate::descriptor;
use crate::guard::guarded;
use crate::module::{configured, destroyed, module};
use crate::sys::{self, Buffer, Envoy, IoResult, Ours};

/// The result of a read or write on the descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Io {
    /// The number of bytes; a read of 0 bytes is the end of the stream.
    Done(usize),
    /// The descriptor is not ready; Envoy calls again when it is.
    WouldBlock,
    /// The connection is broken.
    Broken,
}

/// The result of one read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    pub io: Io,
    /// Bytes or the end of the stream may be left: read again. False: nothing is left, and Envoy reports what follows.
    /// Exception: if a reset arrived with these bytes, only the next write may report it.
    pub more: bool,
}

/// The result of a hook, for Envoy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoOutcome {
    /// Close the connection now.
    pub close: bool,
    /// Bytes added to the read buffer, or removed from the write buffer.
    pub bytes: usize,
    /// The peer will send no more.
    pub end_of_stream: bool,
}

impl IoOutcome {
    /// Keeps the connection open; `bytes` were processed.
    #[must_use]
    pub const fn open(bytes: usize) -> Self {
        Self { close: false, bytes, end_of_stream: false }
    }

    /// Closes the connection after `bytes` were processed.
    #[must_use]
    pub const fn close(bytes: usize) -> Self {
        Self { close: true, bytes, end_of_stream: false }
    }

    fn raw(self) -> IoResult {
        IoResult {
            action: if self.close { sys::CLOSE } else { sys::KEEP_OPEN },
            bytes: self.bytes as u64,
            end_of_stream: self.end_of_stream,
        }
    }
}

/// Which side ended a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closed {
    ByPeer,
    ByEnvoy,
}

/// Creates the sockets of one listener or cluster. Called on all workers, concurrently.
pub trait SocketFactory: Send + Sync {
    /// Creates the socket of a new connection. It cannot be used before [`TransportSocket::on_attached`].
    fn create(&self, envoy: Socket) -> Option<Box<dyn TransportSocket>>;
}

/// The socket of one connection. Hooks may run inside one another, such as a close within a read.
pub trait TransportSocket {
    /// The descriptor and the connection id are known from now on.
    fn on_attached(&self);
    /// The TCP connection is established. An upstream socket must call [`Socket::raise_connected`] before the connect
    /// timeout.
    fn on_connected(&self);
    /// The descriptor may be readable. Read until [`Received::more`] is false, or call [`Socket::set_readable`].
    fn read(&self) -> IoOutcome;
    /// There may be bytes to write, or room for them. `end`: no more bytes follow those in the write buffer.
    fn write(&self, end: bool) -> IoOutcome;
    /// The connection ends. The descriptor is still open.
    fn on_closed(&self, by: Closed);
    /// Whether a close may wait until the write buffer is empty.
    fn can_flush_close(&self) -> bool {
        true
    }
    /// The reason why the connection failed, for Envoy's access log.
    fn failure_reason(&self) -> &'static str {
        ""
    }
}

/// Envoy's side of a socket. After Envoy has closed the socket, reads and writes fail; after Envoy has destroyed it,
/// all methods do nothing.
#[derive(Clone)]
pub struct Socket(Rc<Handle>);

struct Handle {
    envoy: Cell<Envoy>,
    /// Envoy's descriptor. -1 before it is known and after [`TransportSocket::on_closed`], since the number may then be
    /// reused.
    descriptor: Cell<i32>,
}

impl Socket {
    fn with<T>(&self, default: T, call: impl FnOnce(Envoy) -> T) -> T {
        let envoy = self.0.envoy.get();
        if envoy.is_null() { default } else { call(envoy) }
    }

    /// Reads from the descriptor.
    #[must_use]
    pub fn receive(&self, into: &mut [u8]) -> Received {
        match self.0.descriptor.get() {
            -1 => Received { io: Io::Broken, more: false },
            fd => descriptor::receive(fd, into),
        }
    }

    /// Like [`Self::receive`], for a caller that learns from events whether the connection `ends`. This is cheaper,
    /// since not each read asks the kernel.
    #[must_use]
    pub fn receive_with_end(&self, into: &mut [u8], ends: bool) -> Received {
        match self.0.descriptor.get() {
            -1 => Received { io: Io::Broken, more: false },
            fd => descriptor::receive_knowing(fd, into, ends),
        }
    }

    /// Lends Envoy's descriptor, while it is open.
    pub fn with_descriptor<T>(&self, run: impl FnOnce(BorrowedFd<'_>) -> T) -> Option<T> {
        // SAFETY: the descriptor is open, because it is forgotten in the hook that Envoy calls before closing it.
        self.descriptor().map(|fd| run(unsafe { BorrowedFd::borrow_raw(fd) }))
    }

    /// Envoy's descriptor, while it is open.
    pub(crate) fn descriptor(&self) -> Option<i32> {
        let fd = self.0.descriptor.get();
        (fd >= 0).then_some(fd)
    }

    /// A socket with a descriptor that Envoy does not know.
    pub(crate) fn of_descriptor(fd: i32) -> Self {
        Self(Rc::new(Handle { envoy: Cell::new(core::ptr::null_mut()), descriptor: Cell::new(fd) }))
    }

    /// Writes to the descriptor, perhaps only a part of `bytes`.
    #[must_use]
    pub fn send(&self, bytes: &[u8]) -> Io {
        match self.0.descriptor.get() {
            -1 => Io::Broken,
            fd => descriptor::send(fd, bytes),
        }
    }

    /// Writes from Envoy's write buffer, and removes the written bytes from the buffer.
    #[must_use]
    pub fn flush(&self) -> Io {
        self.with(Io::Broken, |socket| {
            let mut done = 0;
            // SAFETY: the socket lives.
            let status = unsafe { sys::socket_flush(socket, &mut done) };
            io(status, done)
        })
    }

    /// Sends a FIN.
    pub fn shutdown_write(&self) {
        // SAFETY: the socket lives.
        self.with((), |socket| unsafe { sys::socket_shutdown_write(socket) });
    }

    /// Passes bytes to the filters; only within [`TransportSocket::read`].
    pub fn pass_on(&self, bytes: &[u8]) {
        // SAFETY: the socket lives; Envoy copies.
        self.with((), |socket| unsafe {
            sys::socket_read_buffer_add(socket, bytes.as_ptr().cast(), bytes.len());
        });
    }

    /// Bytes in Envoy's write buffer.
    #[must_use]
    pub fn write_buffer_length(&self) -> usize {
        // SAFETY: the socket lives.
        self.with(0, |socket| unsafe { sys::socket_write_buffer_length(socket) })
    }

    /// Lends at most 16 pieces of the write buffer to `take`, then removes as many bytes as `take` returns. Only
    /// within [`TransportSocket::write`]. Returns that number.
    pub fn take_from_write_buffer(&self, take: impl FnOnce(&mut dyn Iterator<Item = &[u8]>) -> usize) -> usize {
        self.with(0, |socket| {
            let mut slices = [Buffer::EMPTY; 16];
            let mut count = slices.len();
            // SAFETY: the socket lives; Envoy fills at most `count` pieces, and sets `count` to their number.
            unsafe { sys::socket_write_buffer_slices(socket, slices.as_mut_ptr(), &mut count) };
            let filled = &slices[..count.min(slices.len())];
            // While the pieces are lent, the handle is disabled, so that `take` cannot change the buffer.
            let envoy = self.0.envoy.replace(core::ptr::null_mut());
            // SAFETY: the pieces are valid until the buffer changes, which is below.
            let taken = take(&mut filled.iter().map(|slice| unsafe { slice.bytes() }));
            self.0.envoy.set(envoy);
            if taken > 0 {
                // SAFETY: the socket lives; no piece is used any more.
                unsafe { sys::socket_write_buffer_drain(socket, taken) };
            }
            taken
        })
    }

    /// Reports to Envoy that the connection can be used. May run filters before it returns.
    pub fn raise_connected(&self) {
        // SAFETY: the socket lives.
        self.with((), |socket| unsafe {
            sys::socket_raise_event(socket, sys::EVENT_CONNECTED);
        });
    }

    /// Whether Envoy's read buffer exceeds its limit, so that reading must pause.
    #[must_use]
    pub fn should_stop_reading(&self) -> bool {
        // SAFETY: the socket lives.
        self.with(false, |socket| unsafe { sys::socket_should_drain(socket) })
    }

    /// Makes Envoy call `read` again.
    pub fn set_readable(&self) {
        // SAFETY: the socket lives.
        self.with((), |socket| unsafe { sys::socket_set_readable(socket) });
    }

    /// Makes Envoy call `write` again.
    pub fn set_writable(&self) {
        // SAFETY: the socket lives.
        self.with((), |socket| unsafe { sys::socket_set_writable(socket) });
    }

    /// The id of this connection, unique in the process; None before the socket is attached.
    #[must_use]
    pub fn connection_id(&self) -> Option<u64> {
        self.with(None, |socket| {
            let mut id = 0;
            // SAFETY: the socket lives; the id goes to `id`.
            unsafe { sys::socket_connection_id(socket, &mut id) }.then_some(id)
        })
    }
}

fn io(status: u32, done: usize) -> Io {
    match status {
        sys::IO_SUCCESS => Io::Done(done),
        sys::IO_AGAIN => Io::WouldBlock,
        _ => Io::Broken,
    }
}

/// The object that Envoy holds for one connection.
struct HeldSocket {
    handle: Rc<Handle>,
    socket: Box<dyn TransportSocket>,
}

/// # Safety
/// `ours` is a `HeldSocket` that Envoy got from `new` and has not destroyed.
unsafe fn held<'a>(ours: Ours) -> &'a HeldSocket {
    // SAFETY: the caller's promise; only shared references to it exist.
    unsafe { &*ours.cast::<HeldSocket>() }
}

type SocketFactoryHandle = Box<dyn SocketFactory>;

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_transport_socket_factory_config_new(
    _: Envoy,
    name: Buffer,
    config: Buffer,
    upstream: bool,
) -> Ours {
    // SAFETY: both live until this hook returns.
    let (name, config) = unsafe { (name.text(), config.bytes()) };
    configured("transport socket", &name, || {
        if upstream { module()?.upstream_socket(&name, config) } else { module()?.downstream_socket(&name, config) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_transport_socket_factory_config_destroy(factory: Ours) {
    // SAFETY: created by the hook above; Envoy destroys it once.
    unsafe { destroyed::<SocketFactoryHandle>("transport socket", factory) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_transport_socket_new(factory: Ours, envoy: Envoy) -> Ours {
    // SAFETY: the factory lives as long as its connections.
    let factory = unsafe { &*factory.cast::<SocketFactoryHandle>() };
    guarded("transport_socket_new", core::ptr::null(), || {
        let handle = Rc::new(Handle { envoy: Cell::new(envoy), descriptor: Cell::new(-1) });
        match factory.create(Socket(Rc::clone(&handle))) {
            Some(socket) => Box::into_raw(Box::new(HeldSocket { handle, socket })).cast_const().cast(),
            None => core::ptr::null(),
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_transport_socket_destroy(ours: Ours) {
    if !ours.is_null() {
        // SAFETY: created by `new`, and alive until `destroyed` below.
        let handle = &unsafe { held(ours) }.handle;
        handle.envoy.set(core::ptr::null_mut());
        handle.descriptor.set(-1);
        // SAFETY: Envoy destroys it once.
        unsafe { destroyed::<HeldSocket>("transport socket", ours) }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_transport_socket_set_callbacks(envoy: Envoy, ours: Ours) {
    // SAFETY: Envoy passes what `new` returned.
    let HeldSocket { handle, socket } = unsafe { held(ours) };
    guarded("transport_socket_set_callbacks", (), || {
        // SAFETY: the socket lives.
        let fd = unsafe { sys::socket_fd(envoy) };
        if fd >= 0 {
            descriptor::announce_rest(fd);
            handle.descriptor.set(fd);
        }
        socket.on_attached();
    });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_transport_socket_on_connected(_: Envoy, ours: Ours) {
    // SAFETY: Envoy passes what `new` returned.
    let HeldSocket { socket, .. } = unsafe { held(ours) };
    guarded("transport_socket_on_connected", (), || {
        socket.on_connected();
    });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_transport_socket_do_read(_: Envoy, ours: Ours) -> IoResult {
    // SAFETY: Envoy passes what `new` returned.
    let HeldSocket { socket, .. } = unsafe { held(ours) };
    guarded("transport_socket_do_read", IoOutcome::close(0), || socket.read()).raw()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_transport_socket_do_write(_: Envoy, ours: Ours, end: bool) -> IoResult {
    // SAFETY: Envoy passes what `new` returned.
    let HeldSocket { socket, .. } = unsafe { held(ours) };
    guarded("transport_socket_do_write", IoOutcome::close(0), || socket.write(end)).raw()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_transport_socket_close(_: Envoy, ours: Ours, event: u32, _: bool) {
    // SAFETY: Envoy passes what `new` returned.
    let HeldSocket { handle, socket } = unsafe { held(ours) };
    let by = if event == 0 { Closed::ByPeer } else { Closed::ByEnvoy };
    guarded("transport_socket_close", (), || {
        socket.on_closed(by);
    });
    handle.descriptor.set(-1);
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_transport_socket_get_protocol(_: Envoy, _: Ours, out: *mut Buffer) {
    // SAFETY: Envoy provides the memory for the result. MySQL's protocol has no ALPN name.
    unsafe { out.write(Buffer::EMPTY) };
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_transport_socket_get_failure_reason(
    _: Envoy,
    ours: Ours,
    out: *mut Buffer,
) {
    // SAFETY: Envoy passes what `new` returned.
    let HeldSocket { socket, .. } = unsafe { held(ours) };
    let reason = guarded("transport_socket_get_failure_reason", "", || socket.failure_reason());
    // SAFETY: Envoy provides the memory for the result; the text is static.
    unsafe {
        out.write(if reason.is_empty() { Buffer::EMPTY } else { Buffer::of(reason.as_bytes()) });
    };
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_transport_socket_can_flush_close(_: Envoy, ours: Ours) -> bool {
    // SAFETY: Envoy passes what `new` returned.
    let HeldSocket { socket, .. } = unsafe { held(ours) };
    guarded("transport_socket_can_flush_close", true, || socket.can_flush_close())
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_transport_socket_start_secure_transport(_: Envoy, _: Ours) -> bool {
    false // the MySQL login starts TLS, not a filter
}
