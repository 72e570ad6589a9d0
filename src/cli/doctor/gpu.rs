//! What blocks in GPU memory need: a driver, and a way for a network card into that memory.
//!
//! Nothing here is a failure: without a direct way, blocks go through host memory.

use super::driver::GpuSaid;
use super::{Finding, Host, Status, software};
use crate::memory::Rung;
use crate::sys::kernel::{self, ModuleState};
use crate::sys::libraries;

const NVIDIA: &str = "0x10de";
const DISPLAY_CLASS: &str = "0x03";

/// The first kernel whose RDMA devices take dma-buf memory.
const DMA_BUF_KERNEL: (u32, u32) = (5, 12);

/// What the driver's version file says where its kernel modules are the open ones, which are those
/// that export memory as dma-buf.
const OPEN_MODULES: &str = "Open Kernel Module";

pub(super) fn probe(host: &Host) -> Vec<Finding> {
    let gpus = gpus(host);
    let driver = driver(host, gpus);
    if gpus == 0 {
        let none = Finding::ok("gpu", "no NVIDIA GPU: blocks stay in host memory");
        return [none].into_iter().chain(driver).collect();
    }
    let dma_buf = dma_buf(host);
    let direct = dma_buf.status == Status::Ok;
    let found = [cuda(host, gpus), dma_buf, peermem(host, direct)];
    found.into_iter().chain(driver).collect()
}

/// What the driver itself said, where it was asked.
fn driver(host: &Host, gpus: usize) -> Vec<Finding> {
    const CHECK: &str = "cuda";
    match &host.driver {
        None => Vec::new(),
        Some(Ok(said)) => said.iter().flat_map(said_of).collect(),
        Some(Err(why)) if gpus == 0 => {
            vec![Finding::ok(CHECK, format!("no GPU memory: {why}"))]
        }
        Some(Err(why)) => vec![Finding::bad(
            CHECK,
            Status::Warn,
            why.clone(),
            "mend this, or run kvrail serve without --gpu",
        )],
    }
}

/// A GPU, and the way of each RDMA device into its memory, with what was refused.
fn said_of(gpu: &GpuSaid) -> Vec<Finding> {
    const CHECK: &str = "gpu-direct";
    let way = |(nic, rung): &(String, Rung)| {
        let refused: String = (gpu.climb.refused.iter().filter(|refused| refused.nic == *nic))
            .map(|refused| format!("; no {refused}"))
            .collect();
        let what = format!("{nic} reaches GPU {} by {rung}{refused}", gpu.ordinal);
        match rung {
            Rung::Staging => Finding::bad(
                CHECK,
                Status::Warn,
                what,
                "mend what was refused, or leave it: blocks go through pinned host memory",
            ),
            Rung::DmaBuf | Rung::Peermem => Finding::ok(CHECK, what),
        }
    };
    let ways = gpu.climb.rungs.iter().map(way);
    let untried = gpu.untried.iter().map(|why| {
        let what = format!("whether GPU {} is reached was not tried: {why}", gpu.ordinal);
        Finding::bad(CHECK, Status::Warn, what, "mend this, or run kvrail serve without --gpu")
    });
    [Finding::ok("cuda", gpu.line.clone())].into_iter().chain(ways).chain(untried).collect()
}

fn gpus(host: &Host) -> usize {
    const BUS: &str = "sys/bus/pci/devices";
    let slots = host.root.names(BUS);
    let is_gpu = |slot: &&String| {
        let said = |file: &str| host.root.text(format!("{BUS}/{slot}/{file}")).unwrap_or_default();
        said("vendor") == NVIDIA && said("class").starts_with(DISPLAY_CLASS)
    };
    slots.iter().filter(is_gpu).count()
}

fn cuda(host: &Host, gpus: usize) -> Finding {
    const CHECK: &str = "gpu";
    const LIBRARY: &str = "libcuda.so.1";
    let driver = host.root.exists("proc/driver/nvidia/version");
    match (libraries::find(&host.root, LIBRARY), driver) {
        (Some(path), true) => Finding::ok(CHECK, format!("{gpus} NVIDIA, {}", path.display())),
        (None, true) => Finding::bad(
            CHECK,
            Status::Warn,
            format!(
                "{gpus} NVIDIA, and a driver, but {LIBRARY} is in none of the loader's directories"
            ),
            "start the container with --gpus all (NVIDIA container toolkit), or install the driver's \
             libraries",
        ),
        (_, false) => Finding::bad(
            CHECK,
            Status::Warn,
            format!("{gpus} NVIDIA, but its kernel driver is not loaded"),
            "modprobe nvidia, after the driver's installation",
        ),
    }
}

fn dma_buf(host: &Host) -> Finding {
    const CHECK: &str = "dma-buf";
    let bad = |what: String, remedy: &str| Finding::bad(CHECK, Status::Warn, what, remedy);
    let release = kernel::release(&host.root).unwrap_or_default();
    if kernel::version(&release).is_none_or(|version| version < DMA_BUF_KERNEL) {
        return bad(
            format!("Linux {release} is too old for it"),
            "use Linux 5.12 or later, or nvidia_peermem",
        );
    }
    let version = host.root.text("proc/driver/nvidia/version").unwrap_or_default();
    if !version.contains(OPEN_MODULES) {
        return bad(
            "the GPU driver's kernel modules are not the open ones, which export memory".to_owned(),
            "install the driver's open kernel modules (nvidia-open), or use nvidia_peermem",
        );
    }
    if !host.devices.is_empty() && host.devices.iter().all(software::is_soft) {
        return bad(
            "software RDMA devices do not take it".to_owned(),
            "use an RDMA network card; blocks go through host memory until then",
        );
    }
    Finding::ok(CHECK, format!("Linux {release} and the open GPU driver have it"))
}

fn peermem(host: &Host, dma_buf: bool) -> Finding {
    const CHECK: &str = "peermem";
    let loaded = ["nvidia_peermem", "nv_peer_mem"]
        .into_iter()
        .find(|name| kernel::module(&host.root, name) == ModuleState::Present);
    match loaded {
        Some(name) => Finding::ok(CHECK, format!("{name} is there")),
        None if dma_buf => Finding::ok(CHECK, "not loaded and not needed: dma-buf is there"),
        None => Finding::bad(
            CHECK,
            Status::Warn,
            "nvidia_peermem is not loaded: blocks go through host memory",
            "modprobe nvidia_peermem, on the host itself",
        ),
    }
}
