//! A box that any thread puts things into and that its owner empties: how a thread hands something
//! over that must not wait for the one who gets it, nor make that one wait.
//!
//! # Why nobody waits
//!
//! A thing is put in three steps: take a free node, write the thing into it, exchange the top of the
//! box for the node. The first and the last are exchanges that are tried again only where another
//! thread's exchange came between, so that somebody always gets on. A thread that stops before the last
//! step holds one node that nobody else knows; one that stops behind it holds nothing. [`Mailbox::take`]
//! is one exchange, too, and what it takes belongs to the taker alone: one that stops then holds what it
//! took, and others put and take as before.
//!
//! # Why it is right
//!
//! - **A node has one owner at a time**: who popped it from the free stack, then the box, then the
//!   taker. Its lock is therefore never contended; it is there to say so without unsafe code.
//! - **The return of an old top is harmless**: the box only grows by exchanges, and is emptied as a
//!   whole. The top names the node and how many things are in the box. Where it is the same as when it
//!   was read, the node that it names is in the box now, and as deep as then, whatever happened between.
//! - A link is stored before the exchange that shows its node, and stays as it is until the taker has
//!   read it. The free stack counts its changes against stale tops ([`FreeStack`]).
//!
//! # Memory
//!
//! Nodes are made as they are needed, up to a bound, and never freed while the box lives: it holds as
//! many as were in it, or under way, at one time. So in steady state nothing is allocated.

use super::{Apart, Cell, FreeStack, Mutex, Shared, lock};

const INDEX_BITS: u32 = 28;
/// Also what no node has for its index.
const INDEX_MASK: u64 = (1 << INDEX_BITS) - 1;

#[derive(Debug)]
struct Node<T> {
    /// The index of the one below in the box, or the free stack's link.
    below: Cell,
    thing: Mutex<Option<T>>,
}

/// Things on their way to an owner. Any thread may call any method.
#[derive(Debug)]
pub(crate) struct Mailbox<T> {
    nodes: boxcar::Vec<Node<T>>,
    free: FreeStack,
    /// The index of the newest node in the box, and above it how many are in it: 36 bits.
    top: Apart<Cell>,
    max: usize,
}

/// What was in a box when it was emptied; the newest comes first. [`Mailbox::next`] gives it out, and
/// what it is never asked for stays where it is until the box is dropped.
#[derive(Debug)]
pub(crate) struct Taken {
    next: u64,
}

impl Taken {
    /// Of an empty box.
    pub(crate) const fn nothing() -> Self {
        Self { next: INDEX_MASK }
    }

    /// Whether nothing is left.
    pub(crate) const fn is_empty(&self) -> bool {
        self.next == INDEX_MASK
    }
}

impl<T> Mailbox<T> {
    /// An empty box for about `max` things, at most 2^27: threads that put at the same moment may
    /// exceed it by their number.
    pub(crate) fn new(max: usize) -> Self {
        Self {
            nodes: boxcar::Vec::new(),
            free: FreeStack::empty(),
            top: Apart(Cell::new(INDEX_MASK)),
            max: max.min(1 << (INDEX_BITS - 1)),
        }
    }

    /// Puts a thing in and answers how many are in the box then. Where it is full, the thing comes back.
    pub(crate) fn put(&self, thing: T) -> Result<u64, T> {
        let Some((index, node)) = self.node() else { return Err(thing) };
        *lock(&node.thing) = Some(thing);
        loop {
            let top = self.top.get();
            node.below.publish(top & INDEX_MASK);
            let count = (top >> INDEX_BITS) + 1;
            if self.top.replace(top, count << INDEX_BITS | u64::from(index)) {
                return Ok(count);
            }
        }
    }

    fn node(&self) -> Option<(u32, &Node<T>)> {
        let below = |index: u32| self.nodes.get(index as usize).map(|node| &node.below);
        let free = self.free.pop(below);
        let index = match free {
            Some(index) => index,
            None if self.nodes.count() < self.max => {
                let fresh = Node { below: Cell::new(0), thing: Mutex::new(None) };
                u32::try_from(self.nodes.push(fresh)).ok()?
            }
            None => return None,
        };
        Some((index, self.nodes.get(index as usize)?))
    }

    /// How many things are in the box.
    pub(crate) fn count(&self) -> u64 {
        self.top.get() >> INDEX_BITS
    }

    /// Empties the box.
    pub(crate) fn take(&self) -> Taken {
        loop {
            let top = self.top.get();
            let next = top & INDEX_MASK;
            if next == INDEX_MASK || self.top.replace(top, INDEX_MASK) {
                return Taken { next };
            }
        }
    }

    /// The next newest thing of what was taken from this box.
    pub(crate) fn next(&self, taken: &mut Taken) -> Option<T> {
        let index = u32::try_from(taken.next).ok()?;
        let node = self.nodes.get(index as usize)?;
        taken.next = node.below.get();
        let thing = lock(&node.thing).take();
        self.free.push(index, &node.below);
        thing
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::sync::thread;

    const PER_THREAD: u32 = 3;

    fn empty<T>(mailbox: &Mailbox<T>) -> Vec<T> {
        let mut taken = mailbox.take();
        std::iter::from_fn(|| mailbox.next(&mut taken)).collect()
    }

    /// Two threads put, one empties: each thing arrives once, and those of one thread in their order.
    fn exchange() {
        let mailbox = Arc::new(Mailbox::new(2));
        let put = |name: u32| {
            let mailbox = Arc::clone(&mailbox);
            thread::spawn(move || {
                let mut refused = 0;
                for number in 0..PER_THREAD {
                    refused += u32::from(mailbox.put((name, number)).is_err());
                }
                refused
            })
        };
        let threads = [put(0), put(1)];
        let mut got = Vec::new();
        for _ in 0..3 {
            let mut batch = empty(&mailbox);
            batch.reverse();
            got.append(&mut batch);
        }
        let refused: u32 = threads.map(|thread| thread.join().unwrap()).iter().sum();
        let mut last = empty(&mailbox);
        last.reverse();
        got.append(&mut last);
        assert_eq!(got.len() + refused as usize, 2 * PER_THREAD as usize);
        for name in 0..2 {
            let own: Vec<_> = got.iter().filter(|(from, _)| *from == name).collect();
            assert!(own.is_sorted_by(|a, b| a.1 < b.1), "{got:?}");
        }
        assert_eq!(mailbox.count(), 0);
    }

    #[cfg(shuttle)]
    #[test]
    fn things_arrive_once_and_in_order() {
        shuttle::check_random(exchange, 20_000);
        shuttle::check_pct(exchange, 20_000, 3);
    }

    #[cfg(not(shuttle))]
    mod without_a_model {
        use std::sync::mpsc::{RecvTimeoutError, channel};
        use std::time::Duration;

        use super::*;
        use crate::sync::{park_at, set_interference};

        const DEADLINE: Duration = Duration::from_secs(60);

        #[test]
        fn the_newest_comes_first_and_a_full_box_gives_back() {
            let mailbox = Mailbox::new(3);
            assert!(mailbox.take().is_empty() && Taken::nothing().is_empty());
            assert_eq!(
                [mailbox.put('a'), mailbox.put('b'), mailbox.put('c')],
                [Ok(1), Ok(2), Ok(3)]
            );
            assert_eq!(mailbox.put('d'), Err('d'));
            assert_eq!(mailbox.count(), 3);
            let mut taken = mailbox.take();
            assert_eq!((mailbox.next(&mut taken), mailbox.count()), (Some('c'), 0));
            assert_eq!((mailbox.put('e'), mailbox.put('f')), (Ok(1), Err('f')), "two are taken");
            assert_eq!(
                [mailbox.next(&mut taken), mailbox.next(&mut taken)],
                [Some('b'), Some('a')]
            );
            assert!(taken.is_empty() && mailbox.next(&mut taken).is_none());
            assert_eq!(mailbox.put('g'), Ok(2));
            assert_eq!(empty(&mailbox), ['g', 'e']);
            assert_eq!(mailbox.nodes.count(), 3);
        }

        #[test]
        fn things_arrive_once_and_in_order() {
            for seed in 1..300 {
                set_interference(seed);
                exchange();
            }
            set_interference(0);
        }

        /// Whether the operation has an access with this number.
        fn stop_at(operation: fn(&Mailbox<u32>), access: u32) -> bool {
            let mailbox = Arc::new(Mailbox::new(100));
            (0..3).for_each(|number| assert!(mailbox.put(number).is_ok()));
            let ((parked, is_parked), (resume, resumed)) = (channel(), channel());
            let stopped = thread::spawn({
                let mailbox = Arc::clone(&mailbox);
                move || {
                    park_at(access, parked, resumed);
                    operation(&mailbox);
                    park_at(u32::MAX, channel().0, channel().1);
                }
            });
            let stands = is_parked.recv_timeout(DEADLINE);
            assert_ne!(stands, Err(RecvTimeoutError::Timeout));
            let (done, is_done) = channel();
            let worker = thread::spawn({
                let mailbox = Arc::clone(&mailbox);
                move || {
                    let mut got = empty(&mailbox).len();
                    for round in 0..20 {
                        (0..4).for_each(|thing| assert!(mailbox.put(10 + thing).is_ok()));
                        got += empty(&mailbox).len();
                        assert!(got >= 4 * (round + 1), "{got} in round {round}");
                    }
                    done.send(got).unwrap();
                }
            });
            let got = is_done.recv_timeout(DEADLINE);
            let got = got.unwrap_or_else(|_| panic!("stopped at access {access}, it stopped all"));
            worker.join().unwrap();
            drop(resume);
            stopped.join().unwrap();
            // 3 were there, 80 came, and what the stopped one puts or takes.
            let got = got + empty(&mailbox).len();
            assert!((80..=84).contains(&got), "{got} at access {access}");
            stands.is_ok()
        }

        #[test]
        fn a_thread_that_stops_anywhere_stops_nobody() {
            let operations: [fn(&Mailbox<u32>); 3] = [
                |mailbox| assert!(mailbox.put(7).is_ok()),
                |mailbox| {
                    empty(mailbox);
                    assert!(mailbox.put(8).is_ok());
                },
                |mailbox| {
                    let mut taken = mailbox.take();
                    while mailbox.next(&mut taken).is_some() {}
                },
            ];
            for operation in operations {
                let accesses = (0..).take_while(|&access| stop_at(operation, access)).count();
                assert!(accesses > 1, "{accesses}");
            }
        }
    }
}
