//! Hit ratio, bytes admitted and write amplification over the capacity, as an SVG file: one line
//! per policy, admission, offer and number of ranks.

use std::path::Path;

use forebay::{Error, ErrorKind, Result};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::ReplayResult;
use crate::size::show_count;

type DrawResult<T> = std::result::Result<T, Box<dyn std::error::Error>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// One value of a result.
type Value = fn(&ReplayResult) -> f64;

/// Draws the results, without those of an unlimited capacity.
///
/// # Errors
/// `Io` where the file cannot be written.
pub(super) fn draw(path: &Path, results: &[ReplayResult]) -> Result<()> {
    let svg = render(results).map_err(|e| Error::new(ErrorKind::Internal, format!("cannot draw a chart: {e}")))?;
    std::fs::write(path, svg).map_err(|e| Error::io("cannot write the chart", e).at(path))
}

fn render(results: &[ReplayResult]) -> DrawResult<String> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (940, 1080)).into_drawing_area();
        root.fill(&WHITE)?;
        let (hits, rest) = root.split_vertically(440);
        let (admitted, writes) = rest.split_vertically(320);
        panel(&hits, "Hit ratio", results, |r| r.hit_ratio)?;
        panel(&admitted, "Admitted, GiB", results, |r| r.bytes_admitted as f64 / f64::from(1 << 30))?;
        panel(&writes, "Write amplification", results, |r| r.write_amplification)?;
        root.present()?;
    }
    Ok(svg)
}

fn name(result: &ReplayResult) -> String {
    let mut name = result.policy.clone();
    for (part, usual) in [(&result.admission, "all"), (&result.offer, "stored")] {
        if part != usual {
            name = format!("{name}, {part}");
        }
    }
    if result.ranks == 1 { name } else { format!("{name}, {} ranks", result.ranks) }
}

fn panel(area: &Area<'_>, caption: &str, results: &[ReplayResult], value: Value) -> DrawResult<()> {
    let tokens = |r: &ReplayResult| r.capacity_tokens.map(|c| c as f64);
    let most = results.iter().filter_map(tokens).fold(1.0, f64::max) * 1.05;
    let values = || results.iter().filter(|r| r.capacity_tokens.is_some()).map(value);
    let (low, high) = (values().fold(f64::MAX, f64::min).min(1e9), values().fold(0.0, f64::max));
    let margin = ((high - low) / 10.0).max(0.01);
    let mut chart = ChartBuilder::on(area)
        .caption(caption, ("sans-serif", 18))
        .margin(10)
        .margin_right(30)
        .x_label_area_size(36)
        .y_label_area_size(60)
        .build_cartesian_2d(0.0..most, (low - margin).max(0.0)..high + margin)?;
    chart
        .configure_mesh()
        .x_desc("capacity in tokens")
        .x_label_formatter(&|tokens| show_count(*tokens))
        .light_line_style(WHITE)
        .draw()?;
    let mut names: Vec<String> = Vec::new();
    for name in results.iter().map(name) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    for (number, line) in names.iter().enumerate() {
        let colour = Palette99::pick(number).to_rgba();
        let of_line = results.iter().filter(|r| name(r) == *line);
        let mut points: Vec<_> = of_line.filter_map(|r| Some((tokens(r)?, value(r)))).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        chart
            .draw_series(LineSeries::new(points, colour.stroke_width(2)).point_size(3))?
            .label(line.as_str())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
    }
    chart.configure_series_labels().position(SeriesLabelPosition::LowerRight).background_style(WHITE).draw()?;
    Ok(())
}
