//! The style of this project as a test: layers, lengths, banned calls, unsafe code, documents.
//!
//! Each check is a function from files to complaints, and each complaint says what to do. A check is
//! fed bad examples beside its definition, so that one which can no longer fail is found.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that meets the unexpected fails"
)]

#[path = "tidy/layers.rs"]
mod layers;
#[path = "tidy/source.rs"]
mod source;
#[path = "tidy/text.rs"]
mod text;

use source::{Source, project, without_tests};

fn modules(files: &[Source]) -> Vec<layers::Module> {
    let lib = files.iter().find(|file| file.path == "src/lib.rs").unwrap();
    layers::order(&lib.text).unwrap()
}

fn none(complaints: &[String]) {
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

#[test]
fn modules_use_only_modules_above_them() {
    let files = project();
    none(&layers::arrows(&files, &modules(&files)));
}

#[test]
fn layers_call_only_what_they_may() {
    let files = project();
    none(&layers::banned(&without_tests(&files), &modules(&files)));
}

#[test]
fn unsafe_code_stays_in_machines_and_says_why() {
    let files = project();
    none(&layers::unsafety(&files, &modules(&files)));
}

#[test]
fn every_event_is_emitted_somewhere() {
    none(&layers::silent_events(&without_tests(&project())));
}

#[test]
fn files_and_functions_are_short() {
    none(&text::lengths(&project()));
}

#[test]
fn nothing_is_left_unfinished() {
    none(&text::leftovers(&project()));
}

#[test]
fn every_path_that_a_document_names_exists() {
    none(&text::dead_paths(&project()));
}

#[test]
fn files_hold_on_any_machine() {
    none(&text::machine_traces(&project()));
}
