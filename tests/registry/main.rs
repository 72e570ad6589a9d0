//! What every form of the owner registry promises, held against each of them: in this process, over
//! gRPC, on a Redis server, and on a Redis cluster of three.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "tests and their helpers fail by panicking"
)]

mod cases;
mod forms;
mod model;
#[expect(dead_code, reason = "a bench uses more of it")]
mod redis_server;

use std::time::Duration;

use forms::Form;

/// Long enough that no node of a case is taken for dead on a loaded machine.
const LEASE: Duration = Duration::from_secs(60);

/// So short that a silent node is soon taken for dead.
const SHORT_LEASE: Duration = Duration::from_millis(500);

fn holds(start: impl Fn(Duration) -> Form) {
    let form = start(LEASE);
    form.runtime.block_on(cases::all(&form));
    model::answers_as_the_model(&form);
    drop(form);
    let form = start(SHORT_LEASE);
    form.runtime.block_on(cases::a_silent_node_owns_nothing(&form));
}

#[test]
fn the_registry_in_this_process_keeps_its_promises() {
    holds(Form::in_process);
}

#[test]
fn the_registry_over_grpc_keeps_its_promises() {
    holds(Form::grpc);
}

#[test]
fn the_registry_on_redis_keeps_its_promises() {
    if redis_server::is_there() {
        holds(Form::redis);
    }
}

#[test]
fn the_registry_on_a_redis_cluster_keeps_its_promises() {
    if redis_server::is_there() {
        holds(Form::redis_cluster);
    }
}
