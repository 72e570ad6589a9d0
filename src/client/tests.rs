use std::os::unix::net::UnixListener;
use std::time::Duration;

use super::*;
use crate::event::BusyReason;
use crate::protocol::door::Source;
use crate::runtime::door::stand_in::{Running, eventually, hash, namespace, remote};
use crate::types::Scope;

const POOL: u64 = 1 << 20;

fn save(client: &Client, byte: u8, bytes: &[u8]) -> PublishOutcome {
    let len = u32::try_from(bytes.len()).unwrap();
    let mut memory = client.reserve(&[len]).unwrap().remove(0);
    memory.fill(bytes).unwrap();
    client.publish(&namespace(), vec![(hash(byte), memory)], false).unwrap()[0]
}

fn read(client: &Client, byte: u8, source: Source) -> Option<Vec<u8>> {
    match client.acquire(&namespace(), &[hash(byte)], source).unwrap().remove(0) {
        Acquired::Ready(held) => {
            let mut bytes = vec![0; held.len() as usize];
            held.read_into(&mut bytes).unwrap();
            Some(bytes)
        }
        _ => None,
    }
}

#[test]
fn what_one_client_saves_another_one_reads() {
    let running = Running::start(POOL);
    let (writer, reader) =
        (Client::connect(&running.path()).unwrap(), Client::connect(&running.path()).unwrap());
    assert_eq!(reader.pools()[0].bytes(), POOL);
    assert_eq!(save(&writer, 1, b"some bytes"), PublishOutcome::Stored);
    assert_eq!(read(&reader, 1, Source::Here).unwrap(), b"some bytes");
    assert_eq!(read(&reader, 2, Source::Anywhere), None);
    let again = save(&writer, 1, b"some bytes");
    assert!(matches!(again, PublishOutcome::AlreadyResident(_)));
    let service = &running.service;
    assert_eq!((service.occupied(), service.pins()), (1, 0));
}

#[test]
fn what_is_not_here_is_fetched_where_that_is_allowed() {
    let running = Running::start(POOL);
    let client = Client::connect(&running.path()).unwrap();
    remote(&running.service, hash(5), &[5; 300]);
    assert_eq!(read(&client, 5, Source::Here), None);
    assert_eq!(read(&client, 5, Source::Anywhere).unwrap(), [5; 300]);
}

#[test]
fn a_block_written_in_parts_has_the_checksum_of_the_whole() {
    let running = Running::start(POOL);
    let client = Client::connect(&running.path()).unwrap();
    let bytes: Vec<u8> = (0_u8..=250).cycle().take(40_000).collect();
    let mut memory = client.reserve(&[40_000]).unwrap().remove(0);
    memory.write(20_000, &bytes[20_000..]).unwrap();
    memory.write(0, &bytes[..20_000]).unwrap();
    let beyond = memory.write(39_999, &[0, 0]).unwrap_err();
    assert_eq!(beyond.scope(), Scope::Request);
    client.publish(&namespace(), vec![(hash(1), memory)], false).unwrap();
    assert_eq!(read(&client, 1, Source::Here).unwrap(), bytes);
}

#[test]
fn changed_bytes_are_not_returned() {
    let running = Running::start(POOL);
    let client = Client::connect(&running.path()).unwrap();
    save(&client, 1, b"some bytes");
    running.service.damage(&namespace(), hash(1));
    let held = client.acquire(&namespace(), &[hash(1)], Source::Here).unwrap();
    let Acquired::Ready(held) = &held[0] else {
        panic!("not ready");
    };
    let error = held.read_into(&mut [0; 10]).unwrap_err();
    assert!(matches!(error, ClientError::Checksum { .. }), "{error}");
    assert!(matches!(
        held.read_into(&mut [0; 9]),
        Err(ClientError::Length { block: 10, buffer: 9 })
    ));
}

#[test]
fn dropped_guards_go_back_in_batches_and_the_last_one_at_once() {
    let running = Running::start(POOL);
    let client = Client::connect(&running.path()).unwrap();
    let service = &running.service;
    let mut memory = client.reserve(&[64; 100]).unwrap();
    memory.truncate(99);
    assert_eq!(service.occupied(), 100, "one alone waits for company");
    memory.truncate(36);
    assert_eq!(service.occupied(), 36, "a full batch goes");
    drop(memory);
    assert_eq!(service.occupied(), 0, "the last one goes");

    save(&client, 1, b"x");
    let mut held = client.acquire(&namespace(), &[hash(1); 3], Source::Here).unwrap();
    held.pop();
    assert_eq!(service.pins(), 3);
    client.stat().unwrap();
    assert_eq!(service.pins(), 2, "the next call takes it along");
    drop(held);
    assert_eq!(service.pins(), 0);
}

#[test]
fn a_full_pool_is_backpressure_and_an_impossible_size_is_refused() {
    let running = Running::start(POOL);
    let client = Client::connect(&running.path()).unwrap();
    let half = u32::try_from(POOL / 2).unwrap();
    let all = client.reserve(&[half, half]).unwrap();
    let busy = client.reserve(&[1]).unwrap_err();
    assert_eq!(busy.backpressure(), Some(Duration::from_millis(2)));
    assert!(busy.to_string().contains(BusyReason::Memory.as_str()), "{busy}");
    drop(all);
    client.reserve(&[1]).unwrap();
    let refused = client.reserve(&[u32::MAX / 4]).unwrap_err();
    assert!(matches!(refused, ClientError::Refused { .. }), "{refused}");
    let many = client.reserve(&[1; limits::DOOR_BLOCKS_MAX + 1]).unwrap_err();
    assert!(matches!(many, ClientError::TooMany(_)), "{many}");
    client.stat().unwrap();
}

#[test]
fn the_small_calls_say_what_the_node_says() {
    let running = Running::start(POOL);
    let client = Client::connect(&running.path()).unwrap();
    for byte in 1..=5 {
        save(&client, byte, &[byte]);
    }
    let moved = |hashes: &[BlockHash]| client.finished_sending(&namespace(), hashes).unwrap();
    assert_eq!(moved(&[hash(1), hash(2)]), 2);
    assert_eq!(moved(&[hash(2), hash(3)]), 1);
    assert_eq!(client.stat().unwrap().residents.blocks, 5);

    let mut seen = Vec::new();
    let mut cursor = None;
    loop {
        let page = client.list(Some(&namespace()), cursor, 2).unwrap();
        seen.extend(page.entries.iter().map(|entry| entry.hash));
        cursor = page.next;
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(seen, (1..=5).map(hash).collect::<Vec<_>>());
    let other = "other".parse().unwrap();
    assert_eq!(client.list(Some(&other), None, 9).unwrap().entries, []);

    let since = |sequence| client.evictions(sequence).unwrap().len();
    assert_eq!((since(0), since(2), since(3)), (3, 1, 0));
}

#[test]
fn a_flush_ends_when_the_registry_knows_or_time_is_up() {
    let running = Running::start(POOL);
    let client = Client::connect(&running.path()).unwrap();
    assert!(client.flush(Duration::from_secs(60)).unwrap());
    running.service.registry.send_replace(false);
    assert!(!client.flush(Duration::from_millis(10)).unwrap());
    client.stat().unwrap();
}

#[test]
fn a_node_that_does_not_answer_is_given_up_in_time() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("door");
    let listener = UnixListener::bind(&path).unwrap();
    let error = Client::connect_within(&path, Duration::from_millis(20)).unwrap_err();
    assert!(matches!(error, ClientError::TimedOut { .. }), "{error}");
    drop(listener);
}

#[test]
fn a_node_that_accepts_nobody_is_given_up_in_time() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("door");
    let listener = UnixListener::bind(&path).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    // A queue of length 0 takes one client; the next one waits before it.
    let _waiting = std::os::unix::net::UnixStream::connect(&path).unwrap();
    let error = Client::connect_within(&path, Duration::from_millis(20)).unwrap_err();
    assert!(matches!(error, ClientError::TimedOut { .. }), "{error}");
}

#[test]
fn a_call_that_missed_its_deadline_ends_the_connection() {
    let running = Running::start(POOL);
    let service = &running.service;
    let client = Client::connect(&running.path()).unwrap();
    let memory = client.reserve(&[10]).unwrap();
    service.open.send_replace(false);
    let (source, hashes) = (Source::Anywhere, vec![hash(1)]);
    let acquire = Request::Acquire { namespace: namespace(), source, hashes };
    let late = client.call_within(&acquire, Duration::from_millis(50)).unwrap_err();
    assert!(matches!(late, ClientError::TimedOut { .. }), "{late}");
    let closed = client.stat().unwrap_err();
    assert!(matches!(closed, ClientError::Closed), "{closed}");
    eventually("the reservation went back", || service.occupied() == 0);
    drop(memory);
    service.open.send_replace(true);
}

#[test]
fn where_no_node_is_the_error_says_how_to_start_one() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("door");
    let absent = Client::connect(&path).unwrap_err().to_string();
    let command = format!("kvrail serve --socket {}", path.display());
    assert!(absent.contains(&command), "{absent}");
    drop(UnixListener::bind(&path).unwrap());
    let dead = Client::connect(&path).unwrap_err();
    assert!(matches!(dead, ClientError::NoNode { .. }), "{dead}");
    let long = directory.path().join("x".repeat(200));
    let long = Client::connect(&long).unwrap_err();
    assert!(matches!(long, ClientError::NotASocket { .. }), "{long}");
}

/// Two roles: the parent starts this same test in a process of its own, which is the client.
#[test]
#[expect(clippy::disallowed_methods, reason = "the parent says by a variable where the door is")]
fn a_killed_process_gives_everything_back() {
    if let Some(path) = std::env::var_os("KVRAIL_TEST_DOOR") {
        hold_for_ever(Path::new(&path));
    }
    let running = Running::start(POOL);
    let this = std::env::current_exe().unwrap();
    let mut child = std::process::Command::new(this)
        .args(["--exact", "client::tests::a_killed_process_gives_everything_back"])
        .env("KVRAIL_TEST_DOOR", running.path())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let service = &running.service;
    eventually("the child holds a block and a reservation", || {
        service.pins() == 1 && service.occupied() == 2
    });
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("what it had went back", || service.pins() == 0 && service.occupied() == 1);
}

fn hold_for_ever(path: &Path) -> ! {
    let client = Client::connect(path).unwrap();
    let mut memory = client.reserve(&[100, 100]).unwrap();
    let mut first = memory.remove(0);
    first.fill(&[7; 100]).unwrap();
    client.publish(&namespace(), vec![(hash(1), first)], false).unwrap();
    let held = client.acquire(&namespace(), &[hash(1)], Source::Here).unwrap();
    assert!(matches!(held[0], Acquired::Ready(_)));
    loop {
        std::thread::park();
    }
}
