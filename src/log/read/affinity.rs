//! The drive on which the next chunks of a prompt belong, whose first chunks are stored.
//!
//! Prompts of one service begin alike. If the first chunk of a prompt decided, a system prompt
//! would put all of them on one drive. So each run of new chunks chooses anew, by its own first
//! chunk. But a run behind a chunk that only one prompt has used, as a conversation's next turn,
//! stays on that chunk's drive: then each prompt lies on few drives, and a dead drive breaks fewer.

use crate::key::ChunkKey;
use crate::log::Log;
use crate::log::base::options::Placement;

/// A chunk with more uses has been used by more than one prompt. The lookup before the store counts
/// as one of them.
const MOST_USES_OF_ONE: u8 = 3;

impl Log {
    /// Number of the drive with `parent`, if the chunks after it belong there too; `None` where the
    /// first of them decides, by [`PutSpec::root`](crate::log::PutSpec::root).
    #[must_use]
    pub fn preferred_drive(&self, parent: &ChunkKey) -> Option<usize> {
        if self.volumes.len() < 2 || self.ctx.options.placement != Placement::Chain {
            return None;
        }
        let volume = self.volumes.iter().find(|v| v.find(parent).is_some())?;
        // How often a chunk in another process's lane was used is not known here.
        let lane = volume.own()?;
        let (_, slot) = lane.table().get_slot(parent)?;
        let (_, uses) = lane.state().ok()?.usage.recency().get(slot);
        (uses <= MOST_USES_OF_ONE).then_some(volume.number)
    }
}
