//! The project's files, and Rust text with its comments, strings and tests blanked out.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// A text file of the project.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    /// From the root, with `/`.
    pub(crate) path: String,
    /// As it is.
    pub(crate) text: String,
    /// The same lines with comments, strings and characters blanked; Rust only.
    pub(crate) code: String,
}

impl Source {
    pub(crate) fn new(path: &str, text: &str) -> Self {
        let code = if path.ends_with(".rs") { code_of(text) } else { String::new() };
        Self { path: path.to_owned(), text: text.to_owned(), code }
    }

    /// The module that `lib.rs` declares and this file belongs to.
    pub(crate) fn module(&self) -> Option<&str> {
        let below = self.path.strip_prefix("src/")?;
        let name = below.split('/').next()?;
        let name = name.strip_suffix(".rs").unwrap_or(name);
        (!["lib", "main"].contains(&name)).then_some(name)
    }

    /// Whether it is the file that `lib.rs` declares.
    pub(crate) fn is_module_root(&self) -> bool {
        self.module().is_some_and(|name| {
            self.path == format!("src/{name}.rs") || self.path == format!("src/{name}/mod.rs")
        })
    }
}

/// Folders that hold nothing of the project's own.
const FOREIGN: [&str; 6] = [".git", "target", "shared", "corpus", "artifacts", "coverage"];

/// Every file of the project; what is no text is read as well as it can be.
pub(crate) fn project() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    walk(root, root, &mut files);
    files.sort_by(|one, other| one.path.cmp(&other.path));
    assert!(files.iter().any(|file| file.path == "src/lib.rs"));
    files
}

fn walk(root: &Path, directory: &Path, files: &mut Vec<Source>) {
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() && !FOREIGN.iter().any(|foreign| name == *foreign) {
            walk(root, &entry.path(), files);
        } else if kind.is_file() && name != ".git" {
            let path = entry.path();
            let text = String::from_utf8_lossy(&fs::read(&path).unwrap()).into_owned();
            let name = path.strip_prefix(root).unwrap().to_str().unwrap();
            files.push(Source::new(name, &text));
        }
    }
}

/// `text` with comments, strings and character literals replaced by spaces, line for line.
pub(crate) fn code_of(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let after_word = out.ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let skipped = literal(rest, after_word);
        if skipped == 0 {
            out.push(first);
            rest = &rest[first.len_utf8()..];
        } else {
            let blanked = rest[..skipped].chars();
            out.extend(blanked.map(|c| if c == '\n' { '\n' } else { ' ' }));
            rest = &rest[skipped..];
        }
    }
    out
}

/// Bytes of the comment or literal that `text` begins with; 0 where it begins with code.
fn literal(text: &str, after_word: bool) -> usize {
    if text.starts_with("//") {
        return text.find('\n').unwrap_or(text.len());
    }
    if text.starts_with("/*") {
        return block_comment(text);
    }
    if let (false, Some(raw)) = (after_word, raw_string(text)) {
        return raw;
    }
    if text.starts_with('"') {
        return quoted(text, '"');
    }
    if let Some(inner) = text.strip_prefix('\'') {
        let mut inner = inner.chars();
        // A character is closed after one; a lifetime is not.
        return match (inner.next(), inner.next()) {
            (Some('\\'), _) => quoted(text, '\''),
            (Some(c), Some('\'')) => 2 + c.len_utf8(),
            _ => 0,
        };
    }
    0
}

fn block_comment(text: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while let Some(rest) = text.get(at..) {
        if rest.starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest.starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            let Some(c) = rest.chars().next() else { break };
            at += c.len_utf8();
        }
    }
    text.len()
}

fn quoted(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

fn raw_string(text: &str) -> Option<usize> {
    let marks = ["r", "br", "cr"].iter().find_map(|prefix| text.strip_prefix(prefix))?;
    let hashes = marks.len() - marks.trim_start_matches('#').len();
    marks.get(hashes..)?.strip_prefix('"')?;
    let start = text.len() - marks.len() + hashes + 1;
    let close = format!("\"{}", "#".repeat(hashes));
    let end = text.get(start..)?.find(&close)?;
    Some(start + end + close.len())
}

/// The end of the block whose opening brace is the first at or after `from`; `None` where a `;` comes
/// before it.
pub(crate) fn block(code: &str, from: usize) -> Option<(usize, usize)> {
    let open = from + code.get(from..)?.find(['{', ';'])?;
    if code.get(open..)?.starts_with(';') {
        return None;
    }
    let mut depth = 0_usize;
    for (at, c) in code.get(open..)?.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => continue,
        }
        if depth == 0 {
            return Some((open, open + at + 1));
        }
    }
    None
}

/// Where `word` stands in `code` as a whole word, or a path of words.
pub(crate) fn words<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(word).map(|(at, _)| at).filter(move |at| {
        let before = code[..*at].chars().next_back();
        let after = code[at + word.len()..].chars().next();
        let open = !word.ends_with(part);
        !before.is_some_and(part) && (open || !after.is_some_and(part))
    })
}

/// The line of an offset, from 1.
pub(crate) fn line_of(text: &str, at: usize) -> usize {
    text[..at].matches('\n').count() + 1
}

const TEST_ONLY: [&str; 2] = ["#[cfg(test)]", "#[cfg(all(test"];

/// The files without those that only tests compile, and without the test modules in the others.
pub(crate) fn without_tests(files: &[Source]) -> Vec<Source> {
    let mut test_files = BTreeSet::new();
    let mut kept = Vec::new();
    for file in files {
        let mut file = file.clone();
        while let Some(at) = TEST_ONLY.iter().find_map(|mark| file.code.find(mark)) {
            let end = match block(&file.code, at) {
                Some((_, end)) => end,
                None => at + file.code[at..].find(';').unwrap_or(0) + 1,
            };
            let item = &file.code[at..end];
            if let (true, Some(name)) = (item.ends_with(';'), module_name(item)) {
                let folder = file.path.trim_end_matches("mod.rs").trim_end_matches(".rs");
                test_files.insert(format!("{}/{name}", folder.trim_end_matches('/')));
            }
            let blank: String = item.chars().map(|c| if c == '\n' { '\n' } else { ' ' }).collect();
            file.code.replace_range(at..end, &blank);
        }
        kept.push(file);
    }
    kept.retain(|file| {
        let name = file.path.trim_end_matches(".rs");
        !test_files.iter().any(|test| name == test || name.starts_with(&format!("{test}/")))
    });
    kept
}

fn module_name(item: &str) -> Option<&str> {
    let (_, name) = item.trim_end_matches(';').rsplit_once("mod ")?;
    Some(name.trim())
}

#[test]
fn comments_and_strings_are_blanked_and_code_is_not() {
    let text = "let a = \"crate::x \\\" // y\"; // crate::y\n/* a /* b */ c */ let b = r#\"z\"z\"#;\n\
                let c = '\"'; let d: &'static str = b\"q\"; let e = '\\''; 'outer: loop {}";
    let code = code_of(text);
    for gone in ["crate", "y", "z\"", "/*", "q"] {
        assert!(!code.contains(gone), "{gone}: {code}");
    }
    for kept in ["let a =", "let b =", "let c =", "&'static str", "let e =", "'outer: loop {}"] {
        assert!(code.contains(kept), "{kept}: {code}");
    }
    assert_eq!(code.len(), text.len());
    assert_eq!(code.lines().count(), text.lines().count());
}

#[test]
fn test_modules_are_left_out() {
    let files = [
        Source::new(
            "src/a/mod.rs",
            "fn f() {}\n#[cfg(test)]\nmod tests;\n#[cfg(test)]\nmod t { fn g() {} }\nfn h() {}",
        ),
        Source::new("src/a/tests.rs", "fn t() {}"),
        Source::new("src/a/tests/more.rs", "fn t() {}"),
        Source::new("src/a/testsuite.rs", "fn t() {}"),
    ];
    let kept = without_tests(&files);
    let paths: Vec<&str> = kept.iter().map(|file| &*file.path).collect();
    assert_eq!(paths, ["src/a/mod.rs", "src/a/testsuite.rs"]);
    let code = &kept[0].code;
    assert!(code.contains("fn f") && code.contains("fn h") && !code.contains("fn g"));
}
