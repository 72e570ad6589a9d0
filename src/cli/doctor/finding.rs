//! What a probe has to say: one line each, with its remedy.

use serde::Serialize;

/// How bad a finding is, from good to bad.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As it should be.
    Ok,
    /// Works, but worse than it could, or not what was asked for.
    Warn,
    /// What was asked for does not work on this host.
    Fail,
}

impl Status {
    /// As it is printed.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// One line of the doctor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at: a stable word for programs.
    pub check: &'static str,
    /// How bad it is.
    pub status: Status,
    /// What is the case, with the name of the device where it is about one.
    pub what: String,
    /// What to do about it: a command where there is one. `None` where nothing is to be done.
    pub remedy: Option<String>,
}

impl Finding {
    /// A finding that needs no remedy.
    #[must_use]
    pub fn ok(check: &'static str, what: impl Into<String>) -> Self {
        Self { check, status: Status::Ok, what: what.into(), remedy: None }
    }

    /// A finding that is not as it should be.
    #[must_use]
    pub fn bad(
        check: &'static str,
        status: Status,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { check, status, what: what.into(), remedy: Some(remedy.into()) }
    }
}

/// The findings of alternatives, a group each: where one alternative works, what the others lack is
/// no failure.
#[must_use]
pub(super) fn one_is_enough(mut groups: Vec<Vec<Finding>>) -> Vec<Finding> {
    let fails = |group: &Vec<Finding>| group.iter().any(|it| it.status == Status::Fail);
    if !groups.iter().all(fails) {
        let failures = groups.iter_mut().flatten().filter(|it| it.status == Status::Fail);
        failures.for_each(|it| it.status = Status::Warn);
    }
    groups.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alternatives_fail_together_or_not_at_all() {
        let good = || vec![Finding::ok("a", "x")];
        let bad = || vec![Finding::ok("a", "x"), Finding::bad("b", Status::Fail, "y", "z")];
        let statuses = |groups| -> Vec<Status> {
            one_is_enough(groups).iter().map(|finding| finding.status).collect()
        };
        assert_eq!(statuses(vec![good(), bad()]), [Status::Ok, Status::Ok, Status::Warn]);
        assert_eq!(statuses(vec![bad()]), [Status::Ok, Status::Fail]);
        assert_eq!(
            statuses(vec![bad(), bad()]).iter().filter(|it| **it == Status::Fail).count(),
            2
        );
        assert_eq!(statuses(vec![]), []);
    }
}
