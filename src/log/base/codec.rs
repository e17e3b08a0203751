//! Which codec the next chunk is stored with.
//!
//! An extent of coded chunks has room for so many values that the codec does not cover, and whether
//! it is enough is known only when the KV is there. A chunk for which it is not enough is not
//! stored; those after it are stored as they are, twice as many each time that this happens again.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::format::layout::SlotCodec;

/// After the first chunk that does not fit, so many are stored as they are.
const FIRST_PAUSE: u32 = 64;
/// The pause doubles so many times at most.
const MOST_DOUBLINGS: u32 = 14;

/// The codec that is asked for, and how KV has fitted it lately.
#[derive(Debug, Default)]
pub(in crate::log) struct CodecChoice {
    wanted: SlotCodec,
    /// Chunks that are still to be stored as they are.
    pause: AtomicU32,
    /// Pauses since a chunk has fitted.
    pauses: AtomicU32,
}

impl CodecChoice {
    pub(in crate::log) fn new(wanted: SlotCodec) -> Self {
        Self { wanted, ..Self::default() }
    }

    /// The codec for the next chunk.
    pub(in crate::log) fn next(&self) -> SlotCodec {
        let less = |pause: u32| pause.checked_sub(1);
        let pausing = self.pause.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok();
        if pausing { SlotCodec::None } else { self.wanted }
    }

    /// A coded chunk was stored.
    pub(in crate::log) fn fitted(&self) {
        self.pauses.store(0, Ordering::Relaxed);
    }

    /// A chunk did not fit. Whether a pause begins; those that were begun before it begin none.
    pub(in crate::log) fn misfit(&self) -> bool {
        let doublings = self.pauses.load(Ordering::Relaxed).min(MOST_DOUBLINGS);
        let pause = FIRST_PAUSE << doublings;
        let begins = self.pause.compare_exchange(0, pause, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        self.pauses.fetch_add(u32::from(begins), Ordering::Relaxed);
        begins
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_pauses_the_codec_longer_each_time_until_something_fits() {
        let choice = CodecChoice::new(SlotCodec::Exp4);
        let pause = || std::iter::from_fn(|| (choice.next() == SlotCodec::None).then_some(())).count() as u32;
        assert_eq!(pause(), 0);
        assert!(choice.misfit() && !choice.misfit(), "those under way begin no pause of their own");
        assert_eq!(pause(), FIRST_PAUSE);
        assert!(choice.misfit());
        assert_eq!(pause(), 2 * FIRST_PAUSE);
        choice.fitted();
        assert!(choice.misfit());
        assert_eq!(pause(), FIRST_PAUSE);
        assert_eq!(CodecChoice::new(SlotCodec::None).next(), SlotCodec::None);
    }
}
