//! A histogram with fixed buckets: an observation is two atomic additions.
//!
//! The exporter's own histograms keep every observation in lists that grow until a scrape; an
//! observation on the data path must not allocate.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of whole numbers by `N` upper bounds, and of what lies above them all.
#[derive(Debug)]
pub(super) struct FixedHistogram<const N: usize> {
    /// Upper bounds, inclusive, in rising order.
    bounds: [u64; N],
    counts: [AtomicU64; N],
    above: AtomicU64,
    sum: AtomicU64,
}

impl<const N: usize> FixedHistogram<N> {
    pub(super) fn new(bounds: [u64; N]) -> Self {
        Self {
            bounds,
            counts: [const { AtomicU64::new(0) }; N],
            above: AtomicU64::new(0),
            sum: AtomicU64::new(0),
        }
    }

    /// Counts one value. Relaxed: a scrape may see the count before the sum; each is right by itself.
    pub(super) fn observe(&self, value: u64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts.get(bucket).unwrap_or(&self.above).fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    /// Appends the histogram in Prometheus' text format; values are divided by `unit`.
    pub(super) fn render(&self, out: &mut String, family: &super::Family, unit: f64) {
        let name = family.name;
        let mut total = 0_u64;
        let mut text = format!("# HELP {name} {}\n# TYPE {name} histogram\n", family.help);
        for (bound, count) in self.bounds.iter().zip(&self.counts) {
            total = total.saturating_add(count.load(Ordering::Relaxed));
            append(
                &mut text,
                format_args!("{name}_bucket{{le=\"{}\"}} {total}", *bound as f64 / unit),
            );
        }
        total = total.saturating_add(self.above.load(Ordering::Relaxed));
        let sum = self.sum.load(Ordering::Relaxed) as f64 / unit;
        append(&mut text, format_args!("{name}_bucket{{le=\"+Inf\"}} {total}"));
        append(&mut text, format_args!("{name}_sum {sum}"));
        append(&mut text, format_args!("{name}_count {total}\n"));
        out.push_str(&text);
    }
}

fn append(text: &mut String, line: std::fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    writeln!(text, "{line}").ok();
}

#[cfg(test)]
mod tests {
    use super::super::{Family, Kind};
    use super::*;

    #[test]
    fn a_value_lands_in_the_first_bucket_that_holds_it() {
        let histogram = FixedHistogram::new([10, 20]);
        for value in [0, 10, 11, 20, 21] {
            histogram.observe(value);
        }
        let mut text = String::new();
        let family = Family { name: "h", kind: Kind::Histogram, help: "what" };
        histogram.render(&mut text, &family, 10.0);
        assert_eq!(
            text,
            "# HELP h what\n# TYPE h histogram\nh_bucket{le=\"1\"} 2\nh_bucket{le=\"2\"} 4\n\
             h_bucket{le=\"+Inf\"} 5\nh_sum 6.2\nh_count 5\n\n"
        );
    }
}
