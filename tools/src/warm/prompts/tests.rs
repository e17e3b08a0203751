//! Warming against a small HTTP server that answers as an OpenAI-compatible one does.

use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use clap::Parser;
use serde_json::{Value, json};

use super::*;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: PromptsArgs,
}

fn args(words: &[&str]) -> PromptsArgs {
    Line::try_parse_from(std::iter::once("x").chain(words.iter().copied())).map_or_else(|e| panic!("{e}"), |l| l.args)
}

#[test]
fn options_that_would_have_no_effect_or_no_end_are_refused() {
    for words in [
        "--server http://h --cache-dir d",
        "--server http://h -- --max-model-len 9",
        "--dry-run --prefill-rate=-5",
        "--dry-run --prefill-rate 0",
        "--server http://h --timeout 18446744073709551615",
        "--launch m --cache-dir d --start-timeout 18446744073709551615",
        "--server http://h --timeout 0",
        "--server http://h --preset llama-3.1-8b",
        "--server http://h --prefill-rate 10",
        "--server http://h --python p",
        "--dry-run --python p",
        "--server http://h --start-timeout 9",
        "--dry-run --start-timeout 9",
        "--server http://h --vocab-size 100",
        "--dry-run --vocab-size 100",
    ] {
        assert!(Line::try_parse_from(["x", "f"].into_iter().chain(words.split(' '))).is_err(), "{words}");
    }
    assert!(args(&["f", "--launch", "m", "--cache-dir", "d", "--", "--max-model-len", "9"]).directory.is_some());
    args(&["f", "--launch", "m", "--cache-dir", "d", "--python", "p", "--start-timeout", "9"]);
    args(&["f", "--trace", "--vocab-size", "100", "--dry-run", "--preset", "tiny", "--prefill-rate", "9"]);
}

/// Answers each request by `answer(path, body)`; counts completions.
struct Fake {
    address: String,
    completions: Arc<AtomicUsize>,
}

impl Fake {
    fn start(answer: impl Fn(usize, &Value) -> (u16, Value) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let completions = Arc::new(AtomicUsize::new(0));
        let (count, answer) = (Arc::clone(&completions), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (count, answer) = (Arc::clone(&count), Arc::clone(&answer));
                std::thread::spawn(move || serve(stream, &count, &*answer));
            }
        });
        Self { address, completions }
    }
}

fn serve(stream: TcpStream, count: &AtomicUsize, answer: &(dyn Fn(usize, &Value) -> (u16, Value) + Send + Sync)) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut stream = stream;
    loop {
        let (mut first, mut line, mut length) = (String::new(), String::new(), 0);
        if reader.read_line(&mut first).unwrap_or(0) == 0 {
            return;
        }
        loop {
            line.clear();
            reader.read_line(&mut line).unwrap();
            if line.trim().is_empty() {
                break;
            }
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        let (status, value) = if first.contains("/v1/models") {
            (200, json!({"object": "list", "data": [{"id": "tiny"}]}))
        } else {
            answer(count.fetch_add(1, Ordering::SeqCst), &serde_json::from_slice(&body).unwrap())
        };
        let text = value.to_string();
        let head =
            format!("HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n", text.len());
        stream.write_all(format!("{head}{text}").as_bytes()).unwrap();
    }
}

fn usage(prompt: usize, cached: usize) -> (u16, Value) {
    let details = json!({"cached_tokens": cached});
    (200, json!({"usage": {"prompt_tokens": prompt, "prompt_tokens_details": details}}))
}

fn summary(args: &PromptsArgs, fake: &Fake) -> Summary {
    let prompts = read(args).unwrap();
    let journal = args.journal.as_deref().map(|p| Journal::open(p, true).unwrap()).unwrap_or_default();
    let left: Vec<Prompt> = prompts.into_iter().filter(|p| !journal.contains(&p.digest())).collect();
    let mut summary = Summary::default();
    let server = Server::new(&fake.address, None, (Duration::from_secs(10), 3)).unwrap();
    let context = Context { json: true, quiet: true };
    let model = server.model().unwrap();
    send(&left, (&server, &model, args.jobs), &journal, &mut summary, &context).unwrap();
    summary
}

#[test]
fn a_request_that_is_late_is_not_sent_again() {
    let fake = Fake::start(|_, _| {
        std::thread::sleep(Duration::from_secs(10));
        usage(3, 0)
    });
    let server = Server::new(&fake.address, None, (Duration::from_secs(1), 3)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("p.jsonl");
    std::fs::write(&file, "{\"prompt\": [1, 2, 3]}\n").unwrap();
    let prompts = read(&args(&[file.to_str().unwrap(), "--server", &fake.address])).unwrap();
    assert!(server.warm(&prompts[0], "tiny").is_err());
    assert_eq!(fake.completions.load(Ordering::SeqCst), 1);
}

#[test]
fn every_prompt_is_sent_once_and_its_tokens_are_counted() {
    let fake = Fake::start(|_, body| {
        assert_eq!((&body["model"], &body["max_tokens"]), (&json!("tiny"), &json!(1)));
        usage(body["prompt"].as_array().unwrap().len(), 2)
    });
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("p.jsonl");
    let lines: String = (0..20).map(|i| format!("{{\"prompt\": [1, 2, 3, {i}]}}\n")).collect();
    std::fs::write(&file, lines).unwrap();
    let journal = dir.path().join("journal");
    let args = args(&[file.to_str().unwrap(), "--server", &fake.address, "--journal", journal.to_str().unwrap()]);
    let first = summary(&args, &fake);
    assert_eq!((first.done, first.prompt_tokens, first.cached_tokens, first.computed_tokens), (20, 80, 40, 40));
    let second = summary(&args, &fake);
    assert_eq!((second.done, fake.completions.load(Ordering::SeqCst)), (0, 20), "the journal knows them");
    assert_eq!(run(&args, &Context { json: true, quiet: true }).unwrap(), Outcome::Done);
}

#[test]
fn a_busy_server_is_asked_again_and_a_refusal_is_reported_with_its_words() {
    let fake = Fake::start(|n, body| match (n, body["prompt"].as_str()) {
        (_, Some("too long")) => (400, json!({"message": "maximum context length"})),
        (0, _) => (503, json!({})),
        _ => (200, json!({"usage": {"prompt_tokens": 5}})),
    });
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("p.jsonl");
    std::fs::write(&file, "{\"prompt\": \"fine\"}\n{\"prompt\": \"too long\"}\n").unwrap();
    let args = args(&[file.to_str().unwrap(), "--server", &fake.address, "--jobs", "1"]);
    let summary = summary(&args, &fake);
    assert_eq!((summary.done, summary.failed, summary.answers_without_cached_tokens), (1, 1, 1));
    assert_eq!(summary.failures[0].line, 2);
    assert!(summary.failures[0].error.contains("maximum context length"), "{}", summary.failures[0].error);
    assert!(text(&summary).contains("--enable-prompt-tokens-details"));
}

#[test]
fn a_dry_run_needs_no_server_and_says_what_is_estimated() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("p.jsonl");
    std::fs::write(&file, "{\"prompt\": [1, 2, 3]}\n{\"prompt\": \"12345678\"}\n").unwrap();
    let args = args(&[file.to_str().unwrap(), "--dry-run", "--preset", "llama-3.1-8b", "--prefill-rate", "10"]);
    let mut summary = Summary { dry_run: true, ..Summary::default() };
    estimate(&args, &read(&args).unwrap(), &mut summary).unwrap();
    assert_eq!((summary.prompt_tokens, summary.estimated_prompts), (5, 1));
    assert_eq!((summary.estimated_bytes, summary.estimated_s), (Some(5 * 131_072), Some(0.5)));
    assert!(text(&summary).contains("about 5 tokens"));
    let journal = dir.path().join("journal");
    let args = PromptsArgs { journal: Some(journal.clone()), ..args };
    assert_eq!(run(&args, &Context { json: true, quiet: true }).unwrap(), Outcome::Done);
    assert!(!journal.exists(), "it only looks");
}

#[test]
fn no_server_and_no_address_are_errors_that_say_what_to_do() {
    let gone = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap();
    let server = Server::new(&format!("http://{gone}/v1/"), None, (Duration::from_secs(2), 0)).unwrap();
    let e = server.model().unwrap_err();
    assert!(e.to_string().contains("does not answer") && e.to_string().contains("--server"), "{e}");
    assert!(Server::new("localhost:8000", None, (Duration::from_secs(2), 0)).is_err());
    assert!(Line::try_parse_from(["x", "p.jsonl"]).is_err(), "neither --server nor --launch");
}

#[test]
fn a_server_that_wants_a_key_is_up() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let server = Server::new(&format!("http://{}", listener.local_addr().unwrap()), None, (Duration::from_secs(10), 0));
    std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        assert!(BufReader::new(stream.try_clone().unwrap()).lines().any(|line| line.unwrap().is_empty()));
        stream.write_all(b"HTTP/1.1 401 X\r\nContent-Length: 0\r\n\r\n").unwrap();
    });
    assert!(server.unwrap().is_up());
}

#[test]
fn a_vllm_that_ends_at_once_is_an_error_and_not_a_hang() {
    let dir = tempfile::tempdir().unwrap();
    let launch = Launch {
        python: Path::new("false"),
        model: "m",
        cache_dir: dir.path(),
        args: &[],
        patience: Duration::from_secs(30),
    };
    let e = launch.start().err().unwrap();
    assert!(e.to_string().contains("ended while it started"), "{e}");
}
