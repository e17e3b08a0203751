//! From keys as users write them (nested, flat, LMCache's names, `extra_config`) to the keys of
//! [`Settings`].
//!
//! One layer (a file, one family of environment variables, code) is flattened at a time. A setting
//! that one layer gives twice with different values is an error, because its author cannot see
//! which of the two would win.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde_json::{Map, Value};

use super::Settings;
use super::value;
use super::warning::{Feature, Origin, Warning, WarningKind};
use crate::error::{Error, ErrorKind, Result};

/// Other ways to write a setting, nested ones with a dot.
pub(super) const ALIASES: [(&str, &str); 11] = [
    ("cache_dir", "drives"),
    ("cache_dirs", "drives"),
    ("gds_path", "drives"),
    ("gds_config.cache_dir", "drives"),
    ("gds_config.capacity", "capacity"),
    ("gds_config.enable_rdma", "enable_rdma"),
    ("gds_config.max_concurrent_ops", "max_concurrent_ops"),
    ("gds_config.block_size", "block_size"),
    ("local_config.cache_size_gb", "max_local_cpu_size"),
    ("remote_config.remote_url", "remote_url"),
    ("remote_config.remote_serde", "remote_serde"),
];

/// Keys that hold a mapping.
pub(super) const SECTIONS: [&str; 4] = ["gds_config", "local_config", "remote_config", EXTRA];

const EXTRA: &str = "extra_config";
const OURS: &str = "forebay";

/// LMCache's settings to which one of Forebay corresponds with another meaning, so that it is only
/// suggested.
const RELATED: [(&str, &str); 9] = [
    ("cache_policy", "eviction_policy"),
    ("local_disk", "cache_dir"),
    ("max_local_disk_size", "capacity"),
    ("gds_path_sharding", "placement"),
    ("gds_buffer_size", "staging"),
    ("gds_backend", "io_engine"),
    ("blocking_timeout_secs", "io_timeout_ms"),
    ("numa_mode", "numa"),
    ("local_cpu_use_hugepages", "hugepages"),
];

/// Settings that have no effect where their feature is off or not there yet.
const NOT_ACTIVE: [(&str, Feature); 6] = [
    ("enable_rdma", Feature::Rdma),
    ("max_local_cpu_size", Feature::HostTier),
    ("blend_check_layers", Feature::Blending),
    ("blend_recompute_ratios", Feature::Blending),
    ("blend_special_str", Feature::Blending),
    ("blend_thresholds", Feature::Blending),
];

/// The keys of [`Settings`], in the order of the struct.
pub(super) fn canonical() -> &'static [String] {
    static KEYS: OnceLock<Vec<String>> = OnceLock::new();
    KEYS.get_or_init(|| Settings::default().to_map().into_iter().map(|(key, _)| key).collect())
}

/// The canonical name of a key, where it is one.
pub(super) fn resolve(key: &str) -> Option<&'static str> {
    let own = canonical().iter().find(|own| *own == key).map(String::as_str);
    own.or_else(|| ALIASES.iter().find(|(alias, _)| *alias == key).map(|(_, own)| *own))
}

/// One setting and where it was written.
#[derive(Clone, Debug)]
pub(super) struct Given {
    pub(super) written: String,
    pub(super) origin: Origin,
    pub(super) value: Value,
}

/// The settings of one layer, or of all layers so far.
pub(super) type Layer = BTreeMap<&'static str, Given>;

/// Flattens one layer.
pub(super) struct Flatten<'a> {
    pub(super) layer: Layer,
    pub(super) warnings: &'a mut Vec<Warning>,
    /// Unknown keys are errors.
    pub(super) strict: bool,
}

impl Flatten<'_> {
    /// Takes a mapping whose keys lie below `section` (empty at the top).
    pub(super) fn mapping(&mut self, section: &str, map: Map<String, Value>, origin: &Origin) -> Result<()> {
        for (key, value) in map {
            let written = if section.is_empty() { key } else { format!("{section}.{key}") };
            self.entry(written, value, origin)?;
        }
        Ok(())
    }

    /// Takes one key.
    pub(super) fn entry(&mut self, written: String, value: Value, origin: &Origin) -> Result<()> {
        // A key without a value in YAML means "not set".
        if value.is_null() {
            return Ok(());
        }
        if SECTIONS.contains(&written.as_str()) || written == format!("{EXTRA}.{OURS}") {
            return match value {
                Value::Object(map) => self.mapping(&written, map, origin),
                other => Err(Error::new(ErrorKind::Config, format!("{written} {origin} is {}", value::show(&other)))
                    .advice(format!("write {written} as a mapping of keys to values"))),
            };
        }
        let in_extra = written.strip_prefix(&format!("{EXTRA}."));
        let ours = in_extra.and_then(|key| key.strip_prefix(&format!("{OURS}.")));
        match (in_extra, ours) {
            (Some(_), None) => {
                self.warnings.push(Warning {
                    kind: WarningKind::UnknownKey,
                    key: written.clone(),
                    origin: Some(origin.clone()),
                    message: "not a setting of Forebay, ignored".into(),
                    advice: format!("settings of Forebay inside {EXTRA} begin with {OURS}."),
                });
                Ok(())
            }
            (_, key) => match resolve(key.unwrap_or(&written)) {
                Some(own) => self.take(own, Given { written, origin: origin.clone(), value }),
                None => self.unknown(&written, key, origin),
            },
        }
    }

    fn take(&mut self, key: &'static str, given: Given) -> Result<()> {
        if let Some(before) = self.layer.get(key) {
            if before.value == given.value {
                return Ok(());
            }
            return Err(Error::new(
                ErrorKind::Config,
                format!("{} ({}) and {} ({}) differ", before.written, before.origin, given.written, given.origin),
            )
            .advice("they are the same setting: keep one"));
        }
        self.layer.insert(key, given);
        Ok(())
    }

    fn unknown(&mut self, written: &str, ours: Option<&str>, origin: &Origin) -> Result<()> {
        let advice = match suggestion(ours.unwrap_or(written)) {
            Some(near) => format!("did you mean {near}?"),
            None => "docs/configuration.md lists every setting".into(),
        };
        if self.strict || ours.is_some() {
            return Err(Error::new(ErrorKind::Config, format!("unknown setting {written} {origin}")).advice(advice));
        }
        self.warnings.push(Warning {
            kind: WarningKind::UnknownKey,
            key: written.to_owned(),
            origin: Some(origin.clone()),
            message: "not a setting of Forebay, ignored".into(),
            advice,
        });
        Ok(())
    }
}

/// Whether a key is a setting, or a section of them.
pub(super) fn is_known(key: &str) -> bool {
    resolve(key).is_some() || SECTIONS.contains(&key)
}

/// The setting that a key was probably meant to be.
pub(super) fn suggestion(key: &str) -> Option<String> {
    if let Some((_, ours)) = RELATED.iter().find(|(theirs, _)| *theirs == key) {
        return Some((*ours).to_owned());
    }
    let known = canonical().iter().map(String::as_str).chain(ALIASES.iter().map(|a| a.0)).chain(SECTIONS);
    let allowed = (key.chars().count() / 3).clamp(1, 3);
    known
        .map(|name| (distance(key, name), name))
        .filter(|(distance, _)| *distance <= allowed)
        .min()
        .map(|(_, name)| name.to_owned())
}

/// Levenshtein's distance in characters.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut left = i + 1;
        let mut diagonal = i;
        for (above, y) in row.iter_mut().skip(1).zip(&b) {
            let here = (diagonal + usize::from(x != *y)).min(left + 1).min(*above + 1);
            diagonal = std::mem::replace(above, here);
            left = here;
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or(0)
}

/// Warnings about settings that ask for something that is not active.
pub(super) fn not_active(given: &Layer, settings: &Settings) -> Vec<Warning> {
    let asks = |feature: Feature| match feature {
        // Without local_cpu the user may believe that the size turns the tier on.
        Feature::HostTier => !given.contains_key("local_cpu") && settings.max_local_cpu_size > 0,
        Feature::Blending => !given.contains_key("enable_blending"),
        Feature::Rdma => settings.enable_rdma,
    };
    let words = |feature: Feature| match feature {
        Feature::HostTier => ("is off, the setting has no effect", "set local_cpu: true to turn it on"),
        Feature::Blending => {
            ("is off, the setting has no effect", "set enable_blending: true to turn it on, in vLLM's connector")
        }
        Feature::Rdma => ("is not active yet, the setting has no effect", ""),
    };
    NOT_ACTIVE
        .iter()
        .filter_map(|(key, feature)| Some((*feature, given.get(key)?)))
        .filter(|(feature, _)| asks(*feature))
        .map(|(feature, given)| Warning {
            kind: WarningKind::NotActive(feature),
            key: given.written.clone(),
            origin: Some(given.origin.clone()),
            message: format!("{} {}", feature.as_str(), words(feature).0),
            advice: words(feature).1.to_owned(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_pen_is_recognised_and_a_stranger_is_not() {
        for (key, near) in [
            ("chunk_sise", Some("chunk_size")),
            ("io_timout_ms", Some("io_timeout_ms")),
            ("gds_config.blocksize", Some("gds_config.block_size")),
            ("cache_policy", Some("eviction_policy")),
            ("modes", Some("mode")),
            ("controller_pull_url", None),
            ("", None),
        ] {
            assert_eq!(suggestion(key).as_deref(), near, "{key}");
        }
    }

    #[test]
    fn the_distance_counts_edits() {
        for (a, b, edits) in
            [("", "", 0), ("", "abc", 3), ("kitten", "sitting", 3), ("ab", "ba", 2), ("naïve", "naive", 1)]
        {
            assert_eq!(distance(a, b), edits, "{a} {b}");
        }
    }

    #[test]
    fn every_alias_leads_to_a_setting() {
        for (alias, own) in ALIASES {
            assert!(canonical().iter().any(|key| key == own), "{alias} leads to {own}");
        }
    }
}
