//! The network beside the fabric: the gRPC form of the registry, both the client and what the server
//! shares with it, and the form on Redis or Valkey.

mod codec;
mod grpc;
mod redis;
pub mod wire;

pub use codec::{
    decode_digests, decode_keys, decode_node, encode_digests, encode_keys, error_of, status_of,
};
pub use grpc::{GrpcRegistry, RegistryTimeouts};
pub use redis::RedisRegistry;
