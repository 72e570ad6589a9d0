//! Bandwidth and latency by block size as a picture, with what the machine gives at best drawn in.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::report::{Report, Row};
use crate::config::Size;

/// Pixels.
const EXTENT: (u32, u32) = (960, 960);

/// What a picture's steps end with.
type Drawn = Result<(), Box<dyn Error>>;

/// By name, values by block size.
type Curves = BTreeMap<String, BTreeMap<u32, f64>>;

/// Draws both panels into this file.
pub(super) fn draw(report: &Report, path: &Path) -> Drawn {
    let root = SVGBackend::new(path, EXTENT).into_drawing_area();
    root.fill(&WHITE)?;
    let (upper, lower) = root.split_vertically(EXTENT.1 / 2);
    let mut bandwidth = curves(report, f64::max, |row| row.gb_s);
    for row in &report.rows {
        let Some(machine) = row.machine_gb_s else { continue };
        let limit = bandwidth.entry(format!("machine ({})", row.transport.as_str())).or_default();
        let best = limit.entry(row.size).or_insert(machine);
        *best = best.max(machine);
    }
    panel(&upper, "Best bandwidth, GB/s", &bandwidth)?;
    let latency = curves(report, f64::min, |row| Some(row.p50_us));
    panel(&lower, "Shortest median latency of a batch, microseconds", &latency)?;
    root.present()?;
    Ok(())
}

/// One curve for each kind of read and fabric, the best row of each size.
fn curves(report: &Report, better: fn(f64, f64) -> f64, value: fn(&Row) -> Option<f64>) -> Curves {
    let mut curves = Curves::new();
    for row in &report.rows {
        let name = format!("{} ({})", row.what.as_str(), row.transport.as_str());
        let Some(value) = value(row) else { continue };
        let best = curves.entry(name).or_default().entry(row.size).or_insert(value);
        *best = better(*best, value);
    }
    curves
}

fn panel(area: &DrawingArea<SVGBackend<'_>, Shift>, caption: &str, curves: &Curves) -> Drawn {
    let points = || curves.values().flatten();
    let sizes = || points().map(|(size, _)| *size);
    let (Some(first), Some(last)) = (sizes().min(), sizes().max()) else {
        return Ok(());
    };
    let values = || points().map(|(_, value)| *value).filter(|value| *value > 0.0);
    let lowest = values().fold(f64::INFINITY, f64::min) * 0.8;
    let highest = values().fold(0.0, f64::max) * 1.25;
    if !(lowest.is_finite() && lowest < highest) {
        return Ok(());
    }
    let mut chart = ChartBuilder::on(area)
        .caption(caption, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d(
            // A single size has some room beside it.
            (first..last.max(first.saturating_mul(2))).log_scale().base(2.0),
            (lowest..highest).log_scale(),
        )?;
    chart
        .configure_mesh()
        .x_desc("block")
        .x_label_formatter(&|size| Size(u64::from(*size)).to_string())
        .y_label_formatter(&|value| format!("{value:.3}"))
        .draw()?;
    for (at, (name, values)) in curves.iter().enumerate() {
        let color = Palette99::pick(at).stroke_width(2);
        let line = values.iter().map(|(size, value)| (*size, *value));
        chart
            .draw_series(LineSeries::new(line, color).point_size(3))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color));
    }
    chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(BLACK).draw()?;
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
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("out.svg");
        draw(&report, &path).unwrap();
        std::fs::read_to_string(path).unwrap()
    }

    #[test]
    fn a_picture_names_what_was_measured() {
        let svg = picture(vec![
            row(What::Bare, 4096, 0.5),
            row(What::Bare, 65536, 1.5),
            row(What::Get, 4096, 0.25),
        ]);
        for part in ["<svg", "bare (tcp)", "get (tcp)", "machine (tcp)", "64KiB", "</svg>"] {
            assert!(svg.contains(part), "{part}");
        }
    }

    #[test]
    fn one_row_and_none_have_a_picture() {
        assert!(picture(vec![row(What::Bare, 4096, 0.5)]).contains("bare (tcp)"));
        assert!(picture(Vec::new()).contains("<svg"));
    }
}
