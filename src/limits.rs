//! Every bound of kvrail, with its unit and why it is what it is.
//!
//! A bound that follows from others is written as that sum; relations that must hold are asserted
//! at compile time at the end of the file.

use std::time::Duration;

/// Longest block hash, bytes. SHA-256 and BLAKE3 digests are this long.
pub const HASH_BYTES_MAX: usize = 32;

/// Longest namespace or requester name, bytes: a model path with its parallelism fits.
pub const NAME_BYTES_MAX: usize = 64;

/// Highest eviction rank. Beyond 30 readers of one block the order among them is noise, and 31
/// lists and "none" fit one bitmap word.
pub const RANK_MAX: u8 = 31;

/// Most residents of one store: a slot's index is 24 bits wherever a position is packed beside it.
pub const RESIDENTS_MAX: u32 = 1 << 24;

/// Most pins on one resident; one more is `Busy`. Twelve bits of the state word.
pub const PINS_MAX: u16 = 4095;

/// Requesters that a holder tells apart while it runs. A number is never reused, because residents
/// keep it in their requester sets, so one more requester is refused at its handshake.
pub const REQUESTERS_MAX: usize = 4096;

/// Smallest and largest block, bytes. The lower bound keeps the bookkeeping below the payload; the
/// upper one keeps a block's length, with every offset in it, in 31 bits.
pub const BLOCK_BYTES_MIN: u32 = 1;
/// See [`BLOCK_BYTES_MIN`].
pub const BLOCK_BYTES_MAX: u32 = 1 << 30;

/// Alignment of every extent, bytes: a cache line, so that two blocks never share one.
pub const EXTENT_ALIGN: u64 = 64;

/// Memory pools of one node.
pub const POOLS_MAX: usize = 16;

/// Blocks in one lend request: 512 blocks of 16 tokens are an 8,192-token prefix.
pub const LEND_BLOCKS_MAX: usize = 512;

/// Regions that a node may lend from: its pools and some room, and what an engine publishes blocks in.
pub const REGIONS_MAX: usize = 64 + ENGINE_ALLOCATIONS_MAX;

/// RDMA NICs that one node uses: as many as hosts with eight GPUs have for their data.
pub const NICS_MAX: usize = 8;

/// Registrations that one NIC needs for one region, where it takes no longer ones. Their keys for
/// [`NICS_MAX`] NICs fit one peer message.
pub const REGION_CHUNKS_MAX: usize = 512;

/// Longest peer message, bytes: a lease over [`LEND_BLOCKS_MAX`] loans of 40 bytes is the largest.
pub const MESSAGE_BYTES_MAX: usize = 64 + LEND_BLOCKS_MAX * 40;

/// Local segments of one READ: what SoftRoCE and common NICs take, with room to spare.
pub const READ_SEGMENTS_MAX: usize = 16;

/// Longest READ, bytes; a longer span is split. Below `max_msg_sz` of every device seen.
pub const READ_BYTES_MAX: u32 = 8 << 20;

/// READs of one connection that may be outstanding.
pub const READS_OUTSTANDING_MAX: usize = 1024;

/// Keys of their own that the leases of one peer can have at once: two for each of the 64 leases that
/// it may hold by default. A lease over blocks that lie in one piece needs one.
pub const LEASE_WINDOWS: u16 = 128;

/// Time for the keys of an expired lease to end. Then its requester's connection is cut.
pub const REVOKE_TIMEOUT: Duration = Duration::from_secs(1);

/// Data streams between two nodes on the TCP fabric.
pub const STREAMS_MAX: usize = 16;

/// Connections of one node, to and from peers, admitted or not. One more is closed at once.
pub const CONNECTIONS_MAX: usize = 1024;

/// Connections that have not finished their handshake. Over TCP and verbs one more ends the oldest whose
/// peer has not said what it is, and over verbs is closed itself where all have; over shared memory it is
/// closed at once.
pub const HANDSHAKES_MAX: usize = 64;

/// Longest wait for a name server that is asked where a peer is: a reader has other owners to ask.
pub const LOOKUP_TIMEOUT: Duration = Duration::from_secs(2);

/// Time in which an accepted connection must finish its handshake, and a trickling message arrive.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Time in which outstanding READs, or bytes that a peer has to take, may make no progress on the TCP
/// fabric: longer than a retransmission timeout after a few losses.
pub const STALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Time between pings on an idle connection; three unanswered ones close it.
pub const PING_INTERVAL: Duration = Duration::from_secs(2);

/// A peer that was asked for something and says nothing for so long is asked whether it is there at
/// all: more than a busy peer takes, or two retransmissions of one lost packet.
pub const SILENCE_ASK: Duration = Duration::from_millis(250);

/// A peer that was asked for something and says nothing for so long, not even that it is there, is left
/// alone. With [`SILENCE_LOOK`] that is within a second of what it did not answer.
pub const SILENCE_MAX: Duration = Duration::from_millis(800);

/// How often it is looked who is silent, while anything is asked of anybody.
pub const SILENCE_LOOK: Duration = Duration::from_millis(50);

/// Bytes of the page that each node serves to whoever probes the way to it: one READ that crosses
/// the network with a payload, and touches no block.
pub const PROBE_BYTES: u32 = 4096;

/// How often it is looked whether a connection could go over more NICs than it does.
pub const WIDEN_LOOK: Duration = Duration::from_secs(1);

/// A NIC must have been usable for so long before a connection is made anew for it: a link that comes up
/// may go down again, and the other end of the same one may see it a little later.
pub const WIDEN_SETTLE: Duration = Duration::from_secs(3);

/// Between peers such attempts are spread over so much time, so that a host whose link is back does not
/// make all its connections at once.
pub const WIDEN_SPREAD: Duration = Duration::from_secs(2);

/// After one such attempt the next one to the same peer waits for so long, whatever came of it; after each
/// further one twice as long, up to [`WIDEN_PAUSE_MAX`].
pub const WIDEN_PAUSE: Duration = Duration::from_secs(5);

/// See [`WIDEN_PAUSE`]. What keeps failing costs one handshake in this time, and is not given up.
pub const WIDEN_PAUSE_MAX: Duration = Duration::from_secs(600);

/// The pause halves in each such time without an attempt.
pub const WIDEN_DECAY: Duration = Duration::from_secs(60);

/// How long new requests of a peer wait for those before them to end, so that a wider connection can take
/// the place of the one that they run on: a lease is over within milliseconds. Beyond that they go on as
/// before, and the wider one is given up for now.
pub const WIDEN_REST: Duration = Duration::from_secs(1);

/// The data thread goes round every second at the latest. A heartbeat older than this is a node that
/// is not healthy.
pub const HEARTBEAT_MAX: Duration = Duration::from_secs(3);

/// From so much lateness of the data thread on, deadlines of its peers are moved: well above what a
/// scheduler does to a thread, well below every deadline that a peer could be blamed for.
pub const OWN_STALL_MIN: Duration = Duration::from_millis(500);

/// Ended leases whose answers a holder remembers per requester, for replayed completions.
pub const ENDED_LEASES_MAX: usize = 256;

/// Lends that wait for their blocks to become ready; one more is told that they are busy.
pub const PARKED_LENDS_MAX: usize = 256;

/// How long a lend may wait for that: below the shortest time that readers give a holder to answer.
pub const PREPARE_TIMEOUT: Duration = Duration::from_millis(500);

/// How often blocks are looked at that a device copies: about the time of a READ of a few blocks.
pub const LOOK_AGAIN: Duration = Duration::from_micros(50);

/// Time that peers have to finish what they read when it is withdrawn: far more than the READs of a
/// lease take, and a wait that an engine can bear before it overwrites a block.
pub const WITHDRAW_GRACE: Duration = Duration::from_secs(1);

/// Longest wait of an engine that comes back, for memory that the node has from its last connection: what
/// is published there is withdrawn, keys of leases end, and then the registration of tens of GiB, at some
/// 16 GiB a second.
pub const IMPORT_WAIT: Duration =
    Duration::from_secs(WITHDRAW_GRACE.as_secs() + REVOKE_TIMEOUT.as_secs() + 8);

/// How often blocks that are being withdrawn are looked at while somebody has a pin on them.
pub const WITHDRAW_LOOK: Duration = Duration::from_millis(1);

/// So many of them at a time: well below a millisecond where all of them go.
pub const WITHDRAW_LOOKS: usize = 512;

/// Victims that one allocation may take itself, when the reclaimer is behind.
pub const INLINE_VICTIMS_MAX: usize = 64;

/// Local engines connected to one node.
pub const DOOR_CLIENTS_MAX: usize = 256;

/// Blocks in one request at the local door; a longer list takes several requests.
pub const DOOR_BLOCKS_MAX: usize = 4096;

/// Longest message at the local door, bytes: [`DOOR_BLOCKS_MAX`] entries of at most 128 bytes.
pub const DOOR_MESSAGE_BYTES_MAX: usize = 1024 + DOOR_BLOCKS_MAX * 128;

/// Reservations that one local client may have unpublished: some full requests at once.
pub const DOOR_RESERVATIONS_MAX: usize = 16 * DOOR_BLOCKS_MAX;

/// Blocks that one local client may hold pinned: some full requests at once.
pub const DOOR_HOLDS_MAX: usize = 16 * DOOR_BLOCKS_MAX;

/// Requests of one local client that may be waiting for peers or the registry; one more is `Busy`.
pub const DOOR_WAITS_MAX: usize = 16;

/// What a local client with too many waiting requests is told to wait, milliseconds.
pub const DOOR_WAITS_PAUSE_MS: u32 = 10;

/// Longest wait for the registry that a local client may ask for.
pub const DOOR_FLUSH_MAX: Duration = Duration::from_secs(60);

/// Hashes in one registry call.
pub const REGISTRY_BATCH_MAX: usize = 16_384;

/// Nodes that one registry knows at once. Owners are kept as a node's slot (12 bits) and the
/// generation of its registration (20 bits) in one word.
pub const REGISTRY_NODES_MAX: usize = 4096;

/// Longest address that a node may register, bytes: a DNS name with its port.
pub const REGISTRY_ADDRESS_BYTES_MAX: usize = 264;

/// Nodes that one plan may be told to avoid: far more than fail within one read.
pub const REGISTRY_AVOID_MAX: usize = 64;

/// Nodes of each kind of nearness that one plan may be told of: more than share a host or a rail and
/// hold the same blocks.
pub const REGISTRY_NEAR_MAX: usize = 64;

/// Owners of one key that a plan weighs against each other. More would be the same copies again.
pub const REGISTRY_PLAN_OWNERS_MAX: usize = 16;

/// Parts into which keys fall, for digests and for repairs: a part of 16 million keys still fits one
/// batch.
pub const REGISTRY_PARTITIONS: u16 = 1024;

/// Blocks that wait for one node's next heartbeat, to tell it that it is their only owner. They are
/// hints: more are left out. 48 KiB for a node.
pub const REGISTRY_HINTS_MAX: usize = 1024;

/// Batches of one node that may be under way to its registry.
pub const REGISTRY_IN_FLIGHT_MAX: usize = 16;

/// Longest registry message, bytes: [`REGISTRY_BATCH_MAX`] keys of at most 41 bytes, or a plan of as
/// many segments of three 32-bit numbers and [`REGISTRY_NODES_MAX`] owners.
pub const REGISTRY_MESSAGE_BYTES_MAX: usize = 2 << 20;

/// Changes that a node queues for the registry; beyond that it forgets them, and announces all of
/// its residents again instead. One fills about 64 bytes.
pub const ANNOUNCE_PENDING_MAX: usize = 262_144;

/// Changes that may be on their way to a node's announcer, which takes them over in batches of 1,024
/// or after 20 ms: room for it to be late by that much at 3 million a second. Beyond that it is as with
/// [`ANNOUNCE_PENDING_MAX`].
pub const ANNOUNCE_NOTES_MAX: usize = 65_536;

/// Owner counts that metrics tell apart; the last stands for itself and more.
pub const OWNERS_SHOWN: usize = 8;

/// Evicted blocks that a node remembers, to count fetches that follow an eviction.
pub const EVICTED_MEMORY_MAX: usize = 65_536;

/// A fetch so soon after the block's eviction counts as a refetch.
pub const REFETCH_WINDOW: Duration = Duration::from_secs(60);

/// Allocations of one local engine that its layouts may lie in: one for each layer of the deepest
/// models, where each layer's tensor was allocated alone.
pub const ENGINE_ALLOCATIONS_MAX: usize = 256;

/// Layouts of one local engine: one for each kind of layer of a hybrid model, and room.
pub const ENGINE_LAYOUTS_MAX: usize = 16;

/// Layouts of one peer that a connection remembers at either end: those that were told last.
pub const PEER_LAYOUTS_MAX: usize = 16;

/// Tensors of one layout, as [`ENGINE_ALLOCATIONS_MAX`].
pub const LAYOUT_TENSORS_MAX: usize = 256;

/// Segments of one block: K and V of 512 layers. Layouts are checked pair by pair, half a million
/// pairs at most.
pub const LAYOUT_SEGMENTS_MAX: usize = 1024;

/// Blocks of one layout: a hundred million tokens in blocks of 16 would not fill it.
pub const LAYOUT_BLOCKS_MAX: u32 = 1 << 24;

/// Alignment of everything in a layout, bytes: what a GPU copies at once.
pub const LAYOUT_ALIGN: u64 = 16;

/// Longest allocation of an engine, bytes: sums of a few such lengths stay within 64 bits.
pub const ALLOCATION_BYTES_MAX: u64 = 1 << 48;

/// Retransmissions of an RDMA queue pair before its peer counts as gone. The field holds 7, which
/// means for ever on SoftRoCE.
pub const RETRIES_MAX: u8 = 6;

const _: () = {
    assert!(
        SILENCE_MAX.as_millis() + 2 * SILENCE_LOOK.as_millis() <= 1000,
        "a silent peer is out of use within a second"
    );
    assert!(SILENCE_ASK.as_millis() * 2 < SILENCE_MAX.as_millis(), "there is time to answer");
    assert!(
        OWN_STALL_MIN.as_millis() <= SILENCE_MAX.as_millis() - SILENCE_ASK.as_millis(),
        "a stall of our own that nobody is told of leaves a peer time to answer"
    );
    assert!(RANK_MAX < 32, "ranks are bits of a u32");
    assert!(REQUESTERS_MAX <= u16::MAX as usize + 1, "a RequesterIndex is a u16");
    assert!(READ_BYTES_MAX <= BLOCK_BYTES_MAX);
    assert!(LEND_BLOCKS_MAX <= u16::MAX as usize, "counts of blocks travel as u16");
    assert!(EXTENT_ALIGN.is_power_of_two());
    assert!(REGISTRY_NODES_MAX <= 1 << 12, "a node's slot is 12 bits");
    assert!(
        REGISTRY_PARTITIONS.is_power_of_two(),
        "a partition is the first bits of a fingerprint"
    );
    assert!(
        REGISTRY_BATCH_MAX * (8 + 1 + HASH_BYTES_MAX) < REGISTRY_MESSAGE_BYTES_MAX,
        "a full batch fits one message"
    );
    assert!(
        REGISTRY_BATCH_MAX * 3 * 5 + REGISTRY_NODES_MAX * (REGISTRY_ADDRESS_BYTES_MAX + 48)
            < REGISTRY_MESSAGE_BYTES_MAX,
        "the largest plan fits one message"
    );
};
