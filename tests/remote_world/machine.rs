//! A cache that uses the store of a server, for the tests of the remote tier.
#![allow(dead_code, reason = "each test file uses a part")]

use std::time::{Duration, Instant};

use forebay::config::Codec;
use forebay::engine::{Engine, Fetch, Prompt, RemoteStats};

use crate::engine_world::{CHUNK, Kv, Shape, World, assert_same, load, prompt, slots, store};
use crate::remote_world::{BUCKET, Server};

pub(crate) const N: usize = 3 * CHUNK;

/// A machine whose cache uses the store of `server`.
pub(crate) struct Machine {
    pub(crate) world: World,
    pub(crate) env: Vec<(String, String)>,
}

impl Machine {
    pub(crate) fn new(server: &Server) -> Self {
        Self::with(Shape::plain(), server)
    }

    pub(crate) fn with(shape: Shape, server: &Server) -> Self {
        let prefix = shape.name.replace(' ', "-");
        let mut world = World::new(shape);
        world.settings.remote_url = Some(format!("s3://{BUCKET}/some/{prefix}"));
        world.settings.remote_timeout_ms = 20_000;
        // Of use to the larger shapes only.
        world.settings.codec = Codec::Exp4;
        Self { world, env: server.env() }
    }

    pub(crate) fn open(&self) -> Engine {
        let mut options = self.world.options();
        options.remote_env = Some(self.env.clone());
        self.world.open_with(options)
    }

    /// Stores a prompt made of `seed`, and waits until it is uploaded.
    pub(crate) fn upload(&self, engine: &Engine, seed: u32) -> (Prompt, Kv) {
        let (p, kv) = (prompt(engine, N, seed), self.world.kv().like_kv(seed));
        assert_eq!(store(engine, &p, &kv, slots(N, 1)).stored, 3);
        assert!(engine.wait_uploaded(later()).unwrap());
        (p, kv)
    }

    /// Loads what the cache has of a prompt, compares it, and gives the number of tokens.
    pub(crate) fn check(&self, engine: &Engine, p: &Prompt, from: &Kv) -> usize {
        let kv = self.world.kv();
        let found = load(engine, p, &kv, slots(N, 2)).tokens;
        let map = |seed: usize| slots(N, seed)[..found].to_vec();
        assert_same("loaded", (from, &map(1)), (&kv, &map(2)));
        found
    }
}

pub(crate) fn later() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

pub(crate) fn remote(engine: &Engine) -> RemoteStats {
    engine.stats().unwrap().remote
}

/// What has come of a fetch: the chunks brought, and why it stopped.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fetched {
    pub(crate) chunks: usize,
    pub(crate) stopped: Option<&'static str>,
}

pub(crate) fn wait(fetch: &Fetch) -> Fetched {
    assert!(fetch.wait(later()), "it ends by its own deadline");
    Fetched { chunks: fetch.chunks(), stopped: fetch.stopped() }
}

pub(crate) fn fetch(engine: &Engine, p: &Prompt) -> Fetched {
    wait(&engine.fetch(p, later()).unwrap())
}
