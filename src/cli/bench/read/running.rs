//! A sweep that runs: who reads in each row, and what it takes of both ends.

use std::sync::Arc;
use std::time::Duration;

use super::blocks::SET_MAX;
use super::control::{FilledNode, Holder};
use super::fabric::{Transport, Wire};
use super::hold::written_pool;
use super::report::{Report, RoundTrip, Row};
use super::row::{Load, Measured, Subject, together};
use super::sweep::Sweep;
use super::usage::Usage;
use super::{SIZE_MAX, What, bare, get, leased, limit, resident};
use crate::cli::CliError;
use crate::cli::bench::Bench;
use crate::cli::bench::cpu::CpuTime;
use crate::config::Size;
use crate::memory::HostPool;

/// Bytes of the READ that a round trip is measured with.
const SMALL: u32 = 64;

/// For how long.
pub(super) const ROUND_TRIP_TIME: Duration = Duration::from_millis(200);

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

/// A sweep that runs.
pub(super) struct Run<'a> {
    pub(super) sweep: &'a Sweep,
    pub(super) holder: &'a mut Holder,
    pub(super) bench: &'a Bench,
    pub(super) report: &'a mut Report,
}

/// What bounds a row, beside its own window.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    round_trip: f64,
    reads_at_once: Option<usize>,
    sockets: Option<f64>,
}

impl Run<'_> {
    /// All rows of one fabric.
    pub(super) fn over<F: Wire + 'static>(
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
                        What::Get | What::Resident => self.get(point, bounds)?,
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
        let load =
            Load { size: SMALL, count: 1, batch: 1, depth: 1, run: 1, merge: true, time, seed: 1 };
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
                let longest = (!self.sweep.merge).then_some(size);
                let fabric = make(point.streams)?;
                readers.push(Box::new(leased::Reader::new(fabric, pool, &node, longest)?));
            }
            let mut readers = Readers::Given { readers: &mut readers, room };
            self.rows(point, (size, count), &mut readers, bounds)?;
        }
        Ok(())
    }

    /// Rows of a node's clients.
    fn get(&mut self, point: Point, bounds: Bounds) -> Result<(), CliError> {
        let mut started = None;
        for &size in &self.sweep.sizes {
            if self.bench.is_interrupted() {
                return Ok(());
            }
            let (count, holder) = match point.what {
                // It is there for its registry alone. The blocks of one size need all of a pool.
                What::Resident => {
                    started = None;
                    (0, self.holder.fill(point.transport, self.sweep.pool, (size, 1))?)
                }
                _ => self.filled(point, size)?,
            };
            let node = match &started {
                Some(node) => Arc::clone(node),
                None => {
                    let fabric = (point.transport, &self.sweep.device);
                    let memory = (self.sweep.pool / 4, point.streams);
                    let keeps = point.what == What::Resident;
                    let node = get::Reader::start(&holder, fabric, memory, keeps)?;
                    Arc::clone(started.insert(Arc::new(node)))
                }
            };
            let (count, mut readers) = match point.what {
                What::Resident => {
                    self.bench.say(&format!("saving blocks of {}", Size(u64::from(size))));
                    (node.save(size)?, Readers::Resident(node))
                }
                _ => (count, Readers::Node(node)),
            };
            self.rows(point, (size, count), &mut readers, bounds)?;
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
                let Sweep { run, merge, time, .. } = *self.sweep;
                let load = Load { size, count, batch, depth, run, merge, time, seed: 1 };
                let before = (readers.usage(true)?, self.holder.usage(true)?, Usage::own()?);
                let measured = readers.measure(&load, threads, self.bench)?;
                let own = Usage::own()? - before.2;
                let node = readers.usage(false)? - before.0;
                // Of this process only the threads that read count, and only while they do.
                let reader = Usage {
                    cpu: own.cpu + node.cpu,
                    data: node.data,
                    allocations: measured.allocations + node.allocations,
                };
                let holder = self.holder.usage(false)? - before.1;
                if !self.bench.is_interrupted() {
                    let row = self.row(point, &load, (&measured, reader, holder), bounds);
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
        (measured, reader, holder): (&Measured, Usage, Usage),
        bounds: Bounds,
    ) -> Row {
        let Load { size, batch, depth, run, merge, .. } = *load;
        let Point { what, transport, streams, threads } = point;
        let Measured { latency, blocks, hits, busy, posts, elapsed, .. } = measured;
        let (seconds, size_bytes) = (elapsed.as_secs_f64(), f64::from(size));
        let bytes = *blocks as f64 * size_bytes;
        let gib = (bytes / f64::from(1 << 30)).max(f64::MIN_POSITIVE);
        let micros = |share: f64| latency.at(share) / 1e3;
        let [.., max] = latency.percentiles();
        let per_block = |number: f64| number / (*blocks).max(1) as f64;
        let counted = |number: u64| (number > 0).then(|| per_block(number as f64));
        let in_flight = batch * depth * threads;
        let on_the_wire = bounds
            .reads_at_once
            .map_or(in_flight, |reads| in_flight.min(reads * streams * threads));
        let copies = self.report.copies.iter().find(|copies| copies.size == size);
        let copies = copies.map_or(0.0, |copies| copies.gb_s);
        // Bytes that stay where they are have no bandwidth, and nobody else takes part.
        let moves = what != What::Resident;
        let lends = matches!(what, What::Leased | What::Get) && holder.data != CpuTime::default();
        Row {
            what,
            transport,
            size,
            batch,
            depth,
            streams,
            threads,
            run,
            merge,
            blocks: *blocks,
            hits: *hits,
            busy: *busy,
            seconds,
            gb_s: moves.then_some(bytes / seconds / 1e9),
            blocks_s: *blocks as f64 / seconds,
            p50_us: micros(0.5),
            p90_us: micros(0.9),
            p99_us: micros(0.99),
            p999_us: micros(0.999),
            max_us: max / 1e3,
            reader_cpu_s_per_gib: moves.then_some(reader.cpu.seconds() / gib),
            holder_cpu_s_per_gib: moves.then_some(holder.cpu.seconds() / gib),
            reader_cpu_us_per_block: per_block(measured.cpu.seconds() * 1e6),
            holder_cpu_us_per_block: lends.then(|| per_block(holder.data.seconds() * 1e6)),
            reader_allocations_per_block: per_block(reader.allocations as f64),
            holder_allocations_per_block: moves.then(|| per_block(holder.allocations as f64)),
            works_per_block: counted(posts.works),
            doorbells_per_block: counted(posts.doorbells),
            window_gb_s: moves.then_some(on_the_wire as f64 * size_bytes / bounds.round_trip / 1e9),
            machine_gb_s: moves.then_some(bounds.sockets.unwrap_or(copies)),
        }
    }
}

/// Who reads.
enum Readers<'a> {
    /// One for each thread, with so many bytes each to read into.
    Given { readers: &'a mut [Box<dyn Subject>], room: u64 },
    /// Clients of a node, which are made as they are needed.
    Node(Arc<get::Reader>),
    /// The same for blocks that the node has.
    Resident(Arc<get::Reader>),
}

impl Readers<'_> {
    /// Bytes that one thread may have in flight.
    fn room(&self, pool: u64, threads: usize) -> u64 {
        match self {
            Self::Given { room, .. } => *room,
            // Half of the node's: what was read before is still there.
            Self::Node(_) | Self::Resident(_) => pool / 8 / threads as u64,
        }
    }

    /// What the node behind them has used so far; `start`: for the start of a row.
    fn usage(&self, start: bool) -> Result<Usage, CliError> {
        match self {
            Self::Given { .. } => Ok(Usage::default()),
            Self::Node(node) | Self::Resident(node) => node.usage(start),
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
            // A client waits for its answer, so what is in flight is a client each.
            Self::Node(node) => {
                let engine = || Box::new(get::Engine(Arc::clone(node))) as Box<dyn Subject>;
                let mut engines: Vec<_> = (0..threads * load.depth).map(|_| engine()).collect();
                together(&mut engines, load, bench)
            }
            Self::Resident(node) => {
                let engine = || Box::new(resident::Engine(Arc::clone(node))) as Box<dyn Subject>;
                let mut engines: Vec<_> = (0..threads * load.depth).map(|_| engine()).collect();
                together(&mut engines, load, bench)
            }
        }
    }
}
