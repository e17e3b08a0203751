//! The sizes of all tiers in one argument.

use forebay::{Error, ErrorKind, Result};

use crate::size;

/// Tokens of each tier; 0 for one that is not there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tiers {
    pub(crate) memory: u64,
    pub(crate) drive: u64,
    pub(crate) remote: u64,
}

/// `memory=3m,drive=20m,remote=unlimited`, in any order.
pub(super) fn parse(text: &str) -> Result<Tiers> {
    let mut tiers = Tiers::default();
    for part in text.split(',') {
        let (name, tokens) = part.split_once('=').unwrap_or((part, ""));
        let tier = match name.trim() {
            "memory" => &mut tiers.memory,
            "drive" => &mut tiers.drive,
            "remote" => &mut tiers.remote,
            _ => {
                return Err(Error::new(ErrorKind::InvalidInput, format!("there is no tier {name:?}"))
                    .advice("write memory=TOKENS,drive=TOKENS,remote=TOKENS"));
            }
        };
        *tier = size::parse_tokens(tokens)?;
    }
    if tiers.drive == 0 {
        return Err(Error::new(ErrorKind::InvalidInput, "every cache has a drive").advice("add drive=TOKENS"));
    }
    Ok(tiers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tier_has_its_size_and_what_is_no_tier_is_refused() {
        assert_eq!(parse("memory=3m,drive=20m").unwrap(), Tiers { memory: 3_000_000, drive: 20_000_000, remote: 0 });
        assert_eq!(parse("remote=unlimited, drive=1k").unwrap(), Tiers { memory: 0, drive: 1000, remote: u64::MAX });
        for bad in ["", "memory=3m", "disk=3m", "drive", "drive=x", "drive=0"] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }
}
