//! Lengths, leftovers, and what documents name.

use crate::source::{Source, block, line_of, words};

const FILE_LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 70;

fn rust(files: &[Source]) -> impl Iterator<Item = &Source> {
    files.iter().filter(|file| file.path.ends_with(".rs"))
}

/// Files and functions that are too long. A function's lines are those with code.
pub(crate) fn lengths(files: &[Source]) -> Vec<String> {
    let mut wrong = Vec::new();
    for file in rust(files) {
        let lines = file.text.lines().count();
        if lines > FILE_LINES_MAX {
            wrong.push(format!(
                "{}: {lines} lines; split it, one algorithm each, below {FILE_LINES_MAX}",
                file.path
            ));
        }
        for at in words(&file.code, "fn ") {
            let Some((open, end)) = block(&file.code, at) else {
                continue;
            };
            let body = file.code[open..end].lines();
            let lines = body.filter(|line| !line.trim().is_empty()).count();
            if lines > FUNCTION_LINES_MAX {
                wrong.push(format!(
                    "{}:{}: a function of {lines} lines; take steps out of it, below \
                     {FUNCTION_LINES_MAX}",
                    file.path,
                    line_of(&file.code, at)
                ));
            }
        }
    }
    wrong
}

/// Code that waits to be written, and tests that do not run.
pub(crate) fn leftovers(files: &[Source]) -> Vec<String> {
    let mut wrong = Vec::new();
    for file in rust(files) {
        for left in ["todo!", "unimplemented!", "dbg!", "#[ignore"] {
            for (at, _) in file.code.match_indices(left) {
                let line = line_of(&file.code, at);
                wrong.push(format!("{}:{line}: {left} is unfinished work; finish it", file.path));
            }
        }
    }
    wrong
}

/// Folders that a path in a document begins with.
const ROOTS: [&str; 5] = ["src/", "tests/", "bench/", "ffi/", ".ci/"];

/// Paths in documents, and in the comments of code, that name nothing.
pub(crate) fn dead_paths(files: &[Source]) -> Vec<String> {
    let exists = |path: &str| {
        let folder = format!("{}/", path.trim_end_matches('/'));
        files.iter().any(|file| file.path == path || file.path.starts_with(&folder))
    };
    let mut wrong = Vec::new();
    for file in files {
        let document = file.path.ends_with(".md");
        if !document && !file.path.ends_with(".rs") {
            continue;
        }
        let mut fenced = false;
        for (index, line) in file.text.lines().enumerate() {
            fenced ^= line.trim_start().starts_with("```");
            let comment = line.trim_start().starts_with("//");
            if !document && !comment {
                continue;
            }
            for path in named_paths(line, document && fenced, document) {
                if !exists(path) {
                    wrong.push(format!(
                        "{}:{}: {path} does not exist; name what does",
                        file.path,
                        index + 1
                    ));
                }
            }
        }
    }
    wrong
}

/// The words of a line that look like paths of this project: those in backticks, or all of them.
fn named_paths(line: &str, all: bool, document: bool) -> Vec<&str> {
    let parts = line.split('`').enumerate();
    let quoted = parts.filter(|(index, _)| all || index % 2 == 1);
    quoted
        .flat_map(|(_, part)| part.split([' ', ',', '(', ')', ';', '"']))
        .map(|word| word.trim_start_matches("./").trim_end_matches(['.', ':']))
        .filter(|word| {
            let rooted = ROOTS.iter().any(|root| word.starts_with(root) && word.len() > root.len());
            let file = document && !all && (word.ends_with(".rs") || word.ends_with(".md"));
            let licence = document && *word == "LICENSE";
            (rooted || file || licence) && !word.contains(['*', '<', '{', '$', '…'])
        })
        .collect()
}

/// Paths of one machine and hosts of package registries. Written in pieces, so that this file passes.
const FOREIGN: [(&str, &str); 9] = [
    ("/wo", "rk/"),
    ("/ro", "ot/"),
    ("/ho", "me/"),
    ("/tmp/", "kv"),
    ("deb.deb", "ian.org"),
    ("index.crates", ".io"),
    ("static.cra", "tes.io"),
    ("pypi", ".org"),
    ("registry.npm", "js.org"),
];

/// Traces of the machine that a file was written on.
pub(crate) fn machine_traces(files: &[Source]) -> Vec<String> {
    let mut wrong = Vec::new();
    for file in files {
        for (head, tail) in FOREIGN {
            let trace = format!("{head}{tail}");
            if let Some(at) = file.text.find(&trace) {
                let line = line_of(&file.text, at);
                wrong.push(format!("{}:{line}: {trace} holds on one machine only", file.path));
            }
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(path: &str, text: &str) -> Vec<Source> {
        vec![Source::new(path, text)]
    }

    #[test]
    fn long_files_and_functions_are_found() {
        assert!(!lengths(&one("src/a.rs", &"\n".repeat(501))).is_empty());
        assert!(lengths(&one("src/a.rs", &"\n".repeat(500))).is_empty());
        let function = |lines: usize| format!("fn f() {{\n{}}}\n", "x();\n// y\n\n".repeat(lines));
        assert!(!lengths(&one("src/a.rs", &function(69))).is_empty());
        assert!(lengths(&one("src/a.rs", &function(68))).is_empty());
        assert!(lengths(&one("src/a.rs", "trait T { fn f(); }")).is_empty());
    }

    #[test]
    fn leftovers_are_found() {
        for text in ["todo!()", "unimplemented!()", "dbg!(x)", "#[ignore = \"x\"]"] {
            assert_eq!(leftovers(&one("src/a.rs", text)).len(), 1, "{text}");
        }
        assert!(leftovers(&one("src/a.rs", "// todo!()\nlet a = \"#[ignore]\";")).is_empty());
    }

    #[test]
    fn paths_that_name_nothing_are_found() {
        let bad = [
            ("README.md", "see `src/b.rs`"),
            ("README.md", "see `LICENSE`"),
            ("bench/README.md", "run `bash tests/none now`"),
            ("README.md", "```sh\nbash tests/none\n```"),
            ("README.md", "see `NOTES.md`"),
            ("src/a.rs", "//! See `tests/none.rs`."),
        ];
        for (path, text) in bad {
            assert_eq!(dead_paths(&one(path, text)).len(), 1, "{path} {text}");
        }
        let good = [
            ("src/a.rs", "// `src/a.rs`, `src`\nlet x = \"`tests/none`\";"),
            ("README.md", "`README.md` `kvrail put FILE` src/none `/run/x` `tests/*.rs`"),
        ];
        for (path, text) in good {
            assert_eq!(dead_paths(&one(path, text)), [""; 0], "{path} {text}");
        }
    }

    #[test]
    fn traces_of_a_machine_are_found() {
        for (head, tail) in FOREIGN {
            let text = format!("x {head}{tail} y");
            assert_eq!(machine_traces(&one("a", &text)).len(), 1, "{text}");
        }
    }
}
