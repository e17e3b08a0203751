//! The state of the admission policy, one for all drives of the log.

use parking_lot::{Mutex, MutexGuard};

use super::options::LogOptions;
use crate::format::layout::SlotLayout;
use crate::index::{AdmissionPolicy, AdmissionState};

/// The policy's state; `None` where everything is stored.
#[derive(Debug, Default)]
pub(in crate::log) struct Admit(Option<Mutex<AdmissionState>>);

impl Admit {
    pub(in crate::log) fn new(options: &LogOptions) -> Self {
        if options.admission == AdmissionPolicy::All {
            return Self(None);
        }
        let capacity: u64 = (0..options.dirs.len())
            .map(|drive| options.drive(drive).capacity_bytes.unwrap_or(options.capacity_bytes))
            .fold(0, u64::saturating_add);
        let slot = SlotLayout::of_chunk(&options.geometry, options.geometry.chunk_tokens).slot_bytes.max(1);
        Self(Some(Mutex::new(AdmissionState::new(options.admission, capacity / slot))))
    }

    /// The policy, where there is one.
    pub(in crate::log) fn policy(&self) -> Option<MutexGuard<'_, AdmissionState>> {
        self.0.as_ref().map(Mutex::lock)
    }

    /// Names that it remembers.
    pub(in crate::log) fn names(&self) -> u64 {
        self.policy().map_or(0, |policy| policy.names())
    }
}
