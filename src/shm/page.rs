//! The page of a connection: what its holder lets the reader do, in memory that both see.
//!
//! A reader has the holder's memory mapped and nobody can take that away from it. What the holder can
//! do is to say, before it uses the memory otherwise, that what is read from there from now on counts
//! for nothing; and what a reader's fabric does is to look, after each copy and before it says that
//! the copy is good, whether that was said. So bytes that the holder wrote after a cut are never
//! reported as a block.
//!
//! Why that holds, as in a sequence lock: the holder stores the cut, then a fence, and returns from
//! `close`; what it writes to its memory comes after ([`ServingPage::cut`]). The reader copies, then a
//! fence, then loads the page ([`PeerPage::serves`]). A copy that saw one byte of what was written
//! later is followed by a load that sees the cut. The words of a page only ever go from "no" to "yes"
//! to "no", and a key is never used twice, so one look behind the copy is enough.
//!
//! A holder's page is sealed against all other writers: the reader can map it for reading alone.
#![expect(unsafe_code, reason = "atomics in a mapping that two processes share")]

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::MemfdFlags;

use crate::limits::REGIONS_MAX;
use crate::sys::memfd;

const PAGE_BYTES: usize = 4096;

/// [`Layout::state`]: the reader may read nothing yet.
const STRANGER: u32 = 0;
/// [`Layout::state`]: the reader may read the regions whose keys the page has.
const ADMITTED: u32 = 1;
/// [`Layout::state`]: the reader may read nothing any more.
const CUT: u32 = 2;
/// [`Layout::state`]: as [`CUT`], because the holder takes another way to the reader.
const MOVED: u32 = 3;

#[derive(Debug)]
#[repr(C)]
struct Layout {
    state: AtomicU32,
    reserved: [AtomicU32; 15],
    /// The key of each region that is served, 0 elsewhere.
    keys: [AtomicU32; REGIONS_MAX],
}

const _: () = assert!(size_of::<Layout>() <= PAGE_BYTES);

/// The page that this end writes: what it serves to its peer.
#[derive(Debug)]
pub(super) struct ServingPage {
    map: MmapRaw,
}

impl ServingPage {
    /// A page that says no to everything, and its file, to pass to the peer.
    pub(super) fn new() -> io::Result<(Self, File)> {
        let file = memfd::create("kvrail-page", MemfdFlags::empty())?;
        file.set_len(PAGE_BYTES as u64)?;
        let map = MmapOptions::new().len(PAGE_BYTES).map_raw(&file)?;
        memfd::seal_for_readers(&file)?;
        Ok((Self { map }, file))
    }

    fn layout(&self) -> &Layout {
        // SAFETY: the mapping has PAGE_BYTES bytes, at least those of a Layout, on a page's boundary;
        // it stays as long as `self` is borrowed; every bit pattern is a Layout, and the peer, which
        // cannot write to it, sees it change through atomics only.
        unsafe { &*self.map.as_mut_ptr().cast::<Layout>() }
    }

    /// Lets the peer read the regions of the page. After a cut it changes nothing.
    pub(super) fn admit(&self) {
        let admitted = self.layout().state.compare_exchange(
            STRANGER,
            ADMITTED,
            Ordering::Release,
            Ordering::Relaxed,
        );
        debug_assert!(!matches!(admitted, Err(CUT | MOVED)), "a cut connection was admitted");
    }

    /// Adds a region.
    pub(super) fn serve(&self, slot: usize, rkey: u32) {
        if let Some(key) = self.layout().keys.get(slot) {
            key.store(rkey, Ordering::Release);
        }
    }

    /// Takes a region back. What the peer copies from it after this returns fails there.
    pub(super) fn withdraw(&self, slot: usize) {
        self.serve(slot, 0);
        fence(Ordering::SeqCst);
    }

    /// Takes everything back. What the peer copies after this returns fails there.
    pub(super) fn cut(&self) {
        self.end(CUT);
    }

    /// As [`Self::cut`], and says that the peer is to take another way.
    pub(super) fn move_on(&self) {
        self.end(MOVED);
    }

    /// The first word about the end stays. Only this end writes here, so it reads what it wrote.
    fn end(&self, state: u32) {
        let is_over = matches!(self.layout().state.load(Ordering::Relaxed), CUT | MOVED);
        if !is_over {
            self.layout().state.store(state, Ordering::Release);
        }
        // Pairs with the fence in `PeerPage::serves`: see the module's documentation.
        fence(Ordering::SeqCst);
    }
}

impl Drop for ServingPage {
    fn drop(&mut self) {
        self.cut();
    }
}

/// What a holder lets us do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// Nothing yet.
    Stranger,
    /// To read what it serves.
    Admitted,
    /// Nothing any more.
    Cut,
    /// Nothing any more: the holder takes another way to us.
    Moved,
}

/// The page that the peer writes: what it serves to us.
#[derive(Debug)]
pub(super) struct PeerPage {
    map: MmapRaw,
}

impl PeerPage {
    /// Maps the page that a peer passed; any other file is refused.
    pub(super) fn new(fd: OwnedFd) -> io::Result<Self> {
        let file = memfd::examine(&fd)?;
        if file.len != PAGE_BYTES as u64 || file.huge {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let map = MmapOptions::new().len(PAGE_BYTES).map_raw_read_only(&fd)?;
        Ok(Self { map })
    }

    fn layout(&self) -> &Layout {
        // SAFETY: as in `ServingPage::layout`; the page is of an ordinary memory file that cannot
        // shrink, so that each byte of it can be loaded; the mapping is for reading only, which
        // 32-bit loads that are relaxed or acquire allow. What the peer writes there, atomically or
        // not, is some number.
        unsafe { &*self.map.as_mut_ptr().cast::<Layout>() }
    }

    /// What the holder lets us do now.
    pub(super) fn standing(&self) -> Standing {
        match self.layout().state.load(Ordering::Acquire) {
            STRANGER => Standing::Stranger,
            ADMITTED => Standing::Admitted,
            MOVED => Standing::Moved,
            _ => Standing::Cut,
        }
    }

    /// Whether the holder serves this region to us, also during all copies that came before this
    /// call.
    pub(super) fn serves(&self, slot: usize, rkey: u32) -> bool {
        // Copies come first, then this: see the module's documentation.
        fence(Ordering::SeqCst);
        let key = self.layout().keys.get(slot).map(|key| key.load(Ordering::Acquire));
        key == Some(rkey) && self.standing() == Standing::Admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (ServingPage, PeerPage) {
        let (own, file) = ServingPage::new().unwrap();
        (own, PeerPage::new(file.into()).unwrap())
    }

    #[test]
    fn a_reader_sees_what_its_holder_says() {
        let (own, peer) = pair();
        own.serve(3, 77);
        assert_eq!(peer.standing(), Standing::Stranger);
        assert!(!peer.serves(3, 77), "not admitted");
        own.admit();
        assert!(peer.serves(3, 77));
        assert!(!peer.serves(3, 78) && !peer.serves(4, 77) && !peer.serves(REGIONS_MAX, 0));
        own.withdraw(3);
        assert!(!peer.serves(3, 77));
        own.serve(3, 79);
        assert!(peer.serves(3, 79));
        own.cut();
        assert!(!peer.serves(3, 79));
        assert_eq!(peer.standing(), Standing::Cut);
    }

    #[test]
    fn a_page_that_is_dropped_is_cut() {
        let (own, peer) = pair();
        own.serve(0, 1);
        own.admit();
        drop(own);
        assert!(!peer.serves(0, 1));
        assert_eq!(peer.standing(), Standing::Cut);
    }

    #[test]
    fn a_page_of_a_holder_that_moves_on_says_so_for_good() {
        let (own, peer) = pair();
        own.serve(0, 1);
        own.admit();
        own.move_on();
        assert!(!peer.serves(0, 1));
        assert_eq!(peer.standing(), Standing::Moved);
        drop(own);
        assert_eq!(peer.standing(), Standing::Moved);
    }

    #[test]
    fn other_files_are_no_page() {
        let refused = |file: File| PeerPage::new(file.into()).is_err();
        let memory = |len: u64| {
            let file = memfd::create("kvrail-test", MemfdFlags::empty()).unwrap();
            file.set_len(len).unwrap();
            file
        };
        let open = memory(PAGE_BYTES as u64);
        assert!(refused(open.try_clone().unwrap()), "it may shrink");
        memfd::seal_length(&open).unwrap();
        assert!(!refused(open));
        let short = memory(PAGE_BYTES as u64 - 1);
        memfd::seal_length(&short).unwrap();
        assert!(refused(short));
        assert!(refused(tempfile::tempfile().unwrap()));
        assert!(refused(File::open("/dev/null").unwrap()));
    }

    /// The order of the stores and loads, by force: a holder that cuts and writes, a reader that
    /// copies and looks.
    #[test]
    fn no_byte_written_after_a_cut_passes_as_good() {
        let memory = AtomicU32::new(0);
        for round in 1..2000 {
            let (own, peer) = pair();
            own.serve(0, 1);
            own.admit();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    own.cut();
                    memory.store(round, Ordering::Relaxed);
                });
                for _look in 0..50 {
                    let copied = memory.load(Ordering::Relaxed);
                    assert!(!(peer.serves(0, 1) && copied == round), "round {round}");
                }
            });
        }
    }
}
