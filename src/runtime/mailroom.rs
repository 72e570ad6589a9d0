//! What goes between the data thread and the tasks of its node: commands one way, answers the other.
//!
//! The two have no lock in common, not even one inside of the runtime that the tasks are on: a command
//! and an answer each go through a [`Mailbox`], and what wakes the other side belongs to the kernel. So
//! a task that stands still, wherever its thread was stopped, holds up no lease, and a data thread that
//! stands still holds up no client that wants nothing of it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;

use super::data::Answered;
use super::in_place::{Leftovers, NotRegistered, OpaquePinner, Registered};
use crate::limits;
use crate::peer::Fetched;
use crate::sync::Mailbox;
use crate::sys::eventfd::EventFd;

/// Commands and answers that may be on their way: what clients of the door may wait for at once, each
/// over some leases, and more.
const LETTERS_MAX: usize = 16 * limits::DOOR_CLIENTS_MAX * limits::DOOR_WAITS_MAX;

/// All that was put in a box, oldest first.
fn empty<T>(mailbox: &Mailbox<T>, out: &mut Vec<T>) {
    let mut taken = mailbox.take();
    out.extend(std::iter::from_fn(|| mailbox.next(&mut taken)));
    out.reverse();
}

/// Commands for the data thread.
#[derive(Debug)]
pub(super) struct Inbox<C> {
    commands: Mailbox<C>,
    open: AtomicBool,
}

impl<C> Inbox<C> {
    pub(super) fn new() -> Self {
        Self { commands: Mailbox::new(LETTERS_MAX), open: AtomicBool::new(true) }
    }

    /// Whether the command will be looked at, unless the thread ends first. Then, as where this is
    /// refused, it is dropped, and who waits for an answer hears of that.
    pub(super) fn put(&self, command: C) -> bool {
        let taken = self.commands.put(command).is_ok();
        // Looked at behind the command: either the thread finds it when it closes, or this does.
        let open = self.open.load(Ordering::SeqCst);
        if !open {
            self.drop_all();
        }
        taken && open
    }

    /// Adds the commands so far to an empty list, in their order.
    pub(super) fn take_into(&self, out: &mut Vec<C>) {
        empty(&self.commands, out);
    }

    /// No command will be looked at any more.
    pub(super) fn close(&self) {
        self.open.store(false, Ordering::SeqCst);
        self.drop_all();
    }

    fn drop_all(&self) {
        empty(&self.commands, &mut Vec::new());
    }
}

/// An answer, with the one who waits for it.
#[derive(Debug)]
pub(super) enum Answer<S> {
    Fetched(oneshot::Sender<Answered>, Answered),
    Snapshot(oneshot::Sender<S>, S),
    Reset(oneshot::Sender<u32>, u32),
    Pinner(oneshot::Sender<OpaquePinner>, OpaquePinner),
    LetGo(oneshot::Sender<Leftovers>, Leftovers),
    Registered(
        oneshot::Sender<Result<Registered, NotRegistered>>,
        Result<Registered, NotRegistered>,
    ),
    Done(oneshot::Sender<()>),
}

/// Answers of the data thread.
#[derive(Debug)]
pub(super) struct Outbox<S> {
    answers: Mailbox<Answer<S>>,
    open: AtomicBool,
    wake: Arc<EventFd>,
}

impl<S> Outbox<S> {
    /// # Errors
    /// Where the limit on open files is reached.
    pub(super) fn new() -> io::Result<Self> {
        let wake = Arc::new(EventFd::new()?);
        Ok(Self { answers: Mailbox::new(LETTERS_MAX), open: AtomicBool::new(true), wake })
    }

    /// Where there is no room, the answer comes back.
    pub(super) fn put(&self, answer: Answer<S>) -> Result<(), Answer<S>> {
        if self.answers.put(answer)? == 1 {
            self.notify();
        }
        Ok(())
    }

    /// No answer will come any more.
    pub(super) fn close(&self) {
        self.open.store(false, Ordering::SeqCst);
        self.notify();
    }

    fn notify(&self) {
        // It fails for what is no event counter, and this is one.
        self.wake.notify().ok();
    }

    /// # Errors
    /// At the limit on watches.
    pub(super) fn watched(&self) -> io::Result<AsyncFd<Arc<EventFd>>> {
        self.wake.watched()
    }

    /// Passes answers on until the last one. What was fetched for one who does not wait any more goes to
    /// `unwanted`.
    pub(super) async fn deliver(
        self: Arc<Self>,
        woken: AsyncFd<Arc<EventFd>>,
        unwanted: impl Fn(Fetched),
    ) {
        let mut answers = Vec::new();
        loop {
            // Looked at first: what was put in before the end is delivered.
            let open = self.open.load(Ordering::SeqCst);
            empty(&self.answers, &mut answers);
            for answer in answers.drain(..) {
                // But for what was fetched, an answer that nobody waits for is of no consequence.
                match answer {
                    Answer::Fetched(to, fetched) => {
                        to.send(fetched).map_err(|sent| unwanted(sent.fetched)).unwrap_or_default();
                    }
                    Answer::Snapshot(to, snapshot) => drop(to.send(snapshot)),
                    Answer::Reset(to, count) => drop(to.send(count)),
                    Answer::Pinner(to, pinner) => drop(to.send(pinner)),
                    Answer::LetGo(to, left) => drop(to.send(left)),
                    Answer::Registered(to, registered) => drop(to.send(registered)),
                    Answer::Done(to) => drop(to.send(())),
                }
            }
            if !open {
                return;
            }
            let Ok(mut ready) = woken.readable().await else { return };
            // It fails for what is no event counter, and this is one.
            self.wake.drain().ok();
            ready.clear_ready();
        }
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;
    use crate::peer::FetchId;
    use crate::types::{Load, NodeId};

    fn fetched(id: u64) -> Fetched {
        Fetched {
            id: FetchId(id),
            node: NodeId([1; 16]),
            outcomes: Vec::new(),
            load: Load::default(),
            suspended: None,
        }
    }

    #[test]
    fn commands_come_in_their_order_until_the_end() {
        let inbox = Inbox::new();
        let mut commands = Vec::new();
        let held = Arc::new(());
        (0..3).for_each(|number| assert!(inbox.put((number, Arc::clone(&held)))));
        inbox.take_into(&mut commands);
        assert!(commands.drain(..).map(|(number, _)| number).eq(0..3));
        assert!(inbox.put((3, Arc::clone(&held))));
        inbox.close();
        assert!(!inbox.put((4, Arc::clone(&held))));
        assert_eq!(Arc::strong_count(&held), 1, "a command that nobody looks at is dropped");
    }

    #[tokio::test]
    async fn answers_come_to_those_who_wait_and_others_go_back() {
        let outbox = Arc::new(Outbox::<u8>::new().unwrap());
        let (back, mut came_back) = tokio::sync::mpsc::unbounded_channel();
        let unwanted = move |fetched: Fetched| back.send(fetched.id).unwrap();
        let woken = outbox.watched().unwrap();
        let delivery = tokio::spawn(Arc::clone(&outbox).deliver(woken, unwanted));
        for round in 0..3 {
            let (to, gone) = oneshot::channel();
            drop(gone);
            outbox
                .put(Answer::Fetched(to, Answered { fetched: fetched(round), reach: None }))
                .unwrap();
            assert_eq!(came_back.recv().await, Some(FetchId(round)));
        }
        let ((to, answer), (reset, count)) = (oneshot::channel(), oneshot::channel());
        outbox.put(Answer::Snapshot(to, 7)).unwrap();
        outbox.put(Answer::Reset(reset, 3)).unwrap();
        assert_eq!((answer.await, count.await), (Ok(7), Ok(3)));
        let (to, drained) = oneshot::channel();
        outbox.put(Answer::Done(to)).unwrap();
        outbox.close();
        assert_eq!(drained.await, Ok(()), "the end waits for the last one");
        delivery.await.unwrap();
    }
}
