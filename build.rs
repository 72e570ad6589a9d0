//! Generates the gRPC code of the registry. The descriptors come from `protox`, so that no `protoc`
//! is needed.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let proto = "src/net/registry.proto";
    println!("cargo::rerun-if-changed={proto}");
    println!("cargo::rerun-if-changed=build.rs");
    let descriptors = protox::compile([proto], ["src/net"])?;
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}
