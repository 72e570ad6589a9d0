//! Stand-ins for the real world, for tests: faults at chosen steps.

pub mod fault;
