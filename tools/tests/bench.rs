//! `forebay bench` as fio's users run it: options, job files, output.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use std::path::Path;

use common::{folder, forebay};
use serde_json::Value;

fn bench(folder: &Path, arguments: &str) -> common::Run {
    let all: Vec<&str> = std::iter::once("bench").chain(arguments.split_whitespace()).collect();
    forebay(folder, &all)
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn a_read_has_the_json_of_fio_and_moves_real_bytes() {
    let dir = folder();
    let run = bench(dir.path(), "--rw read --bs 64k --iodepth 4 --size 4m --numjobs 2 --output-format json").expect(0);
    let json = run.json();
    assert!(json["fio version"].as_str().unwrap().starts_with("forebay-"));
    let job = &json["jobs"][0];
    assert_eq!(job["jobname"], "forebay");
    assert_eq!(job["job options"]["rw"], "read");
    let read = &job["read"];
    assert_eq!(read["io_bytes"], 8 << 20);
    assert_eq!(read["total_ios"], 128);
    assert_eq!(read["clat_ns"]["N"], 128);
    for percentile in ["1.000000", "50.000000", "99.000000", "99.990000"] {
        assert!(number(&read["clat_ns"]["percentile"][percentile]) > 0.0, "{percentile}");
    }
    for key in ["bw_bytes", "bw", "iops"] {
        assert!(number(&read[key]) > 0.0, "{key}");
    }
    for key in ["min", "max", "mean", "stddev"] {
        assert!(read["lat_ns"][key].is_number() && read["slat_ns"][key].is_number(), "{key}");
    }
    assert!((number(&read["bw"]) - number(&read["bw_bytes"]) / 1024.0).abs() <= 1.0);
    assert_eq!(job["write"]["io_bytes"], 0);
    for key in ["usr_cpu", "sys_cpu", "ctx"] {
        assert!(job[key].is_number(), "{key}");
    }
    let own = &job["forebay"];
    assert!(own["path"].is_string());
    if own["direct"] == true {
        assert!(number(&own["device_read_bytes"]) >= f64::from(8 << 20), "{own}");
    }
    assert!(own.get("reopen_ms").is_none(), "figures of other modes are left out");
}

/// What fio_jsonplus_clat2csv (fio 3.33) and fio-plot (1.1.21) read of a result; both were run on
/// one.
#[test]
fn the_tools_of_fio_find_what_they_read() {
    let dir = folder();
    let logs = "--write_bw_log --write_iops_log=other --write_lat_log=other";
    let arguments = format!("--rw randrw --bs 4k --iodepth 4 --size 1m --time_based --runtime 550ms --name one {logs}");
    let json = bench(dir.path(), &format!("{arguments} --output-format=json+")).expect(0).json();
    assert!(json["fio version"].is_string());
    let job = &json["jobs"][0];
    for option in ["rw", "iodepth", "numjobs", "bs"] {
        assert!(job["job options"][option].is_string(), "{option}");
    }
    assert_eq!(job["trim"]["total_ios"], 0);
    assert!(job["trim"]["clat_ns"].get("bins").is_none(), "fio has no bins of nothing either");
    for direction in ["read", "write"] {
        let of = &job[direction];
        for latency in ["slat_ns", "clat_ns", "lat_ns"] {
            let bins = of[latency]["bins"].as_object().unwrap();
            let sum: u64 = bins.values().map(|n| n.as_u64().unwrap()).sum();
            assert_eq!(Some(sum), of["total_ios"].as_u64(), "{direction} {latency}");
            assert!(bins.keys().all(|ns| ns.parse::<u64>().is_ok()));
        }
        for key in ["iops_min", "iops_max", "iops_mean", "iops_stddev", "iops_samples"] {
            assert!(of[key].is_number(), "{key}");
        }
    }
    let classes = ["latency_ns", "latency_us", "latency_ms"].map(|unit| job[unit].as_object().unwrap());
    let percent: f64 = classes.iter().flat_map(|c| c.values()).map(number).sum();
    assert!((percent - 100.0).abs() < 0.01, "{percent} % of the operations have a class");
    for (name, least) in [("one_bw", 1), ("other_iops", 1), ("other_lat", 1), ("other_slat", 0), ("other_clat", 1)] {
        let text = std::fs::read_to_string(dir.path().join(format!("{name}.1.log"))).unwrap();
        let rows: Vec<Vec<u64>> =
            text.lines().map(|l| l.split(", ").map(|field| field.parse().unwrap()).collect()).collect();
        assert!(rows.iter().all(|row| row.len() == 5 && row[0] % 100 == 0 && row[1] >= least && row[2] <= 1), "{text}");
        assert!([0, 1].iter().all(|direction| rows.iter().any(|row| row[2] == *direction)), "{name}: {text}");
        assert!(rows.is_sorted_by_key(|row| row[0]), "{name}: {text}");
    }
    let plain = bench(dir.path(), "--rw read --bs 4k --size 64k --json").expect(0).json();
    assert!(plain["jobs"][0]["read"]["clat_ns"].get("bins").is_none());
}

#[test]
fn files_are_laid_out_in_full_and_used_again() {
    let dir = folder();
    bench(dir.path(), "--rw randread --bs 4k --size 1m --name keepme --direct 1").expect(0);
    let path = dir.path().join("keepme.0.0");
    let first = std::fs::read(&path).unwrap();
    assert_eq!(first.len(), 1 << 20);
    let empty_pages = first.chunks(4096).filter(|p| p.iter().all(|b| *b == 0)).count();
    assert_eq!(empty_pages, 0, "a hole would measure nothing");
    bench(dir.path(), "--rw read --bs 4k --name keepme").expect(0);
    assert_eq!(std::fs::read(&path).unwrap(), first);
    bench(dir.path(), "--rw read --bs 4k --name keepme --unlink=1").expect(0);
    assert!(!path.exists());
}

#[test]
fn what_a_write_that_ended_early_left_is_not_taken_for_laid_out() {
    let dir = folder();
    let path = dir.path().join("early.0.0");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(1 << 20).unwrap();
    std::process::Command::new("fallocate").args(["-l", "1M"]).arg(&path).status().unwrap();
    bench(dir.path(), "--rw read --bs 4k --size 1m --name early").expect(0);
    let empty = std::fs::read(&path).unwrap().chunks(4096).filter(|p| p.iter().all(|b| *b == 0)).count();
    assert_eq!(empty, 0, "reads of reserved space measure nothing");
}

#[test]
fn options_of_the_other_kind_of_job_are_refused() {
    let dir = folder();
    for (arguments, named) in [
        ("--rw write --size 1m --verify", "verify is for the engine's modes"),
        ("--rw read --size 1m --model llama-3.1-8b", "for the engine's modes"),
        ("--rw load --size 1m --direct=0", "direct=0 is for plain files"),
        ("--rw store --size 1m --end_fsync", "end_fsync is for plain files"),
        ("--rw layerload --size 1m --numjobs 2", "numjobs is for plain files, load and store"),
    ] {
        let run = bench(dir.path(), arguments).expect(2);
        assert!(run.stderr.contains(named), "{arguments}: {}", run.stderr);
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    bench(dir.path(), "--rw write --size 1m --verify=0 --name fine").expect(0);
}

#[test]
fn a_file_that_was_given_is_not_overwritten_by_a_read() {
    let dir = folder();
    let path = dir.path().join("theirs");
    std::fs::write(&path, [7; 8192]).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
    let run = bench(dir.path(), "--rw read --bs 4k --size 1m --filename theirs").expect(2);
    assert!(run.stderr.contains("never written"), "{}", run.stderr);
    assert_eq!(std::fs::read(&path).unwrap()[..8192], [7; 8192]);
}

#[test]
fn what_was_measured_before_an_error_is_printed() {
    let dir = folder();
    let text = "[one]\nrw=write\nsize=1m\n[two]\nstonewall\nrw=read\nfilename=missing\n";
    std::fs::write(dir.path().join("job.fio"), text).unwrap();
    let run = bench(dir.path(), "job.fio").expect(2);
    assert!(run.stdout.contains("one: ") && run.stderr.contains("no size"), "{}\n{}", run.stdout, run.stderr);
    for place in ["--output=none/r.json", "--html=none/r.html", "--write_bw_log=none/r"] {
        let run = bench(dir.path(), &format!("--rw write --size 1m --name late {place}")).expect(1);
        assert!(run.stderr.contains("none") && !dir.path().join("late.0.0").exists(), "{}", run.stderr);
    }
}

#[test]
fn two_jobs_may_remove_the_file_that_they_share() {
    let dir = folder();
    let text = "[global]\nrw=write\nsize=1m\nfilename=shared\nunlink=1\n[one]\n[two]\n";
    std::fs::write(dir.path().join("job.fio"), text).unwrap();
    let run = bench(dir.path(), "job.fio").expect(0);
    assert!(run.stdout.contains("one: ") && run.stdout.contains("two: ") && run.stderr.is_empty(), "{}", run.stderr);
    assert!(!dir.path().join("shared").exists());
}

#[test]
fn a_cache_is_no_place_for_other_files() {
    let dir = folder();
    std::fs::create_dir_all(dir.path().join("live/below")).unwrap();
    std::fs::write(dir.path().join("live/BUDGET"), "").unwrap();
    for arguments in [
        "bench --rw read --size 1m --directory live",
        "bench --rw write --size 1m --filename live/below/file",
        "bench --rw store --model tiny --size 128k --directory live",
        "bench --rw store --model tiny --size 128k --directory live/below --keep",
        "demo --directory live",
    ] {
        let run = forebay(dir.path(), &arguments.split(' ').collect::<Vec<_>>()).expect(2);
        assert!(run.stderr.contains("name a directory beside it"), "{arguments}: {}", run.stderr);
    }
    assert_eq!(std::fs::read_dir(dir.path().join("live")).unwrap().count(), 2);
    // A file that is there may be read.
    std::fs::write(dir.path().join("live/file"), vec![1; 1 << 16]).unwrap();
    bench(dir.path(), "--rw read --bs 4k --filename live/file").expect(0);
}

#[test]
fn every_raw_mode_moves_its_size_on_every_engine() {
    let dir = folder();
    for engine in ["auto", "threads", "psync"] {
        for (rw, reads, writes) in
            [("write", false, true), ("randwrite", false, true), ("rw", true, true), ("randrw", true, true)]
        {
            let depth = if engine == "psync" { 1 } else { 8 };
            let arguments =
                format!("--rw {rw} --bs 16k --iodepth {depth} --size 1m --ioengine {engine} --end_fsync --json");
            let json = bench(dir.path(), &arguments.replace("--end_fsync", "--end_fsync=1")).expect(0).json();
            let bytes = |direction: &str| json["jobs"][0][direction]["io_bytes"].as_u64().unwrap();
            assert_eq!(bytes("read") + bytes("write"), 1 << 20, "{engine} {rw}");
            assert_eq!((bytes("read") > 0, bytes("write") > 0), (reads, writes), "{engine} {rw}");
        }
    }
}

#[test]
fn time_based_runs_start_over_until_the_time_is_up() {
    let dir = folder();
    let json = bench(dir.path(), "--rw read --bs 4k --size 8k --time_based --runtime 300ms --json").expect(0).json();
    let read = &json["jobs"][0]["read"];
    assert!(number(&read["io_bytes"]) > f64::from(8 << 10), "{read}");
    // The clock stops with the last operation, which may end a little before the time is up.
    assert!((150.0..10_000.0).contains(&number(&read["runtime"])), "{read}");
}

#[test]
fn normal_output_reads_like_fio() {
    let dir = folder();
    let run = bench(dir.path(), "--rw rw --bs 64k --size 2m --rwmixread 60 --name mixed").expect(0);
    for part in [
        "mixed: (groupid=0): rw=rw",
        "read: IOPS=",
        "write: IOPS=",
        "BW=",
        "clat percentiles (",
        "99.99th=[",
        "cpu          : usr=",
        "READ: bw=",
        "WRITE: bw=",
        "io=",
    ] {
        assert!(run.stdout.contains(part), "{part:?} is not in\n{}", run.stdout);
    }
}

#[test]
fn job_files_run_in_groups_and_ignored_options_are_named() {
    let dir = folder();
    let text = "[global]\nsize=1m\nbs=64k\nioengine=libaio\ngtod_reduce=1\ngroup_reporting\nwrite_bw_log\n\n[one]\nrw=read\n\n[two]\nrw=write\n\n[three]\nstonewall\nrw=randread\nbs=4k\n";
    std::fs::write(dir.path().join("job.fio"), text).unwrap();
    let run = bench(dir.path(), "job.fio --output-format=json --output result.json --html report.html").expect(0);
    assert!(run.stderr.contains("were ignored: [global] gtod_reduce"), "{}", run.stderr);
    assert_eq!(run.stdout, "");
    let json: Value = serde_json::from_str(&std::fs::read_to_string(dir.path().join("result.json")).unwrap()).unwrap();
    let jobs: Vec<_> = json["jobs"].as_array().unwrap().iter().map(|j| (&j["jobname"], &j["groupid"])).collect();
    assert_eq!(
        format!("{jobs:?}"),
        r#"[(String("one"), Number(0)), (String("two"), Number(0)), (String("three"), Number(1))]"#
    );
    assert_eq!(json["jobs"][2]["read"]["total_ios"], 256);
    let html = std::fs::read_to_string(dir.path().join("report.html")).unwrap();
    for part in ["<td>host</td>", "<td>file system</td>", " UTC</td>", "bench job.fio", "Summary"] {
        assert!(html.contains(part), "{part:?} is not in the report");
    }
    assert!(html.contains("<svg") && html.contains("three") && html.trim_end().ends_with("</html>"));
    let without_xmlns = html.replace("http://www.w3.org/2000/svg", "");
    assert!(!without_xmlns.contains("http"), "the report must not load anything");
    for name in ["one_bw.1.log", "two_bw.2.log", "three_bw.3.log"] {
        assert!(dir.path().join(name).is_file(), "{name}");
    }
    let one = bench(dir.path(), "job.fio --section three --json").expect(0).json();
    assert_eq!(one["jobs"].as_array().unwrap().len(), 1);
}

#[test]
fn job_files_with_options_that_would_change_the_figures_are_refused() {
    let dir = folder();
    for line in ["rate=1m", "ramp_time=1", "filesize=2m", "bssplit=4k/50:64k/50", "nrfiles=4", "fsync=1", "nonsense=1"]
    {
        std::fs::write(dir.path().join("job.fio"), format!("[one]\nrw=write\nsize=1m\n{line}\n")).unwrap();
        let run = bench(dir.path(), "job.fio").expect(2);
        let key = line.split('=').next().unwrap();
        assert!(run.stderr.contains(&format!("[one] {key}")), "{line}: {}", run.stderr);
        assert!(run.stderr.contains("remove it") || run.stderr.contains("use "), "{line}: {}", run.stderr);
        assert_eq!(run.stdout, "", "{line}");
    }
}

#[test]
fn groups_have_totals_of_their_own() {
    let dir = folder();
    let text = "[global]\nsize=1m\nbs=64k\n[one]\nrw=read\n[two]\nrw=read\n[three]\nstonewall\nrw=write\nsize=2m\n";
    std::fs::write(dir.path().join("job.fio"), text).unwrap();
    let run = bench(dir.path(), "job.fio").expect(0);
    let (_, status) = run.stdout.split_once("Run status group 0 (all jobs):").unwrap();
    let (first, second) = status.split_once("Run status group 1 (all jobs):").unwrap();
    assert!(first.contains("READ: ") && first.contains("io=2MiB") && !first.contains("WRITE"), "{first}");
    assert!(second.contains("WRITE: ") && second.contains("io=2MiB") && !second.contains("READ"), "{second}");
}

#[test]
fn mistakes_say_what_to_do() {
    let dir = folder();
    std::fs::write(dir.path().join("bad.fio"), "[a]\nrw=read\nbs=4q\n").unwrap();
    for (arguments, code, want) in [
        ("--bs 4k", 2, "no workload"),
        ("--rw read --bs 4k", 2, "add --size"),
        ("--rw read --bs 1m --size 4k", 2, "smaller than bs"),
        ("--rw read --bs 1000 --size 1m", 2, "multiple of 512"),
        ("--rw read --size 1m --time_based", 2, "time_based needs a runtime"),
        ("--rw read --size 1m --ioengine cufile", 2, "add --device cuda:0"),
        ("--rw read --size 1m --device tpu", 2, "use host, cuda, or cuda:N"),
        ("--rw load --model gpt-5", 2, "llama-3.1-8b"),
        ("--rw read --size 1m --ioengine sync --iodepth 4", 2, "use ioengine threads"),
        ("--rw write --size 1m --filename one:two", 2, "a section for each file"),
        ("--rw load --model tiny --tokens unlimited", 2, "tokens must be at most"),
        ("--rw reopen --chunks unlimited", 2, "chunks must be at most"),
        ("bad.fio", 2, "section [a]: invalid value '4q'"),
        ("--rw load --verify crc32c", 2, "--verify takes no value, or =0 or =1: remove \"crc32c\""),
        ("--rw read --size 1m --time_based 1", 2, "--time_based takes no value"),
        ("bad.fio --bs 4k", 2, "put the options into the job file"),
        ("missing.fio", 1, "missing.fio"),
        ("--rw read --size 1m --directory nowhere", 1, "nowhere"),
    ] {
        let run = bench(dir.path(), arguments).expect(code);
        assert!(run.stderr.starts_with("forebay: ") && run.stderr.contains(want), "{arguments}: {}", run.stderr);
        assert_eq!(run.stdout, "", "{arguments}");
    }
    let run = bench(dir.path(), "--rw load --verify=crc32c").expect(2);
    assert!(run.stderr.contains("invalid value 'crc32c'"), "{}", run.stderr);
    let run = bench(dir.path(), "--rw sideways").expect(2);
    assert!(run.stderr.contains("randrw") && run.stderr.contains("layerload"), "{}", run.stderr);
}
