//! A report as one HTML page without outside resources: where and how it was measured, a summary of
//! all jobs, and for each a table of results and two charts, drawn as inline SVG.

use std::fmt::Write as _;

use forebay::{Error, ErrorKind, Result};
use plotters::prelude::*;

use super::{DirectionResult, JobResult, OVERLAP, PERCENTILES, SAMPLE_INTERVAL};
use crate::size::{show_bytes, show_count};

const STYLE: &str = "\
:root{color-scheme:light dark}\
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1000px;padding:0 1rem}\
h1{margin-bottom:.2rem}h2{margin-top:2.5rem;border-bottom:2px solid #8886}\
.figures{display:flex;flex-wrap:wrap;gap:.3rem 1.5rem;margin:1rem 0;padding:0;list-style:none}\
.figures b{font-weight:600}\
pre{white-space:pre-wrap;background:#8882;padding:.5rem .8rem;border-radius:6px}\
.head td:first-child{opacity:.7}.head td{text-align:left;border:0;padding:.1rem .8rem .1rem 0}\
table{border-collapse:collapse;margin:1rem 0}\
th,td{text-align:right;padding:.3rem .8rem;border-bottom:1px solid #8886}\
th:first-child,td:first-child{text-align:left}\
figure{margin:1rem 0;background:#fff;border:1px solid #8884;border-radius:6px;padding:.5rem}\
svg{max-width:100%;height:auto}\
code{background:#8882;padding:.1rem .3rem;border-radius:3px}";

const READ_COLOUR: RGBColor = RGBColor(31, 119, 180);
const WRITE_COLOUR: RGBColor = RGBColor(214, 93, 14);

/// Where and how a run was measured.
#[derive(Debug, Default)]
pub(crate) struct Head {
    /// Names and values: host, date, drive and the like.
    pub(crate) facts: Vec<(&'static str, String)>,
    /// The command line.
    pub(crate) command: String,
}

/// The page over all jobs of a run.
pub(crate) fn document(jobs: &[JobResult], head: &Head) -> Result<String> {
    let mut page = String::from("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">");
    page.push_str("<meta name=\"viewport\" content=\"width=device-width\"><title>forebay bench</title>");
    let _ = write!(page, "<style>{STYLE}</style></head><body><h1>forebay bench</h1><table class=\"head\">");
    for (name, value) in &head.facts {
        let _ = write!(page, "<tr><td>{name}</td><td>{}</td></tr>", escape(value));
    }
    let _ = write!(page, "</table><pre>{}</pre>", escape(&head.command));
    summary(&mut page, jobs);
    for job in jobs {
        section(&mut page, job)?;
    }
    page.push_str("</body></html>\n");
    Ok(page)
}

/// A line for each job and direction.
fn summary(page: &mut String, jobs: &[JobResult]) {
    page.push_str("<h2>Summary</h2><table><tr><th>job</th><th></th><th>bandwidth</th><th>IOPS</th><th>p99</th></tr>");
    for job in jobs {
        for (word, d) in job.directions() {
            let (bw, iops) = (show_bytes(d.bytes_per_s()), show_count(d.iops()));
            let p99 = micros(d.clat.percentile(99.0) as f64);
            let _ = write!(page, "<tr><td>{}</td><td>{word}</td><td>{bw}/s</td>", escape(&job.name));
            let _ = write!(page, "<td>{iops}</td><td>{p99}</td></tr>");
        }
    }
    page.push_str("</table>");
}

/// A figure beyond fio's: bytes in binary units, fractions with two decimals below 100 and none
/// above.
fn shown(name: &str, value: &serde_json::Value) -> String {
    match value.as_f64() {
        Some(bytes) if name.ends_with("_bytes") => show_bytes(bytes),
        Some(whole) if value.is_u64() => format!("{whole}"),
        Some(number) if number.abs() >= 100.0 => format!("{number:.0}"),
        Some(number) => format!("{number:.2}"),
        None => value.as_str().map_or_else(|| value.to_string(), str::to_owned),
    }
}

fn section(page: &mut String, job: &JobResult) -> Result<()> {
    let _ = write!(page, "<section><h2>{}</h2><p>", escape(&job.name));
    for (name, value) in &job.options {
        let _ = write!(page, "<code>{}={}</code> ", escape(name), escape(value));
    }
    page.push_str("</p><table><tr><th></th><th>bandwidth</th><th>IOPS</th><th>bytes</th><th>time</th>");
    page.push_str("<th>clat mean</th><th>p50</th><th>p99</th><th>p99.9</th></tr>");
    for (word, d) in job.directions() {
        let clat = d.clat.summary();
        let _ = write!(
            page,
            "<tr><td>{word}</td><td>{}/s</td><td>{}</td><td>{}</td><td>{:.2} s</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            show_bytes(d.bytes_per_s()),
            show_count(d.iops()),
            show_bytes(d.io_bytes as f64),
            d.runtime.as_secs_f64(),
            micros(clat.mean),
            micros(d.clat.percentile(50.0) as f64),
            micros(d.clat.percentile(99.0) as f64),
            micros(d.clat.percentile(99.9) as f64),
        );
    }
    page.push_str("</table>");
    if let Ok(serde_json::Value::Object(figures)) = serde_json::to_value(&job.forebay)
        && !figures.is_empty()
    {
        page.push_str("<ul class=\"figures\">");
        for (name, value) in &figures {
            let (name, value) = (escape(&name.replace('_', " ")), escape(&shown(name, value)));
            let _ = write!(page, "<li>{name} <b>{value}</b></li>");
        }
        page.push_str("</ul>");
    }
    let definition = job.forebay.overlap_efficiency.map(|_| OVERLAP);
    for line in definition.into_iter().chain(job.notes.iter().map(String::as_str)) {
        let _ = write!(page, "<p>{}</p>", escape(line));
    }
    if job.directions().next().is_some() {
        let _ = write!(page, "<figure>{}</figure>", percentile_chart(job).map_err(drawing)?);
        if job.directions().any(|(_, d)| d.whole_samples().len() > 1) {
            let _ = write!(page, "<figure>{}</figure>", bandwidth_chart(job).map_err(drawing)?);
        }
    }
    page.push_str("</section>");
    Ok(())
}

fn drawing(e: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Internal, format!("cannot draw a chart: {e}"))
}

fn micros(ns: f64) -> String {
    match ns {
        ns if ns >= 100e6 => format!("{:.0} ms", ns / 1e6),
        ns if ns >= 1e6 => format!("{:.1} ms", ns / 1e6),
        ns => format!("{:.1} µs", ns / 1e3),
    }
}

fn escape(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut out, c| {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
        out
    })
}

type DrawResult<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn colour(word: &str) -> RGBColor {
    if word == "read" { READ_COLOUR } else { WRITE_COLOUR }
}

/// Completion latency over percentiles; the percentiles are spread evenly, as in fio's own list.
fn percentile_chart(job: &JobResult) -> DrawResult<String> {
    let value = |d: &DirectionResult, p: f64| d.clat.percentile(p) as f64 / 1e3;
    let top = job.directions().flat_map(|(_, d)| PERCENTILES.map(|p| value(d, p))).fold(1.0, f64::max) * 1.1;
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (940, 320)).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .caption("Completion latency by percentile", ("sans-serif", 18))
            .margin(10)
            .margin_right(30)
            .x_label_area_size(36)
            .y_label_area_size(80)
            .build_cartesian_2d(0..PERCENTILES.len() - 1, 0.0..top)?;
        chart
            .configure_mesh()
            .x_labels(PERCENTILES.len())
            .x_label_formatter(&|i| PERCENTILES.get(*i).map_or(String::new(), |p| format!("{p}")))
            .y_desc("µs")
            .y_label_formatter(&|us| format!("{us:.0}"))
            .light_line_style(WHITE)
            .draw()?;
        for (word, d) in job.directions() {
            let colour = colour(word);
            let points: Vec<_> = PERCENTILES.iter().enumerate().map(|(i, &p)| (i, value(d, p))).collect();
            chart
                .draw_series(LineSeries::new(points, colour.stroke_width(2)).point_size(3))?
                .label(word)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
        }
        chart.configure_series_labels().position(SeriesLabelPosition::UpperLeft).background_style(WHITE).draw()?;
        root.present()?;
    }
    Ok(svg)
}

fn bandwidth_chart(job: &JobResult) -> DrawResult<String> {
    let interval = SAMPLE_INTERVAL.as_secs_f64();
    let rate = |bytes: u64| bytes as f64 / interval / f64::from(1 << 20);
    let samples = job.directions().map(|(_, d)| d.whole_samples().len()).max().unwrap_or(1);
    let top =
        job.directions().flat_map(|(_, d)| d.whole_samples().iter().map(|m| rate(m.bytes))).fold(1.0, f64::max) * 1.1;
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (940, 320)).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .caption("Bandwidth over time", ("sans-serif", 18))
            .margin(10)
            .margin_right(30)
            .x_label_area_size(36)
            .y_label_area_size(80)
            .build_cartesian_2d(0.0..samples as f64 * interval, 0.0..top)?;
        chart
            .configure_mesh()
            .x_desc("seconds")
            .y_desc("MiB/s")
            .y_label_formatter(&|rate| format!("{rate:.0}"))
            .light_line_style(WHITE)
            .draw()?;
        for (word, d) in job.directions() {
            let colour = colour(word);
            let points =
                d.whole_samples().iter().enumerate().map(|(i, m)| ((i as f64 + 0.5) * interval, rate(m.bytes)));
            chart
                .draw_series(LineSeries::new(points, colour.stroke_width(2)))?
                .label(word)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
        }
        chart.configure_series_labels().position(SeriesLabelPosition::LowerRight).background_style(WHITE).draw()?;
        root.present()?;
    }
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn figures_are_rounded_and_bytes_have_a_unit() {
        for (name, value, want) in [
            ("device_read_bytes", json!(1_610_612_736_u64), "1.50GiB"),
            ("cpu_s_per_gb", json!(0.123_456), "0.12"),
            ("reopen_ms", json!(1234.56), "1235"),
            ("hits", json!(1_000_000), "1000000"),
            ("path", json!("io_uring"), "io_uring"),
            ("direct", json!(true), "true"),
        ] {
            assert_eq!(shown(name, &value), want, "{name}");
        }
    }

    #[test]
    fn the_head_says_where_it_was_measured_and_its_text_is_no_markup() {
        let head = Head { facts: vec![("host", "a<b>".to_owned())], command: "forebay bench \"x\"".to_owned() };
        let page = document(&[], &head).unwrap();
        assert!(page.contains("<tr><td>host</td><td>a&lt;b&gt;</td></tr>"), "{page}");
        assert!(page.contains("<pre>forebay bench &quot;x&quot;</pre>"), "{page}");
    }
}
