//! Hosts that have no driver, half a driver, or no GPU.

use kvrail::cuda::{Context, CudaError, DeviceMemory, Driver, WriteOrdering};

use crate::cuda_standin::StandIn;
use crate::{context, used};

#[test]
fn an_absent_library_is_an_error_that_names_it() {
    let absent = Driver::open("libkvrail-no-such-driver.so.1").unwrap_err();
    assert!(matches!(absent, CudaError::Absent { .. }));
    let said = absent.to_string();
    assert!(said.contains("libkvrail-no-such-driver.so.1") && said.contains("install"), "{said}");
}

#[test]
fn a_function_that_every_driver_has_is_missed_by_name() {
    let Some(standin) = StandIn::without(&["cuIpcOpenMemHandle_v2"]) else { return };
    let missing = Driver::open(standin.library()).unwrap_err();
    assert!(matches!(missing, CudaError::Symbol { symbol: "cuIpcOpenMemHandle_v2", .. }));
}

#[test]
fn without_younger_functions_only_what_needs_them_is_refused() {
    let younger = [
        "cuMemCreate",
        "cuMemGetHandleForAddressRange",
        "cuFlushGPUDirectRDMAWrites",
        "cuGetErrorName",
    ];
    let Some(standin) = StandIn::without(&younger) else { return };
    let context = context(&standin);
    let attributes = context.device().attributes().clone();
    assert!(!attributes.virtual_memory && !attributes.dma_buf && !attributes.host_flush);
    let bound = context.bind().unwrap();
    let memory = DeviceMemory::allocate(&bound, 1 << 20).unwrap();
    assert_eq!(used(&context), 1 << 20);
    assert!(matches!(memory.export(&bound), Err(CudaError::Unsupported { .. })));
    assert!(matches!(memory.dma_buf(&bound, 0, 4096), Err(CudaError::Unsupported { .. })));
    assert!(matches!(bound.flush_writes(), Err(CudaError::Unsupported { .. })));
    standin.control("cuMemGetInfo_v2 fail 1");
    let unnamed = bound.memory().unwrap_err().to_string();
    assert!(unnamed.contains("cuMemGetInfo") && unnamed.contains("(1)"), "{unnamed}");
}

#[test]
fn an_old_driver_and_a_host_without_a_gpu_are_told_apart() {
    let Some(standin) = StandIn::new() else { return };
    standin.control("set version 11020");
    let old = Driver::open(standin.library()).unwrap_err();
    assert!(matches!(old, CudaError::TooOld { version: (11, 2) }), "{old}");
    standin.control("set devices 0");
    assert!(matches!(Driver::open(standin.library()), Err(CudaError::NoDevice)));
    standin.control("cuInit fail 804");
    let refused = Driver::open(standin.library()).unwrap_err();
    assert!(matches!(refused, CudaError::Call { result: 804, .. }), "{refused}");
    standin.control("set devices 2");
    let driver = Driver::open(standin.library()).unwrap();
    assert_eq!(driver.version(), (12, 8));
    assert_eq!(driver.device(1).unwrap().ordinal(), 1);
    let none = driver.device(2).unwrap_err();
    assert!(matches!(none, CudaError::NoSuchDevice { ordinal: 2, count: 2 }), "{none}");
}

#[test]
fn a_fork_is_refused_before_the_driver_is_asked() {
    let Some(standin) = StandIn::new() else { return };
    let context = context(&standin);
    // SAFETY: the child calls nothing that could wait for a lock of another thread: the check comes
    // before everything else, and the exit runs no handlers.
    #[expect(unsafe_code, reason = "no wrapper forks a test")]
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = matches!(context.bind().map(|_| ()), Err(CudaError::Forked))
            && matches!(context.device().driver().device_count(), Err(CudaError::Forked));
        // SAFETY: ends the child at once.
        #[expect(unsafe_code, reason = "no wrapper ends a fork")]
        unsafe {
            libc::_exit(if refused { 0 } else { 1 })
        };
    }
    let mut status = 0;
    // SAFETY: writes one integer.
    #[expect(unsafe_code, reason = "no wrapper waits for a fork")]
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((waited, status), (child, 0));
    assert_eq!(context.device().driver().device_count().unwrap(), 1, "the parent goes on");
}

#[test]
fn guards_nest_and_a_context_that_nobody_holds_is_released() {
    let Some(standin) = StandIn::new() else { return };
    let context = context(&standin);
    let outer = context.bind().unwrap();
    drop(context.bind().unwrap());
    assert!(outer.memory().is_ok(), "still current");
    drop(outer);
    let device = context.device().clone();
    drop(context);
    assert_eq!(standin.calls("cuDevicePrimaryCtxRelease_v2"), 1);
    assert_eq!(standin.calls("cuCtxPushCurrent_v2"), standin.calls("cuCtxPopCurrent_v2"));
    assert!(Context::primary(&device).is_ok());
}

#[test]
fn writes_are_flushed_where_the_device_does_not_order_them() {
    let Some(standin) = StandIn::new() else { return };
    let table = [
        ("set ordering 0", Some(true), WriteOrdering::None),
        ("set ordering 100", Some(false), WriteOrdering::Owner),
        ("set ordering 200", Some(false), WriteOrdering::AllDevices),
        ("set ordering 0\nset flush_options 0", None, WriteOrdering::None),
        ("set ordering 100\nset flush_options 0", Some(false), WriteOrdering::Owner),
    ];
    for (control, flushed, ordering) in table {
        standin.control(control);
        let context = context(&standin);
        assert_eq!(context.device().attributes().write_ordering, ordering);
        let before = standin.calls("cuFlushGPUDirectRDMAWrites");
        let outcome = context.bind().unwrap().flush_writes();
        assert_eq!(outcome.ok(), flushed, "{control}");
        let calls = standin.calls("cuFlushGPUDirectRDMAWrites") - before;
        assert_eq!(calls == 1, flushed == Some(true), "{control}");
    }
}
