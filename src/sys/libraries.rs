//! Where the loader finds a shared library, and which verbs providers are installed.
//!
//! The loader's cache has an undocumented format; the directories that it is built from have not.

use std::path::{Path, PathBuf};

use super::root::HostRoot;

/// Directories that the loader knows without being told, for 64-bit programs of the distributions.
const BUILT_IN: [&str; 8] = [
    "lib64",
    "usr/lib64",
    "lib",
    "usr/lib",
    "lib/x86_64-linux-gnu",
    "usr/lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
];

/// How deep configuration files of the loader may include one another.
const INCLUDES_MAX: usize = 4;

/// Where libibverbs is told which providers there are.
const PROVIDERS: &str = "etc/libibverbs.d";

/// The library that the loader would find under this name, as a path of the host.
#[must_use]
pub fn find(root: &HostRoot, name: &str) -> Option<PathBuf> {
    directories(root).into_iter().map(|directory| directory.join(name)).find(|it| root.exists(it))
}

/// The loader's directories in its order: the variable, the configuration, its own.
fn directories(root: &HostRoot) -> Vec<PathBuf> {
    let environment = root.text("proc/self/environ").unwrap_or_default();
    let variable = environment.split('\0').find_map(|one| one.strip_prefix("LD_LIBRARY_PATH="));
    let mut found: Vec<PathBuf> = variable
        .unwrap_or_default()
        .split([':', ';'])
        .filter(|part| part.starts_with('/'))
        .map(PathBuf::from)
        .collect();
    configured(root, "etc/ld.so.conf", INCLUDES_MAX, &mut found);
    found.extend(BUILT_IN.iter().map(|directory| Path::new("/").join(directory)));
    found
}

fn configured(root: &HostRoot, file: &str, includes: usize, found: &mut Vec<PathBuf>) {
    let text = root.text(file).unwrap_or_default();
    for line in text.lines().map(|line| line.split('#').next().unwrap_or_default().trim()) {
        if let Some(pattern) = line.strip_prefix("include ") {
            if includes == 0 {
                continue;
            }
            // Distributions include `directory/*.conf` and nothing else.
            let Some((directory, "*.conf")) = pattern.trim().rsplit_once('/') else {
                continue;
            };
            for name in root.names(directory).iter().filter(|name| name.ends_with(".conf")) {
                configured(root, &format!("{directory}/{name}"), includes - 1, found);
            }
        } else if line.starts_with('/') {
            found.push(PathBuf::from(line));
        }
    }
}

/// A user-space driver of libibverbs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Provider {
    /// Whether libibverbs is told to load it.
    pub configured: bool,
    /// Its library, as a path of the host.
    pub library: Option<PathBuf>,
}

/// The provider of this name, such as `mlx5`.
#[must_use]
pub fn verbs_provider(root: &HostRoot, name: &str) -> Provider {
    let configured = root.names(PROVIDERS).iter().any(|file| {
        let text = root.text(format!("{PROVIDERS}/{file}")).unwrap_or_default();
        text.lines().any(|line| {
            let mut words = line.split_whitespace();
            words.next() == Some("driver") && words.next() == Some(name)
        })
    });
    // The number after `rdmav` is the interface between libibverbs and its providers.
    let head = format!("lib{name}-rdmav");
    let library = directories(root).into_iter().find_map(|directory| {
        let directory = directory.join("libibverbs");
        let names = root.names(&directory);
        let file = names.iter().find(|it| it.starts_with(&head) && it.ends_with(".so"))?;
        Some(directory.join(file))
    });
    Provider { configured, library }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_found_where_the_loader_looks() {
        let (_directory, root) = HostRoot::imitation(&[
            ("etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n# /hidden\n"),
            ("etc/ld.so.conf.d/a.conf", "# comment\n/opt/rdma/lib\n"),
            ("etc/ld.so.conf.d/b.txt", "/hidden\n"),
            ("opt/rdma/lib/libibverbs.so.1", ""),
            ("usr/lib64/libibverbs.so.1", ""),
            ("hidden/libcuda.so.1", ""),
            ("variable/libnccl.so", ""),
            ("proc/self/environ", "A=b\0LD_LIBRARY_PATH=/none:/variable\0C=d\0"),
        ]);
        let at = |name| find(&root, name);
        assert_eq!(at("libibverbs.so.1"), Some("/opt/rdma/lib/libibverbs.so.1".into()));
        assert_eq!(at("libcuda.so.1"), None);
        assert_eq!(at("libnccl.so"), Some("/variable/libnccl.so".into()));
    }

    #[test]
    fn configuration_that_includes_itself_ends() {
        let (_directory, root) = HostRoot::imitation(&[
            ("etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n"),
            ("etc/ld.so.conf.d/a.conf", "include /etc/ld.so.conf.d/*.conf\n/a\n"),
            ("a/libx.so", ""),
        ]);
        assert_eq!(find(&root, "libx.so"), Some("/a/libx.so".into()));
    }

    #[test]
    fn a_provider_needs_its_entry_and_its_library() {
        let (_directory, root) = HostRoot::imitation(&[
            ("etc/libibverbs.d/mlx5.driver", "driver mlx5\n"),
            ("etc/libibverbs.d/rxe.driver", "driver rxe\n"),
            ("usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so", ""),
            ("usr/lib/x86_64-linux-gnu/libibverbs/libsiw-rdmav34.so", ""),
        ]);
        let library = Some("/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so".into());
        assert_eq!(verbs_provider(&root, "rxe"), Provider { configured: true, library });
        assert_eq!(verbs_provider(&root, "mlx5"), Provider { configured: true, library: None });
        assert!(!verbs_provider(&root, "siw").configured);
    }
}
