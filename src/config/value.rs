//! Reading values as users write them: numbers as text, sizes with units, percentages, durations.
//!
//! A reason and the advice that follows from it are one text joined by `"; "`, because a serde
//! error carries one text; [`super::load`] splits it again. Decoding is total: any value gives a
//! result or a reason, never a panic.

use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serializer};
use serde_json::Value;

use crate::error::{Error, ErrorKind};

/// Types that can be read from the several ways in which a value may be written.
pub(super) trait Loose: Sized {
    /// The value, or why it cannot be read.
    fn loose(value: &Value) -> Result<Self, String>;
}

/// Serde's `deserialize_with` for [`Loose`] types.
pub(super) fn loose<'de, D: Deserializer<'de>, T: Loose>(d: D) -> Result<T, D::Error> {
    T::loose(&Value::deserialize(d)?).map_err(D::Error::custom)
}

/// Serde's `deserialize_with` for enums of words, read without regard to case.
pub(super) fn choice<'de, D: Deserializer<'de>, T: DeserializeOwned>(d: D) -> Result<T, D::Error> {
    let value = Value::deserialize(d)?;
    let word = value.as_str().map_or_else(|| show(&value), |word| word.trim().to_ascii_lowercase());
    T::deserialize(Value::String(word)).map_err(|e: serde_json::Error| {
        // serde's message ends with the words that are accepted.
        let text = e.to_string();
        let known = text.split_once("expected ").map_or(text.as_str(), |(_, known)| known);
        D::Error::custom(format!("{} is not known here; use {known}", show(&value)))
    })
}

/// A value as an error message shows it, cut to a readable length.
pub(super) fn show(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 60 { text } else { text.chars().take(57).collect::<String>() + "..." }
}

fn digits(text: &str) -> String {
    text.trim().replace('_', "")
}

macro_rules! loose_integers {
    ($($int:ty),*) => {$(
        impl Loose for $int {
            fn loose(value: &Value) -> Result<Self, String> {
                let number = match value {
                    Value::Number(n) => n.as_u64().or_else(|| {
                        n.as_f64().filter(|f| f.fract() == 0.0 && (0.0..1e15).contains(f)).map(|f| f as u64)
                    }),
                    Value::String(text) => digits(text).parse().ok(),
                    _ => None,
                };
                number
                    .and_then(|n| Self::try_from(n).ok())
                    .ok_or_else(|| format!("{} is not a whole number; write one from 0 to {}", show(value), Self::MAX))
            }
        }
    )*};
}
loose_integers!(u32, u64, usize);

impl Loose for bool {
    fn loose(value: &Value) -> Result<Self, String> {
        let word = match value {
            Value::Bool(b) => return Ok(*b),
            Value::String(text) => text.trim().to_ascii_lowercase(),
            other => other.to_string(),
        };
        match word.as_str() {
            "true" | "yes" | "on" | "1" => Ok(true),
            "false" | "no" | "off" | "0" => Ok(false),
            _ => Err(format!("{} is neither true nor false; write true or false", show(value))),
        }
    }
}

impl Loose for f64 {
    fn loose(value: &Value) -> Result<Self, String> {
        let number = match value {
            Value::Number(n) => n.as_f64(),
            Value::String(text) => digits(text).parse().ok(),
            _ => None,
        };
        number
            .filter(|f: &f64| f.is_finite())
            .ok_or_else(|| format!("{} is not a number; write one such as 0.25", show(value)))
    }
}

impl<T: Loose> Loose for Option<T> {
    fn loose(value: &Value) -> Result<Self, String> {
        match value {
            Value::Null => Ok(None),
            Value::String(text) if text.trim().eq_ignore_ascii_case("none") => Ok(None),
            some => T::loose(some).map(Some),
        }
    }
}

impl Loose for String {
    fn loose(value: &Value) -> Result<Self, String> {
        value.as_str().map(str::to_owned).ok_or_else(|| format!("{} is not text; write it in quotes", show(value)))
    }
}

fn list<T: Loose>(value: &Value) -> Result<Vec<T>, String> {
    let is_none = |text: &str| text.is_empty() || text.eq_ignore_ascii_case("none");
    match value {
        Value::Array(items) => items.iter().map(T::loose).collect(),
        Value::String(text) if is_none(text.trim()) => Ok(Vec::new()),
        Value::String(text) => text.split(',').map(|item| T::loose(&Value::from(item.trim()))).collect(),
        single => T::loose(single).map(|item| vec![item]),
    }
}

impl Loose for Vec<u32> {
    fn loose(value: &Value) -> Result<Self, String> {
        list(value)
    }
}

impl Loose for Vec<f64> {
    fn loose(value: &Value) -> Result<Self, String> {
        list(value)
    }
}

const UNITS: [(&str, u64); 5] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

/// Bytes in the largest unit that loses nothing.
pub(super) fn show_size(bytes: u64) -> String {
    let exact = UNITS.iter().find(|(_, unit)| bytes > 0 && bytes.is_multiple_of(*unit)).unwrap_or(&("B", 1));
    format!("{}{}", bytes / exact.1, exact.0)
}

fn unit(name: &str) -> Option<u64> {
    Some(match name.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return None,
    })
}

fn parse_bytes(text: &str, plain_unit: u64) -> Option<u64> {
    let text = digits(text);
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, name) = text.split_at_checked(split)?;
    let name = name.trim();
    let factor = if name.is_empty() { plain_unit } else { unit(name)? };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(factor);
    }
    let bytes = number.parse::<f64>().ok()? * factor as f64;
    // A fraction of a byte is a mistake, a fraction of a GiB is not.
    ((0.0..1e18).contains(&bytes) && (factor > 1 || bytes.fract() == 0.0)).then_some(bytes as u64)
}

fn read_size(value: &Value, plain_unit: u64) -> Result<u64, String> {
    let size = match value {
        Value::String(text) => parse_bytes(text, plain_unit),
        Value::Number(number) => parse_bytes(&number.to_string(), plain_unit),
        _ => None,
    };
    let plain = if plain_unit == 1 { "bytes" } else { "GiB" };
    size.ok_or_else(|| format!("{} is not a size; write {plain}, or a number with KiB, MiB, GiB or TiB", show(value)))
}

/// Bytes from a number or a number with a unit: KiB, MiB, GiB, TiB (also K, M, G, T) are powers of
/// 1024, KB to TB of 1000.
pub(super) fn size_of(value: &Value) -> Result<u64, String> {
    read_size(value, 1)
}

/// As [`Settings::parse_size`](super::Settings::parse_size).
pub(super) fn parse_size(text: &str) -> crate::Result<u64> {
    size_of(&Value::from(text)).map_err(|why| {
        let (reason, advice) = why.split_once("; ").unwrap_or((&why, ""));
        Error::new(ErrorKind::InvalidInput, reason.to_owned()).advice(advice.to_owned())
    })
}

/// The percentage, where the value is written as one.
pub(super) fn percent(value: &Value) -> Result<Option<f64>, String> {
    let Some(number) = value.as_str().and_then(|text| text.trim().strip_suffix('%')) else { return Ok(None) };
    let percent = number.trim().parse::<f64>().ok().filter(|p| (0.0..=100.0).contains(p));
    percent.map(Some).ok_or_else(|| format!("{} is not a percentage; write 0% to 100%", show(value)))
}

/// Sizes in memory and of requests, in bytes.
pub(super) mod size {
    use super::*;

    pub(in crate::config) fn serialize<S: Serializer>(bytes: &usize, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&show_size(*bytes as u64))
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<usize, D::Error> {
        let bytes = size_of(&Value::deserialize(d)?).map_err(D::Error::custom)?;
        usize::try_from(bytes).map_err(|_| D::Error::custom("the size does not fit this machine's addresses"))
    }
}

/// A size, or none.
pub(super) mod maybe_size {
    use super::*;

    #[expect(clippy::ref_option, reason = "serde's signature")]
    pub(in crate::config) fn serialize<S: Serializer>(bytes: &Option<u64>, s: S) -> Result<S::Ok, S::Error> {
        match bytes {
            None => s.serialize_str("none"),
            Some(bytes) => s.serialize_str(&show_size(*bytes)),
        }
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
        let value = Value::deserialize(d)?;
        if value.is_null() || value.as_str().is_some_and(|word| word.trim().eq_ignore_ascii_case("none")) {
            return Ok(None);
        }
        size_of(&value).map(Some).map_err(D::Error::custom)
    }
}

/// Sizes whose plain numbers are GiB, as LMCache means them.
pub(super) mod gigabytes {
    use super::*;

    pub(in crate::config) fn serialize<S: Serializer>(bytes: &u64, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&show_size(*bytes))
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
        read_size(&Value::deserialize(d)?, 1 << 30).map_err(D::Error::custom)
    }
}

/// Time to live: seconds, or a number with s, m, h, d or w; `never` and 0 for none.
pub(super) mod ttl {
    use std::time::Duration;

    use super::*;

    #[expect(clippy::ref_option, reason = "serde's signature")]
    pub(in crate::config) fn serialize<S: Serializer>(ttl: &Option<Duration>, s: S) -> Result<S::Ok, S::Error> {
        match ttl {
            None => s.serialize_str("never"),
            Some(ttl) => s.serialize_str(&format!("{}s", ttl.as_secs())),
        }
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Duration>, D::Error> {
        let value = Value::deserialize(d)?;
        let text = match &value {
            Value::String(text) => digits(text).to_ascii_lowercase(),
            other => other.to_string(),
        };
        if text == "never" || text == "none" {
            return Ok(None);
        }
        let seconds = parse(&text).ok_or_else(|| {
            D::Error::custom(format!("{} is not a time; write seconds, or a number with m, h, d or w", show(&value)))
        })?;
        Ok((seconds > 0).then(|| Duration::from_secs(seconds)))
    }

    fn parse(text: &str) -> Option<u64> {
        let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at_checked(split)?;
        let factor = match unit.trim() {
            "" | "s" => 1,
            "m" | "min" => 60,
            "h" => 3600,
            "d" => 86_400,
            "w" => 604_800,
            _ => return None,
        };
        number.parse::<u64>().ok()?.checked_mul(factor)
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
pub(super) fn show_workers<S: Serializer>(workers: &usize, s: S) -> Result<S::Ok, S::Error> {
    if *workers == 0 { s.serialize_str("auto") } else { s.serialize_u64(*workers as u64) }
}

pub(super) fn workers<'de, D: Deserializer<'de>>(d: D) -> Result<usize, D::Error> {
    let value = Value::deserialize(d)?;
    if value.as_str().is_some_and(|word| word.trim().eq_ignore_ascii_case("auto")) {
        return Ok(0);
    }
    usize::loose(&value).map_err(D::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_binary_and_decimal_units() {
        let cases = [
            ("4096", 4096),
            ("64KiB", 65_536),
            ("64 kib", 65_536),
            ("1_000", 1000),
            ("1KB", 1000),
            ("1.5GiB", 3 << 29),
            ("2T", 2 << 40),
            ("10gb", 10_000_000_000),
            ("0", 0),
        ];
        for (text, bytes) in cases {
            assert_eq!(size_of(&Value::from(text)), Ok(bytes), "{text}");
        }
        for bad in ["", "GiB", "-1", "1.5", "1XB", "1e3", "1..5GiB", "99999999999TiB", "∞"] {
            let reason = size_of(&Value::from(bad)).unwrap_err();
            assert!(reason.contains("is not a size; write"), "{bad}: {reason}");
        }
    }

    #[test]
    fn shown_sizes_read_back_as_the_same_bytes() {
        for bytes in [0, 1, 1023, 1024, 1536, 1 << 20, (1 << 30) + 1, 5 << 40, u64::MAX] {
            assert_eq!(size_of(&Value::from(show_size(bytes))), Ok(bytes));
        }
        assert_eq!(show_size(256 << 20), "256MiB");
    }

    #[test]
    fn a_percentage_beyond_a_hundred_is_refused() {
        assert_eq!(percent(&Value::from("80 %")), Ok(Some(80.0)));
        assert_eq!(percent(&Value::from("1GiB")), Ok(None));
        for bad in ["101%", "-1%", "NaN%", "%"] {
            assert!(percent(&Value::from(bad)).is_err(), "{bad}");
        }
    }
}
