//! Keys of their own on a real device.

#[allow(dead_code, unused_imports, unused_macros, reason = "the other tests want no windows")]
mod conformance;
#[allow(dead_code, reason = "the other tests want no windows")]
mod rdma;

use rdma::{Lanes, device};

type Windows = Lanes<3, true>;

/// Makes one `#[test]` per function of the suite, which runs where there is a device.
macro_rules! on_a_device {
    ($($name:ident $(($argument:expr))?),+ $(,)?) => {
        $(
            #[test]
            fn $name() {
                if device().is_some() {
                    conformance::$name::<Windows>($($argument)?);
                }
            }
        )+
    };
}

on_a_device!(
    a_key_reads_its_span_and_no_byte_more,
    a_regions_own_key_reads_nothing,
    a_key_ends_and_the_others_of_its_peer_go_on,
    a_key_of_another_connection_reads_nothing,
    a_window_is_granted_again_and_again(10_000),
    a_message_after_a_grant_finds_the_key_at_work,
    windows_are_bounded_and_granted_once,
    a_deregistration_ends_the_keys_of_its_region,
    a_closed_connection_takes_its_keys_along,
);
