//! `kvrail bench store` with the caches of other crates beside our own two contenders. Same loads,
//! same arguments, same report: `cargo bench --bench store -- --help`.

mod contender;

use std::process::ExitCode;

use kvrail::cli::bench::store::{Entrant, main_with};

use contender::{Foyer, Lru, Moka, PegaFlow, Quick};

const OTHERS: [Entrant; 5] = [
    Entrant::plain::<Lru>("hashlink"),
    Entrant::plain::<PegaFlow>("pegaflow"),
    Entrant::plain::<Moka>("moka"),
    Entrant::plain::<Foyer>("foyer"),
    Entrant::plain::<Quick>("quick_cache"),
];

fn main() -> ExitCode {
    main_with(std::env::args_os(), &OTHERS)
}
