//! One name, three places: how flags, variables and the file come together.
//!
//! A value from a variable or from the file is parsed by the same `clap` argument as the flag, one
//! at a time, so that the refusal can say where it stands.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::{Args, Command};

use super::ConfigError;

/// Longest file that a setting may name, bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The variables that configuration reads.
#[derive(Clone, Copy)]
pub struct Environment<'a>(&'a dyn Fn(&str) -> Option<OsString>);

impl fmt::Debug for Environment<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Environment(..)")
    }
}

impl Environment<'static> {
    /// This process's own.
    #[must_use]
    pub fn process() -> Self {
        #[expect(clippy::disallowed_methods, reason = "the one place that reads the environment")]
        Self(&|name| env::var_os(name))
    }
}

impl<'a> Environment<'a> {
    /// Variables that `lookup` answers.
    #[must_use]
    pub const fn of(lookup: &'a dyn Fn(&str) -> Option<OsString>) -> Self {
        Self(lookup)
    }

    /// A variable's value; one that is set to nothing counts as not set.
    fn get(self, name: &str) -> Option<OsString> {
        self.0(name).filter(|value| !value.is_empty())
    }

    /// Where a node's local door is unless it is told otherwise.
    pub(super) fn door(self) -> PathBuf {
        let directory =
            self.get("XDG_RUNTIME_DIR").map_or_else(|| PathBuf::from("/run"), PathBuf::from);
        directory.join("kvrail.sock")
    }
}

/// The variable that names the local door's path to clients and to nodes.
pub const SOCKET_VARIABLE: &str = "KVRAIL_SOCKET";

/// The local door's path for a client that was given none: `KVRAIL_SOCKET`, else
/// `$XDG_RUNTIME_DIR/kvrail.sock`, else `/run/kvrail.sock`.
#[must_use]
pub fn default_socket() -> PathBuf {
    let environment = Environment::process();
    environment.get(SOCKET_VARIABLE).map_or_else(|| environment.door(), PathBuf::from)
}

/// Settings of one process: every field is optional, and `over` fills the gaps from a lower layer.
pub(super) trait Settings: Args + Default {
    /// The values of `self`, and those of `lower` where `self` has none.
    fn over(self, lower: Self) -> Self;
    /// The file that a flag names.
    fn file(&self) -> Option<&Path>;
}

/// The name of a setting's variable.
pub(super) fn variable(setting: &str) -> String {
    format!("KVRAIL_{}", setting.replace('-', "_").to_uppercase())
}

/// The names of all settings, without the dashes.
pub(super) fn names<S: Args>() -> Vec<String> {
    S::augment_args(Command::new("settings"))
        .get_arguments()
        .filter_map(|argument| argument.get_long().map(ToOwned::to_owned))
        .collect()
}

/// Flags over variables over the file.
pub(super) fn gather<S: Settings>(
    flags: S,
    environment: Environment<'_>,
) -> Result<S, ConfigError> {
    let mut variables = S::default();
    for name in names::<S>() {
        let origin = variable(&name);
        if let Some(value) = environment.get(&origin) {
            variables = parse::<S>(&name, &value, &origin)?.over(variables);
        }
    }
    let upper = flags.over(variables);
    let Some(path) = upper.file().map(Path::to_path_buf) else {
        return Ok(upper);
    };
    Ok(upper.over(read(&path)?))
}

/// One setting from text.
fn parse<S: Settings>(name: &str, value: &OsString, origin: &str) -> Result<S, ConfigError> {
    let mut argument = OsString::from(format!("--{name}="));
    argument.push(value);
    let refused = |error: clap::Error| ConfigError::Value {
        origin: origin.to_owned(),
        reason: sentence(&error),
    };
    let command = S::augment_args(Command::new("settings").no_binary_name(true));
    let matches = command.try_get_matches_from([argument]).map_err(refused)?;
    S::from_arg_matches(&matches).map_err(refused)
}

/// What clap says of wrong arguments, on one line: its first paragraph, and what it would try instead.
/// Usage follows after that.
pub(crate) fn sentence(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines = text.strip_prefix("error: ").unwrap_or(&text).lines().map(str::trim);
    let first: Vec<&str> = lines.clone().take_while(|line| !line.is_empty()).collect();
    let tips = lines.filter_map(|line| line.strip_prefix("tip: ")).collect::<Vec<_>>().join("; ");
    let tips = match error.kind() {
        ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand if tips.is_empty() => {
            "--help lists what there is"
        }
        _ => &tips,
    };
    let first = first.join(" ");
    if tips.is_empty() { first } else { format!("{first}; {tips}") }
}

/// What a file holds, which a setting names, and which is text that a person or a program wrote for it:
/// it is short, whatever the name leads to.
pub(super) fn read_short(setting: &'static str, path: &Path) -> Result<Vec<u8>, ConfigError> {
    let read = || {
        let mut bytes = Vec::new();
        File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(io::Error::other(format!("it has more than {FILE_BYTES_MAX} bytes")));
        }
        Ok(bytes)
    };
    read().map_err(|source| ConfigError::Unreadable { setting, path: path.to_owned(), source })
}

/// The settings of a TOML file: its keys are the flags' names.
fn read<S: Settings>(path: &Path) -> Result<S, ConfigError> {
    let text = String::from_utf8(read_short("--config", path)?).map_err(|error| {
        let good = error.utf8_error().valid_up_to();
        let before = error.as_bytes().get(..good).unwrap_or_default();
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        ConfigError::Syntax {
            path: path.to_owned(),
            reason: format!("line {line}: it is not UTF-8"),
        }
    })?;
    let table: toml::Table = toml::from_str(&text).map_err(|error| {
        let offset = error.span().map_or(0, |span| span.start);
        let line = text.get(..offset).unwrap_or_default().matches('\n').count() + 1;
        ConfigError::Syntax {
            path: path.to_owned(),
            reason: format!("line {line}: {}", error.message().replace('\n', ", ")),
        }
    })?;
    let names = names::<S>();
    let mut settings = S::default();
    for (key, value) in &table {
        if key == "config" || !names.contains(key) {
            return Err(ConfigError::UnknownKey { path: path.to_owned(), key: key.clone() });
        }
        let origin = format!("{}, key {key}", path.display());
        let value = text_of(value).ok_or_else(|| ConfigError::Value {
            origin: origin.clone(),
            reason: "a setting is a string, a whole number, true, false, or a list of those"
                .to_owned(),
        })?;
        settings = parse::<S>(key, &OsString::from(value), &origin)?.over(settings);
    }
    Ok(settings)
}

/// A TOML value as a flag would have it; lists with commas.
fn text_of(value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Boolean(truth) => Some(truth.to_string()),
        toml::Value::Array(items) => items
            .iter()
            .map(|item| (!item.is_array()).then(|| text_of(item)).flatten())
            .collect::<Option<Vec<_>>>()
            .map(|items| items.join(",")),
        toml::Value::Float(_) | toml::Value::Datetime(_) | toml::Value::Table(_) => None,
    }
}
