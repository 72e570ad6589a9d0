//! GPUs that are lost to this process, which is for as long as it lives, and what lies in their memory.
//!
//! Who meets a loss says so here, once for all: be it the data thread, or a copy for an engine or for a
//! local reader. From the node's own pool residents are evicted; what engines published in place is taken
//! back ([`crate::node::in_place`]), which whoever watches the losses sees to.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use tokio::sync::watch;

use super::Residency;
use crate::protocol::door::DeviceUuid;
use crate::types::ResidentId;

impl Residency {
    /// A GPU is lost: what is in its memory goes. Whether that is news.
    pub(in crate::node) fn lose_gpu(&self, gpu: DeviceUuid) -> bool {
        if let Some(own) = self.device.as_ref().filter(|own| own.gpu == gpu) {
            // Relaxed, as below: the flag carries no data; whoever sees it late fails by the driver.
            own.lost.store(true, Ordering::Relaxed);
        }
        let news = self.lost.send_if_modified(|lost| lost.insert(gpu));
        if news && let Some(reclaimer) = self.reclaimer.get() {
            reclaimer.wake();
        }
        news
    }

    /// The node's own GPU is lost. Whether that is news.
    #[cfg_attr(not(feature = "gpu"), expect(dead_code, reason = "there is no such memory then"))]
    pub(in crate::node) fn lose_device(&self) -> bool {
        self.device.as_ref().is_some_and(|own| self.lose_gpu(own.gpu))
    }

    pub(in crate::node) fn device_is_lost(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.lost.load(Ordering::Relaxed))
    }

    /// The GPUs that are lost. Whoever keeps what it returns keeps others from losing more.
    pub(in crate::node) fn lost_gpus(&self) -> watch::Ref<'_, BTreeSet<DeviceUuid>> {
        self.lost.borrow()
    }

    /// Hears of each further loss, until this is dropped.
    pub(in crate::node) fn losses(&self) -> watch::Receiver<BTreeSet<DeviceUuid>> {
        self.lost.subscribe()
    }

    /// Gives pins back on residents of a lost GPU, and takes out those on which nobody else has one: for
    /// who cannot wait until the reclaimer has.
    pub(in crate::node) fn forget_lost(&self, holds: &[ResidentId]) {
        self.store.unpin_batch(holds);
        let now = self.clock.now();
        // What others have pins on goes with the last of these; what is gone the reclaimer took.
        for lost in holds.iter().filter_map(|hold| self.store.remove(*hold).ok()) {
            self.note_gone(&lost, now);
        }
    }
}
