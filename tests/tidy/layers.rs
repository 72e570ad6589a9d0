//! The order of the layers, and what each may call.

use crate::source::{Source, line_of, words};

/// The layers of DESIGN §3, from the words outwards.
const LAYERS: [&str; 7] = ["words", "port", "cores", "machines", "pace", "services", "shell"];

/// A module as `lib.rs` declares it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Module {
    pub(crate) name: String,
    /// Index into [`LAYERS`].
    pub(crate) layer: usize,
}

/// The modules in their order, or what is wrong with `lib.rs`.
pub(crate) fn order(lib: &str) -> Result<Vec<Module>, String> {
    let mut layer = None;
    let mut modules = Vec::new();
    for line in lib.lines().map(str::trim) {
        let heading = line
            .strip_prefix("// ")
            .and_then(|text| text.split_once(':'))
            .and_then(|(name, _)| LAYERS.iter().position(|layer| *layer == name));
        if let Some(next) = heading {
            if layer.is_some_and(|last| last >= next) {
                return Err(format!("src/lib.rs: layer {} stands too late", LAYERS[next]));
            }
            layer = Some(next);
        }
        let declared = line.strip_prefix("pub ").unwrap_or(line);
        if let Some(name) = declared.strip_prefix("mod ").and_then(|it| it.strip_suffix(';')) {
            let layer = layer.ok_or(format!("src/lib.rs: {name} stands under no layer"))?;
            modules.push(Module { name: name.to_owned(), layer });
        }
    }
    Ok(modules)
}

/// Names of top-level modules that `code` refers to, with their offsets.
fn references(file: &Source) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for at in words(&file.code, "crate::") {
        let rest = &file.code[at + "crate::".len()..];
        for name in heads(rest) {
            found.push((at, name));
        }
    }
    if file.is_module_root() {
        // Above the root of a module is the crate.
        for (at, _) in file.code.match_indices("\nuse super::") {
            let rest = &file.code[at + "\nuse super::".len()..];
            found.extend(heads(rest).into_iter().map(|name| (at + 1, name)));
        }
    }
    found
}

/// The first words of a path, or of each path of a braced list.
fn heads(rest: &str) -> Vec<String> {
    let word = |text: &str| -> String {
        text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
    };
    let Some(list) = rest.strip_prefix('{') else {
        return vec![word(rest)];
    };
    let mut depth = 0_i32;
    let mut names = Vec::new();
    let mut start = true;
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => start = true,
            _ if start && !c.is_whitespace() => {
                names.push(word(&list[at..]));
                start = false;
            }
            _ => {}
        }
    }
    names
}

/// Whether a file holds tests of the module that it belongs to. What drives a core in a test, a
/// simulated fabric for example, may lie below it.
fn is_test(path: &str) -> bool {
    path.contains("/tests/") || path.ends_with("tests.rs")
}

/// References that run back up the order of `lib.rs`.
pub(crate) fn arrows(files: &[Source], modules: &[Module]) -> Vec<String> {
    let place = |name: &str| modules.iter().position(|module| module.name == name);
    let mut wrong = Vec::new();
    for file in files.iter().filter(|file| !is_test(&file.path)) {
        let Some(own) = file.module() else { continue };
        let Some(here) = place(own) else {
            wrong.push(format!("{}: src/lib.rs does not declare {own}", file.path));
            continue;
        };
        for (at, name) in references(file) {
            if place(&name).is_some_and(|there| there > here) {
                wrong.push(format!(
                    "{}:{}: {own} uses {name}, which src/lib.rs declares below it. Move what is \
                     shared up into a module that both may use, or take it as an argument or trait.",
                    file.path,
                    line_of(&file.code, at)
                ));
            }
        }
    }
    wrong
}

const CORES: usize = 2;
const MACHINES: usize = 3;
const PACE: usize = 4;
const SHELL: usize = 6;

/// Paths that code may not use above a layer, and what to do instead.
const BANNED: [(&str, usize, &str); 20] = [
    ("std::thread", MACHINES, "the core is handed calls; threads belong to runtime"),
    ("thread::spawn", MACHINES, "the core is handed calls; threads belong to runtime"),
    ("std::net", MACHINES, "the core takes and gives plain data; sockets belong to machines"),
    ("std::fs", MACHINES, "files belong to machines and the shell"),
    ("std::os", MACHINES, "descriptors belong to machines"),
    ("std::process", MACHINES, "processes belong to the shell"),
    ("Instant", MACHINES, "time is an argument: take a types::Timestamp"),
    ("SystemTime", MACHINES, "time is an argument: take a types::Timestamp"),
    ("rustix::", MACHINES, "system calls belong to machines"),
    ("libc::", MACHINES, "system calls belong to machines"),
    ("memmap2::", MACHINES, "mappings belong to memory"),
    ("getrandom::", MACHINES, "randomness is an argument"),
    ("tokio::", MACHINES, "the core is synchronous and has no runtime"),
    ("tonic::", MACHINES, "the core knows no transport"),
    ("tracing::", MACHINES, "emit an event::Event; logs are made from events"),
    ("std::env", SHELL, "settings are parsed once, in config; take them as an argument"),
    ("env::var", SHELL, "settings are parsed once, in config; take them as an argument"),
    ("clap::", SHELL, "settings are parsed once, in config; take them as an argument"),
    ("axum::", PACE, "HTTP belongs to runtime"),
    ("metrics::", SHELL, "emit an event::Event; metrics are made from events"),
];

/// Uses of what a file's layer may not use. Expects files without their tests.
pub(crate) fn banned(files: &[Source], modules: &[Module]) -> Vec<String> {
    let mut wrong = Vec::new();
    for file in files {
        let own = file.module();
        let Some(module) = modules.iter().find(|it| Some(&*it.name) == own) else {
            continue;
        };
        for (path, from, instead) in BANNED {
            if module.layer >= from {
                continue;
            }
            for at in words(&file.code, path) {
                // `crate::metrics::` is a module of ours; the order of the layers has a say there.
                let ours = path == "metrics::" && file.code[..at].ends_with("::");
                if !ours {
                    let line = line_of(&file.code, at);
                    wrong.push(format!("{}:{line}: {path} is banned here: {instead}", file.path));
                }
            }
        }
    }
    wrong
}

/// Cores that do not forbid unsafe code, `unsafe` outside machines, and `unsafe` without reasons.
pub(crate) fn unsafety(files: &[Source], modules: &[Module]) -> Vec<String> {
    let mut wrong = Vec::new();
    for file in files {
        let own = file.module();
        let Some(module) = modules.iter().find(|it| Some(&*it.name) == own) else {
            continue;
        };
        let forbids = file.code.contains("#![forbid(unsafe_code)]");
        if module.layer == CORES && file.is_module_root() && !forbids {
            wrong.push(format!("{}: a core begins with #![forbid(unsafe_code)]", file.path));
        }
        let unsafes = || words(&file.code, "unsafe").filter(|at| !is_type(&file.code[*at..]));
        for at in unsafes() {
            let line = line_of(&file.code, at);
            let place = format!("{}:{line}", file.path);
            if module.layer != MACHINES {
                wrong.push(format!("{place}: unsafe code belongs to a module of machines"));
            } else if !explained(&file.text, line) {
                wrong.push(format!(
                    "{place}: say in a SAFETY comment above each precondition and why it holds \
                     (# Safety for an unsafe fn)"
                ));
            }
        }
        let opens = unsafes().next().is_some();
        if opens && module.layer == MACHINES && !file.text.contains("unsafe_code,") {
            wrong.push(format!(
                "{}: open the room with #![expect(unsafe_code, reason = …)]",
                file.path
            ));
        }
    }
    wrong
}

/// Whether this `unsafe` is a part of a function pointer's type, which does nothing by itself. The
/// name of the calling convention is blanked, as a string.
fn is_type(code: &str) -> bool {
    let rest = code.trim_start_matches("unsafe").trim_start();
    rest.trim_start_matches("extern").trim_start().starts_with("fn(")
}

/// Whether a comment that ends at most a statement's head above `line` explains the unsafe there.
fn explained(text: &str, line: usize) -> bool {
    const REACH: usize = 20;
    let lines: Vec<&str> = text.lines().collect();
    let first = line.saturating_sub(REACH);
    lines[first..line].iter().any(|line| line.contains("SAFETY:") || line.contains("# Safety"))
}

/// An event that nothing but its definition and the metrics names. Expects files without tests.
pub(crate) fn silent_events(files: &[Source]) -> Vec<String> {
    let Some(definition) = files.iter().find(|file| file.path == "src/event.rs") else {
        return vec!["src/event.rs is missing".to_owned()];
    };
    let variants = variants(&definition.code, "pub enum Event ");
    assert!(!variants.is_empty(), "src/event.rs has no events");
    let emitted = |name: &str| {
        let path = format!("Event::{name}");
        files
            .iter()
            .filter(|file| !matches!(file.module(), Some("event" | "metrics") | None))
            .any(|file| words(&file.code, &path).next().is_some())
    };
    variants
        .into_iter()
        .filter(|name| !emitted(name))
        .map(|name| {
            format!(
                "src/event.rs: nothing emits Event::{name}; emit it where it happens or remove it"
            )
        })
        .collect()
}

/// The names of an enum's variants.
fn variants(code: &str, head: &str) -> Vec<String> {
    let Some((open, end)) = code.find(head).and_then(|at| crate::source::block(code, at)) else {
        return Vec::new();
    };
    let mut depth = 0_usize;
    let mut names = Vec::new();
    for line in code[open..end].lines() {
        let name = line.trim().trim_end_matches([',', '{', ' ']);
        let is_name =
            name.starts_with(char::is_uppercase) && name.chars().all(char::is_alphanumeric);
        if depth == 1 && is_name {
            names.push(name.to_owned());
        }
        depth = depth + line.matches('{').count() - line.matches('}').count();
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIB: &str = "// words: values\npub mod types;\npub mod event;\n// cores: pure\npub mod store;\n\
        pub mod lease;\n// machines: io\npub mod tcp;\n// shell: outside\npub mod metrics;\n";

    fn file(path: &str, text: &str) -> Source {
        Source::new(path, text)
    }

    #[test]
    fn lib_declares_modules_under_layers_in_order() {
        let modules = order(LIB).unwrap();
        let names: Vec<&str> = modules.iter().map(|module| &*module.name).collect();
        assert_eq!(names, ["types", "event", "store", "lease", "tcp", "metrics"]);
        assert!(order("mod types;").is_err());
        assert!(order("// cores: x\n// words: y\n").is_err());
    }

    #[test]
    fn arrows_that_run_back_up_are_found() {
        let modules = order(LIB).unwrap();
        let bad = [
            ("src/store/mod.rs", "use crate::lease::X;"),
            ("src/store/slot.rs", "fn f() { crate::tcp::g() }"),
            ("src/types.rs", "use crate::{\n types::A, store::{B, lease}};"),
            ("src/store/mod.rs", "\nuse super::lease::X;"),
            ("src/unknown.rs", ""),
        ];
        for (path, text) in bad {
            assert_eq!(arrows(&[file(path, text)], &modules).len(), 1, "{path} {text}");
        }
        let good = [
            ("src/lease/mod.rs", "use crate::store::{lease, X}; use crate::types::T;"),
            ("src/store/slot.rs", "// crate::tcp\nuse super::lease::X; use crate::{types, event};"),
            ("src/main.rs", "use crate::tcp;"),
        ];
        for (path, text) in good {
            assert_eq!(arrows(&[file(path, text)], &modules), [""; 0], "{path} {text}");
        }
    }

    #[test]
    fn banned_calls_are_found_by_layer() {
        let modules = order(LIB).unwrap();
        for (path, ..) in BANNED {
            let text = format!("fn f() {{ {path}x(); }}").replace("Instantx", "Instant::now");
            let text =
                if path.ends_with(':') { text } else { text.replace(&format!("{path}x"), path) };
            assert!(!banned(&[file("src/store/a.rs", &text)], &modules).is_empty(), "{path}");
        }
        let fine =
            "use crate::metrics::M; // std::thread\nlet a = \"tokio::x\"; let b = my_metrics::c;";
        assert_eq!(banned(&[file("src/store/a.rs", fine)], &modules), [""; 0]);
        let machine = "use std::net::TcpStream; fn f() { std::env::var(x); }";
        assert_eq!(banned(&[file("src/tcp/a.rs", machine)], &modules).len(), 2);
    }

    #[test]
    fn unsafe_code_in_the_wrong_place_or_without_reasons_is_found() {
        let modules = order(LIB).unwrap();
        let bad = [
            ("src/store/mod.rs", "fn f() {}"),
            ("src/store/a.rs", "// SAFETY: x\nunsafe { f() }"),
            ("src/types.rs", "unsafe impl Send for X {}"),
            ("src/tcp/a.rs", "#![expect(unsafe_code, reason = \"x\")]\nunsafe { f() }"),
            ("src/tcp/a.rs", "// SAFETY: x\nunsafe { f() }"),
            (
                "src/tcp/a.rs",
                "#![expect(unsafe_code, reason = \"x\")]\nunsafe extern \"C\" fn f() {}",
            ),
        ];
        for (path, text) in bad {
            assert_eq!(unsafety(&[file(path, text)], &modules).len(), 1, "{path} {text}");
        }
        let good = [
            ("src/store/mod.rs", "#![forbid(unsafe_code)]"),
            ("src/tcp/a.rs", "type F = Option<unsafe extern \"C\" fn(u8)>; type G = unsafe fn();"),
            (
                "src/tcp/a.rs",
                "#![expect(unsafe_code, reason = \"x\")]\n// SAFETY: y\nunsafe { f() }",
            ),
        ];
        for (path, text) in good {
            assert_eq!(unsafety(&[file(path, text)], &modules), [""; 0], "{path} {text}");
        }
    }

    #[test]
    fn events_that_nothing_emits_are_found() {
        let event = file(
            "src/event.rs",
            "pub enum Event {\n    One,\n    Two {\n        Bytes: u64,\n    },\n}\nfn f() { Event::One }",
        );
        let store = file("src/store.rs", "fn f() { s.emit(Event::Two { Bytes: 1 }) }");
        let metrics = file("src/metrics/mod.rs", "fn f() { Event::One; }");
        let wrong = silent_events(&[event, store, metrics]);
        assert_eq!(wrong.len(), 1, "{wrong:?}");
        assert!(wrong[0].contains("Event::One"));
    }
}
