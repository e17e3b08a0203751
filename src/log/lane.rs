//! One lane.

/// One lane: a writer's segments and journal.
#[derive(Debug)]
pub struct Lane {
    pub(super) data: std::sync::Arc<crate::io::DirectFile>,
}
