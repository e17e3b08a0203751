//! Where the next chunks of a prompt that is stored in part belong.
//!
//! Prompts of one service begin alike. If the first chunk of a prompt decided, a system prompt
//! would put all of them on one drive, so each run of new chunks chooses anew, by its own first
//! chunk. But what goes on where one prompt alone had got to, a conversation's next turn, stays
//! beside it, so that a dead drive breaks few prompts that it does not hold.

use crate::key::ChunkKey;
use crate::log::Log;
use crate::log::base::options::Placement;

/// A chunk that was used more often has more than one prompt after it. The lookup before the store
/// is counted already.
const MOST_USES_OF_ONE: u8 = 3;

impl Log {
    /// Number of the drive that the chunks after `parent` should go to, where they belong beside
    /// it; `None` where the first of them decides, as by
    /// [`PutSpec::root`](crate::log::PutSpec::root).
    #[must_use]
    pub fn preferred_drive(&self, parent: &ChunkKey) -> Option<usize> {
        if self.volumes.len() < 2 || self.ctx.options.placement != Placement::Chain {
            return None;
        }
        let volume = self.volumes.iter().find(|v| v.find(parent).is_some())?;
        // Of chunks in lanes of other processes this one does not know how often they were used.
        let lane = volume.own()?;
        let (_, slot) = lane.table().get_slot(parent)?;
        let (_, uses) = lane.state().ok()?.usage.recency().get(slot);
        (uses <= MOST_USES_OF_ONE).then_some(volume.number)
    }
}
