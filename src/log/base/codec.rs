//! Which codec the next chunk is stored with.
//!
//! A coded extent has a fixed length, with room for a few values that the codec cannot code.
//! Whether that room is enough is known only when the KV has been gathered. A chunk for which it is
//! not is begun again without the codec: that takes a second gather, and leaves a gap where its
//! first slot was. So the next chunks are stored without the codec (a pause), and then one is coded
//! as a trial. If it does not fit either, the next pause is twice as long.

use parking_lot::Mutex;

use crate::format::layout::SlotCodec;

/// Chunks stored without the codec after the first one that does not fit.
const FIRST_PAUSE: u32 = 64;
/// How often the pause doubles at most.
const MOST_DOUBLINGS: u32 = 14;

/// The codec that is asked for, and how KV has fitted it lately.
#[derive(Debug, Default)]
pub(in crate::log) struct CodecChoice {
    wanted: SlotCodec,
    fit: Mutex<Fit>,
}

#[derive(Debug, Default)]
struct Fit {
    /// Chunks that are still to be stored without the codec.
    pause: u32,
    /// Pauses begun since a trial has fitted.
    pauses: u32,
    /// A trial is under way.
    is_trying: bool,
}

impl CodecChoice {
    pub(in crate::log) fn new(wanted: SlotCodec) -> Self {
        Self { wanted, ..Self::default() }
    }

    /// The codec for the next chunk.
    pub(in crate::log) fn next(&self) -> SlotCodec {
        let mut fit = self.fit.lock();
        if let Some(less) = fit.pause.checked_sub(1) {
            fit.pause = less;
            return SlotCodec::None;
        }
        if fit.pauses > 0 {
            // The trial's put may be dropped without a result: then there is another trial after a
            // pause.
            (fit.is_trying, fit.pause) = (true, FIRST_PAUSE);
        }
        self.wanted
    }

    /// A coded slot is committed: its KV has fitted.
    pub(in crate::log) fn fitted(&self) {
        let mut fit = self.fit.lock();
        if fit.is_trying {
            *fit = Fit::default();
        }
    }

    /// A chunk did not fit; whether that begins a pause. Chunks that were already being stored when
    /// a pause began do not begin another.
    pub(in crate::log) fn misfit(&self) -> bool {
        let mut fit = self.fit.lock();
        let begins = fit.is_trying || fit.pauses == 0;
        if begins {
            let pause = FIRST_PAUSE << fit.pauses.min(MOST_DOUBLINGS);
            *fit = Fit { pause, pauses: fit.pauses.saturating_add(1), is_trying: false };
        }
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
        choice.fitted();
        assert_eq!(pause(), FIRST_PAUSE, "so do those that fit");
        assert!(choice.misfit());
        assert_eq!(pause(), 2 * FIRST_PAUSE);
        assert_eq!(pause(), FIRST_PAUSE, "of the trial nothing was heard");
        choice.fitted();
        assert_eq!(pause(), 0);
        assert!(choice.misfit());
        assert_eq!(pause(), FIRST_PAUSE);
        assert_eq!(CodecChoice::new(SlotCodec::None).next(), SlotCodec::None);
    }
}
