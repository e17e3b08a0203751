//! fio job files: `[global]` sections give defaults to the job sections after them.
//!
//! Every key is an option of the command line under the same name, so a section is turned into
//! arguments and parsed by the same parser. Options that we do have are checked as strictly as on
//! the command line. Of those that fio has and we do not, the ones that change what is measured are
//! refused by name, and the others reported and ignored (`fio_keys`).

use std::path::Path;

use clap::{Args as _, FromArgMatches as _};
use forebay::{Error, ErrorKind, Result};
use ini::{Ini, ParseOption};

use super::fio_keys::{self, Fate};
use super::options::JobOptions;

/// The jobs of a job file.
#[derive(Debug)]
pub(crate) struct JobFile {
    /// Section names with their options, in order.
    pub(crate) jobs: Vec<(String, JobOptions)>,
    /// What was ignored: `[section] option`.
    pub(crate) ignored: Vec<String>,
}

/// Reads a job file; `sections` (where not empty) names the sections to run.
pub(crate) fn read(path: &Path, sections: &[String]) -> Result<JobFile> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::io("cannot read the job file", e).at(path))?;
    parse(&text, sections).map_err(|e| e.at(path))
}

pub(crate) fn parse(text: &str, sections: &[String]) -> Result<JobFile> {
    let command = JobOptions::augment_args(clap::Command::new("job").no_binary_name(true).args_override_self(true));
    let ini = load(text)?;
    let mut file = JobFile { jobs: Vec::new(), ignored: Vec::new() };
    let mut global: Vec<String> = Vec::new();
    let mut refused: Vec<(String, String)> = Vec::new();
    for (section, properties) in &ini {
        let Some(section) = section else {
            if let Some((key, _)) = properties.iter().next() {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    format!("option {key:?} stands before the first section"),
                )
                .advice("put it under [global] or under a job's [name]"));
            }
            continue;
        };
        let chosen = section == "global" || sections.is_empty() || sections.iter().any(|s| s == section);
        if !chosen {
            continue;
        }
        let mut arguments = Vec::new();
        for (key, value) in properties.iter() {
            let value = expand(value);
            if known(&command, key) {
                arguments.push(format!("--{key}={value}"));
                continue;
            }
            match fio_keys::fate(key, &value) {
                Fate::Implied => {}
                Fate::Ignored => file.ignored.push(format!("[{section}] {key}")),
                Fate::Refused(advice) => refused.push((format!("[{section}] {key}"), format!("{key}: {advice}"))),
            }
        }
        if section == "global" {
            global.extend(arguments);
            continue;
        }
        let all = global.iter().chain(&arguments);
        if !refused.is_empty() {
            // The error below lists all refused keys; a mistake in this section must not hide it.
            continue;
        }
        let options = command.clone().try_get_matches_from(all).and_then(|m| JobOptions::from_arg_matches(&m));
        file.jobs.push((section.to_owned(), options.map_err(|e| option_error(section, &e))?));
    }
    if !refused.is_empty() {
        return Err(refusal(&refused));
    }
    if let Some(missing) = sections.iter().find(|s| !file.jobs.iter().any(|(name, _)| name == *s)) {
        return Err(Error::new(ErrorKind::InvalidInput, format!("no section [{missing}] in the job file")));
    }
    if file.jobs.is_empty() {
        return Err(Error::new(ErrorKind::InvalidInput, "the job file has no job section")
            .advice("add a section such as [job1] below [global]"));
    }
    Ok(file)
}

/// One error for all keys that change what is measured and that we do not have.
fn refusal(keys: &[(String, String)]) -> Error {
    let names: Vec<&str> = keys.iter().map(|(name, _)| name.as_str()).collect();
    let mut advice: Vec<&str> = keys.iter().map(|(_, advice)| advice.as_str()).collect();
    advice.dedup();
    Error::new(
        ErrorKind::InvalidInput,
        format!("options that forebay does not have, and without which figures are not fio's: {}", names.join(", ")),
    )
    .advice(advice.join("; "))
}

/// The INI structure. fio allows options without a value: `time_based` reads as 1, and
/// `write_bw_log` as one whose name is the job's.
fn load(text: &str) -> Result<Ini> {
    let with_values: String = text
        .lines()
        .map(|line| {
            let bare = line.trim();
            let is_flag = !bare.is_empty() && !bare.starts_with(['[', ';', '#']) && !bare.contains('=');
            match is_flag {
                true if bare.starts_with("write_") => format!("{bare}=\n"),
                true => format!("{bare}=1\n"),
                false => format!("{bare}\n"),
            }
        })
        .collect();
    let options = ParseOption { enabled_quote: false, enabled_escape: false, ..ParseOption::default() };
    Ini::load_from_str_opt(&with_values, options)
        .map_err(|e| Error::new(ErrorKind::InvalidInput, format!("line {}: {}", e.line, e.msg)))
}

fn known(command: &clap::Command, key: &str) -> bool {
    command.get_arguments().any(|a| a.get_long() == Some(key) || a.get_all_aliases().unwrap_or_default().contains(&key))
}

/// `${NAME}` becomes the environment variable's value, as in fio; unset ones become nothing.
fn expand(value: &str) -> String {
    let mut out = String::new();
    let mut rest = value;
    while let Some((before, after)) = rest.split_once("${") {
        out.push_str(before);
        match after.split_once('}') {
            Some((name, tail)) => {
                out.push_str(&std::env::var(name).unwrap_or_default());
                rest = tail;
            }
            None => {
                out.push_str("${");
                rest = after;
            }
        }
    }
    out + rest
}

/// clap's message without its own prefix, usage and hints.
fn option_error(section: &str, error: &clap::Error) -> Error {
    let text = error.to_string();
    let first = text.lines().next().unwrap_or_default();
    let message = first.strip_prefix("error: ").unwrap_or(first);
    Error::new(ErrorKind::InvalidInput, format!("section [{section}]: {message}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::options::{IoEngine, Rw};

    const FILE: &str = "\
; a comment
[global]
ioengine=io_uring
direct=1
size=64m
time_based
runtime=2
group_reporting
gtod_reduce=1
ramp_time=0

# another
[seq]
rw=read
bs=1m

[global]
iodepth=8

[rand]
stonewall
rw=randread
bs=4k
size=1g
";

    #[test]
    fn global_options_hold_for_the_sections_after_them() {
        let file = parse(FILE, &[]).unwrap();
        let names: Vec<_> = file.jobs.iter().map(|(n, _)| n.as_str()).collect();
        assert_eq!(names, ["seq", "rand"]);
        let (seq, rand) = (&file.jobs[0].1, &file.jobs[1].1);
        assert_eq!((seq.rw, seq.bs, seq.size, seq.iodepth), (Some(Rw::Read), Some(1 << 20), Some(64 << 20), None));
        assert_eq!((seq.ioengine, seq.time_based, seq.stonewall), (Some(IoEngine::Uring), Some(true), None));
        assert_eq!((rand.size, rand.iodepth, rand.stonewall), (Some(1 << 30), Some(8), Some(true)));
        assert_eq!(file.ignored, ["[global] gtod_reduce"]);
    }

    #[test]
    fn single_sections_can_be_chosen() {
        assert_eq!(parse(FILE, &["rand".to_owned()]).unwrap().jobs.len(), 1);
        assert!(parse(FILE, &["nope".to_owned()]).unwrap_err().to_string().contains("[nope]"));
    }

    #[test]
    fn keys_that_change_what_is_measured_are_refused_together_and_by_name() {
        let text =
            "[global]\nsize=1m\nramp_time=5\n[a]\nrw=read\nrate=10m\ndescription=x\n[b]\nrw=write\nbssplit=4k/50\n";
        let error = parse(text, &[]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        let said = error.to_string();
        for part in ["[global] ramp_time", "[a] rate", "[b] bssplit", "bssplit: use bs"] {
            assert!(said.contains(part), "{said:?} lacks {part:?}");
        }
        assert!(!said.contains("description"), "{said:?}");
        // A section that is not run may hold what it wants.
        let text = "[a]\nrw=read\nsize=1m\n[b]\nrw=write\nbssplit=4k/50\n";
        assert_eq!(parse(text, &["a".to_owned()]).unwrap().jobs.len(), 1);
    }

    #[test]
    fn mistakes_name_section_and_option() {
        for (text, want) in [
            ("[a]\nrw=sideways\n", "section [a]: invalid value 'sideways' for '--rw <MODE>'"),
            ("[a]\nrw=read\nbs=4q\n", "section [a]: invalid value '4q'"),
            ("rw=read\n", "before the first section"),
            ("[global]\nrw=read\n", "no job section"),
        ] {
            let e = parse(text, &[]).unwrap_err().to_string();
            assert!(e.contains(want), "{e:?} lacks {want:?}");
        }
    }
}
