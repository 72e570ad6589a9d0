//! The `kvrail` command.

fn main() {}
