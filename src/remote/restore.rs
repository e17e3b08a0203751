//! From the remote store to a drive without a prompt: whatever lies there, for `forebay sync`.
//!
//! An object's header says what its chunk is. Headers are read first, so that chunks come in the
//! order of their chains: what has come is of use however early the work ends. Each chunk is then
//! brought as for a prompt, with all checks.

use std::collections::HashSet;
use std::sync::Arc;

use futures_util::StreamExt;
use parking_lot::Mutex;

use super::Shared;
use super::fetch::{self, AT_ONCE, Destination, FetchState};
use super::known::RemotePresence;
use super::object::{self, Wanted};
use super::stats::RemoteCause;
use super::store::RemoteObject;
use crate::format::layout::SlotCodec;
use crate::format::record::KeyKind;
use crate::format::slot::SlotHeader;

/// Tries of one chunk.
const TRIES: u32 = 3;
/// The pause after which it is tried again to ask a store that is left alone.
const LOOK_AGAIN: std::time::Duration = std::time::Duration::from_millis(200);

/// Brings those of `objects` that no drive has, up to `most` bytes. Where the drives take no more
/// it stops, and gives the cause; a chunk that does not come for another reason is passed over.
pub(super) async fn run(
    shared: &Arc<Shared>,
    to: &Destination,
    objects: Vec<RemoteObject>,
    most: u64,
    state: &FetchState,
) -> Option<RemoteCause> {
    let missing = objects.into_iter().filter(|object| !to.log.contains(&object.key));
    let mut described = Vec::new();
    let mut all = futures_util::stream::iter(missing)
        .map(|object| async move { (object, again(|| describe(shared, to, object)).await) })
        .buffer_unordered(AT_ONCE);
    while let Some((object, end)) = all.next().await {
        match end {
            Ok(wanted) => described.push((wanted, object.bytes)),
            Err(cause) => shared.counters.not_fetched.add(cause, 1),
        }
    }
    described.sort_by_key(|(wanted, _)| (wanted.depth, wanted.tokens));
    let mut bytes = 0;
    let fits = |(_, len): &(Wanted, u64)| {
        bytes += *len;
        bytes <= most
    };
    let wanted: Vec<Wanted> = described.into_iter().take_while(fits).map(|(wanted, _)| wanted).collect();
    // Each further chunk of such a tenant would have it give up one.
    let full_tenants = &Mutex::new(HashSet::new());
    let mut all = futures_util::stream::iter(wanted)
        .map(|wanted| async move {
            if full_tenants.lock().contains(&wanted.tenant) {
                return Err(RemoteCause::Quota);
            }
            let end = again(|| fetch::bring(shared, to, &wanted, fetch::put_spec(to, &wanted), 0)).await;
            match end {
                // Here, for chunks come that are not looked at below where one before them ends it.
                Ok(bytes) => fetch::count(shared, state, bytes),
                Err(RemoteCause::Quota) => drop(full_tenants.lock().insert(wanted.tenant)),
                Err(_) => {}
            }
            end
        })
        .buffered(AT_ONCE);
    while let Some(end) = all.next().await {
        match end {
            Ok(_) => {}
            Err(RemoteCause::NoSpace | RemoteCause::Closed) => return end.err(),
            Err(cause) => shared.counters.not_fetched.add(cause, 1),
        }
    }
    None
}

/// Tries a request again where it fails because of the network; waits for a store that is left
/// alone.
async fn again<T, F: Future<Output = Result<T, RemoteCause>>>(request: impl Fn() -> F) -> Result<T, RemoteCause> {
    let mut tries = 0;
    loop {
        match request().await {
            Err(RemoteCause::CircuitOpen) => tokio::time::sleep(LOOK_AGAIN).await,
            Err(RemoteCause::Io | RemoteCause::TimedOut) if tries + 1 < TRIES => tries += 1,
            end => return end,
        }
    }
}

/// What an object is, as its header says.
async fn describe(shared: &Shared, to: &Destination, object: RemoteObject) -> Result<Wanted, RemoteCause> {
    let RemoteObject { key, tenant, bytes } = object;
    // Of all chunks of a geometry the header has the same length.
    let full = to.log.chunk_layout(to.log.geometry().chunk_tokens, SlotCodec::None);
    // A store that lost its power may have kept a name without the bytes.
    if bytes < u64::from(full.header_bytes) {
        return Err(RemoteCause::Corrupt);
    }
    let mut header = Vec::with_capacity(full.header_bytes as usize);
    let range = 0..u64::from(full.header_bytes);
    shared.bucket.get(&shared.name_of(&key, tenant), range, bytes, |some| header.extend_from_slice(some)).await?;
    let (header, _) = SlotHeader::decode(&header).map_err(|_| RemoteCause::Corrupt)?;
    if header.key_kind != KeyKind::Chain {
        return Err(RemoteCause::Unsupported);
    }
    if header.key != key || header.tenant != tenant {
        return Err(RemoteCause::Corrupt);
    }
    if header.expiry_s != 0 && header.expiry_s <= to.log.options().clock.unix_s() {
        return Err(RemoteCause::Expired);
    }
    let codec = object::codec_of(&to.log, header.tokens, bytes).ok_or(RemoteCause::Corrupt)?;
    shared.known.set(&key, RemotePresence::There(codec));
    Ok(Wanted { key, parent: header.parent, tokens: header.tokens, depth: header.depth, tenant })
}
