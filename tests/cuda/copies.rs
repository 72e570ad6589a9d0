//! Copies: their bytes, their order, and what holds their memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvrail::cuda::{
    Bound, Context, CopyQueue, CudaError, DeviceMemory, End, Event, HostRegistration, Piece, Stream,
};

use crate::cuda_standin::StandIn;
use crate::{context, host, used};

const BYTES: usize = 64 << 10;
const LEN: u64 = BYTES as u64;
const PATIENCE: Duration = Duration::from_secs(60);

/// Host memory on both sides of device memory.
struct Scene {
    context: Arc<Context>,
    source: Arc<HostRegistration>,
    device: Arc<DeviceMemory>,
    target: Arc<HostRegistration>,
}

impl Scene {
    fn new(standin: &StandIn) -> Self {
        let context = context(standin);
        let (source, target) = (host(&context, LEN), host(&context, LEN));
        let bytes: Vec<u8> = (0..=250).cycle().take(BYTES).collect();
        source.mapping().write(0, &bytes).unwrap();
        let device = DeviceMemory::allocate(&context.bind().unwrap(), LEN).unwrap();
        Self { context, source, device, target }
    }

    fn ends(&self) -> (End, End, End) {
        (
            End::Host(Arc::clone(&self.source)),
            End::Device(Arc::clone(&self.device)),
            End::Host(Arc::clone(&self.target)),
        )
    }

    fn arrived(&self) -> Vec<u8> {
        bytes(&self.target)
    }
}

fn bytes(host: &HostRegistration) -> Vec<u8> {
    let mut bytes = vec![0; BYTES];
    host.mapping().read(0, &mut bytes).unwrap();
    bytes
}

#[expect(clippy::disallowed_methods, reason = "a deadline of a test")]
fn poll_until(queue: &mut CopyQueue, bound: &Bound<'_>, count: usize) -> Vec<u64> {
    let end = Instant::now() + PATIENCE;
    let mut ended = Vec::new();
    while ended.len() < count {
        queue.poll(bound, &mut ended).unwrap();
        assert!(Instant::now() < end, "{ended:?} of {count}");
        std::thread::yield_now();
    }
    ended
}

#[test]
fn bytes_go_to_the_device_and_back_in_the_order_asked() {
    let Some(standin) = StandIn::new() else { return };
    let scene = Scene::new(&standin);
    let (source, device, target) = scene.ends();
    let bound = scene.context.bind().unwrap();
    let mut queue = CopyQueue::new(&bound, 4).unwrap();
    // The copy in is held: were the copy out not behind it, it would bring zeros.
    standin.control("cuMemcpyHtoDAsync_v2 hold 1");
    let whole = [Piece::contiguous(0, 0, LEN)];
    queue.submit(&bound, (&source, &device), &whole, 7).unwrap();
    queue.submit(&bound, (&device, &target), &whole, 8).unwrap();
    let mut ended = Vec::new();
    queue.poll(&bound, &mut ended).unwrap();
    assert_eq!((ended.len(), queue.in_flight(), queue.room()), (0, 2, 2), "neither waits");
    standin.control("");
    assert_eq!(poll_until(&mut queue, &bound, 2), [7, 8]);
    assert_eq!(scene.arrived(), bytes(&scene.source));
    assert_eq!(standin.calls("cuStreamSynchronize"), 0);
}

#[test]
fn rows_are_gathered_and_scattered() {
    let Some(standin) = StandIn::new() else { return };
    let scene = Scene::new(&standin);
    let (source, device, target) = scene.ends();
    let bound = scene.context.bind().unwrap();
    let mut queue = CopyQueue::new(&bound, 4).unwrap();
    // 16 contiguous rows of 100 bytes become rows that are 1000 bytes apart, and come back so.
    let scatter =
        Piece { from: 50, from_pitch: 100, to: 200, to_pitch: 1000, width: 100, rows: 16 };
    let back = Piece::contiguous(0, 0, LEN);
    queue.submit(&bound, (&source, &device), &[scatter], 1).unwrap();
    queue.submit(&bound, (&device, &target), &[back], 2).unwrap();
    poll_until(&mut queue, &bound, 2);
    let (sent, arrived) = (bytes(&scene.source), scene.arrived());
    let mut expected = vec![0; BYTES];
    for row in 0..16 {
        expected[200 + row * 1000..][..100].copy_from_slice(&sent[50 + row * 100..][..100]);
    }
    assert_eq!(arrived, expected);
    // And within the device, one contiguous piece again.
    let gather = Piece { from: 200, from_pitch: 1000, to: 32 << 10, to_pitch: 100, ..scatter };
    let out = Piece::contiguous(32 << 10, 0, 1600);
    queue.submit(&bound, (&device, &device), &[gather], 3).unwrap();
    queue.submit(&bound, (&device, &target), &[out], 4).unwrap();
    poll_until(&mut queue, &bound, 2);
    assert_eq!(scene.arrived()[..1600], sent[50..1650]);
}

#[test]
fn what_leaves_its_memory_or_overlaps_itself_is_refused_whole() {
    let Some(standin) = StandIn::new() else { return };
    let scene = Scene::new(&standin);
    let (source, device, _) = scene.ends();
    let bound = scene.context.bind().unwrap();
    let mut queue = CopyQueue::new(&bound, 1).unwrap();
    let good = Piece { from: 0, from_pitch: 64, to: 0, to_pitch: 64, width: 64, rows: 4 };
    let device_len = scene.device.len();
    let bad = [
        Piece { from: LEN - 255, ..good },
        Piece { to: device_len - 255, ..good },
        Piece { to_pitch: 63, ..good },
        Piece { from_pitch: 0, ..good },
        Piece { to_pitch: u64::MAX, ..good },
        Piece { rows: u64::MAX, ..good },
        Piece { from: u64::MAX, ..good },
    ];
    for piece in bad {
        let refused = queue.submit(&bound, (&source, &device), &[good, piece], 0);
        assert!(matches!(refused, Err(CudaError::Bounds(_))), "{piece:?}");
    }
    assert_eq!((queue.in_flight(), queue.room()), (0, 1), "a refusal takes no slot");
    assert_eq!(standin.calls("cuMemcpy2DAsync_v2"), 0);
    queue.submit(&bound, (&source, &device), &[good], 1).unwrap();
    let full = queue.submit(&bound, (&source, &device), &[good], 2).unwrap_err();
    assert!(full.is_backpressure(), "{full}");
    assert_eq!(poll_until(&mut queue, &bound, 1), [1]);
}

#[test]
fn memory_stays_until_its_copy_has_run() {
    let Some(standin) = StandIn::new() else { return };
    let scene = Scene::new(&standin);
    let (source, device, target) = scene.ends();
    let Scene { context, source: kept, device: memory, target: arrived } = scene;
    let bound = context.bind().unwrap();
    let mut queue = CopyQueue::new(&bound, 2).unwrap();
    standin.control("cuMemcpyDtoHAsync_v2 late 30");
    let whole = [Piece::contiguous(0, 0, LEN)];
    queue.submit(&bound, (&source, &device), &whole, 1).unwrap();
    queue.submit(&bound, (&device, &target), &whole, 2).unwrap();
    drop((source, device, target, memory));
    assert!(used(&context) > 0, "the queue holds it");
    drop(queue);
    assert_eq!(used(&context), 0, "and no longer than it must");
    assert_eq!(bytes(&arrived), bytes(&kept), "dropping waits");
}

#[test]
fn work_waits_for_another_streams_event() {
    let Some(standin) = StandIn::new() else { return };
    let scene = Scene::new(&standin);
    let (source, device, target) = scene.ends();
    let bound = scene.context.bind().unwrap();
    let (mut engine, mut ours) =
        (CopyQueue::new(&bound, 1).unwrap(), CopyQueue::new(&bound, 1).unwrap());
    let other = Stream::new(&bound).unwrap();
    let event = Event::new(&bound).unwrap();
    assert!(event.is_complete(&bound).unwrap(), "before it is recorded");
    standin.control("cuEventRecord hold 1");
    standin.log();
    let whole = [Piece::contiguous(0, 0, LEN)];
    event.record(&bound, &other).unwrap();
    assert!(!event.is_complete(&bound).unwrap());
    engine.wait_for(&bound, &event).unwrap();
    engine.submit(&bound, (&source, &device), &whole, 1).unwrap();
    standin.control("");
    assert_eq!(poll_until(&mut engine, &bound, 1), [1]);
    assert!(event.is_complete(&bound).unwrap(), "it came first");
    let log = standin.logged();
    let first = |line: &str| log.iter().position(|logged| logged == line).unwrap();
    assert!(first("ran cuEventRecord") < first("ran cuMemcpyHtoDAsync_v2"), "{log:?}");
    ours.submit(&bound, (&device, &target), &whole, 2).unwrap();
    assert_eq!(poll_until(&mut ours, &bound, 1), [2]);
    assert_eq!(scene.arrived(), bytes(&scene.source));
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a deadline of a test")]
fn a_device_that_is_lost_in_mid_copy_is_an_error_and_no_hang() {
    let Some(standin) = StandIn::new() else { return };
    let scene = Scene::new(&standin);
    let (source, device, _) = scene.ends();
    let bound = scene.context.bind().unwrap();
    let mut queue = CopyQueue::new(&bound, 2).unwrap();
    // Not before the submission is whole; the next test is of a loss within one.
    standin.control("cuMemcpyHtoDAsync_v2 lose 719\ncuMemcpyHtoDAsync_v2 hold 1");
    queue.submit(&bound, (&source, &device), &[Piece::contiguous(0, 0, LEN)], 1).unwrap();
    standin.control("");
    let end = Instant::now() + PATIENCE;
    let mut ended = Vec::new();
    let error = loop {
        match queue.poll(&bound, &mut ended) {
            Ok(()) => assert!(ended.is_empty() && Instant::now() < end),
            Err(error) => break error,
        }
        std::thread::yield_now();
    };
    assert!(error.is_lost(), "{error}");
    let again = queue.submit(&bound, (&source, &device), &[Piece::contiguous(0, 0, 1)], 2);
    assert!(again.unwrap_err().is_lost());
    drop(queue);
    assert_eq!(bytes(&scene.source).len() as u64, LEN, "host memory is unharmed");
}

#[test]
fn a_device_that_is_lost_while_a_copy_is_asked_for_is_an_error_and_its_memory_stays() {
    let Some(standin) = StandIn::new() else { return };
    let scene = Scene::new(&standin);
    let (source, device, _) = scene.ends();
    let Scene { context, source: kept, device: memory, .. } = scene;
    let bound = context.bind().unwrap();
    let mut queue = CopyQueue::new(&bound, 2).unwrap();
    let whole = [Piece::contiguous(0, 0, LEN)];
    // The copy has begun, and its mark finds the device lost.
    standin.control("cuEventRecord fail 719");
    let error = queue.submit(&bound, (&source, &device), &whole, 1).unwrap_err();
    assert!(error.is_lost(), "{error}");
    assert_eq!((queue.in_flight(), queue.room(), queue.is_idle()), (1, 1, false));
    drop((source, device, memory));
    assert!(used(&context) > 0, "the copy may still touch it");
    assert_eq!(Arc::strong_count(&kept), 2);
    standin.control("");
    drop(queue);
    assert_eq!((used(&context), Arc::strong_count(&kept)), (0, 1));
}
