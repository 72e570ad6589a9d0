//! Real memory files, reserved, written, given back.

use super::*;
use crate::memory::checksum_bytes;

fn pool(bytes: u64) -> Arc<HostPool> {
    HostPool::create(&PoolOptions {
        id: PoolId(3),
        bytes,
        huge_pages: None,
        lock: false,
        numa_node: None,
    })
    .unwrap()
}

#[test]
fn a_dropped_reservation_returns_its_memory_exactly_once() {
    let pool = pool(1 << 20);
    let reservation = pool.reserve(&[100]).unwrap().pop().unwrap();
    let extent = reservation.extent();
    assert_eq!(pool.usage().used, 128);
    drop(reservation);
    assert_eq!(pool.usage().used, 0);
    // Once more: it is found out when it is settled, and changes nothing.
    pool.release(extent).unwrap();
    assert_eq!(pool.strays(), 0);
    // And the memory is there for the next one.
    let whole = pool.reserve(&[1 << 20]).unwrap();
    assert_eq!((whole.len(), pool.strays()), (1, 1));
    assert_eq!(pool.usage().used, 1 << 20);
}

#[test]
fn a_handed_over_extent_stays_until_it_is_released() {
    let pool = pool(4096);
    let extent = pool.reserve(&[4096]).unwrap().pop().unwrap().into_extent();
    let full = pool.reserve(&[1]).unwrap_err();
    assert_eq!((full.free, full.largest), (0, 0));
    let foreign = Extent { pool: PoolId(4), ..extent };
    assert!(matches!(pool.release(foreign), Err(ReleaseError::WrongPool { .. })));
    assert_eq!(pool.release(extent), Ok(()));
    assert_eq!(pool.usage(), Usage { bytes: 4096, used: 0 });
    assert!(pool.reserve(&[4096]).is_ok());
}

#[test]
fn a_reservation_settles_all_that_came_back_before_it_is_refused() {
    let blocks = 40_000;
    let pool = pool(blocks * 64);
    let all = vec![64; usize::try_from(blocks).unwrap()];
    let kept = pool.reserve(&all).unwrap();
    assert!(pool.reserve(&[64]).is_err());
    drop(kept);
    assert_eq!(pool.usage().used, 0);
    // Every second one stays unsettled for a while, and what is asked for is one piece.
    let whole = pool.reserve(&[u32::try_from(blocks * 64).unwrap()]).unwrap();
    assert_eq!(pool.usage().used, blocks * 64);
    drop(whole);
    assert_eq!(pool.strays(), 0);
}

/// A thread that gives memory back stops at each of its accesses to what it shares, and another one
/// reserves and gives back meanwhile.
#[test]
fn who_stops_while_it_gives_memory_back_stops_nobody() {
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::time::Duration;

    const DEADLINE: Duration = Duration::from_secs(60);
    let stop_at = |access: u32| {
        let pool = pool(4096);
        let mut kept = pool.reserve(&[1024; 4]).unwrap();
        let victim = kept.pop().unwrap().into_extent();
        let ((parked, is_parked), (resume, resumed)) = (channel(), channel());
        std::thread::scope(|scope| {
            let (stopped, others) = (&pool, &pool);
            scope.spawn(move || {
                crate::sync::park_at(access, parked, resumed);
                stopped.release(victim).unwrap();
                crate::sync::park_at(u32::MAX, channel().0, channel().1);
            });
            let stands = is_parked.recv_timeout(DEADLINE);
            assert_ne!(stands, Err(RecvTimeoutError::Timeout));
            let (done, is_done) = channel();
            scope.spawn(move || {
                drop(kept);
                for _ in 0..20 {
                    drop(others.reserve(&[1024; 3]).unwrap());
                }
                done.send(()).unwrap();
            });
            let alive = is_done.recv_timeout(DEADLINE);
            drop(resume);
            assert!(alive.is_ok(), "stopped at access {access}, it stopped everybody");
            stands.is_ok()
        })
    };
    let accesses = (0..).take_while(|&access| stop_at(access)).count();
    assert!(accesses > 2, "{accesses}");
}

#[test]
fn a_batch_is_contiguous_and_all_or_nothing() {
    let pool = pool(4096);
    let mut kept = pool.reserve(&[1024, 1024]).unwrap();
    let offsets: Vec<_> = kept.iter().map(|r| r.extent().offset).collect();
    assert_eq!(offsets, [0, 1024]);
    assert!(pool.reserve_into(&[1024, 1024, 1024], &mut kept).is_err());
    assert_eq!((kept.len(), pool.usage().used), (2, 2048));
    pool.reserve_into(&[2048], &mut kept).unwrap();
    assert!(pool.reserve(&[1]).is_err());
}

#[test]
fn bytes_stay_within_their_extent() {
    let pool = pool(8192);
    let block = pool.reserve(&[100, 100]).unwrap();
    let extent = block[0].extent();
    pool.write(extent, 0, &[7; 100]).unwrap();
    pool.write(extent, 98, &[8, 9]).unwrap();
    let mut bytes = [0; 3];
    pool.read(extent, 97, &mut bytes).unwrap();
    assert_eq!(bytes, [7, 8, 9]);
    let mut expected = [7; 100];
    expected[98..].copy_from_slice(&[8, 9]);
    assert_eq!(pool.checksum(extent), Ok(checksum_bytes(&expected)));
    assert!(pool.write(extent, 99, &[1, 2]).is_err());
    assert!(pool.read(extent, 101, &mut []).is_err());
    let foreign = Extent { pool: PoolId(0), ..extent };
    assert!(pool.checksum(foreign).is_err());
    let outside = Extent { offset: 8192, ..extent };
    assert!(pool.checksum(outside).is_err());
}

#[test]
fn the_memory_file_is_the_pool_and_keeps_its_length() {
    let pool = pool(5000);
    assert_eq!(pool.len(), 8192, "whole pages");
    let file = File::from(pool.memfd().try_clone_to_owned().unwrap());
    assert!(file.set_len(4096).is_err(), "sealed against shrinking");
    assert!(file.set_len(1 << 20).is_err(), "sealed against growing");
    let other = Mapping::new(&file, pool.len()).unwrap();
    let reservation = pool.reserve(&[64]).unwrap().pop().unwrap();
    other.write(reservation.extent().offset, b"engine").unwrap();
    let mut bytes = [0; 6];
    pool.read(reservation.extent(), 0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"engine");
}

#[test]
fn threads_share_a_pool_without_sharing_a_byte() {
    let pool = pool(64 << 10);
    std::thread::scope(|scope| {
        for mark in 1..=4_u8 {
            let pool = &pool;
            scope.spawn(move || {
                for _round in 0..200 {
                    let Ok(blocks) = pool.reserve(&[4096; 3]) else {
                        continue;
                    };
                    for block in &blocks {
                        pool.write(block.extent(), 0, &[mark; 4096]).unwrap();
                    }
                    for block in &blocks {
                        let sum = pool.checksum(block.extent());
                        assert_eq!(sum, Ok(checksum_bytes(&[mark; 4096])));
                    }
                }
            });
        }
    });
    assert_eq!((pool.usage().used, pool.strays()), (0, 0));
}

#[test]
fn reclaim_starts_above_the_high_mark_and_ends_at_the_low_one() {
    assert_eq!(Watermarks::new(900, 900), None);
    assert_eq!(Watermarks::new(1001, 900), None);
    let marks = Watermarks::new(900, 800).unwrap();
    let usage = |used| Usage { bytes: 10_000, used };
    assert_eq!(marks.excess(usage(9000)), 0);
    assert_eq!(marks.excess(usage(9001)), 1001);
    let huge = Usage { bytes: u64::MAX, used: u64::MAX };
    assert!(marks.excess(huge) > u64::MAX / 6);
}
