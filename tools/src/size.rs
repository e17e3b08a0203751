//! Sizes, times and token counts as users write them.
//!
//! Sizes are read as in the settings: `GiB` and `g` are powers of 1024, `GB` of 1000. Those of
//! `bench` follow fio with its default `kb_base=1024`: `k`, `kb`, `m`, `g`, … are powers of 1024,
//! and the `ki`, `mi`, `gi` spellings are powers of 1000 (fio's inverted reading, kept so that job
//! files mean the same here). Token counts are decimal: `3m` is three million.

use std::time::Duration;

use forebay::{Error, ErrorKind, Result};

fn split(text: &str) -> (&str, String) {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    (number, suffix.trim().to_ascii_lowercase())
}

fn scaled(text: &str, number: &str, factor: u64) -> Result<u64> {
    let too_large = || Error::new(ErrorKind::InvalidInput, format!("{text:?} is too large"));
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(factor).ok_or_else(too_large);
    }
    let value: f64 = number
        .parse()
        .map_err(|_| Error::new(ErrorKind::InvalidInput, format!("{text:?} does not start with a number")))?;
    let product = value * factor as f64;
    if product >= u64::MAX as f64 { Err(too_large()) } else { Ok(product.round() as u64) }
}

/// Bytes as the settings spell them: `200GiB`, `200g`, `4096`.
pub(crate) fn parse_bytes(text: &str) -> Result<u64> {
    forebay::config::Settings::parse_size(text)
}

/// Bytes from fio's spelling: `4k`, `1m`, `2g`, `0x1000`, `4096`.
pub(crate) fn parse_fio_bytes(text: &str) -> Result<u64> {
    let text = text.trim();
    if let Some(hex) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        return u64::from_str_radix(hex, 16)
            .map_err(|_| Error::new(ErrorKind::InvalidInput, format!("{text:?} is not a hexadecimal number")));
    }
    let (number, suffix) = split(text);
    let (letter, si) = match suffix.strip_suffix("ib").or_else(|| suffix.strip_suffix('i')) {
        Some(letter) => (letter.to_owned(), true),
        None => (suffix.strip_suffix('b').unwrap_or(&suffix).to_owned(), false),
    };
    let power = match letter.as_str() {
        "" if !si => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        "p" => 5,
        _ => {
            return Err(Error::new(ErrorKind::InvalidInput, format!("{text:?} is not a size"))
                .advice("write bytes, or a number with k, m, g, t or p (powers of 1024, as in fio)"));
        }
    };
    let base: u64 = if si { 1000 } else { 1024 };
    scaled(text, number, base.pow(power))
}

/// Tokens: `512`, `3m`, `0.5m`, `128k`, decimal; `unlimited` is [`u64::MAX`].
pub(crate) fn parse_tokens(text: &str) -> Result<u64> {
    let text = text.trim();
    if matches!(text, "unlimited" | "inf") {
        return Ok(u64::MAX);
    }
    let (number, suffix) = split(text);
    let factor = match suffix.as_str() {
        "" => 1,
        "k" => 1_000,
        "m" => 1_000_000,
        "g" | "b" => 1_000_000_000,
        _ => {
            return Err(Error::new(ErrorKind::InvalidInput, format!("{text:?} is not a number of tokens"))
                .advice("write a number, or one with k, m or g (decimal), or `unlimited`"));
        }
    };
    scaled(text, number, factor)
}

/// A time in fio's spelling: seconds unless a unit (`us`, `ms`, `s`, `m`, `h`, `d`) follows.
pub(crate) fn parse_time(text: &str) -> Result<Duration> {
    let text = text.trim();
    let (number, suffix) = split(text);
    let micros = match suffix.as_str() {
        "us" | "usec" => 1,
        "ms" | "msec" => 1_000,
        "" | "s" | "sec" => 1_000_000,
        "m" | "min" => 60_000_000,
        "h" => 3_600_000_000,
        "d" => 86_400_000_000,
        _ => {
            return Err(Error::new(ErrorKind::InvalidInput, format!("{text:?} is not a time"))
                .advice("write seconds, or a number with us, ms, s, m, h or d"));
        }
    };
    Ok(Duration::from_micros(scaled(text, number, micros)?))
}

/// Bytes for people, in fio's binary units: `1024KiB`, `3.5GiB`.
pub(crate) fn show_bytes(bytes: f64) -> String {
    show(bytes, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB"])
}

/// The unit in which [`show_bytes`] shows so many bytes, KiB at least, and its bytes.
pub(crate) fn byte_unit(bytes: f64) -> (&'static str, f64) {
    let units = [("TiB", 4), ("GiB", 3), ("MiB", 2)];
    let fits = units.into_iter().map(|(name, power)| (name, 1024f64.powi(power))).find(|(_, unit)| bytes >= *unit);
    fits.unwrap_or(("KiB", 1024.0))
}

/// Bytes for people, in decimal units: `3.7GB`.
pub(crate) fn show_bytes_decimal(bytes: f64) -> String {
    show(bytes, 1000.0, &["B", "kB", "MB", "GB", "TB", "PB"])
}

/// A count for people: `3841`, `12.3k`, `1.2M`.
pub(crate) fn show_count(count: f64) -> String {
    show(count, 1000.0, &["", "k", "M", "G", "T"])
}

/// Three to four significant digits, as fio prints them.
fn show(value: f64, base: f64, units: &[&str]) -> String {
    let mut value = value;
    let mut unit = "";
    for (i, &name) in units.iter().enumerate() {
        unit = name;
        // Plain figures keep four digits, as fio's IOPS do.
        let limit = if i == 0 { base * 10.0 } else { base };
        if value < limit || i + 1 == units.len() {
            break;
        }
        value /= base;
    }
    if value >= 100.0 || value.fract() == 0.0 {
        format!("{value:.0}{unit}")
    } else if value >= 10.0 {
        format!("{value:.1}{unit}")
    } else {
        format!("{value:.2}{unit}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_fio_reads_them() {
        for (text, want) in [
            ("4096", 4096),
            ("4k", 4096),
            ("4K", 4096),
            ("4kb", 4096),
            ("4kib", 4000),
            ("1m", 1 << 20),
            ("1.5g", 3 << 29),
            ("0x1000", 4096),
            ("2t", 2 << 40),
            ("512b", 512),
        ] {
            assert_eq!(parse_fio_bytes(text).unwrap(), want, "{text}");
        }
        for text in ["", "k", "4x", "-1", "99999999p", "1..2k", "4i"] {
            assert!(parse_fio_bytes(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn sizes_of_other_commands_read_as_the_settings_do() {
        for (text, want) in [("200GiB", 200 << 30), ("200g", 200 << 30), ("1.5GiB", 3 << 29), ("2GB", 2_000_000_000)] {
            assert_eq!(parse_bytes(text).unwrap(), want, "{text}");
        }
        assert!(parse_bytes("4x").unwrap_err().to_string().contains("GiB"));
    }

    #[test]
    fn tokens_are_decimal_and_times_default_to_seconds() {
        assert_eq!(parse_tokens("3m").unwrap(), 3_000_000);
        assert_eq!(parse_tokens("unlimited").unwrap(), u64::MAX);
        assert!(parse_tokens("3x").is_err());
        assert_eq!(parse_time("10").unwrap(), Duration::from_secs(10));
        assert_eq!(parse_time("250ms").unwrap(), Duration::from_millis(250));
        assert_eq!(parse_time("2m").unwrap(), Duration::from_secs(120));
        assert!(parse_time("2w").is_err());
    }

    #[test]
    fn figures_keep_three_digits() {
        assert_eq!(show_bytes(4096.0), "4096B");
        assert_eq!(show_bytes(16_384.0), "16KiB");
        assert_eq!(show_bytes((3u64 << 20) as f64), "3MiB");
        assert_eq!(show_bytes(3.5 * (1u64 << 30) as f64), "3.50GiB");
        assert_eq!(show_count(12_345.0), "12.3k");
        assert_eq!(show_count(999.0), "999");
    }
}
