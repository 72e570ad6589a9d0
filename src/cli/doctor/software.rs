//! Kernel modules, libibverbs and its providers.

use super::{Finding, Host, Status};
use crate::sys::confinement;
use crate::sys::kernel::{self, ModuleState};
use crate::sys::libraries;
use crate::sys::rdma_sysfs::RdmaDevice;

/// PCI vendor of ConnectX and BlueField cards, and the class of network controllers.
const MELLANOX: &str = "0x15b3";
const NETWORK_CLASS: &str = "0x02";

/// Kernel drivers and the providers of libibverbs that know their devices.
const PROVIDERS: [(&str, &str); 18] = [
    ("mlx5_core", "mlx5"),
    ("mlx5_ib", "mlx5"),
    ("mlx4_core", "mlx4"),
    ("mlx4_ib", "mlx4"),
    ("bnxt_en", "bnxt_re"),
    ("bnxt_re", "bnxt_re"),
    ("ice", "irdma"),
    ("i40e", "irdma"),
    ("irdma", "irdma"),
    ("hns3", "hns"),
    ("qede", "qedr"),
    ("qedr", "qedr"),
    ("cxgb4", "cxgb4"),
    ("efa", "efa"),
    ("mana", "mana"),
    ("erdma", "erdma"),
    ("vmw_pvrdma", "vmw_pvrdma"),
    ("rxe", "rxe"),
];

/// Whether the device is made of software: it has no memory of its own that another one could read.
pub(super) fn is_soft(device: &RdmaDevice) -> bool {
    matches!(device.driver.as_deref(), Some("rxe" | "siw"))
}

/// Whether there is a card that the kernel drives by mlx5.
pub(super) fn has_mellanox_nic(host: &Host) -> bool {
    const BUS: &str = "sys/bus/pci/devices";
    host.root.names(BUS).iter().any(|slot| {
        let said = |file: &str| host.root.text(format!("{BUS}/{slot}/{file}")).unwrap_or_default();
        said("vendor") == MELLANOX && said("class").starts_with(NETWORK_CLASS)
    })
}

/// The kernel's part.
pub(super) fn modules(host: &Host) -> Vec<Finding> {
    let mut findings = vec![module(host, "ib_uverbs", "user-space RDMA")];
    if has_mellanox_nic(host) {
        findings.push(module(host, "mlx5_ib", "RDMA on NVIDIA network cards"));
    }
    let soft = kernel::module(&host.root, "rdma_rxe");
    if host.devices.is_empty() || host.devices.iter().any(is_soft) {
        findings.push(match soft {
            ModuleState::Present => Finding::ok("module", "rdma_rxe (SoftRoCE) is there"),
            _absent => {
                Finding::ok("module", "rdma_rxe (SoftRoCE) is not loaded; only trials need it")
            }
        });
    }
    findings
}

fn module(host: &Host, name: &str, purpose: &str) -> Finding {
    const CHECK: &str = "module";
    let inside = match confinement::container(&host.root) {
        Some(_container) => ", on the host outside this container",
        None => "",
    };
    let (what, remedy) = match kernel::module(&host.root, name) {
        ModuleState::Present => {
            return Finding::ok(CHECK, format!("{name} ({purpose}) is there"));
        }
        ModuleState::Loadable => ("is not loaded", format!("modprobe {name}{inside}")),
        ModuleState::Unknown => (
            "is not loaded",
            format!("modprobe {name}{inside}; a kernel without it must be replaced by one with it"),
        ),
        ModuleState::Absent => (
            "is not installed for this kernel",
            "install the kernel's full set of modules (Debian: linux-image-amd64 in place of a \
             cloud kernel; Ubuntu: linux-modules-extra-$(uname -r))"
                .to_owned(),
        ),
    };
    Finding::bad(CHECK, host.rdma_problem(), format!("{name} ({purpose}) {what}"), remedy)
}

/// libibverbs itself.
pub(super) fn libraries(host: &Host) -> Vec<Finding> {
    const CHECK: &str = "libibverbs";
    const LIBRARY: &str = "libibverbs.so.1";
    vec![match libraries::find(&host.root, LIBRARY) {
        Some(path) => Finding::ok(CHECK, format!("{}", path.display())),
        None => Finding::bad(
            CHECK,
            host.rdma_problem(),
            format!("{LIBRARY} is in none of the loader's directories"),
            "apt-get install libibverbs1 ibverbs-providers (Fedora, RHEL: dnf install libibverbs)",
        ),
    }]
}

/// The provider that libibverbs needs for a device.
pub(super) fn provider(host: &Host, device: &RdmaDevice) -> Option<Finding> {
    const CHECK: &str = "provider";
    let driver = device.driver.as_deref()?;
    let name = PROVIDERS.iter().find(|(kernel, _)| *kernel == driver).map(|(_, name)| *name)?;
    let provider = libraries::verbs_provider(&host.root, name);
    let missing = |what: String| {
        let remedy = "apt-get install ibverbs-providers (Fedora, RHEL: dnf install libibverbs; \
                      with DOCA or OFED: reinstall its rdma-core)";
        Some(Finding::bad(CHECK, Status::Fail, what, remedy))
    };
    match (provider.configured, provider.library) {
        (true, Some(path)) => {
            Some(Finding::ok(CHECK, format!("{}: {}", device.name, path.display())))
        }
        (_, None) => missing(format!("{}: no lib{name}-rdmav*.so is installed", device.name)),
        (false, Some(path)) => missing(format!(
            "{}: {} is there, but no file in /etc/libibverbs.d names {name}",
            device.name,
            path.display()
        )),
    }
}
