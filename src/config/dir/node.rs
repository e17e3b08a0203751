//! The NUMA node that staging memory should come from, by sysfs.

use std::path::Path;

use super::MountTable;
use crate::config::{Numa, Settings};

/// The node that staging should come from: the one set, or the first drive's on machines with
/// several.
#[must_use]
pub fn numa_node(settings: &Settings) -> Option<u32> {
    match settings.numa {
        Numa::Off => None,
        Numa::Node(node) => Some(node),
        Numa::Auto => {
            let online = std::fs::read_to_string("/sys/devices/system/node/online").ok()?;
            if !online.contains([',', '-']) {
                return None;
            }
            let path = settings.drives.first()?.path.canonicalize().ok()?;
            let mounts = MountTable::read();
            let device = Path::new("/sys/dev/block").join(&mounts.of(&path)?.device);
            // For a disk, a partition of one, or an NVMe namespace below its controller.
            let places =
                ["device/numa_node", "../device/numa_node", "device/device/numa_node", "../device/device/numa_node"];
            let node = places.iter().find_map(|p| std::fs::read_to_string(device.join(p)).ok())?;
            node.trim().parse().ok()
        }
    }
}
