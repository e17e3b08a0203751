//! The remote store that a command names, and what it holds.

use forebay::Result;
use forebay::config::{Loader, Settings};
use forebay::remote::{RemoteObject, RemoteOptions, RemoteStore};

use crate::out::Context;
use crate::progress::{self, Unit};
use crate::settings::REMOTE;

/// What errors of a slow store advise to raise.
const TIMEOUT: &str = "FOREBAY_REMOTE_TIMEOUT_MS";

/// Settings with a remote store by its address, which is checked as a server's would be.
pub(crate) fn settings(url: &str) -> Result<Settings> {
    let timeout = std::env::var_os(TIMEOUT).map(|ms| (TIMEOUT, ms));
    Ok(Loader::bare().env(timeout).code_name(REMOTE).set("remote_url", url).load()?.0)
}

/// The chunks of a shard in a remote store.
pub(crate) struct RemoteShard {
    pub(crate) namespace: String,
    pub(crate) shard: String,
    /// As the store describes it, where it does.
    pub(crate) model: Option<String>,
    pub(crate) objects: Vec<RemoteObject>,
}

impl RemoteShard {
    /// Bytes of its objects.
    pub(crate) fn bytes(&self) -> u64 {
        self.objects.iter().map(|object| object.bytes).sum()
    }
}

/// All that lies in the remote store at `url`; nothing where there is none.
pub(crate) fn list(url: Option<&str>, context: &Context) -> Result<Vec<RemoteShard>> {
    let Some(url) = url else { return Ok(Vec::new()) };
    let Some(options) = RemoteOptions::of_settings(&settings(url)?) else { return Ok(Vec::new()) };
    let store = RemoteStore::open(&options)?;
    let shards = store.shards()?;
    let bar = progress::bar(context, "list the remote store", shards.len() as u64, Unit::Count);
    let mut found = Vec::with_capacity(shards.len());
    for (namespace, shard) in shards {
        let model = store.geometry(&namespace, &shard).ok().map(|geometry| geometry.model);
        let objects = store.objects(&namespace, &shard)?;
        found.push(RemoteShard { namespace, shard, model, objects });
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(found)
}
