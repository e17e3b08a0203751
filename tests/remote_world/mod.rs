//! A real S3 server (s3s-fs) in a thread, whose answers a test may spoil.
//!
//! `machine.rs` has caches that use it, `serve.rs` is the server as a program of its own.
#![allow(dead_code, reason = "each test file uses a part")]

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::http::response::Parts;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use tokio::sync::oneshot;

pub(crate) const BUCKET: &str = "kv-cache";
const ACCESS: &str = "test";
const SECRET: &str = "not-a-secret";
/// Bytes that a limited network sends at once: many, because timers are late by a millisecond.
const PACKET_BYTES: usize = 1 << 20;

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spoil {
    /// It is served.
    No,
    /// An error of the server's.
    Status(u16),
    /// It is served, unless it is a put that is to replace nothing: that is not implemented.
    NoConditions,
    /// One byte of the answer is another.
    WrongByte,
    /// Every byte of the answer is another, as if it were of some other object.
    WrongBytes,
    /// The connection ends within the answer.
    Cut,
    /// The answer is shorter than was asked for, and says so.
    Short,
    /// There is no answer.
    Stall,
    /// The answer stops in the middle and never goes on.
    StallWithin,
    /// The answer comes a few bytes at a time.
    SlowLoris,
    /// The connection is closed without an answer.
    Close,
    /// The request's body ends in an error half way, as that of a client that dies.
    CutRequest,
    /// It is served when the test says so ([`Server::let_go`]), and the connection closed without
    /// an answer.
    Unheard,
}

impl Spoil {
    pub(crate) const ALL: [Self; 11] = [
        Self::No,
        Self::Status(500),
        Self::WrongByte,
        Self::WrongBytes,
        Self::Cut,
        Self::Short,
        Self::Stall,
        Self::StallWithin,
        Self::SlowLoris,
        Self::Close,
        Self::CutRequest,
    ];
}

type Plan = Box<dyn FnMut(&Method, u64) -> Spoil + Send>;
type AnyBody = http_body_util::combinators::UnsyncBoxBody<Bytes, io::Error>;

struct Shared {
    service: S3Service,
    plan: Mutex<Plan>,
    asked: AtomicU64,
    /// Whether unheard requests are served.
    is_let_go: AtomicBool,
    /// Requests by method, and bodies stored by path.
    methods: Mutex<HashMap<Method, u64>>,
    puts: Mutex<HashMap<String, u64>>,
    /// Answers to reads by path and range, where they are remembered.
    answers: Mutex<Option<HashMap<String, (Parts, Bytes)>>>,
    network: Mutex<Option<Network>>,
}

/// A network that remembered answers go through: all of them share its rate.
struct Network {
    bytes_per_s: f64,
    /// When it has sent what was given to it.
    idle_at: Instant,
}

impl Network {
    /// When `bytes` more have gone.
    fn sent_at(&mut self, bytes: usize) -> Instant {
        self.idle_at = self.idle_at.max(Instant::now()) + Duration::from_secs_f64(bytes as f64 / self.bytes_per_s);
        self.idle_at
    }
}

/// The server. Dropping it kills it, with its connections.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

impl Server {
    /// Serves what lies in `root`.
    pub(crate) fn start(root: &Path) -> Self {
        std::fs::create_dir_all(root.join(BUCKET)).unwrap();
        Self::listen(root, "127.0.0.1:0".parse().unwrap())
    }

    /// As [`start`](Self::start), where a server was before.
    pub(crate) fn again(root: &Path, address: SocketAddr) -> Self {
        Self::listen(root, address)
    }

    fn listen(root: &Path, address: SocketAddr) -> Self {
        let mut builder = S3ServiceBuilder::new(s3s_fs::FileSystem::new(root).unwrap());
        builder.set_auth(SimpleAuth::from_single(ACCESS, SECRET));
        let shared = Arc::new(Shared {
            service: builder.build(),
            plan: Mutex::new(Box::new(|_, _| Spoil::No)),
            asked: AtomicU64::new(0),
            is_let_go: AtomicBool::new(false),
            methods: Mutex::default(),
            puts: Mutex::default(),
            answers: Mutex::default(),
            network: Mutex::default(),
        });
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind(address)).unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            runtime.spawn(async move {
                loop {
                    let (socket, _) = listener.accept().await.unwrap();
                    let shared = Arc::clone(&serving);
                    let serve = service_fn(move |request| answer(Arc::clone(&shared), request));
                    let server = hyper::server::conn::http1::Builder::new();
                    tokio::spawn(async move { drop(server.serve_connection(TokioIo::new(socket), serve).await) });
                }
            });
            drop(runtime.block_on(stopped));
            // Its port is free when it has ended.
            runtime.shutdown_timeout(Duration::from_secs(60));
        });
        Self { address, shared, thread: Some((stop, thread)) }
    }

    /// Asks `plan` about every request from now on, by its method and its number.
    pub(crate) fn spoil(&self, plan: impl FnMut(&Method, u64) -> Spoil + Send + 'static) {
        *self.shared.plan.lock() = Box::new(plan);
    }

    /// Serves the requests that are [`Spoil::Unheard`], from now on.
    pub(crate) fn let_go(&self) {
        self.shared.is_let_go.store(true, Ordering::SeqCst);
    }

    /// From now on a read that was answered before is answered from memory, at once: the server
    /// then does not limit what is measured.
    pub(crate) fn remember(&self) {
        *self.shared.answers.lock() = Some(HashMap::new());
    }

    /// From now on what is remembered is answered at this rate, all answers together.
    pub(crate) fn limit(&self, bytes_per_s: f64) {
        *self.shared.network.lock() = Some(Network { bytes_per_s, idle_at: Instant::now() });
    }

    pub(crate) fn requests(&self, method: &Method) -> u64 {
        self.shared.methods.lock().get(method).copied().unwrap_or(0)
    }

    /// How often the body of each chunk's object came in full.
    pub(crate) fn puts(&self) -> Vec<u64> {
        let is_chunk = |name: &str| !name.ends_with(".json");
        self.shared.puts.lock().iter().filter(|(name, _)| is_chunk(name)).map(|(_, puts)| *puts).collect()
    }

    /// The environment of a client.
    pub(crate) fn env(&self) -> Vec<(String, String)> {
        let endpoint = format!("http://{}", self.address);
        [
            ("AWS_ENDPOINT_URL", &*endpoint),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ACCESS_KEY_ID", ACCESS),
            ("AWS_SECRET_ACCESS_KEY", SECRET),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .to_vec()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.thread.take() {
            drop(stop);
            thread.join().unwrap();
        }
    }
}

fn io_error(why: &'static str) -> io::Error {
    io::Error::other(why)
}

async fn answer(shared: Arc<Shared>, request: Request<Incoming>) -> io::Result<Response<AnyBody>> {
    let number = shared.asked.fetch_add(1, Ordering::SeqCst);
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    *shared.methods.lock().entry(method.clone()).or_default() += 1;
    let spoil = match (shared.plan.lock())(&method, number) {
        Spoil::NoConditions if request.headers().contains_key("if-none-match") => Spoil::Status(501),
        spoil => spoil,
    };
    match spoil {
        Spoil::Stall => return std::future::pending().await,
        Spoil::Unheard => {
            while !shared.is_let_go.load(Ordering::SeqCst) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        Spoil::Close => return Err(io_error("closed")),
        Spoil::Status(code) => {
            let mut response = Response::new(whole(Bytes::from_static(b"<Error/>")));
            *response.status_mut() = StatusCode::from_u16(code).unwrap();
            return Ok(response);
        }
        _ => {}
    }
    let range = request.headers().get("range").map(|range| format!("{path} {range:?}"));
    let remembered = shared.answers.lock().as_ref().and_then(|all| all.get(range.as_ref()?).cloned());
    if let Some((head, bytes)) = remembered.filter(|_| method == Method::GET) {
        let is_limited = shared.network.lock().is_some();
        let body = if is_limited { through_network(shared, bytes) } else { whole(bytes) };
        return Ok(Response::from_parts(head, body));
    }
    let (head, body) = request.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    let body = match spoil {
        Spoil::CutRequest => {
            let half = body.slice(..body.len() / 2);
            let cut = stream::iter([Ok(Frame::data(half)), Err(io_error("cut"))]);
            s3s::Body::http_body_unsync(StreamBody::new(cut))
        }
        _ => s3s::Body::from(body),
    };
    let response = shared.service.call(Request::from_parts(head, body)).await;
    let response = response.map_err(|e| io::Error::other(format!("{e:?}")))?;
    if method == Method::PUT && response.status().is_success() {
        *shared.puts.lock().entry(path).or_default() += 1;
    }
    if spoil == Spoil::Unheard {
        return Err(io_error("unheard"));
    }
    let (mut head, body) = response.into_parts();
    let bytes = BodyExt::collect(body).await.map_err(|e| io::Error::other(e.to_string()))?.to_bytes();
    if let (Some(all), Some(range)) = (shared.answers.lock().as_mut(), range) {
        all.insert(range, (head.clone(), bytes.clone()));
    }
    let half = bytes.len() / 2;
    let first = bytes.slice(..half);
    let body = match spoil {
        _ if bytes.is_empty() => whole(bytes),
        Spoil::WrongByte => {
            let mut wrong = bytes.to_vec();
            wrong[(number as usize).wrapping_mul(7919) % bytes.len()] ^= 4;
            whole(wrong.into())
        }
        Spoil::WrongBytes => whole(bytes.iter().map(|b| b ^ 0x5a).collect::<Vec<u8>>().into()),
        Spoil::Short => {
            head.headers.insert("content-length", half.into());
            whole(first)
        }
        Spoil::Cut => body_of(stream::iter([Ok(first), Err(io_error("cut"))])),
        Spoil::StallWithin => body_of(stream::iter([Ok(first)]).chain(stream::pending())),
        Spoil::SlowLoris => body_of(stream::unfold(bytes, |mut left| async move {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let some = left.split_to(left.len().min(16));
            (!some.is_empty()).then_some((Ok(some), left))
        })),
        _ => whole(bytes),
    };
    Ok(Response::from_parts(head, body))
}

/// A body whose packets come when the network has sent them.
fn through_network(shared: Arc<Shared>, bytes: Bytes) -> AnyBody {
    body_of(stream::unfold((shared, bytes), |(shared, mut left)| async move {
        if left.is_empty() {
            return None;
        }
        let some = left.split_to(left.len().min(PACKET_BYTES));
        let sent_at = shared.network.lock().as_mut().map(|network| network.sent_at(some.len()));
        if let Some(sent_at) = sent_at {
            tokio::time::sleep_until(sent_at.into()).await;
        }
        Some((Ok(some), (shared, left)))
    }))
}

fn whole(bytes: Bytes) -> AnyBody {
    http_body_util::Full::new(bytes).map_err(|e: Infallible| match e {}).boxed_unsync()
}

fn body_of(pieces: impl futures_util::Stream<Item = io::Result<Bytes>> + Send + 'static) -> AnyBody {
    StreamBody::new(pieces.map(|piece| piece.map(Frame::data))).boxed_unsync()
}
