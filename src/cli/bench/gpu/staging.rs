//! Staging: slots of pinned memory that go to the GPU and come from it, as many at a time as the ring
//! holds, each copy's end told by its event.

use std::sync::Arc;

use super::measure::in_turn;
use super::report::{Report, Row};
use super::{Run, pattern};
use crate::cli::CliError;
use crate::cuda::{Bound, CudaError, Staging, StagingCopy};

/// Slots that the ring holds of the longest kind.
const SLOTS: u64 = 4;

/// Measures both ways at each size.
pub(super) fn run(run: &mut Run<'_>, report: &mut Report) -> Result<(), CliError> {
    let longest = run.sizes.blocks.iter().copied().max().unwrap_or_default();
    let ring = u64::from(longest) * SLOTS;
    let mut staging = Staging::new(run.bound, &run.beside, ring).map_err(CliError::failed)?;
    for way in [StagingCopy::ToDevice, StagingCopy::FromDevice] {
        for bytes in run.sizes.blocks.clone() {
            if run.is_over() {
                return Ok(());
            }
            let row = row(run, &mut staging, way, bytes)?;
            report.rows.push(row);
            run.bench.step();
        }
    }
    Ok(())
}

fn row(
    run: &mut Run<'_>,
    staging: &mut Staging<u32>,
    way: StagingCopy,
    bytes: u32,
) -> Result<Row, CliError> {
    let batch = run.sizes.batch;
    let medians = {
        let mut driver = |run: &mut Run<'_>| {
            let (bound, beside, len) = (run.bound, Arc::clone(&run.beside), bytes as usize);
            for _slot in 0..batch / bytes {
                match way {
                    StagingCopy::ToDevice => run.pinned.copy_to(bound, &beside, len),
                    StagingCopy::FromDevice => run.pinned.copy_from(bound, &beside, len),
                }
                .map_err(CliError::failed)?;
            }
            Ok(None)
        };
        let mut kvrail = |run: &mut Run<'_>| {
            let passed = pass(run.bound, staging, way, (bytes, batch), &mut |_, _, _| Ok(()));
            passed.map_err(CliError::failed).map(|()| None)
        };
        in_turn(run, &mut driver, &mut kvrail)?
    };
    let what = match way {
        StagingCopy::ToDevice => "staging in",
        StagingCopy::FromDevice => "staging out",
    };
    let wrong = !is_right(run, staging, way, bytes)?;
    Ok(Row::new((what, "in one piece"), (bytes.into(), batch.into()), medians, wrong))
}

/// What is done with a slot, by its number: before it goes to the GPU, after it came from there.
type Touch<'t> = &'t mut dyn FnMut(&Staging<u32>, u64, u32) -> Result<(), CudaError>;

/// Lets a batch of slots through, in order.
fn pass(
    bound: &Bound<'_>,
    staging: &mut Staging<u32>,
    way: StagingCopy,
    (bytes, batch): (u32, u32),
    touch: Touch<'_>,
) -> Result<(), CudaError> {
    let (mut begun, mut ended, count) = (0, 0, batch / bytes);
    let mut arrived = Vec::new();
    while ended < count {
        while begun < count {
            let Some(slot) = staging.take(bytes.into()) else { break };
            if way == StagingCopy::ToDevice {
                touch(staging, slot.offset(), begun)?;
            }
            let at = u64::from(begun) * u64::from(bytes);
            staging.begin(bound, way, (slot, at), begun).map_err(|(error, _back)| error)?;
            begun += 1;
        }
        staging.poll(bound, |slot, number| arrived.push((slot, number)))?;
        for (slot, number) in arrived.drain(..) {
            if way == StagingCopy::FromDevice {
                touch(staging, slot.offset(), number)?;
            }
            ended += 1;
        }
    }
    Ok(())
}

/// Whether a batch arrives as it was sent, by the driver's own copy of the other side.
fn is_right(
    run: &mut Run<'_>,
    staging: &mut Staging<u32>,
    way: StagingCopy,
    bytes: u32,
) -> Result<bool, CliError> {
    let (bound, batch, beside) = (run.bound, run.sizes.batch, Arc::clone(&run.beside));
    let len = (batch - batch % bytes) as usize;
    let sent = pattern(&format!("staged {bytes} {way:?}"), len);
    let slot = |number: u32| sent.chunks(bytes as usize).nth(number as usize).unwrap_or_default();
    let mut right = true;
    let checked = match way {
        StagingCopy::ToDevice => {
            pass(bound, staging, way, (bytes, batch), &mut |staging, offset, number| {
                Ok(staging.mapping().write(offset, slot(number))?)
            })
            .and_then(|()| run.pinned.copy_from(bound, &beside, len))
            .and_then(|()| {
                let mut arrived = vec![0; len];
                run.pinned.read(&mut arrived)?;
                right = arrived == sent;
                Ok(())
            })
        }
        StagingCopy::FromDevice => {
            run.pinned.write(&sent).map_err(CliError::failed)?;
            run.pinned.copy_to(bound, &beside, len).map_err(CliError::failed)?;
            let mut arrived = vec![0; bytes as usize];
            pass(bound, staging, way, (bytes, batch), &mut |staging, offset, number| {
                staging.mapping().read(offset, &mut arrived)?;
                right &= arrived == slot(number);
                Ok(())
            })
        }
    };
    checked.map_err(CliError::failed)?;
    Ok(right)
}
