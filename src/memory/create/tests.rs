//! What a host refuses, asked of a real one.

use super::*;

fn options(bytes: u64) -> PoolOptions {
    PoolOptions { id: PoolId(7), bytes, huge_pages: None, lock: false, numa_node: None }
}

fn refusal(options: &PoolOptions) -> PoolError {
    create(options).map(drop).unwrap_err()
}

#[test]
fn every_page_is_present_when_the_pool_is() {
    let (file, mapping) = create(&options(1 << 20)).unwrap();
    // Blocks that the file has allocated: all of them, although nobody has written a byte.
    let stat = rustix::fs::fstat(&file).unwrap();
    assert_eq!(stat.st_blocks.cast_unsigned() * 512, mapping.len());
    let mut bytes = [1; 64];
    mapping.read((1 << 20) - 64, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 64]);
    let flags = rustix::io::fcntl_getfd(&file).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
    let link = std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap();
    assert_eq!(link.to_str(), Some("/memfd:kvrail-pool-7 (deleted)"));
}

#[test]
fn a_pool_of_nothing_is_refused() {
    let error = refusal(&options(0));
    assert!(matches!(error, PoolError::Empty { .. }));
    assert_eq!(error.scope(), Scope::Request);
}

#[test]
fn a_pool_larger_than_memory_is_refused_with_a_sentence() {
    for bytes in [1 << 50, u64::MAX] {
        let error = refusal(&options(bytes));
        assert!(matches!(error, PoolError::TooLarge { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.starts_with("memory pool 7 asks for "), "{text}");
        assert!(text.contains("make the pool smaller"), "{text}");
    }
}

#[test]
fn pools_that_do_not_fit_together_are_refused_before_the_first_is_made() {
    let (available, _bound) = sys::host::available_memory(None).unwrap();
    let one = |id| PoolOptions { id: PoolId(id), ..options(available / 5 * 3) };
    check_room(&[one(0)]).unwrap();
    let error = check_room(&[one(0), one(1), one(2)]).unwrap_err();
    assert!(matches!(error, PoolError::TooLarge { id: PoolId(1), .. }), "{error:?}");
    // Huge pages are another kind of memory.
    let huge = PoolOptions { huge_pages: Some(HugePageSize::TwoMiB), ..one(1) };
    assert_eq!(taken(&huge, &[one(0)], |_| true), 0);
    assert_eq!(taken(&huge, &[huge, huge], |_| true), 2 * whole_pages(&huge).unwrap());
}

#[test]
fn the_largest_pool_leaves_its_page_tables_and_some_more() {
    assert_eq!(largest_pool(0), 0);
    assert_eq!(largest_pool(LEFT_FREE_BYTES), 0);
    for available in [LEFT_FREE_BYTES + 1, 1 << 30, 1 << 40, u64::MAX] {
        let pool = largest_pool(available);
        assert!(available - pool >= LEFT_FREE_BYTES + pool / PAGE_TABLE_PART);
    }
}

#[test]
fn a_numa_node_that_does_not_exist_is_named_with_those_that_do() {
    for node in [1023, 4096, u32::MAX] {
        let error = refusal(&PoolOptions { numa_node: Some(node), ..options(4096) });
        assert!(matches!(error, PoolError::NoSuchNode { .. }), "{error:?}");
        assert!(error.to_string().contains(&node.to_string()), "{error}");
    }
}

#[test]
fn a_numa_node_that_exists_is_used() {
    match create(&PoolOptions { numa_node: Some(0), ..options(1 << 20) }) {
        Ok((_file, mapping)) => {
            mapping.write(0, b"x").unwrap();
            let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap();
            let bound = |line: &str| line.contains(" bind:0 ") && line.contains("kvrail-pool-7");
            assert!(maps.lines().any(bound), "{maps}");
        }
        Err(error) => {
            let by_host = match &error {
                PoolError::NoSuchNode { .. } => true,
                PoolError::Os { source, .. } => {
                    [Some(libc::EPERM), Some(libc::ENOSYS)].contains(&source.raw_os_error())
                }
                _other => false,
            };
            assert!(by_host, "{error}");
            eprintln!("skipped: this host lets no process bind memory to node 0: {error}");
        }
    }
}

#[test]
fn huge_pages_that_nobody_reserved_are_refused_with_the_remedy() {
    for size in [HugePageSize::TwoMiB, HugePageSize::OneGiB] {
        let directory = sys::host::huge_page_directory(size.bytes(), None);
        let free = sys::host::free_huge_pages(&directory);
        if free.is_some_and(|free| free > 0) {
            eprintln!("asked for more than the {free:?} huge pages that this host has");
        }
        let error = refusal(&PoolOptions {
            huge_pages: Some(size),
            ..options((free.unwrap_or(0) + 1) * size.bytes())
        });
        let text = error.to_string();
        match error {
            PoolError::HugePages { .. } => assert!(text.contains("nr_hugepages"), "{text}"),
            PoolError::HugePageSize { .. } => assert_eq!(free, None),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn huge_pages_that_are_reserved_are_used() {
    let size = HugePageSize::TwoMiB;
    let directory = sys::host::huge_page_directory(size.bytes(), None);
    if sys::host::free_huge_pages(&directory).unwrap_or(0) == 0 {
        eprintln!("skipped: no free huge pages in {}", directory.display());
        return;
    }
    let huge = PoolOptions { huge_pages: Some(size), ..options(1) };
    let (_file, mapping) = create(&huge).unwrap();
    assert_eq!(mapping.len(), size.bytes());
    mapping.write(size.bytes() - 1, b"x").unwrap();
}

/// Set in the child process of the test below.
const CHILD: &str = "KVRAIL_TEST_MEMLOCK_CHILD";

/// Lowering a limit and dropping a capability concern the whole process, so the test runs itself
/// again, as a child that may do so.
#[test]
#[expect(clippy::disallowed_methods, reason = "the child process is told by a variable what it is")]
fn a_locked_pool_beyond_the_limit_names_it() {
    if std::env::var_os(CHILD).is_some() {
        return locked_pool_in_child();
    }
    let this = concat!(module_path!(), "::a_locked_pool_beyond_the_limit_names_it");
    let name = this.split_once("::").unwrap().1;
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{errors}");
    assert!(text.contains("1 passed"), "{text}");
}

fn locked_pool_in_child() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

    let limit = Some(1 << 20);
    let rlimit = Rlimit { current: limit, maximum: limit };
    setrlimit(Resource::Memlock, rlimit).unwrap();
    let mut sets = capabilities(None).unwrap();
    sets.effective.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, sets).unwrap();

    let locked = |bytes| PoolOptions { lock: true, ..options(bytes) };
    let error = refusal(&locked(2 << 20));
    assert!(matches!(error, PoolError::Lock { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("may not lock 2.0 MiB"), "{text}");
    assert!(text.contains("(RLIMIT_MEMLOCK) is 1.0 MiB"), "{text}");
    // Within the limit it works, and is locked.
    let (_file, _mapping) = create(&locked(512 << 10)).unwrap();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    assert!(status.contains("VmLck:\t     512 kB"), "{status}");
}
