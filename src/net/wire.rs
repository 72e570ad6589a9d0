//! The generated messages, client and server of `registry.proto`.
#![allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    clippy::pedantic,
    clippy::allow_attributes_without_reason,
    reason = "generated code; its documentation is the proto file"
)]

tonic::include_proto!("kvrail.registry.v1");
