//! Which objects there are, by name. Names lie in the headers of slots only, so a listing reads the
//! header of every slot that it looks at. Parts have no name, and are read to learn just that.

use std::sync::Arc;

use super::batch::ObjectCause;
use super::core::Core;
use super::names::Version;
use super::read::judge;
use crate::error::Result;
use crate::format::slot::{SlotHeader, TLV_OBJECT_NAME};
use crate::index::EntryKind;
use crate::io::{AlignedBuf, Request, wait};
use crate::key::{ChunkKey, object_key};
use crate::log::{Chunk, Log};

/// Up to `limit` objects whose names begin with `prefix`, in the order of their digests, those
/// after `after` only.
pub(super) fn list(
    core: &Core,
    log: &Arc<Log>,
    prefix: &[u8],
    limit: usize,
    after: Option<&[u8]>,
) -> Result<Vec<(Vec<u8>, u64)>> {
    let place = |key: &ChunkKey| u128::from_be_bytes(*key.0.first_chunk().unwrap_or(&[0; 16]));
    let after = after.map(|name| place(&object_key(name)));
    // The index knows the first half of a key.
    let mut keys: Vec<ChunkKey> = Vec::new();
    log.for_each(|info| {
        if info.kind == EntryKind::Object && after.is_none_or(|after| place(&info.key) > after) {
            keys.push(info.key);
        }
    });
    keys.sort_unstable_by_key(place);
    let mut found = Vec::new();
    for half in keys {
        if found.len() >= limit {
            break;
        }
        let Some(head) = log.hold(&half, core.pin()) else { continue };
        let Some((key, name)) = name_of(core, log, head.clone())? else { continue };
        if object_key(&name) == key
            && name.starts_with(prefix)
            && let Some(length) = length(log, &key, &head)
        {
            found.push((name, length));
        }
    }
    Ok(found)
}

/// The key and the name in a slot's header; `None` for a part, which has no name, and for what
/// cannot be read: then it is no longer there.
fn name_of(core: &Core, log: &Arc<Log>, mut chunk: Chunk) -> Result<Option<(ChunkKey, Vec<u8>)>> {
    let Some(drive) = log.drive(chunk.drive) else { return Ok(None) };
    let page = AlignedBuf::zeroed(chunk.layout.header_bytes as usize)?;
    let request = Request::read(Arc::clone(&chunk.file), chunk.header_offset(), page.into(), |_| ());
    let read = wait(&*drive.read, request.timeout(core.io_timeout));
    let header = match (read.result, read.buf) {
        (Ok(()), Some(buf)) => {
            if let Ok((header, _)) = SlotHeader::decode(buf.as_slice()) {
                chunk.key = header.key;
            }
            log.check_header(&chunk, buf.as_slice()).map_err(|_| ObjectCause::Corrupt)
        }
        (Ok(()), None) => Err(ObjectCause::Internal),
        (Err(e), _) => Err(ObjectCause::of_transfer(&e)),
    };
    match header {
        Ok(header) => Ok(header.tlv(TLV_OBJECT_NAME).map(|name| (chunk.key, name.to_vec()))),
        Err(cause) => {
            judge(log, &chunk, cause);
            Ok(None)
        }
    }
}

/// The bytes of an object; `None` where it has lost a part.
fn length(log: &Log, key: &ChunkKey, head: &Chunk) -> Option<u64> {
    let Some(version) = Version::of(key, head.length, head.tenant, head.depth) else { return Some(head.length) };
    version.keys().iter().map(|part| log.peek(part).map(|info| info.length)).sum()
}
