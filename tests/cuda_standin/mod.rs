//! The stand-in CUDA driver, compiled from `ffi/`: one copy for each test, with a control file of its
//! own beside it.
#![expect(unsafe_code, reason = "asks the stand-in how often it was called")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use tempfile::TempDir;

const SOURCES: [&str; 4] = [
    "ffi/cuda_standin.c",
    "ffi/cuda_standin_host.c",
    "ffi/cuda_standin_memory.c",
    "ffi/cuda_standin_streams.c",
];

/// The name that the loader looks for.
const NAME: &str = "libcuda.so.1";

/// A copy of the driver that nobody else has loaded.
#[derive(Debug)]
pub(crate) struct StandIn {
    directory: TempDir,
}

impl StandIn {
    /// A driver as it is without a control file; `None` where nothing can be compiled, which is said
    /// once, and fails where the variable `CI` is set.
    pub(crate) fn new() -> Option<Self> {
        // Its bytes alone: nobody would remove a file of a static's.
        static COMPILED: OnceLock<Option<Vec<u8>>> = OnceLock::new();
        let bytes = || compile(&[]).map(|whole| std::fs::read(whole.library()).unwrap());
        let compiled = COMPILED.get_or_init(bytes).as_ref()?;
        let standin = Self { directory: tempfile::tempdir().unwrap() };
        std::fs::write(standin.library(), compiled).unwrap();
        Some(standin)
    }

    /// A driver that lacks these functions.
    pub(crate) fn without(symbols: &[&str]) -> Option<Self> {
        compile(symbols)
    }

    /// The library.
    pub(crate) fn library(&self) -> PathBuf {
        self.directory.path().join(NAME)
    }

    /// What holds from the next call on; the head of `ffi/cuda_standin.c` has the lines.
    pub(crate) fn control(&self, lines: &str) {
        // Renamed into place, so that no call sees a half.
        let next = self.directory.path().join("control.next");
        std::fs::write(&next, format!("{lines}\n")).unwrap();
        std::fs::rename(&next, self.directory.path().join("control")).unwrap();
    }

    /// From here on calls are written down.
    pub(crate) fn log(&self) {
        std::fs::write(self.directory.path().join("log"), "").unwrap();
    }

    /// What was called, and which asynchronous operations have run, in all processes that loaded this
    /// copy, in their order: `call cuEventQuery`, `ran cuMemcpyHtoDAsync_v2`.
    pub(crate) fn logged(&self) -> Vec<String> {
        let log = std::fs::read_to_string(self.directory.path().join("log")).unwrap();
        let line = |line: &str| line.split_once(' ').map(|(_process, said)| said.to_owned());
        log.lines().filter_map(line).collect()
    }

    /// How often this process has called a function.
    pub(crate) fn calls(&self, name: &str) -> u64 {
        let name = std::ffi::CString::new(name).unwrap();
        // SAFETY: the library is loaded already; its initialisers have nothing to do.
        let library = unsafe { libloading::Library::new(self.library()) }.unwrap();
        // SAFETY: `ffi/cuda_standin.c` defines the function with this type.
        let calls: libloading::Symbol<'_, unsafe extern "C" fn(*const i8) -> u64> =
            unsafe { library.get(b"standin_calls\0") }.unwrap();
        // SAFETY: the name is a string that ends with a zero.
        unsafe { calls(name.as_ptr().cast()) }
    }
}

#[expect(clippy::disallowed_methods, reason = "CI sets a variable; there nothing may be skipped")]
fn compile(without: &[&str]) -> Option<StandIn> {
    if let Err(error) = Command::new("cc").arg("--version").output() {
        let reason = format!("there is no C compiler, cc: {error}");
        assert!(std::env::var_os("CI").is_none(), "{reason}");
        // Not by a macro, whose output the test harness would hide.
        let line = format!("SKIPPED the tests with a stand-in GPU driver: {reason}\n");
        std::io::stderr().write_all(line.as_bytes()).unwrap();
        return None;
    }
    let standin = StandIn { directory: tempfile::tempdir().unwrap() };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let compiled = Command::new("cc")
        .args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"])
        .args(["-shared", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wl,-soname,libcuda.so.1"])
        .args(without.iter().map(|symbol| format!("-D{symbol}=absent_{symbol}")))
        .arg("-o")
        .arg(standin.library())
        .args(SOURCES.map(|source| root.join(source)))
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    Some(standin)
}
