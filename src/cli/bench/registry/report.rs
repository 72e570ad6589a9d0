//! The rounds, as tables for people and as one object for programs.

use std::io::{self, Write};
use std::time::Duration;

use serde::Serialize;

use super::death::Death;
use super::rates::{BATCH, Rates};
use super::resync::{LEND, Resync};
use super::{Form, Plan};
use crate::cli::bench::latency::Latency;
use crate::cli::bench::machine::Machine;
use crate::cli::bench::median;
use crate::cli::door::write_json;
use crate::cli::table::table;

/// What was measured so far.
#[derive(Debug)]
pub(super) struct Report {
    plan: Plan,
    /// The Redis server that is here.
    redis: Option<String>,
    pub(super) interrupted: bool,
    pub(super) rates: Vec<(Form, Rates)>,
    pub(super) deaths: Vec<Death>,
    pub(super) resync: Option<Resync>,
}

/// One form, medians of the rounds.
#[derive(Debug, Serialize)]
struct Row {
    form: Form,
    rounds: usize,
    #[serde(flatten)]
    rates: Rates,
    /// Its announcements to those of the plain loop over Redis.
    announce_ratio: Option<f64>,
}

/// Lends, microseconds.
#[derive(Debug, Serialize)]
struct Lends {
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
}

impl From<&Latency> for Lends {
    fn from(times: &Latency) -> Self {
        let [p50, p99, _, max] = times.percentiles().map(|nanos| nanos / 1e3);
        Self { p50_us: p50, p99_us: p99, max_us: max }
    }
}

#[derive(Debug, Serialize)]
struct Dead {
    void_us: f64,
    sweep_steps: u32,
    /// The longest step on the clock, and the processor time in it.
    longest_step_us: f64,
    longest_step_work_us: f64,
    /// The most processor time of a step.
    most_work_us: f64,
}

#[derive(Debug, Serialize)]
struct Again {
    lend_blocks: usize,
    seconds: f64,
    before: Lends,
    during: Lends,
}

/// All of it, for programs.
#[derive(Debug, Serialize)]
struct Whole {
    bench: &'static str,
    version: &'static str,
    machine: Machine,
    #[serde(flatten)]
    plan: Plan,
    batch: usize,
    redis: Option<String>,
    interrupted: bool,
    /// Hashes per processor second, bytes per entry.
    rows: Vec<Row>,
    death: Option<Dead>,
    resync: Option<Again>,
}

const HEADER: [&str; 6] = [
    "million hashes per CPU second of",
    "announce",
    "plan",
    "withdraw",
    "bytes/entry",
    "announce ÷ plain Redis",
];

impl Report {
    pub(super) fn new(plan: Plan, redis: Option<String>) -> Self {
        let (rates, deaths) = (Vec::new(), Vec::new());
        Self { plan, redis, interrupted: false, rates, deaths, resync: None }
    }

    pub(super) fn write(&self, json: bool, out: &mut dyn Write) -> io::Result<()> {
        let whole = self.whole();
        if json { write_json(out, &whole) } else { out.write_all(whole.text().as_bytes()) }
    }

    fn whole(&self) -> Whole {
        let mut rows: Vec<Row> = Form::ALL.into_iter().filter_map(|form| self.row(form)).collect();
        let plain = rows.iter().find(|row| row.form == Form::PlainRedis);
        let plain = plain.map(|row| row.rates.announce);
        for row in &mut rows {
            row.announce_ratio = plain.map(|plain| row.rates.announce / plain);
        }
        Whole {
            bench: "registry",
            version: env!("CARGO_PKG_VERSION"),
            machine: Machine::here(),
            plan: self.plan,
            batch: BATCH,
            redis: self.redis.clone(),
            interrupted: self.interrupted,
            rows,
            death: self.death(),
            resync: self.resync.as_ref().map(|it| Again {
                lend_blocks: LEND,
                seconds: it.took.as_secs_f64(),
                before: Lends::from(&it.before),
                during: Lends::from(&it.during),
            }),
        }
    }

    /// The medians of a form; `None` where it was not measured.
    fn row(&self, form: Form) -> Option<Row> {
        let of = |value: fn(&Rates) -> f64| {
            let own = self.rates.iter().filter(|(it, _)| *it == form);
            median(own.map(|(_, rates)| value(rates)).collect())
        };
        let rates = Rates {
            announce: of(|it| it.announce)?,
            plan: of(|it| it.plan)?,
            withdraw: of(|it| it.withdraw)?,
            bytes_per_entry: of(|it| it.bytes_per_entry)?,
        };
        let rounds = self.rates.iter().filter(|(it, _)| *it == form).count();
        Some(Row { form, rounds, rates, announce_ratio: None })
    }

    fn death(&self) -> Option<Dead> {
        let micros = |span: Duration| span.as_secs_f64() * 1e6;
        let of = |value: fn(&Death) -> Duration| {
            median(self.deaths.iter().map(|death| micros(value(death))).collect())
        };
        Some(Dead {
            void_us: of(|death| death.void)?,
            sweep_steps: self.deaths.iter().map(|death| death.steps).max()?,
            longest_step_us: of(|death| death.longest.time)?,
            longest_step_work_us: of(|death| death.longest.work)?,
            most_work_us: of(|death| death.most_work)?,
        })
    }
}

impl Dead {
    fn sentence(&self, keys: u32) -> String {
        let Self { void_us, sweep_steps, longest_step_us, longest_step_work_us, most_work_us } =
            self;
        format!(
            "\nA node of {keys} keys dies: {void_us:.1} us until none of them counts; {sweep_steps} steps \
             sweep them\nup later, the longest in {longest_step_us:.0} us on the clock, \
             {longest_step_work_us:.0} us of them on a processor; no step\ntook more than {most_work_us:.0} \
             us there.\n"
        )
    }
}

impl Whole {
    fn text(&self) -> String {
        let Plan { keys, residents, .. } = self.plan;
        let with = self.redis.as_ref().map_or_else(String::new, |redis| format!(", {redis}"));
        let rounds = match self.plan.rounds {
            1 => "one round".to_owned(),
            rounds => format!("medians of {rounds} rounds"),
        };
        let mut text = format!(
            "{}{with}\n{keys} keys of 32-byte hashes, {BATCH} a call; {rounds}\n\n",
            self.machine
        );
        if !self.rows.is_empty() {
            text.push_str(&format!("{}\n", self.table()));
        }
        if self.redis.is_none() {
            text.push_str(
                "\nNot measured: the forms on Redis; there is no redis-server here (apt-get install \
                 redis-server).\n",
            );
        }
        if let Some(dead) = &self.death {
            text.push_str(&dead.sentence(keys));
        }
        if let Some(Again { lend_blocks, seconds, before, during }) = &self.resync {
            text.push_str(&format!(
                "\n{residents} residents are announced again in {seconds:.1} s. A lend of {lend_blocks} \
                 blocks takes\n{:.1} us (p50) and {:.1} us (p99) meanwhile, {:.1} and {:.1} us before: p99 \
                 × {:.2}.\n",
                during.p50_us,
                during.p99_us,
                before.p50_us,
                before.p99_us,
                during.p99_us / before.p99_us
            ));
        }
        if self.interrupted {
            text.push_str("\nInterrupted: this is what was measured.\n");
        }
        text
    }

    fn table(&self) -> String {
        let mut table = table(HEADER, 1);
        for Row { form, rates, announce_ratio, .. } in &self.rows {
            let mut cells = vec![form.as_str().to_owned()];
            let millions = [rates.announce, rates.plan, rates.withdraw];
            cells.extend(millions.map(|hashes| format!("{:.2}", hashes / 1e6)));
            cells.push(format!("{:.0}", rates.bytes_per_entry));
            cells.push(announce_ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}")));
            table.add_row(cells);
        }
        table.trim_fmt()
    }
}

#[cfg(test)]
mod tests {
    use super::super::death::Step;
    use super::*;

    fn rates(announce: f64) -> Rates {
        Rates { announce, plan: 1e6, withdraw: 1e6, bytes_per_entry: 90.0 }
    }

    fn report(redis: Option<&str>) -> Report {
        let plan = Plan { keys: 10_000, residents: 0, rounds: 3 };
        let mut report = Report::new(plan, redis.map(str::to_owned));
        for announce in [3e6, 9e6, 4e6] {
            report.rates.push((Form::InProcess, rates(announce)));
        }
        report
    }

    fn written(report: &Report, json: bool) -> String {
        let mut out = Vec::new();
        report.write(json, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn medians_stand_beside_the_plain_loop() {
        let mut report = report(Some("Redis 7.0.15"));
        report.rates.push((Form::PlainRedis, rates(5e5)));
        let step = |micros| Duration::from_micros(micros);
        for micros in [5, 1, 3] {
            let longest = Step { time: step(10 * micros), work: step(2 * micros) };
            let (void, most_work) = (step(micros), step(4 * micros));
            report.deaths.push(Death { void, steps: 64, longest, most_work });
        }
        let json: serde_json::Value = serde_json::from_str(&written(&report, true)).unwrap();
        assert_eq!(json["rows"][0]["form"], "in_process");
        assert_eq!(json["rows"][0]["announce"], 4e6);
        assert_eq!(json["rows"][0]["announce_ratio"], 8.0);
        assert_eq!((&json["rows"][1]["rounds"], &json["keys"]), (&1.into(), &10_000.into()));
        assert_eq!((&json["death"]["void_us"], &json["resync"]), (&3.0.into(), &().into()));
        let text = written(&report, false);
        let line = text.lines().find(|line| line.trim_start().starts_with("in this")).unwrap();
        let cells: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(cells[3..], ["4.00", "1.00", "1.00", "90", "8.00"], "{text}");
        assert!(text.contains("the longest in 30 us on the clock, 6 us"), "{text}");
        assert!(text.contains("more than 12 us") && !text.contains("Not measured"), "{text}");
    }

    #[test]
    fn what_is_not_there_is_said() {
        let mut report = report(None);
        report.interrupted = true;
        let text = written(&report, false);
        assert!(text.contains("no redis-server here") && text.contains("Interrupted"), "{text}");
        assert!(!text.contains("dies"), "{text}");
        let json: serde_json::Value = serde_json::from_str(&written(&report, true)).unwrap();
        assert_eq!(json["rows"][0]["announce_ratio"], serde_json::Value::Null);
    }

    #[test]
    fn lends_are_compared_with_those_before() {
        let mut report = report(None);
        let times = |micros: u64| {
            let mut times = Latency::new().unwrap();
            times.record(Duration::from_micros(micros));
            times
        };
        let took = Duration::from_secs(2);
        report.resync = Some(Resync { before: times(10), during: times(15), took });
        let text = written(&report, false);
        assert!(text.contains("again in 2.0 s") && text.contains("× 1.50"), "{text}");
    }
}
