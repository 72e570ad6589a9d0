//! A decoder under attack: what it admits, it admits in one form.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn introductions() -> impl Strategy<Value = Introduction> {
    let name = "[a-z0-9:.é-]{1,32}";
    (any::<[u8; 16]>(), any::<u64>(), name, any::<[u8; 16]>()).prop_map(
        |(node, epoch, requester, nonce)| Introduction {
            node: NodeId(node),
            epoch: NodeEpoch(epoch),
            requester: requester.parse().unwrap(),
            nonce,
        },
    )
}

fn region_lists() -> impl Strategy<Value = Vec<RegionEntry>> {
    let one = (any::<u32>(), 0..1_u64 << 63, 1..1_u64 << 62);
    vec(one.prop_map(|(r, a, l)| region(r, a, l)), 0..8)
}

fn loans() -> impl Strategy<Value = LoanEntry> {
    prop_oneof![
        Just(Loan::NotFound),
        proptest::sample::select(LendRefusal::ALL.to_vec()).prop_map(Loan::Busy),
        Just(Loan::Failed),
        (1..=31_u32, 0..1_u64 << 62, 1..=1_u32 << 30).prop_map(|(r, a, l)| ready(r, a, l)),
    ]
    .prop_map(LoanEntry::from)
}

fn loads() -> impl Strategy<Value = Load> {
    (any::<u64>(), any::<u32>())
        .prop_map(|(outstanding_bytes, pause_ms)| Load { outstanding_bytes, pause_ms })
}

fn messages() -> impl Strategy<Value = Owned> {
    let proofs = || any::<[u8; 32]>().prop_map(Proof);
    let leases = || (1..u64::MAX).prop_map(LeaseId);
    let hashes = vec(vec(any::<u8>(), 1..=32).prop_map(|bytes| hash(&bytes)), 1..40);
    prop_oneof![
        proptest::sample::select(Kind::ALL).prop_map(example),
        introductions().prop_map(|it| Owned::Plain(Message::Hello(it))),
        (introductions(), proofs(), region_lists()).prop_map(|(i, p, r)| Owned::Welcome(i, p, r)),
        (proofs(), region_lists()).prop_map(|(p, r)| Owned::Confirm(p, r)),
        (any::<u64>(), any::<u64>(), hashes).prop_map(|(r, n, h)| Owned::Lend(
            RequestId(r),
            NamespaceId(n),
            h
        )),
        (any::<u64>(), leases(), any::<u32>(), loads(), vec(loans(), 1..40)).prop_map(
            |(request, lease, ttl, load, loans)| {
                let lent = loans.iter().any(|entry| entry.loan().is_ready());
                let lease = if lent { lease } else { LeaseId::NONE };
                Owned::Lease(RequestId(request), lease, ttl, load, loans)
            }
        ),
        (leases(), any::<u64>(), vec(any::<bool>(), 1..100)).prop_map(|(lease, epoch, good)| {
            let mut bitmap = Vec::new();
            let count = Outcomes::pack(&mut bitmap, good.into_iter());
            Owned::Complete(lease, NodeEpoch(epoch), count, bitmap)
        }),
        (leases(), loads(), vec(0..=31_u8, 1..60)).prop_map(|(l, load, ranks)| Owned::Ranks(
            l,
            RanksStatus::Replayed,
            load,
            ranks
        )),
        leases().prop_map(|lease| Owned::Ranks(
            lease,
            RanksStatus::Unknown,
            Load::default(),
            Vec::new()
        )),
        (leases(), any::<u32>(), loads()).prop_map(|(lease, ttl_ms, load)| Owned::Plain(
            Message::Renewed { lease, ttl_ms, load }
        )),
    ]
}

/// What decodes is encoded in exactly one way.
fn check(bytes: &[u8]) {
    if let Ok(message) = decode(bytes) {
        let mut again = Vec::new();
        message.encode(&mut again);
        assert_eq!(again, bytes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn what_is_encoded_decodes_to_itself(owned in messages()) {
        let bytes = owned.encoded();
        prop_assert_eq!(decode(&bytes), Ok(owned.message()));
    }

    #[test]
    fn arbitrary_bytes_are_judged(bytes in vec(any::<u8>(), 0..200)) {
        check(&bytes);
    }

    #[test]
    fn mutated_messages_are_judged(
        owned in messages(),
        flips in vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
        cut in proptest::option::of(any::<proptest::sample::Index>()),
    ) {
        let mut bytes = owned.encoded();
        for (at, value) in flips {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len() + 1));
            // A header that admits to the new length leads the decoder further in.
            if let Some(body) = bytes.len().checked_sub(8) {
                bytes[4..8].copy_from_slice(&u32::try_from(body).unwrap().to_le_bytes());
            }
        }
        check(&bytes);
    }
}
