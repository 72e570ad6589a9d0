//! The switch of a module's deliberate faults.

/// Defines `is` and `set` for a type of faults, beside it. `set` breaks a rule in this thread, from now
/// on, and `is` asks for it; outside of tests nothing is left of the question.
macro_rules! fault_switch {
    ($fault:ty) => {
        #[cfg(not(test))]
        pub(super) const fn is(_: $fault) -> bool {
            false
        }

        #[cfg(test)]
        thread_local! {
            static ACTIVE: std::cell::Cell<Option<$fault>> = const { std::cell::Cell::new(None) };
        }

        #[cfg(test)]
        pub(super) fn set(fault: Option<$fault>) {
            ACTIVE.set(fault);
        }

        #[cfg(test)]
        pub(super) fn is(fault: $fault) -> bool {
            ACTIVE.get() == Some(fault)
        }
    };
}

pub(crate) use fault_switch;
