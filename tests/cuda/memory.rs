//! Memory: where it comes from, where it goes, and what a refused step leaves behind.

use std::sync::Arc;

use kvrail::cuda::{CudaError, DeviceMemory, HostRegistration};
use kvrail::memory::Mapping;

use crate::cuda_standin::StandIn;
use crate::{context, host, used};

const MIB: u64 = 1 << 20;

#[test]
fn memory_is_created_as_cards_reach_it_and_comes_back() {
    let Some(standin) = StandIn::new() else { return };
    for (control, created) in [
        ("", true),
        ("set vmm 0", false),
        // What cards reach is what counts: here the driver would not let them at created memory.
        ("cuMemCreate fail 801\nset vmm 0", false),
    ] {
        standin.control(control);
        let context = context(&standin);
        let calls = standin.calls("cuMemCreate");
        let memory = DeviceMemory::allocate(&context.bind().unwrap(), 3 * MIB).unwrap();
        assert_eq!(standin.calls("cuMemCreate") > calls, created, "{control}");
        assert_eq!(memory.len(), if created { 4 * MIB } else { 3 * MIB });
        assert_eq!(used(&context), memory.len());
        assert_eq!(memory.pointer(MIB, MIB).unwrap(), memory.address() + MIB);
        assert!(memory.pointer(memory.len(), 1).is_err());
        drop(memory);
        assert_eq!(used(&context), 0, "{control}");
    }
    assert!(standin.calls("cuPointerSetAttribute") >= 3, "SYNC_MEMOPS on each");
}

#[test]
fn a_device_without_room_says_so_and_keeps_none() {
    let Some(standin) = StandIn::new() else { return };
    standin.control("set memory_bytes 8388608");
    let context = context(&standin);
    let bound = context.bind().unwrap();
    let held = DeviceMemory::allocate(&bound, 6 * MIB).unwrap();
    let full = DeviceMemory::allocate(&bound, 4 * MIB).unwrap_err();
    assert!(full.is_out_of_memory() && !full.is_lost(), "{full}");
    assert!(full.to_string().contains("--gpu-pool"), "{full}");
    assert!(DeviceMemory::allocate_plain(&bound, 4 * MIB).unwrap_err().is_out_of_memory());
    assert_eq!(used(&context), held.len());
    assert!(DeviceMemory::allocate(&bound, 2 * MIB).is_ok());
}

#[test]
fn a_refused_step_of_mapping_leaves_nothing_behind() {
    let Some(standin) = StandIn::new() else { return };
    let context = context(&standin);
    let bound = context.bind().unwrap();
    for step in ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"] {
        standin.control(&format!("{step} fail 2"));
        let refused = DeviceMemory::allocate(&bound, MIB).unwrap_err();
        assert!(refused.to_string().contains(step), "{refused}");
        standin.control("");
        assert_eq!(used(&context), 0, "{step}");
    }
    assert_eq!(standin.calls("cuMemAddressFree"), 2, "those that were reserved");
}

#[test]
fn host_memory_is_registered_once_and_outlives_its_registration() {
    let Some(standin) = StandIn::new() else { return };
    let context = context(&standin);
    let bound = context.bind().unwrap();
    let registered = host(&context, MIB);
    let mapping = Arc::clone(registered.mapping());
    let twice = HostRegistration::new(&bound, &mapping).unwrap_err();
    assert!(matches!(twice, CudaError::Call { result: 712, .. }), "{twice}");
    drop(registered);
    assert!(HostRegistration::new(&bound, &mapping).is_ok());
    let empty = Arc::new(Mapping::anonymous("page", 4096).unwrap());
    standin.control("cuMemHostRegister_v2 fail 2");
    let refused = HostRegistration::new(&bound, &empty).unwrap_err().to_string();
    assert!(refused.contains("ulimit -l"), "{refused}");
}

#[test]
fn a_dma_buf_is_asked_for_with_the_pcie_flag_first() {
    let Some(standin) = StandIn::new() else { return };
    let context = context(&standin);
    let bound = context.bind().unwrap();
    let memory = DeviceMemory::allocate(&bound, 4 * MIB).unwrap();
    let real = std::path::Path::new("/dev/udmabuf").exists();
    let plain = memory.dma_buf(&bound, MIB + 100, MIB);
    if !real {
        let refused = plain.unwrap_err();
        assert!(matches!(refused, CudaError::Call { result: 801, .. }), "{refused}");
        assert_eq!(standin.calls("cuMemGetHandleForAddressRange"), 2, "with the flag and without");
        return;
    }
    let plain = plain.unwrap();
    assert!(plain.without_pcie.is_none());
    assert_eq!(plain.offset, 100, "the buffer begins at a page");
    standin.control("set dmabuf_pcie 0");
    let fallen_back = memory.dma_buf(&bound, 0, MIB).unwrap();
    assert!(matches!(fallen_back.without_pcie, Some(CudaError::Call { result: 801, .. })));
}

#[test]
fn a_device_that_exports_nothing_is_not_asked() {
    let Some(standin) = StandIn::new() else { return };
    standin.control("set dmabuf 0");
    let context = context(&standin);
    let bound = context.bind().unwrap();
    let memory = DeviceMemory::allocate(&bound, MIB).unwrap();
    let refused = memory.dma_buf(&bound, 0, 4096).unwrap_err();
    assert!(matches!(refused, CudaError::Unsupported { .. }), "{refused}");
    assert_eq!(standin.calls("cuMemGetHandleForAddressRange"), 0);
}

/// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS` is set before anybody else can be told of the memory, however it
/// was made and is passed on.
#[test]
fn memory_is_kept_synchronous_before_it_is_exported() {
    let Some(standin) = StandIn::new() else { return };
    let context = context(&standin);
    let bound = context.bind().unwrap();
    standin.log();
    let (created, plain) = (
        DeviceMemory::allocate(&bound, MIB).unwrap(),
        DeviceMemory::allocate_plain(&bound, MIB).unwrap(),
    );
    created.export(&bound).unwrap();
    plain.ipc_handle(&bound).unwrap();
    // Whether this host exports it or not, the driver is asked behind the attribute.
    drop(created.dma_buf(&bound, 0, MIB));
    let log = standin.logged();
    let calls = |name: &str| {
        let line = format!("call {name}");
        let at = log.iter().enumerate().filter(|(_, logged)| **logged == line);
        at.map(|(at, _)| at).collect::<Vec<_>>()
    };
    let kept = calls("cuPointerSetAttribute");
    assert_eq!(kept.len(), 2, "{log:?}");
    for (made, exported) in [
        ("cuMemSetAccess", "cuMemExportToShareableHandle"),
        ("cuMemAlloc_v2", "cuIpcGetMemHandle"),
        ("cuMemSetAccess", "cuMemGetHandleForAddressRange"),
    ] {
        let (made, exported) = (calls(made)[0], calls(exported)[0]);
        assert!(kept.iter().any(|kept| made < *kept && *kept < exported), "{log:?}");
    }
}
