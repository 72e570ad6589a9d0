//! Every combination of what was asked for, one row each.

use std::sync::Arc;
use std::time::Duration;

use super::blocks::SET_MAX;
use super::control::{FilledNode, Holder};
use super::fabric::{self, DeviceArgs, Transport, Wire};
use super::hold::written_pool;
use super::report::{Report, RoundTrip, Row};
use super::row::{Load, Measured, Subject, together};
use super::{POOL_MIN, ReadArgs, SIZE_MAX, What, bare, get, leased, limit};
use crate::cli::CliError;
use crate::cli::bench::Bench;
use crate::cli::bench::cpu::CpuTime;
use crate::config::Size;
use crate::memory::HostPool;
use crate::node::TransportChoice;

/// Bytes of the READ that a round trip is measured with.
const SMALL: u32 = 64;

/// For how long.
const ROUND_TRIP_TIME: Duration = Duration::from_millis(200);

/// The arguments with their defaults filled in.
#[derive(Debug, Clone)]
pub(super) struct Sweep {
    transports: Vec<Transport>,
    what: Vec<What>,
    sizes: Vec<u32>,
    batches: Vec<usize>,
    depths: Vec<usize>,
    streams: Vec<usize>,
    threads: Vec<usize>,
    run: u32,
    time: Duration,
    pool: u64,
    device: DeviceArgs,
}

/// Makes a fabric with so many streams that only connects.
type Make<'a, F> = &'a dyn Fn(usize) -> Result<F, CliError>;

/// Where in the sweep.
#[derive(Debug, Clone, Copy)]
struct Point {
    what: What,
    transport: Transport,
    streams: usize,
    threads: usize,
}

impl Sweep {
    pub(super) fn new(args: &ReadArgs) -> Result<Self, CliError> {
        let quick = args.quick;
        let or = |given: &[u16], usual: &[u16], small: &[u16]| -> Vec<usize> {
            let chosen = if !given.is_empty() {
                given
            } else if quick {
                small
            } else {
                usual
            };
            chosen.iter().map(|number| usize::from(*number)).collect()
        };
        let sizes = match args.size.as_slice() {
            [] if quick => vec![4 << 10, 64 << 10],
            [] => vec![1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20],
            given => given.to_vec(),
        };
        let pool = args.pool.map_or(POOL_MIN, |Size(bytes)| bytes);
        if pool < POOL_MIN {
            return Err(CliError::usage(format!(
                "--pool: this takes at least {}, 16 of the longest blocks; got {}",
                Size(POOL_MIN),
                Size(pool)
            )));
        }
        let time = if quick { Duration::from_millis(50) } else { Duration::from_millis(500) };
        Ok(Self {
            transports: transports(&args.transport, &args.device)?,
            what: if args.what.is_empty() { What::ALL.to_vec() } else { args.what.clone() },
            sizes,
            batches: or(&args.batch, &[1, 32], &[1, 8]),
            depths: or(&args.depth, &[1, 4], &[2]),
            streams: or(&args.streams, &[2], &[2]),
            threads: or(&args.threads, &[1], &[1]),
            run: args.run.unwrap_or(1),
            time: args.time.unwrap_or(time),
            pool,
            device: args.device.clone(),
        })
    }

    pub(super) fn steps(&self) -> u64 {
        let Self { transports, what, sizes, batches, depths, streams, threads, .. } = self;
        let rows = sizes.len() * batches.len() * depths.len() * streams.len() * threads.len();
        (transports.len() * what.len() * rows) as u64
    }

    pub(super) fn measure(
        &self,
        holder: &mut Holder,
        bench: &Bench,
        report: &mut Report,
    ) -> Result<(), CliError> {
        bench.say("memcpy");
        report.copies = limit::copies(&self.sizes, self.time.min(ROUND_TRIP_TIME));
        for transport in &self.transports {
            let run = Run { sweep: self, holder, bench, report };
            match transport {
                Transport::Tcp => {
                    run.over(Transport::Tcp, &|streams| fabric::tcp(None, streams))?;
                }
                Transport::Verbs => run.over(Transport::Verbs, &|streams| {
                    fabric::verbs(&self.device, None, streams)
                })?,
            }
        }
        Ok(())
    }

    /// What fits into `room` bytes of this: fewer batches in flight first, then smaller ones.
    fn fit(&self, size: u32, (batch, depth): (usize, usize), room: u64) -> (usize, usize) {
        let blocks = usize::try_from(room / u64::from(size)).unwrap_or(usize::MAX).max(1);
        let batch = batch.min(blocks);
        (batch, depth.min(blocks / batch).max(1))
    }

    /// A reader's own memory.
    fn scratch(&self, threads: usize) -> u64 {
        (self.pool / 4 / threads as u64).max(SIZE_MAX)
    }
}

/// The fabrics to measure: `auto` is what a node would take here.
fn transports(
    choices: &[TransportChoice],
    device: &DeviceArgs,
) -> Result<Vec<Transport>, CliError> {
    let choices = if choices.is_empty() { &[TransportChoice::Auto] } else { choices };
    let mut all = Vec::new();
    for choice in choices {
        all.push(match choice {
            TransportChoice::Tcp => Transport::Tcp,
            TransportChoice::Shm => {
                return Err(CliError::usage(
                    "--transport: bench read measures verbs and tcp; cargo bench --bench shm_read \
                     measures shared memory",
                ));
            }
            TransportChoice::Verbs => {
                fabric::verbs(device, None, 1)?;
                Transport::Verbs
            }
            TransportChoice::Auto if fabric::verbs(device, None, 1).is_ok() => Transport::Verbs,
            TransportChoice::Auto => Transport::Tcp,
        });
    }
    all.dedup();
    Ok(all)
}

/// A sweep that runs.
struct Run<'a> {
    sweep: &'a Sweep,
    holder: &'a mut Holder,
    bench: &'a Bench,
    report: &'a mut Report,
}

/// What bounds a row, beside its own window.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    round_trip: f64,
    reads_at_once: Option<usize>,
    sockets: Option<f64>,
}

impl Run<'_> {
    fn over<F: Wire + 'static>(
        mut self,
        transport: Transport,
        make: Make<'_, F>,
    ) -> Result<(), CliError> {
        let mut bounds = self.round_trip(transport, make)?;
        for &streams in &self.sweep.streams {
            if transport == Transport::Tcp && !self.bench.is_interrupted() {
                self.bench.say("plain sockets");
                let endpoint = self.holder.blast(streams)?;
                let time = self.sweep.time.max(ROUND_TRIP_TIME);
                let sockets = limit::sockets(endpoint, streams, time)?;
                self.report.sockets.push(sockets);
                bounds.sockets = Some(sockets.gb_s);
            }
            for &threads in &self.sweep.threads {
                for &what in &self.sweep.what {
                    let point = Point { what, transport, streams, threads };
                    match what {
                        What::Bare => self.bare(point, make, bounds)?,
                        What::Leased => self.leased(point, make, bounds)?,
                        What::Get => self.get(point, bounds)?,
                    }
                }
            }
        }
        Ok(())
    }

    fn round_trip<F: Wire + 'static>(
        &mut self,
        transport: Transport,
        make: Make<'_, F>,
    ) -> Result<Bounds, CliError> {
        self.bench.say("round trip");
        let served = self.holder.open(transport, self.sweep.pool)?;
        let fabric = make(1)?;
        let reads_at_once = fabric.reads_at_once(1);
        let pool = written_pool(SIZE_MAX)?;
        let mut reader = bare::Reader::connect(fabric, &pool, served)?;
        let time = ROUND_TRIP_TIME;
        let load = Load { size: SMALL, count: 1, batch: 1, depth: 1, run: 1, time, seed: 1 };
        let round_trip = reader.measure(&load, self.bench)?.latency.at(0.5) / 1e9;
        let micros = round_trip * 1e6;
        self.report.round_trips.push(RoundTrip { transport, micros, reads_at_once });
        Ok(Bounds { round_trip, reads_at_once, sockets: None })
    }

    fn bare<F: Wire + 'static>(
        &mut self,
        point: Point,
        make: Make<'_, F>,
        bounds: Bounds,
    ) -> Result<(), CliError> {
        if self.bench.is_interrupted() {
            return Ok(());
        }
        let served = self.holder.open(point.transport, self.sweep.pool)?;
        let room = self.sweep.scratch(point.threads);
        let mut readers: Vec<Box<dyn Subject>> = Vec::new();
        for _ in 0..point.threads {
            let pool = written_pool(room)?;
            readers.push(Box::new(bare::Reader::connect(make(point.streams)?, &pool, served)?));
        }
        for &size in &self.sweep.sizes {
            self.rows(
                point,
                (size, 0),
                &mut Readers::Given { readers: &mut readers, room },
                bounds,
            )?;
        }
        Ok(())
    }

    /// Blocks of this size on the holding node: (how many, where).
    fn filled(&mut self, point: Point, size: u32) -> Result<(u32, FilledNode), CliError> {
        self.bench.say(&format!("saving blocks of {}", Size(u64::from(size))));
        let count = self.sweep.pool / 2 / u64::from(size);
        let count = u32::try_from(count).unwrap_or(SET_MAX).min(SET_MAX);
        let node = self.holder.fill(point.transport, self.sweep.pool, (size, count))?;
        Ok((count, node))
    }

    fn leased<F: Wire + 'static>(
        &mut self,
        point: Point,
        make: Make<'_, F>,
        bounds: Bounds,
    ) -> Result<(), CliError> {
        let room = self.sweep.scratch(point.threads);
        let pools: Vec<Arc<HostPool>> =
            (0..point.threads).map(|_| written_pool(room)).collect::<Result<_, _>>()?;
        for &size in &self.sweep.sizes {
            if self.bench.is_interrupted() {
                return Ok(());
            }
            let (count, node) = self.filled(point, size)?;
            let mut readers: Vec<Box<dyn Subject>> = Vec::new();
            for pool in &pools {
                readers.push(Box::new(leased::Reader::new(make(point.streams)?, pool, &node)?));
            }
            let mut readers = Readers::Given { readers: &mut readers, room };
            self.rows(point, (size, count), &mut readers, bounds)?;
        }
        Ok(())
    }

    fn get(&mut self, point: Point, bounds: Bounds) -> Result<(), CliError> {
        let mut started = None;
        for &size in &self.sweep.sizes {
            if self.bench.is_interrupted() {
                return Ok(());
            }
            let (count, holder) = self.filled(point, size)?;
            let node = match &started {
                Some(node) => Arc::clone(node),
                None => {
                    let fabric = (point.transport, &self.sweep.device);
                    let memory = (self.sweep.pool / 4, point.streams);
                    Arc::clone(
                        started.insert(Arc::new(get::Reader::start(&holder, fabric, memory)?)),
                    )
                }
            };
            self.rows(point, (size, count), &mut Readers::Node(node), bounds)?;
        }
        Ok(())
    }

    /// The rows of one block size.
    fn rows(
        &mut self,
        point: Point,
        (size, count): (u32, u32),
        readers: &mut Readers<'_>,
        bounds: Bounds,
    ) -> Result<(), CliError> {
        for &batch in &self.sweep.batches {
            for &depth in &self.sweep.depths {
                if self.bench.is_interrupted() {
                    return Ok(());
                }
                let Point { what, threads, .. } = point;
                let room = readers.room(self.sweep.pool, threads);
                let (batch, depth) = self.sweep.fit(size, (batch, depth), room);
                let what = what.as_str();
                self.bench.say(&format!("{what}, {batch} × {}, {depth} deep", Size(size.into())));
                let (run, time) = (self.sweep.run, self.sweep.time);
                let load = Load { size, count, batch, depth, run, time, seed: 1 };
                let before = (CpuTime::own()? + readers.cpu()?, self.holder.cpu()?);
                let measured = readers.measure(&load, threads, self.bench)?;
                let reader = CpuTime::own()? + readers.cpu()? - before.0;
                let cpu = (reader, self.holder.cpu()? - before.1);
                if !self.bench.is_interrupted() {
                    let row = self.row(point, &load, (&measured, cpu), bounds);
                    self.report.rows.push(row);
                }
                self.bench.step();
            }
        }
        Ok(())
    }

    fn row(
        &self,
        point: Point,
        load: &Load,
        (measured, cpu): (&Measured, (CpuTime, CpuTime)),
        bounds: Bounds,
    ) -> Row {
        let Load { size, batch, depth, run, .. } = *load;
        let Point { what, transport, streams, threads } = point;
        let Measured { latency, blocks, hits, busy, works, posts, elapsed } = measured;
        let (seconds, size_bytes) = (elapsed.as_secs_f64(), f64::from(size));
        let bytes = *blocks as f64 * size_bytes;
        let gib = (bytes / f64::from(1 << 30)).max(f64::MIN_POSITIVE);
        let micros = |share: f64| latency.at(share) / 1e3;
        let [.., max] = latency.percentiles();
        let each = |number: u64| (number > 0).then(|| number as f64 / (*blocks).max(1) as f64);
        let in_flight = batch * depth * threads;
        let on_the_wire = bounds
            .reads_at_once
            .map_or(in_flight, |reads| in_flight.min(reads * streams * threads));
        let copies = self.report.copies.iter().find(|copies| copies.size == size);
        let copies = copies.map_or(0.0, |copies| copies.gb_s);
        Row {
            what,
            transport,
            size,
            batch,
            depth,
            streams,
            threads,
            run,
            blocks: *blocks,
            hits: *hits,
            busy: *busy,
            seconds,
            gb_s: bytes / seconds / 1e9,
            blocks_s: *blocks as f64 / seconds,
            p50_us: micros(0.5),
            p90_us: micros(0.9),
            p99_us: micros(0.99),
            p999_us: micros(0.999),
            max_us: max / 1e3,
            reader_cpu_s_per_gib: cpu.0.seconds() / gib,
            holder_cpu_s_per_gib: cpu.1.seconds() / gib,
            works_per_block: each(*works),
            posts_per_block: each(*posts),
            window_gb_s: on_the_wire as f64 * size_bytes / bounds.round_trip / 1e9,
            machine_gb_s: bounds.sockets.unwrap_or(copies),
        }
    }
}

/// Who reads.
enum Readers<'a> {
    /// One for each thread, with so many bytes each to read into.
    Given { readers: &'a mut [Box<dyn Subject>], room: u64 },
    /// Clients of a node, which are made as they are needed.
    Node(Arc<get::Reader>),
}

impl Readers<'_> {
    /// Bytes that one thread may have in flight.
    fn room(&self, pool: u64, threads: usize) -> u64 {
        match self {
            Self::Given { room, .. } => *room,
            // Half of the node's: what was read before is still there.
            Self::Node(_) => pool / 8 / threads as u64,
        }
    }

    /// The processor time of other processes.
    fn cpu(&self) -> Result<CpuTime, CliError> {
        match self {
            Self::Given { .. } => Ok(CpuTime::default()),
            Self::Node(node) => node.cpu(),
        }
    }

    fn measure(
        &mut self,
        load: &Load,
        threads: usize,
        bench: &Bench,
    ) -> Result<Measured, CliError> {
        match self {
            Self::Given { readers, .. } => together(readers, load, bench),
            Self::Node(node) => {
                // A client waits for its answer, so what is in flight is a client each.
                let engine = || Box::new(get::Engine(Arc::clone(node))) as Box<dyn Subject>;
                let mut engines: Vec<_> = (0..threads * load.depth).map(|_| engine()).collect();
                together(&mut engines, load, bench)
            }
        }
    }
}
