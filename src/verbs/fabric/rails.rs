//! Rails: the pairs of NICs that the lanes of one connection go over, and the proof of each.
//!
//! Messages prove theirs by a READ ([`super::probe`]). Over the first lane of each other one both ends
//! send the pattern, at the same time as that READ. A rail that does not carry it is left out: its
//! lanes go, at both ends, since each end tells the other one in its READY which lanes work. What is
//! left is numbered anew, alike at both ends.

use super::connection::{Connection, Path, Stage, Surroundings};
use super::device::Device;
use super::hello::{Card, Hello};
use super::link::Link;
use super::nics::Nics;
use super::pairing::Reason;
use super::probe::PathEnds;
use crate::fabric::{EventBatch, Lack, LackReason, Rail as Told};
use crate::limits::{NICS_MAX, STREAMS_MAX};
use crate::sys::avoided::Avoided;
use crate::sys::connections::Broken;
use crate::types::Timestamp;
use crate::verbs::VerbsError;

const _: () = assert!(STREAMS_MAX <= 32, "lanes are bits of a u32");

/// Where the trial of a rail is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trial {
    /// It is not tried, or not yet: messages go over it, or it waits for its turn.
    None,
    /// The pattern is on its way.
    Running,
    /// It has failed.
    Failed,
}

/// A pair of NICs.
#[derive(Debug)]
pub(super) struct RailState {
    nic: u8,
    peer: u8,
    ends: PathEnds,
    reason: Option<Reason>,
    /// Whether the READ of the pattern goes over it.
    by_messages: bool,
    trial: Trial,
}

impl Link {
    /// Notes the rails, and waits for the peer's pattern on each that messages do not prove. Queue pairs
    /// may receive.
    pub(super) fn lay_rails(&mut self, nics: &Nics, peer: &Hello) -> Result<(), VerbsError> {
        let talks = self.seats.first().map(|seat| (seat.nic, seat.peer));
        for (lane, seat) in self.lanes.iter().zip(self.seats.iter().skip(1)) {
            let known = |rail: &RailState| (rail.nic, rail.peer) == (seat.nic, seat.peer);
            let card: Option<&Card> = peer.cards().get(usize::from(seat.peer));
            let Some((device, card)) = nics.get(seat.nic).zip(card) else { continue };
            if self.rails.iter().any(known) {
                continue;
            }
            let by_messages = talks == Some((seat.nic, seat.peer));
            if !by_messages {
                lane.await_probe(device)?;
            }
            self.rails.push(RailState {
                nic: seat.nic,
                peer: seat.peer,
                ends: PathEnds::new(device, card, self.path_mtu(device, card, seat.nic)),
                reason: seat.reason,
                by_messages,
                trial: Trial::None,
            });
        }
        Ok(())
    }

    /// Sends the pattern over each rail that messages do not prove.
    pub(super) fn try_rails(&mut self, nics: &Nics) {
        for rail in self.rails.iter_mut().filter(|rail| !rail.by_messages) {
            let over = |lane: &&mut super::lane::Lane| {
                (lane.rail().nic, lane.rail().peer) == (rail.nic, rail.peer)
            };
            let lane = self.lanes.iter_mut().find(over);
            let Some((lane, device)) = lane.zip(nics.get(rail.nic)) else { continue };
            rail.trial = match lane.send_probe(device) {
                Ok(()) => Trial::Running,
                Err(error) => {
                    rail.ends.left_out(&error.to_string());
                    Trial::Failed
                }
            };
        }
    }

    /// Whether a rail's trial has no end yet.
    pub(super) fn tries_rails(&self) -> bool {
        self.rails.iter().any(|rail| rail.trial == Trial::Running)
    }

    /// The trial over a lane has ended.
    fn tried(&mut self, lane: u8, good: bool) {
        let Some(over) = self.lanes.get(usize::from(lane)).map(super::lane::Lane::rail) else {
            return;
        };
        let rail =
            self.rails.iter_mut().find(|rail| (rail.nic, rail.peer) == (over.nic, over.peer));
        let Some(rail) = rail.filter(|rail| rail.trial == Trial::Running) else { return };
        rail.trial = if good { Trial::None } else { Trial::Failed };
        if !good {
            rail.ends.left_out("what this end sent over it was not answered");
        }
    }

    /// Trials that have not ended by now have failed.
    fn stop_trials(&mut self) {
        for rail in self.rails.iter_mut().filter(|rail| rail.trial == Trial::Running) {
            rail.trial = Trial::Failed;
            rail.ends.left_out("what this end sent over it was not answered in time");
        }
    }

    /// Lanes whose rails have not failed, as bits.
    fn working(&self) -> u32 {
        let failed = |lane: &super::lane::Lane| {
            self.rails.iter().any(|rail| {
                rail.trial == Trial::Failed
                    && (rail.nic, rail.peer) == (lane.rail().nic, lane.rail().peer)
            })
        };
        let bits = self.lanes.iter().enumerate().filter(|(_, lane)| !failed(lane));
        bits.fold(0, |bits, (at, _)| bits | 1 << at)
    }

    /// Whether these bits name lanes, and at least one.
    fn may_keep(&self, working: u32) -> bool {
        working != 0 && u64::from(working) >> self.lanes.len() == 0
    }

    /// Destroys the other lanes. Answers the NICs that are left without one.
    fn keep(&mut self, working: u32) -> Vec<u8> {
        let kept = |at: usize| working >> at & 1 == 1;
        let mut at = 0;
        self.lanes.retain(|_| {
            at += 1;
            kept(at - 1)
        });
        for list_at in (0..self.seats.len().saturating_sub(1)).rev() {
            if !kept(list_at) {
                self.seats.remove(1 + list_at);
                self.psns.remove(1 + list_at);
            }
        }
        (0..).zip(&mut self.lanes).for_each(|(index, lane)| lane.renumber(index));
        let lanes = &self.lanes;
        self.rails.retain(|rail| {
            let goes_on = lanes
                .iter()
                .any(|lane| (lane.rail().nic, lane.rail().peer) == (rail.nic, rail.peer));
            if !goes_on && rail.trial != Trial::Failed {
                rail.ends.left_out("what the peer sent over it was not answered");
            }
            goes_on
        });
        let before: Vec<u8> = self.queues.iter().map(|queue| queue.nic).collect();
        let seats = &self.seats;
        self.queues.retain(|queue| seats.iter().any(|seat| seat.nic == queue.nic));
        before.into_iter().filter(|nic| !self.uses(*nic)).collect()
    }

    /// The rails, for people.
    pub(super) fn told(&self, nics: &Nics) -> Vec<Told> {
        let lanes = |rail: &RailState| {
            let over = self.lanes.iter().map(super::lane::Lane::rail);
            over.filter(|lane| (lane.nic, lane.peer) == (rail.nic, rail.peer)).count()
        };
        let one = |rail: &RailState| Told {
            local: nics.get(rail.nic).map_or("", Device::name).to_owned(),
            remote: rail.ends.peer_device().to_owned(),
            queue_pairs: lanes(rail),
            reason: rail.reason.map(|reason| reason.to_string()).unwrap_or_default(),
        };
        self.rails.iter().map(one).collect()
    }
}

impl Connection {
    /// It is made without those NICs of ours that `which` picks.
    pub(super) fn leave_nics_out(&mut self, around: &Surroundings<'_>, which: impl Fn(u8) -> bool) {
        let out = (0..).take(around.nics.devices.len()).filter(|nic| which(*nic));
        self.left_out = out.fold(0, |bits, nic| bits | 1 << nic);
    }

    /// NICs of ours that it goes without because they did not work when it was made.
    pub(super) fn lacks(&self, nics: &Nics, avoided: &Avoided<Path>, now: Timestamp) -> Vec<Lack> {
        let Some(link) = self.link.as_ref().filter(|_| self.is_open()) else { return Vec::new() };
        let lost = |nic: &u8| self.left_out >> nic & 1 == 1 && !link.uses(*nic);
        let lack = |nic: u8| {
            let device = nics.get(nic)?;
            let fails = self.path(nic).is_some_and(|path| avoided.contains(&path, now));
            let reason = match () {
                () if device.gone => LackReason::Gone,
                () if !device.up => LackReason::Down,
                () if fails => LackReason::Failed,
                () => LackReason::None,
            };
            Some(Lack { local: device.name().to_owned(), reason })
        };
        (0..).take(NICS_MAX).filter(lost).filter_map(lack).collect()
    }

    /// The READ of the pattern and the trials of rails begin.
    pub(super) fn start_probes(&mut self, around: &Surroundings<'_>) -> Result<(), VerbsError> {
        self.stage = Stage::Probe;
        // The other half is for the other end's probes.
        self.trials_end = around.now + self.deadline.since(around.now) / 2;
        let Some(link) = &mut self.link else { return Ok(()) };
        link.start_probe()?;
        link.try_rails(around.nics);
        Ok(())
    }

    /// The trial over a lane has ended.
    pub(super) fn take_trial(
        &mut self,
        lane: u8,
        good: bool,
        around: &mut Surroundings<'_>,
        batch: &mut EventBatch,
    ) -> Result<(), Broken> {
        if self.stage != Stage::Probe || self.broken.is_some() {
            return Ok(());
        }
        self.link.as_mut().ok_or(Broken::UNREACHABLE)?.tried(lane, good);
        self.end_probes(around, batch)
    }

    /// Whether trials run that had time enough.
    pub(super) fn has_late_trials(&self, now: Timestamp) -> bool {
        self.stage == Stage::Probe
            && self.broken.is_none()
            && now >= self.trials_end
            && self.link.as_ref().is_some_and(Link::tries_rails)
    }

    /// Goes on without the rails whose trials have not ended.
    pub(super) fn stop_trials(
        &mut self,
        around: &mut Surroundings<'_>,
        batch: &mut EventBatch,
    ) -> Result<(), Broken> {
        self.link.as_mut().ok_or(Broken::UNREACHABLE)?.stop_trials();
        self.end_probes(around, batch)
    }

    /// Where all probes have ended: says which lanes work, and goes on.
    pub(super) fn end_probes(
        &mut self,
        around: &mut Surroundings<'_>,
        batch: &mut EventBatch,
    ) -> Result<(), Broken> {
        let link = self.link.as_mut().ok_or(Broken::UNREACHABLE)?;
        if !link.is_proven || link.tries_rails() {
            return Ok(());
        }
        let working = link.working();
        self.keep_lanes(working, around)?;
        let link = self.link.as_mut().ok_or(Broken::UNREACHABLE)?;
        link.messages.ready(working).map_err(|error| self.exhausted(&error))?;
        if self.announced {
            self.stage = Stage::Ready;
        } else {
            self.open(batch);
        }
        Ok(())
    }

    /// Only these lanes work, as one end has found.
    pub(super) fn keep_lanes(
        &mut self,
        working: u32,
        around: &mut Surroundings<'_>,
    ) -> Result<(), Broken> {
        let link = self.link.as_mut().ok_or(Broken::UNREACHABLE)?;
        if !link.may_keep(working) {
            return Err(Broken::VIOLATION);
        }
        for nic in link.keep(working) {
            self.left_out |= 1 << nic;
            if let Some(path) = self.path(nic) {
                around.avoided.add(path, around.now);
            }
        }
        Ok(())
    }
}
