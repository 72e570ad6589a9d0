//! One read of blocks that are not here: whom to ask for what, and when to give up.
//!
//! ```text
//! plan -> (plan others than busy owners) -> (plan anyone for what is left) -> lends -> next round
//! ```
//!
//! A round asks the registry, then the owners that it names, several lends at a time. What an owner does
//! not have is asked of the next one. What failed or was busy is tried once more: by another owner, or,
//! where there is none, by the same one, whose connection may have been stale.

use std::collections::VecDeque;

use super::Sources;
use super::lend::{Lend, Lent, lends_of};
use crate::limits;
use crate::peer::FetchOutcome;
use crate::protocol::door::Source;
use crate::registry::Plan;
use crate::types::{BlockKey, NodeId, Reach, Timestamp};

/// Leases that one read has in flight.
const LENDS_IN_FLIGHT: usize = 4;

/// Rounds of a read: the plan, one retry of what failed, and as many owners more as turn out not to
/// hold what they are listed for.
const ROUNDS: usize = 4;

/// How often a block may fail or be busy.
const TRIES: u8 = 2;

/// What to ask the registry: who holds these blocks?
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// The blocks, in the order of reading.
    pub keys: Vec<BlockKey>,
    /// Owners to leave out.
    pub avoid: Vec<NodeId>,
    /// Nodes on this host, which come first.
    pub same_host: Vec<NodeId>,
    /// Nodes on a rail of this node's, which come next.
    pub same_rail: Vec<NodeId>,
    /// Decides among equals.
    pub choice: u64,
}

/// What a read wants next.
#[derive(Debug)]
pub enum Step {
    /// A plan; [`Read::handle_plan`] answers.
    Ask(Question),
    /// Blocks of an owner; [`Read::handle_lent`] answers. There may be more to do meanwhile.
    Lend(Lend),
    /// Answers to what was asked.
    Wait,
    /// Nothing: its outcomes are final.
    Over,
}

/// What a plan that is asked for is to find.
#[derive(Debug)]
enum Aim {
    /// Owners of everything that is open.
    Owners,
    /// Others than the busy owners of these lends.
    Others(Vec<Lend>),
    /// Anyone, for what nobody else is left for. In the first round, those that are left alone, which
    /// say so at once.
    Anyone,
}

#[derive(Debug)]
struct Planning {
    aim: Aim,
    /// What is asked for, as positions in the read.
    positions: Vec<usize>,
    avoid: Vec<NodeId>,
    asked: bool,
}

#[derive(Debug)]
struct Running {
    waiting: VecDeque<Lend>,
    running: usize,
    /// Lends at a time.
    most: usize,
}

#[derive(Debug)]
enum Stage {
    Planning(Planning),
    Running(Running),
    Over,
}

/// A read of blocks that are not here.
#[derive(Debug)]
pub struct Read {
    keys: Vec<BlockKey>,
    source: Source,
    outcomes: Vec<FetchOutcome>,
    /// By position: how often it failed or was busy.
    tries: Vec<u8>,
    /// Whom this read does not ask again.
    avoid: Vec<NodeId>,
    /// Positions that an owner may still have.
    open: Vec<usize>,
    round: usize,
    /// The lends of this round, as far as they are planned.
    lends: Vec<Lend>,
    stage: Stage,
}

impl Read {
    /// A read of these blocks, in the order in which they are used, from where `source` allows.
    #[must_use]
    pub fn new(keys: Vec<BlockKey>, source: Source, sources: &Sources, now: Timestamp) -> Self {
        let blocks = keys.len();
        let mut read = Self {
            keys,
            source,
            outcomes: vec![FetchOutcome::NotFound; blocks],
            tries: vec![0; blocks],
            avoid: Vec::new(),
            open: (0..blocks).collect(),
            round: 0,
            lends: Vec::new(),
            stage: Stage::Over,
        };
        if blocks > 0 {
            read.begin_round(sources, now);
        }
        read
    }

    /// By position: what became of each block so far. One that is ready is final.
    #[must_use]
    pub fn outcomes(&self) -> &[FetchOutcome] {
        &self.outcomes
    }

    /// What to do next. Ask again until it is to wait, or over.
    pub fn poll(&mut self, sources: &mut Sources, now: Timestamp) -> Step {
        loop {
            match &mut self.stage {
                Stage::Over => return Step::Over,
                Stage::Planning(planning) if planning.asked => return Step::Wait,
                Stage::Planning(planning) => {
                    planning.asked = true;
                    let wanted = planning.positions.iter().filter_map(|at| self.keys.get(*at));
                    return Step::Ask(Question {
                        keys: wanted.copied().collect(),
                        avoid: planning.avoid.clone(),
                        same_host: sources.within(Reach::SameHost),
                        same_rail: sources.within(Reach::SameRail),
                        choice: sources.next_choice(),
                    });
                }
                Stage::Running(run) => {
                    if run.running < run.most
                        && let Some(lend) = run.waiting.pop_front()
                    {
                        run.running += 1;
                        return Step::Lend(lend);
                    }
                    if run.running > 0 {
                        return Step::Wait;
                    }
                    self.end_round(sources, now);
                }
            }
        }
    }

    /// The answer to [`Step::Ask`]; `None` where the registry gave none, which leaves these blocks
    /// without an owner.
    pub fn handle_plan(&mut self, plan: Option<&Plan>, sources: &mut Sources, now: Timestamp) {
        let mut planning = match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Planning(planning) if planning.asked => planning,
            other => {
                self.stage = other;
                return;
            }
        };
        let mut named = plan.map_or_else(Vec::new, |plan| lends_of(plan, &planning.positions));
        if let Source::From(node) = self.source {
            // Whoever is preferred to it is left out until it is named.
            let others = named.iter().map(|lend| lend.owner).filter(|owner| *owner != node);
            let room = planning.avoid.len() < limits::REGISTRY_AVOID_MAX;
            let others: Vec<NodeId> = others.filter(|_| room).collect();
            if !others.is_empty() {
                planning.avoid.extend(others);
                planning.avoid = distinct(planning.avoid);
                planning.asked = false;
                self.stage = Stage::Planning(planning);
                return;
            }
            named.retain(|lend| lend.owner == node);
        }
        match planning.aim {
            Aim::Owners => match self.others(&named, planning.avoid, sources, now) {
                Some((positions, avoid)) => self.ask(Aim::Others(named), positions, avoid),
                None => {
                    self.lends = sources.assign(named, &[], now);
                    self.ask_for_the_rest(sources, now);
                }
            },
            Aim::Others(first) => {
                self.lends = sources.assign(first, &named, now);
                self.ask_for_the_rest(sources, now);
            }
            Aim::Anyone => {
                self.lends.extend(sources.assign(named, &[], now));
                self.run();
            }
        }
    }

    /// The answer to [`Step::Lend`]. Answers the blocks that the owner is listed for and does not hold,
    /// which the registry should hear.
    #[must_use]
    pub fn handle_lent(
        &mut self,
        lend: &Lend,
        lent: &Lent,
        sources: &mut Sources,
        now: Timestamp,
    ) -> Vec<BlockKey> {
        sources.lent(lend, lent, now);
        let (mut missing, mut busy) = (Vec::new(), Vec::new());
        for (at, outcome) in lend.positions.iter().zip(&lent.outcomes) {
            match outcome {
                FetchOutcome::NotFound => missing.extend(self.keys.get(*at).copied()),
                FetchOutcome::Busy(_) => busy.push(*at),
                FetchOutcome::Ready { .. } | FetchOutcome::Failed(_) => {}
            }
            if let Some(slot) = self.outcomes.get_mut(*at) {
                *slot = *outcome;
            }
        }
        let left_alone = sources.is_suspended(lend.owner, now);
        // One that leaves, or is left alone, is not asked again; neither is one that disappointed.
        if left_alone || lent.outcomes.iter().any(FetchOutcome::is_disappointing) {
            self.avoid.push(lend.owner);
        }
        let Stage::Running(run) = &mut self.stage else { return missing };
        run.running = run.running.saturating_sub(1);
        if !left_alone && !busy.is_empty() && run.running > 0 {
            // What was busy because of our own other lends is asked for again behind them, with
            // fewer at a time. Busy for a lend that was alone is the answer.
            run.most = (run.most / 2).max(1);
            let again = Lend { positions: busy, ..lend.clone() };
            run.waiting.extend(sources.assign(vec![again], &[], now));
        }
        missing
    }

    /// A lend ended without an answer: its blocks stay as they were.
    pub fn handle_lost(&mut self) {
        if let Stage::Running(run) = &mut self.stage {
            run.running = run.running.saturating_sub(1);
        }
    }

    fn ask(&mut self, aim: Aim, positions: Vec<usize>, avoid: Vec<NodeId>) {
        self.stage = Stage::Planning(Planning { aim, positions, avoid, asked: false });
    }

    fn begin_round(&mut self, sources: &Sources, now: Timestamp) {
        let mut avoid = self.avoid.clone();
        if !matches!(self.source, Source::From(_)) {
            avoid.extend(sources.suspended(now));
        }
        self.ask(Aim::Owners, self.open.clone(), distinct(avoid));
    }

    /// What to ask others than the busy ones of these owners for, and whom to leave out then. A read
    /// that is long enough makes its owner busy by itself.
    fn others(
        &self,
        first: &[Lend],
        mut avoid: Vec<NodeId>,
        sources: &Sources,
        now: Timestamp,
    ) -> Option<(Vec<usize>, Vec<NodeId>)> {
        if matches!(self.source, Source::From(_)) {
            return None;
        }
        let long = |owner: NodeId| first.iter().filter(|lend| lend.owner == owner).count() > 1;
        let mut positions = Vec::new();
        for lend in first {
            let is_loaded = sources.is_busy(lend.owner, now) || long(lend.owner);
            if is_loaded && sources.has_rivals(lend.owner) {
                positions.extend_from_slice(&lend.positions);
                avoid.push(lend.owner);
            }
        }
        avoid.sort_unstable();
        avoid.dedup();
        let fits = avoid.len() <= limits::REGISTRY_AVOID_MAX;
        (!positions.is_empty() && fits).then_some((positions, avoid))
    }

    /// Plans what no owner was found for that is not to be avoided, or goes on to the lends.
    fn ask_for_the_rest(&mut self, sources: &Sources, now: Timestamp) {
        let mut covered = vec![false; self.keys.len()];
        for at in self.lends.iter().flat_map(|lend| &lend.positions) {
            if let Some(covered) = covered.get_mut(*at) {
                *covered = true;
            }
        }
        let worthy = |at: &usize| match self.outcomes.get(*at) {
            Some(FetchOutcome::Busy(_) | FetchOutcome::Failed(_)) => true,
            _ => self.round == 0,
        };
        let open = self.open.iter().filter(|at| covered.get(**at) == Some(&false));
        let rest: Vec<usize> = open.filter(|at| worthy(at)).copied().collect();
        if !rest.is_empty() && (self.round > 0 || sources.leaves_anyone_alone(now)) {
            self.ask(Aim::Anyone, rest, Vec::new());
        } else {
            self.run();
        }
    }

    fn run(&mut self) {
        let waiting = VecDeque::from(std::mem::take(&mut self.lends));
        self.stage = match waiting.is_empty() {
            true => Stage::Over,
            false => Stage::Running(Running { waiting, running: 0, most: LENDS_IN_FLIGHT }),
        };
    }

    /// Counts a try of each position that is still open, and goes on with those that have another one.
    fn end_round(&mut self, sources: &Sources, now: Timestamp) {
        let (outcomes, tries) = (&self.outcomes, &mut self.tries);
        self.open.retain(|at| match (outcomes.get(*at), tries.get_mut(*at)) {
            (Some(FetchOutcome::NotFound), _) => true,
            (Some(FetchOutcome::Busy(_) | FetchOutcome::Failed(_)), Some(tries)) => {
                *tries += 1;
                *tries < TRIES
            }
            _ => false,
        });
        self.round += 1;
        self.stage = Stage::Over;
        if !self.open.is_empty() && self.round < ROUNDS {
            self.begin_round(sources, now);
        }
    }
}

/// Each once, and as many as a plan can be told to avoid.
fn distinct(mut nodes: Vec<NodeId>) -> Vec<NodeId> {
    nodes.sort_unstable();
    nodes.dedup();
    nodes.truncate(limits::REGISTRY_AVOID_MAX);
    nodes
}
