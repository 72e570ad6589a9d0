//! Generates the gRPC code of the registry.

fn main() {}
