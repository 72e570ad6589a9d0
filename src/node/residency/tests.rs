use super::*;
use crate::event::Discard;
use crate::memory::PoolOptions;
use crate::policy::Policy;
use crate::runtime::reclaim::{Reclaim, Reclaimed};
use crate::store::StoreConfig;
use crate::types::{BlockHash, NamespaceId, PoolId};

#[test]
fn readers_hold_back_only_where_what_they_keep_is_missed() {
    let (id, bytes) = (PoolId(0), 16 << 10);
    let options = PoolOptions { id, bytes, huge_pages: None, lock: false, numa_node: None };
    let config = StoreConfig { capacity: 100, policy: Policy::default() };
    let (marks, sink) = (Watermarks::new(500, 250).unwrap(), Arc::new(Discard));
    let store = Arc::new(Store::new(config, sink.clone()).unwrap());
    let pools = vec![HostPool::create(&options).unwrap()];
    let residency = Residency::new(store, (pools, None), marks, Clock::start(), sink);
    let key =
        |name: u8| BlockKey { namespace: NamespaceId(1), hash: BlockHash::new(&[name]).unwrap() };
    for name in 0..12 {
        let memory = residency.reserve(&[1 << 10]).unwrap().pop().unwrap();
        residency.admit(key(name), memory, 0, Origin::Saved { owners: None });
    }
    assert!(residency.excess(MemoryKind::Host) > 0);
    assert_eq!(residency.pause_ms(), 0, "there is much to evict");
    let pins: Vec<_> = (0..12).map(|name| residency.store.pin(&key(name)).unwrap().id).collect();
    assert_eq!(residency.reclaim(), Reclaimed::Stuck);
    assert_eq!(residency.pause_ms(), PAUSE_UNDER_PRESSURE_MS);
    assert_eq!(residency.store.unpin_batch(&pins), 0);
    assert_eq!(residency.reclaim(), Reclaimed::Some);
    assert_eq!((residency.reclaim(), residency.pause_ms()), (Reclaimed::Enough, 0));
    assert_eq!(residency.usage(MemoryKind::Host).used, 4 << 10);
}
