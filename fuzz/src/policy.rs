//! What a policy has learned, as a file says it. An input is tried as the whole file, and as what
//! lies behind a CRC that fits.

use forebay::format::policy;
use forebay::index::{ChainChunk, Prefix, SavedPrefix};

/// Bytes of what lies before the policy's own.
const HEADER_BYTES: usize = 48;
/// Room of the drive.
const ROOM_BYTES: u64 = 10_000;

pub(crate) fn policy_state(input: &[u8]) {
    let framed = policy::encode(&[1; 16], input);
    assert_eq!(policy::decode(&framed).ok(), Some(([1; 16], input)), "a file is read as it was written");
    for payload in [policy::decode(input).map_or(&[][..], |(_, payload)| payload), input, behind_header(input)] {
        if let Some(saved) = SavedPrefix::decode(payload.to_vec()) {
            used(&saved);
        }
    }
}

fn behind_header(input: &[u8]) -> &[u8] {
    input.get(HEADER_BYTES..).unwrap_or_default()
}

/// Goes on with what was read, whatever it says.
fn used(saved: &SavedPrefix) {
    let Some(mut policy) = Prefix::restored(saved, ROOM_BYTES) else { return };
    policy.compare(|tag| tag % 3 != 0);
    for i in 0..200u64 {
        let (chain, depth) = (i / 8, (i % 8) as u32);
        let parent = if depth == 0 { 0 } else { i - 1 };
        policy.stored(&ChainChunk { tag: i, parent, depth, bytes: 100, partial: chain.is_multiple_of(5) });
        policy.used(i / 2);
        assert!(policy.held_bytes() <= ROOM_BYTES, "{} bytes are held", policy.held_bytes());
    }
    drop(policy.take_doomed(u64::MAX));
    assert_eq!(policy.doomed_bytes(), 0);
    let Some(mut saving) = policy.save(u64::MAX) else { return };
    while !policy.save_more(&mut saving, 10) {}
    let bytes = policy.saved(saving).into_bytes();
    let read = SavedPrefix::decode(bytes).and_then(|saved| Prefix::restored(&saved, ROOM_BYTES));
    let same = read.is_some_and(|read| (read.held(), read.held_bytes()) == (policy.held(), policy.held_bytes()));
    assert!(same, "what goes on can be saved and read");
}
