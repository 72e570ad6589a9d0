//! The steps of the demonstration, each checked: bytes against what was saved, ranks against the
//! rules.

use std::path::Path;
#[cfg(feature = "gpu")]
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::DemoArgs;
#[cfg(feature = "gpu")]
use super::engine::Engine;
use super::report::{Eviction, Ranks, Report};
use crate::cli::CliError;
use crate::cli::chain::Chain;
use crate::cli::cluster::{Cluster, Process};
use crate::client::{Acquired, Client};
use crate::node::TransportChoice;
use crate::protocol::door::Source;
use crate::runtime::deadline::Deadline;
use crate::types::{BlockHash, Namespace, NodeId};

pub(super) const BLOCK_BYTES: u32 = 256 << 10;

/// Blocks of the prefix that travels, and of the one that stays on B.
pub(super) const BLOCKS: usize = 4;

/// The longest that a busy node, or the registry, is waited for.
const PATIENCE: Duration = Duration::from_secs(5);

/// How often a condition is looked at.
const POLL: Duration = Duration::from_millis(2);

/// Some blocks, and what is in them.
struct Blocks {
    name: &'static str,
    hashes: Vec<BlockHash>,
    bytes: Vec<Vec<u8>>,
}

impl Blocks {
    /// Random bytes, so that nothing but a real transfer brings them anywhere.
    fn random(name: &'static str, count: usize) -> Result<Self, CliError> {
        let mut chain = Chain::default();
        let (mut hashes, mut bytes) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let mut block = vec![0; BLOCK_BYTES as usize];
            getrandom::fill(&mut block).map_err(CliError::failed)?;
            hashes.extend(chain.next(&block));
            bytes.push(block);
        }
        Ok(Self { name, hashes, bytes })
    }
}

/// A node of the story.
struct Actor {
    client: Client,
    node: NodeId,
    process: Process,
    #[cfg(feature = "gpu")]
    engine: Option<Rc<Engine>>,
}

impl Actor {
    fn new(process: Process) -> Result<Self, CliError> {
        let client = process.client()?;
        let node = client.stat()?.node.id.parse().map_err(CliError::failed)?;
        Ok(Self {
            client,
            node,
            process,
            #[cfg(feature = "gpu")]
            engine: None,
        })
    }

    /// Saves blocks as an engine would: reserve, write in place, publish.
    fn save(&self, namespace: &Namespace, blocks: &Blocks) -> Result<(), CliError> {
        #[cfg(feature = "gpu")]
        if let Some(engine) = self.engine.as_ref().filter(|_| blocks.hashes.len() == BLOCKS) {
            let content = (blocks.hashes.as_slice(), blocks.bytes.as_slice());
            engine.save(&self.process.client()?, namespace, content)?;
            return self.flush();
        }
        let sizes = vec![BLOCK_BYTES; blocks.hashes.len()];
        let deadline = Deadline::after(PATIENCE);
        let mut memory = loop {
            match self.client.reserve(&sizes) {
                Ok(memory) => break memory,
                Err(error) => match error.backpressure() {
                    Some(pause) if deadline.pause(pause) => {}
                    _ => return Err(error.into()),
                },
            }
        };
        for (reservation, bytes) in memory.iter_mut().zip(&blocks.bytes) {
            reservation.fill(bytes)?;
        }
        let entries = blocks.hashes.iter().copied().zip(memory).collect();
        self.client.publish(namespace, entries, false)?;
        self.flush()
    }

    /// Waits until there is memory for another block without an eviction: the reclaimer has done
    /// its part, and what goes next is what the story says.
    fn settle(&self) -> Result<(), CliError> {
        let deadline = Deadline::after(PATIENCE);
        loop {
            let pools = self.client.stat()?.pools;
            if pools.iter().map(|pool| pool.free_bytes).sum::<u64>() >= u64::from(BLOCK_BYTES) {
                return Ok(());
            }
            if !deadline.pause(POLL) {
                let name = self.process.name();
                return Err(CliError::failed(format!("{name} reclaims no memory")));
            }
        }
    }

    /// Waits until the registry knows what this node holds.
    fn flush(&self) -> Result<(), CliError> {
        if self.client.flush(PATIENCE)? {
            return Ok(());
        }
        Err(CliError::failed(format!("the registry did not answer {}", self.process.name())))
    }

    /// Reads blocks and compares their bytes; how many bytes were compared.
    fn read(
        &self,
        namespace: &Namespace,
        blocks: &Blocks,
        source: Source,
    ) -> Result<u64, CliError> {
        #[cfg(feature = "gpu")]
        if let Some(engine) = &self.engine {
            let wish = (blocks.hashes.as_slice(), source);
            let got = engine.load(&self.process.client()?, namespace, wish)?;
            if got != blocks.bytes.concat() {
                let name = self.process.name();
                let what = blocks.name;
                return Err(CliError::failed(format!(
                    "{what} has other bytes in the GPU memory of {name} than were saved"
                )));
            }
            self.flush()?;
            return Ok(got.len() as u64);
        }
        let acquired = self.acquire(namespace, blocks, source)?;
        let mut got = vec![0; BLOCK_BYTES as usize];
        let mut compared = 0;
        for (at, (block, want)) in acquired.iter().zip(&blocks.bytes).enumerate() {
            let Acquired::Ready(held) = block else {
                let name = self.process.name();
                return Err(CliError::failed(format!(
                    "{name} did not get block {at} of {}: {block:?}",
                    blocks.name
                )));
            };
            held.read_into(&mut got)?;
            if got != *want {
                let name = self.process.name();
                return Err(CliError::failed(format!(
                    "block {at} of {} has other bytes on {name} than were saved",
                    blocks.name
                )));
            }
            compared += u64::from(BLOCK_BYTES);
        }
        drop(acquired);
        self.flush()?;
        Ok(compared)
    }

    /// Pins blocks. On a machine that stands still for a second, nodes leave each other alone for a moment:
    /// what fails then is asked for again.
    fn acquire(
        &self,
        namespace: &Namespace,
        blocks: &Blocks,
        source: Source,
    ) -> Result<Vec<Acquired<'_>>, CliError> {
        let deadline = Deadline::after(PATIENCE);
        loop {
            let acquired = self.client.acquire(namespace, &blocks.hashes, source)?;
            let is_for_now = |it: &Acquired<'_>| matches!(it, Acquired::Busy(_) | Acquired::Failed);
            if !acquired.iter().any(is_for_now) || !deadline.pause(POLL) {
                return Ok(acquired);
            }
        }
    }

    /// The rank that all these blocks have here; `None` where none is here.
    fn rank(&self, namespace: &Namespace, blocks: &Blocks) -> Result<Option<u8>, CliError> {
        let page = self.client.list(Some(namespace), None, 1024)?;
        let mut ranks: Vec<u8> = page
            .entries
            .iter()
            .filter(|entry| blocks.hashes.contains(&entry.hash))
            .map(|entry| entry.rank.get())
            .collect();
        let all = ranks.len();
        ranks.dedup();
        match (all, ranks.as_slice()) {
            (0, _) => Ok(None),
            (BLOCKS, [rank]) => Ok(Some(*rank)),
            _ => Err(CliError::failed(format!(
                "the blocks of one step have different ranks on {}: {ranks:?} ({all} of them)",
                self.process.name()
            ))),
        }
    }
}

struct Story<'a> {
    a: Actor,
    b: Actor,
    c: Actor,
    namespace: Namespace,
    shared: Blocks,
    report: &'a mut Report,
    interrupted: &'a AtomicBool,
}

impl Story<'_> {
    /// Notes a step whose ranks must be these.
    fn step(&mut self, step: &str, want: [Option<u8>; 3]) -> Result<(), CliError> {
        let rank = |actor: &Actor| actor.rank(&self.namespace, &self.shared);
        let ranks = Ranks { a: rank(&self.a)?, b: rank(&self.b)?, c: rank(&self.c)? };
        let [a, b, c] = want;
        self.report.step(step, ranks)?;
        if self.interrupted.load(Ordering::Relaxed) {
            return Err(CliError::failed("interrupted"));
        }
        if ranks == (Ranks { a, b, c }) {
            return Ok(());
        }
        Err(CliError::failed(format!("after \"{step}\" the ranks must be {want:?}, not {ranks:?}")))
    }

    fn read(&mut self, who: fn(&Self) -> &Actor, source: Source) -> Result<(), CliError> {
        self.report.verified_bytes += who(self).read(&self.namespace, &self.shared, source)?;
        Ok(())
    }

    fn transfers(&mut self) -> Result<(), CliError> {
        self.a.save(&self.namespace, &self.shared)?;
        self.step("A saves a prefix of 4 blocks", [Some(1), None, None])?;
        self.read(|story| &story.b, Source::From(self.a.node))?;
        self.step("B reads it from A: A steps up, B starts below", [Some(2), Some(1), None])?;
        self.read(|story| &story.c, Source::From(self.b.node))?;
        self.step("C reads it from B", [Some(2), Some(2), Some(1)])?;
        self.squeeze_c()?;
        self.step("C runs out of memory and drops its copy", [Some(2), Some(2), None])?;
        self.read(|story| &story.c, Source::From(self.b.node))?;
        self.step("C reads it from B again: one reader counts once", [Some(2), Some(2), Some(1)])?;
        Ok(())
    }

    /// C takes other blocks until its copy is gone.
    fn squeeze_c(&self) -> Result<(), CliError> {
        let deadline = Deadline::after(PATIENCE);
        while self.c.rank(&self.namespace, &self.shared).unwrap_or(Some(0)).is_some() {
            self.fill_c()?;
            if deadline.remaining().is_none() {
                return Err(CliError::failed("C did not evict its copy"));
            }
        }
        self.c.flush()
    }

    /// One block more in the memory of C that its copy lies in: saved there, or where that is a GPU's,
    /// in which what is fetched lands, fetched from A.
    fn fill_c(&self) -> Result<(), CliError> {
        let block = Blocks::random("C's own", 1)?;
        #[cfg(feature = "gpu")]
        if self.c.engine.is_some() {
            self.a.save(&self.namespace, &block)?;
            let from_a = Source::From(self.a.node);
            return match self.c.client.acquire(&self.namespace, &block.hashes, from_a)?.first() {
                Some(Acquired::Ready(_)) => Ok(()),
                other => Err(CliError::failed(format!("C did not get another block: {other:?}"))),
            };
        }
        self.c.save(&self.namespace, &block)
    }

    fn local_events(&mut self) -> Result<(), CliError> {
        self.read(|story| &story.a, Source::Here)?;
        self.step("an engine on A reads it: it is wanted there", [Some(1), Some(2), Some(1)])?;
        let sent =
            |story: &Self| story.a.client.finished_sending(&story.namespace, &story.shared.hashes);
        sent(self)?;
        self.step("A's engine has sent it on (finished_sending)", [Some(2), Some(2), Some(1)])?;
        self.read(|story| &story.a, Source::Here)?;
        sent(self)?;
        self.step(
            "read there again; sent on again, which counts once",
            [Some(1), Some(2), Some(1)],
        )?;
        Ok(())
    }

    /// B saves more than it has room for. Its own blocks are older, yet the copies that others hold
    /// too go first.
    fn pressure(&mut self, own: &Blocks) -> Result<(), CliError> {
        let before = self.b.client.evictions(0)?.last().map_or(0, |last| last.sequence);
        let deadline = Deadline::after(PATIENCE);
        let mut evicted = Vec::new();
        while evicted.len() < BLOCKS {
            self.b.save(&self.namespace, &Blocks::random("B's new", 1)?)?;
            self.b.settle()?;
            evicted = self.b.client.evictions(before)?;
            if deadline.remaining().is_none() {
                return Err(CliError::failed("B did not evict under pressure"));
            }
        }
        for eviction in evicted.iter().take(BLOCKS) {
            let at = |blocks: &Blocks| blocks.hashes.iter().position(|it| *it == eviction.hash);
            let block = match (at(&self.shared), at(own)) {
                (Some(at), _) => format!("shared block {at}"),
                (None, Some(at)) => format!("B's own block {at}"),
                (None, None) => "a new block of B".to_owned(),
            };
            self.report.evicted.push(Eviction { block, rank: eviction.rank.get() });
        }
        self.report.say("\nB runs out of memory. What went, in this order:")?;
        for eviction in &self.report.evicted {
            self.report.say(&format!("  rank {}  {}", eviction.rank, eviction.block))?;
        }
        self.step(
            "B's own blocks are older and stay: nobody else has them",
            [Some(1), None, Some(1)],
        )?;
        self.report.verified_bytes += self.b.read(&self.namespace, own, Source::Here)?;
        self.read(|story| &story.b, Source::Anywhere)?;
        self.report.say("B reads the prefix again, from whoever has it.")
    }
}

/// The GPU of the story, where it has one.
#[cfg(feature = "gpu")]
struct Gpu {
    engine: Option<Rc<Engine>>,
    /// What nodes are told.
    arguments: Vec<String>,
}

#[cfg(feature = "gpu")]
impl Gpu {
    fn of(args: &DemoArgs) -> Result<Self, CliError> {
        if !args.gpu {
            return Ok(Self { engine: None, arguments: Vec::new() });
        }
        let library = args.gpu_driver.as_deref();
        // As little as GPUs hand out: C runs out of it soon.
        let mut arguments = ["--gpu", "0", "--gpu-pool", "2MiB"].map(str::to_owned).to_vec();
        if let Some(library) = library {
            arguments.extend(["--gpu-driver".to_owned(), library.display().to_string()]);
        }
        Ok(Self { engine: Some(Rc::new(Engine::open(library)?)), arguments })
    }

    /// Says what the blocks lie in, and which way they take.
    fn introduce(&self, story: &mut Story<'_>) -> Result<(), CliError> {
        let Some(engine) = &self.engine else { return Ok(()) };
        for actor in [&mut story.a, &mut story.b, &mut story.c] {
            actor.engine = Some(Rc::clone(engine));
        }
        let way = story.b.client.stat()?.gpu.unwrap_or_default().way;
        story.report.gpu = Some(way.clone());
        story.report.say(&format!(
            "Blocks are saved from and loaded into GPU memory ({}), and land there: by way of {way}.",
            engine.name()
        ))
    }
}

/// Tells the story. Processes and files are gone when this returns.
pub(super) fn tell(
    (binary, args): (&Path, &DemoArgs),
    report: &mut Report,
    interrupted: &AtomicBool,
) -> Result<(), CliError> {
    let cluster = Cluster::new(binary)?;
    report.say("A registry and three nodes, A, B and C, start on this machine.")?;
    let registry = cluster.registry("registry", &[])?;
    let address = registry.addresses()?.listen;
    let choice = match args.transport {
        // The nodes stand for hosts: between these, auto is RDMA or TCP.
        TransportChoice::Auto => "--no-shm".to_owned(),
        chosen => format!("--transport={chosen}"),
    };
    #[cfg(feature = "gpu")]
    let gpu = Gpu::of(args)?;
    #[cfg(feature = "gpu")]
    let more = gpu.arguments.as_slice();
    #[cfg(not(feature = "gpu"))]
    let more: &[String] = &[];
    let start = |name: &str, pool: &str| {
        let own = ["--pool", pool, choice.as_str()].into_iter();
        let arguments: Vec<&str> = own.chain(more.iter().map(String::as_str)).collect();
        cluster.start_node(name, address, &arguments)
    };
    let (a, b, c) = (start("A", "8MiB")?, start("B", "4MiB")?, start("C", "2MiB")?);
    let namespace: Namespace = "demo".parse().map_err(CliError::failed)?;
    let mut story = Story {
        a: Actor::new(a.ready()?)?,
        b: Actor::new(b.ready()?)?,
        c: Actor::new(c.ready()?)?,
        namespace,
        shared: Blocks::random("the prefix", BLOCKS)?,
        report,
        interrupted,
    };
    #[cfg(feature = "gpu")]
    gpu.introduce(&mut story)?;
    story.report.transport = story.a.client.stat()?.node.transport;
    let transport = format!(
        "They talk over {}. The numbers are the eviction rank of the prefix on each node:\n\
         1 is kept longest, the highest goes first.\n",
        story.report.transport
    );
    story.report.say(&transport)?;
    let own = Blocks::random("B's own", BLOCKS)?;
    story.b.save(&namespace, &own)?;
    story.transfers()?;
    story.local_events()?;
    #[cfg(feature = "gpu")]
    let with_pressure = !args.gpu;
    #[cfg(not(feature = "gpu"))]
    let with_pressure = true;
    if with_pressure {
        story.pressure(&own)?;
    }
    story.report.verified = true;
    let bytes = story.report.verified_bytes;
    story.report.say(&format!("\nAll bytes that were read ({bytes}) are those that were saved."))
}
