//! Asynchronous events of a device: what no completion tells.
#![expect(unsafe_code, reason = "calls libibverbs through function pointers")]

use std::mem::MaybeUninit;

use super::context::Context;
use crate::sys::ibverbs::constants as c;
use crate::sys::ibverbs::ibv_async_event;

/// An asynchronous event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// A queue pair went to ERR; its token.
    QueuePair(u64),
    /// A completion queue overflowed; its token.
    CompletionQueue(u64),
    /// A port came up.
    PortActive(u8),
    /// A port went down.
    PortDown(u8),
    /// A port's GID table changed.
    GidChange(u8),
    /// The device is going away.
    DeviceFatal,
    /// Anything else, as `IBV_EVENT_*`.
    Other(i32),
}

impl Context {
    /// Takes and acknowledges one event; `None` where there is none. A device that was removed may
    /// answer [`AsyncEvent::DeviceFatal`] first and nothing afterwards.
    #[must_use]
    pub fn next_event(&self) -> Option<AsyncEvent> {
        let mut event = MaybeUninit::<ibv_async_event>::zeroed();
        let library = self.library();
        // SAFETY: the context is open and does not block; there is room for an event.
        let rc = unsafe { (library.get_async_event)(self.raw().as_ptr(), event.as_mut_ptr()) };
        if rc != 0 {
            return None;
        }
        // SAFETY: the call succeeded, so the event is written; all bit patterns of it are valid.
        let mut event = unsafe { event.assume_init() };
        let seen = decode(&event);
        // SAFETY: the event came from `get_async_event` and is acknowledged once. Until now the
        // object that it names could not be destroyed.
        unsafe { (library.ack_async_event)(&raw mut event) };
        Some(seen)
    }
}

fn decode(event: &ibv_async_event) -> AsyncEvent {
    match event.event_type {
        c::IBV_EVENT_QP_FATAL | c::IBV_EVENT_QP_REQ_ERR | c::IBV_EVENT_QP_ACCESS_ERR => {
            // SAFETY: events of these types name a queue pair.
            let qp = unsafe { event.element.qp };
            // SAFETY: it is not destroyed before the event is acknowledged.
            let token = unsafe { (*qp).qp_context }.addr();
            AsyncEvent::QueuePair(u64::try_from(token).unwrap_or(u64::MAX))
        }
        c::IBV_EVENT_CQ_ERR => {
            // SAFETY: events of this type name a completion queue.
            let cq = unsafe { event.element.cq };
            // SAFETY: it is not destroyed before the event is acknowledged.
            let token = unsafe { (*cq).cq_context }.addr();
            AsyncEvent::CompletionQueue(u64::try_from(token).unwrap_or(u64::MAX))
        }
        c::IBV_EVENT_DEVICE_FATAL => AsyncEvent::DeviceFatal,
        kind @ (c::IBV_EVENT_PORT_ACTIVE | c::IBV_EVENT_PORT_ERR | c::IBV_EVENT_GID_CHANGE) => {
            // SAFETY: events of these types name a port.
            let port = unsafe { event.element.port_num };
            let port = u8::try_from(port).unwrap_or(0);
            match kind {
                c::IBV_EVENT_PORT_ACTIVE => AsyncEvent::PortActive(port),
                c::IBV_EVENT_PORT_ERR => AsyncEvent::PortDown(port),
                _ => AsyncEvent::GidChange(port),
            }
        }
        other => AsyncEvent::Other(other),
    }
}
