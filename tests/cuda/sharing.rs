//! Memory and events of another process, which dies without a word.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use kvrail::cuda::{
    CopyQueue, CudaError, DeviceMemory, End, Event, IpcEventHandle, IpcMemoryHandle, Piece,
};

use crate::cuda_standin::StandIn;
use crate::{context, host, used};

const BYTES: usize = 3 << 20;
pub(crate) const LEN: u64 = BYTES as u64;
const LIBRARY: &str = "KVRAIL_TEST_EXPORTER";

/// An engine: another process that has memory on the device, until this is dropped.
pub(crate) struct Engine {
    child: Child,
    _stdin: ChildStdin,
    /// Open as long as the child: what it writes after its handles goes somewhere.
    _stdout: BufReader<ChildStdout>,
    pub(crate) memory: IpcMemoryHandle,
    pub(crate) event: IpcEventHandle,
}

impl Engine {
    pub(crate) fn start(standin: &StandIn) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "sharing::engine_process", "--nocapture"])
            .env(LIBRARY, standin.library())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut said = stdout.by_ref().lines().filter_map(|line| {
            let line = line.unwrap();
            let (_, hex) = line.split_once("handle ")?;
            let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap();
            Some(std::array::from_fn(byte))
        });
        let (memory, event) = (said.next().unwrap(), said.next().unwrap());
        let (memory, event) = (IpcMemoryHandle(memory), IpcEventHandle(event));
        Self { child, _stdin: stdin, _stdout: stdout, memory, event }
    }

    /// Without a word.
    pub(crate) fn kill(self) {
        drop(self);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Not a test of its own: what [`Engine`] runs. Its memory holds sevens once its event is complete.
#[test]
#[expect(clippy::disallowed_methods, reason = "says whether this process is an engine")]
fn engine_process() {
    let Some(library) = std::env::var_os(LIBRARY) else { return };
    let driver = kvrail::cuda::Driver::open(library).unwrap();
    let context = kvrail::cuda::Context::primary(&driver.device(0).unwrap()).unwrap();
    let bound = context.bind().unwrap();
    let memory = DeviceMemory::allocate_plain(&bound, LEN).unwrap();
    let source = host(&context, LEN);
    source.mapping().write(0, &[7; BYTES]).unwrap();
    let mut queue = CopyQueue::new(&bound, 1).unwrap();
    let (from, to) = (End::Host(source), End::Device(Arc::clone(&memory)));
    queue.submit(&bound, (&from, &to), &[Piece::contiguous(0, 0, LEN)], 0).unwrap();
    queue.drain(&bound, &mut Vec::new()).unwrap();
    let event = Event::for_other_processes(&bound).unwrap();
    let hex = |bytes: [u8; 64]| bytes.map(|byte| format!("{byte:02x}")).concat();
    let mut out = std::io::stdout();
    writeln!(out, "\nhandle {}", hex(memory.ipc_handle(&bound).unwrap().0)).unwrap();
    writeln!(out, "handle {}", hex(event.ipc_handle(&bound).unwrap().0)).unwrap();
    out.flush().unwrap();
    // Until the test ends, however it does.
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

#[test]
fn an_engines_memory_is_read_and_goes_without_a_trace() {
    let Some(standin) = StandIn::new() else { return };
    let engine = Engine::start(&standin);
    let context = context(&standin);
    let bound = context.bind().unwrap();
    let memory = DeviceMemory::open(&bound, engine.memory).unwrap();
    assert_eq!(memory.len(), LEN);
    let event = Event::open(&bound, engine.event).unwrap();
    let target = host(&context, LEN);
    let mut queue = CopyQueue::new(&bound, 1).unwrap();
    queue.wait_for(&bound, &event).unwrap();
    let (from, to) = (End::Device(Arc::clone(&memory)), End::Host(Arc::clone(&target)));
    queue.submit(&bound, (&from, &to), &[Piece::contiguous(0, 0, LEN)], 0).unwrap();
    queue.drain(&bound, &mut Vec::new()).unwrap();
    assert_eq!(target.mapping().checksum(0, LEN), Ok(kvrail::memory::checksum_bytes(&[7; BYTES])));
    engine.kill();
    // The engine is gone; what is open here stays valid until it is closed here.
    queue.submit(&bound, (&from, &to), &[Piece::contiguous(0, 0, 4096)], 1).unwrap();
    drop((queue, from, to));
    assert_eq!(Arc::strong_count(&memory), 1);
    drop(memory);
    assert_eq!(standin.calls("cuIpcCloseMemHandle"), 1);
    assert_eq!(used(&context), 0);
}

#[test]
fn handles_that_cannot_be_opened_are_refused() {
    let Some(standin) = StandIn::new() else { return };
    standin.control("set devices 2");
    let engine = Engine::start(&standin);
    let context = context(&standin);
    let bound = context.bind().unwrap();
    let own = DeviceMemory::allocate_plain(&bound, LEN).unwrap();
    let own = own.ipc_handle(&bound).unwrap();
    assert!(DeviceMemory::open(&bound, own).is_err(), "this process's own");
    let nonsense = DeviceMemory::open(&bound, IpcMemoryHandle([9; 64])).unwrap_err();
    assert!(matches!(nonsense, CudaError::Call { result: 400, .. }), "{nonsense}");
    let driver = context.device().driver();
    let other = kvrail::cuda::Context::primary(&driver.device(1).unwrap()).unwrap();
    let foreign = DeviceMemory::open(&other.bind().unwrap(), engine.memory).unwrap_err();
    assert!(foreign.to_string().contains("on this GPU"), "{foreign}");
    let (memory, event) = (engine.memory, engine.event);
    engine.kill();
    let gone = DeviceMemory::open(&bound, memory).unwrap_err();
    assert!(gone.to_string().contains("engine"), "{gone}");
    assert!(Event::open(&bound, event).is_err());
}

#[test]
fn created_memory_is_passed_on_by_descriptor() {
    let Some(standin) = StandIn::new() else { return };
    let context = context(&standin);
    let bound = context.bind().unwrap();
    let memory = DeviceMemory::allocate(&bound, LEN).unwrap();
    let len = memory.len();
    let fd = memory.export(&bound).unwrap();
    let again = DeviceMemory::import(&bound, &fd, len).unwrap();
    let (source, target) = (host(&context, LEN), host(&context, LEN));
    source.mapping().write(0, b"shared").unwrap();
    let mut queue = CopyQueue::new(&bound, 2).unwrap();
    let piece = [Piece::contiguous(0, 100, 6)];
    queue.submit(&bound, (&End::Host(source), &End::Device(memory)), &piece, 0).unwrap();
    let back = [Piece::contiguous(100, 0, 6)];
    let ends = (End::Device(again), End::Host(Arc::clone(&target)));
    queue.submit(&bound, (&ends.0, &ends.1), &back, 1).unwrap();
    queue.drain(&bound, &mut Vec::new()).unwrap();
    let mut bytes = [0; 6];
    target.mapping().read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"shared");
    let wrong = tempfile::tempfile().unwrap();
    assert!(DeviceMemory::import(&bound, &wrong, len).is_err(), "another file");
    standin.control("");
    assert!(DeviceMemory::import(&bound, &fd, len + (2 << 20)).is_err(), "longer than it is");
}
