//! The kernel that runs: its release, and which of its modules are there.

use super::root::HostRoot;

/// Whether a kernel module can serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModuleState {
    /// Loaded, or part of the kernel.
    Present,
    /// Installed, not loaded.
    Loadable,
    /// Not installed for the kernel that runs.
    Absent,
    /// Not loaded, and this file system does not hold the kernel's modules: a container's, for
    /// example.
    Unknown,
}

/// The kernel's release, such as `6.12.9-amd64`.
#[must_use]
pub fn release(root: &HostRoot) -> Option<String> {
    root.text("proc/sys/kernel/osrelease")
}

/// The major and minor number that a release begins with.
#[must_use]
pub fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    let mut next = || numbers.next()?.parse().ok();
    Some((next()?, next()?))
}

/// The state of a module, by its name with underscores.
#[must_use]
pub fn module(root: &HostRoot, name: &str) -> ModuleState {
    let loaded = root.text("proc/modules").is_some_and(|modules| {
        modules.lines().any(|line| line.split_whitespace().next() == Some(name))
    });
    // A module that is part of the kernel has a directory where it has a parameter.
    if loaded || root.exists(format!("sys/module/{name}")) {
        return ModuleState::Present;
    }
    let Some(release) = release(root) else {
        return ModuleState::Unknown;
    };
    let listed = |list: &str| {
        let text = root.text(format!("lib/modules/{release}/{list}"))?;
        Some(text.lines().any(|line| module_name(line).as_deref() == Some(name)))
    };
    match (listed("modules.builtin"), listed("modules.dep")) {
        (Some(true), _) => ModuleState::Present,
        (_, Some(true)) => ModuleState::Loadable,
        (_, Some(false)) => ModuleState::Absent,
        (_, None) => ModuleState::Unknown,
    }
}

/// The module of a line such as `kernel/drivers/a/b-c.ko.xz: kernel/…`; names mix dashes and
/// underscores.
fn module_name(line: &str) -> Option<String> {
    let path = line.split(':').next()?;
    let file = path.rsplit('/').next()?;
    let (name, _compression) = file.split_once(".ko")?;
    Some(name.replace('-', "_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_begin_with_two_numbers() {
        assert_eq!(version("6.12.117+deb12-amd64"), Some((6, 12)));
        assert_eq!(version("5.4-rc1"), Some((5, 4)));
        assert_eq!(version("next"), None);
    }

    #[test]
    fn a_module_is_loaded_built_in_loadable_or_absent() {
        let (directory, root) = HostRoot::imitation(&[]);
        let write = |path, text| root.write(path, text);
        write("proc/modules", "rdma_rxe 192512 0 - Live 0x0\nib_uverbs_x 1 0 - Live 0x0\n");
        assert_eq!(module(&root, "rdma_rxe"), ModuleState::Present);
        assert_eq!(module(&root, "ib_uverbs"), ModuleState::Unknown);
        write("proc/sys/kernel/osrelease", "6.1.0-1\n");
        assert_eq!(module(&root, "ib_uverbs"), ModuleState::Unknown, "no modules here");
        write(
            "lib/modules/6.1.0-1/modules.dep",
            "kernel/a/ib_uverbs.ko.xz: kernel/a/ib_core.ko.xz\nkernel/b/nvidia-peermem.ko:\n",
        );
        assert_eq!(module(&root, "ib_uverbs"), ModuleState::Loadable);
        assert_eq!(module(&root, "nvidia_peermem"), ModuleState::Loadable);
        assert_eq!(module(&root, "ib_core"), ModuleState::Absent, "a dependency is no entry");
        write("lib/modules/6.1.0-1/modules.builtin", "kernel/a/ib_core.ko\n");
        assert_eq!(module(&root, "ib_core"), ModuleState::Present);
        std::fs::create_dir_all(directory.path().join("sys/module/mlx5_ib")).unwrap();
        assert_eq!(module(&root, "mlx5_ib"), ModuleState::Present);
    }
}
