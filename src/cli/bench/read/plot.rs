//! Bandwidth and latency by block size as a picture, with what the machine gives at best drawn in.
//!
//! A kind of read has a colour and a fabric a mark, so that many curves can be told apart, also by those
//! who see colours differently. The picture has its own white ground: it looks the same on any page.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;

use plotters::coord::Shift;
use plotters::element::DashedPathElement;
use plotters::prelude::*;

use super::What;
use super::fabric::Transport;
use super::report::{Report, Row};
use crate::config::Size;

/// Pixels: the picture, the head above the panels, and the legend beside them.
const EXTENT: (u32, u32) = (1080, 960);
const HEAD: u32 = 40;
const LEGEND: u32 = 170;

/// Pixels between two lines of the legend.
const LINE: i32 = 24;

/// What a picture's steps end with.
type Drawn = Result<(), Box<dyn Error>>;

/// A part of the picture, in pixels of its own.
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Whose curve it is: that of a kind of read, or of what the machine gives at best.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Name {
    what: Option<What>,
    transport: Transport,
}

impl Name {
    fn text(self) -> String {
        let what = self.what.map_or("machine", What::as_str);
        format!("{what} ({})", self.transport.as_str())
    }

    /// Colours of Okabe and Ito, which most colour-blind people tell apart.
    const fn color(self) -> RGBColor {
        match self.what {
            None => RGBColor(90, 90, 90),
            Some(What::Bare) => RGBColor(0, 114, 178),
            Some(What::Leased) => RGBColor(213, 94, 0),
            Some(What::Get) => RGBColor(0, 158, 115),
            Some(What::Resident) => RGBColor(170, 80, 150),
        }
    }
}

/// By name, values by block size.
type Curves = BTreeMap<Name, BTreeMap<u32, f64>>;

/// Both panels and their legend as SVG.
pub(super) fn draw(report: &Report) -> Result<String, Box<dyn Error>> {
    let mut svg = String::new();
    paint(report, &mut svg)?;
    Ok(svg)
}

fn paint(report: &Report, svg: &mut String) -> Drawn {
    let root = SVGBackend::with_string(svg, EXTENT).into_drawing_area();
    root.fill(&WHITE)?;
    let (head, body) = root.split_vertically(HEAD);
    head.draw(&Text::new(report.title(), (16, 16), ("sans-serif", 15)))?;
    let (panels, legend) = body.split_horizontally(EXTENT.0 - LEGEND);
    let (upper, lower) = panels.split_vertically((EXTENT.1 - HEAD) / 2);
    let bandwidth = bandwidths(report);
    panel(&upper, ("Best bandwidth", "GB/s"), &bandwidth)?;
    let latency = curves(report, f64::min, |row| Some(row.p50_us));
    panel(&lower, ("Shortest median time of a batch", "microseconds"), &latency)?;
    let names: BTreeSet<Name> = bandwidth.into_keys().chain(latency.into_keys()).collect();
    for (name, y) in names.into_iter().zip((40..).step_by(LINE as usize)) {
        entry(&legend, name, y)?;
    }
    root.present()?;
    Ok(())
}

/// One curve for each kind of read and fabric, the best row of each size.
fn curves(report: &Report, better: fn(f64, f64) -> f64, value: fn(&Row) -> Option<f64>) -> Curves {
    let mut curves = Curves::new();
    for row in &report.rows {
        let name = Name { what: Some(row.what), transport: row.transport };
        let Some(value) = value(row) else { continue };
        let best = curves.entry(name).or_default().entry(row.size).or_insert(value);
        *best = better(*best, value);
    }
    curves
}

/// Those of the reads, and of the machine.
fn bandwidths(report: &Report) -> Curves {
    let mut all = curves(report, f64::max, |row| row.gb_s);
    for row in &report.rows {
        let Some(machine) = row.machine_gb_s else { continue };
        let limit = all.entry(Name { what: None, transport: row.transport }).or_default();
        let best = limit.entry(row.size).or_insert(machine);
        *best = best.max(machine);
    }
    all
}

/// The powers of ten around all values; `None` where there are none.
fn decades(curves: &Curves) -> Option<(f64, f64)> {
    let values = || curves.values().flat_map(BTreeMap::values).filter(|value| **value > 0.0);
    let lowest = values().copied().fold(f64::INFINITY, f64::min).log10().floor();
    let highest = values().copied().fold(0.0, f64::max).log10().ceil();
    lowest.is_finite().then(|| (10_f64.powf(lowest), 10_f64.powf(highest.max(lowest + 1.0))))
}

/// A size, where it is one that people have a name for.
fn named(size: u32) -> String {
    if size.is_power_of_two() { Size(u64::from(size)).to_string() } else { String::new() }
}

/// A power of ten without digits that say nothing.
fn plain(value: f64) -> String {
    if value < 1.0 {
        format!("{value:.6}").trim_end_matches('0').to_owned()
    } else {
        format!("{value:.0}")
    }
}

fn panel(area: &Area<'_>, (caption, unit): (&str, &str), curves: &Curves) -> Drawn {
    let sizes = || curves.values().flat_map(BTreeMap::keys).copied();
    let (Some(first), Some(last)) = (sizes().min(), sizes().max()) else {
        return Ok(());
    };
    let Some((lowest, highest)) = decades(curves) else {
        return Ok(());
    };
    // A single size has some room beside it.
    let sizes = if first < last { first..last } else { first / 2..last.saturating_mul(2) };
    let mut chart = ChartBuilder::on(area)
        .caption(caption, ("sans-serif", 20))
        .margin(12)
        // Half of the last size's name stands beyond the panel.
        .margin_right(32)
        .x_label_area_size(44)
        .y_label_area_size(72)
        .build_cartesian_2d(sizes.log_scale().base(2.0), (lowest..highest).log_scale())?;
    chart
        .configure_mesh()
        .label_style(("sans-serif", 13))
        .axis_desc_style(("sans-serif", 14))
        .x_desc("bytes of a block")
        .y_desc(unit)
        .x_max_light_lines(1)
        .y_max_light_lines(9)
        .x_label_formatter(&|size| named(*size))
        .y_label_formatter(&|value| plain(*value))
        .draw()?;
    for (name, values) in curves {
        let points = values.iter().map(|(size, value)| (*size, *value));
        let stroke = name.color().stroke_width(2);
        if name.what.is_none() {
            chart.draw_series(DashedLineSeries::new(points.clone(), 8, 5, stroke))?;
        } else {
            chart.draw_series(LineSeries::new(points.clone(), stroke))?;
        }
        match name.transport {
            Transport::Verbs => chart.draw_series(points.map(|at| triangle(at, *name)))?,
            Transport::Tcp => chart.draw_series(points.map(|at| circle(at, *name)))?,
            Transport::Shm => chart.draw_series(points.map(|at| cross(at, *name)))?,
        };
    }
    Ok(())
}

fn triangle<C>(at: C, name: Name) -> TriangleMarker<C, i32> {
    TriangleMarker::new(at, 6, name.color().filled())
}

fn circle<C>(at: C, name: Name) -> Circle<C, i32> {
    Circle::new(at, 4, name.color().filled())
}

fn cross<C>(at: C, name: Name) -> Cross<C, i32> {
    Cross::new(at, 5, name.color().stroke_width(2))
}

/// A line of the legend.
fn entry(area: &Area<'_>, name: Name, y: i32) -> Drawn {
    let (points, stroke) = ([(0, y), (36, y)], name.color().stroke_width(2));
    if name.what.is_none() {
        area.draw(&DashedPathElement::new(points, 8, 5, stroke))?;
    } else {
        area.draw(&PathElement::new(points, stroke))?;
    }
    match name.transport {
        Transport::Verbs => area.draw(&triangle((18, y), name))?,
        Transport::Tcp => area.draw(&circle((18, y), name))?,
        Transport::Shm => area.draw(&cross((18, y), name))?,
    }
    area.draw(&Text::new(name.text(), (46, y - 7), ("sans-serif", 14)))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::What;
    use super::super::report::tests::row;
    use super::*;

    fn picture(rows: Vec<Row>) -> String {
        let mut report = Report::new("loopback".to_owned());
        report.rows = rows;
        draw(&report).unwrap()
    }

    #[test]
    fn a_picture_names_what_was_measured() {
        let svg = picture(vec![
            row(What::Bare, 4096, 0.5),
            row(What::Bare, 65536, 1.5),
            row(What::Get, 4096, 0.25),
        ]);
        for part in [
            "<svg",
            "kvrail",
            "GB/s",
            "microseconds",
            "bare (tcp)",
            "get (tcp)",
            "machine (tcp)",
            "64KiB",
            "</svg>",
        ] {
            assert!(svg.contains(part), "{part}");
        }
    }

    #[test]
    fn axes_have_whole_decades() {
        let name = |what| Name { what, transport: Transport::Shm };
        let curves = |values: [f64; 2]| -> Curves {
            let both = [name(None), name(Some(What::Bare))].into_iter().zip(values);
            both.map(|(name, value)| (name, BTreeMap::from([(4096, value)]))).collect()
        };
        assert_eq!(decades(&curves([1.2, 1.9])), Some((1.0, 10.0)));
        assert_eq!(decades(&curves([0.02, 350.0])), Some((0.01, 1000.0)));
        assert_eq!(decades(&curves([10.0, 10.0])), Some((10.0, 100.0)));
        assert_eq!(decades(&curves([0.0, 0.0])), None);
        assert_eq!([0.001, 0.1, 1.0, 100_000.0].map(plain), ["0.001", "0.1", "1", "100000"]);
    }

    #[test]
    fn one_row_and_none_have_a_picture() {
        assert!(picture(vec![row(What::Bare, 4096, 0.5)]).contains("bare (tcp)"));
        assert!(picture(Vec::new()).contains("<svg"));
    }
}
