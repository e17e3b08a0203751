//! The element types of keys, and their conversions by operations on bits, so that every machine
//! and the kernels give the same bits.

/// Element type of keys or of a table of cosines and sines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FloatKind {
    /// 32 bits.
    F32,
    /// The upper half of 32 bits.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl FloatKind {
    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// The element with these bits, of which the lowest [`FloatKind::bytes`] count.
    #[inline]
    pub(super) fn decode(self, bits: u32) -> f32 {
        match self {
            Self::F32 => f32::from_bits(bits),
            Self::Bf16 => f32::from_bits(bits << 16),
            Self::F16 => f16_to_f32(bits as u16),
        }
    }

    /// The bits of the nearest element; half way between two, of the even one.
    #[inline]
    pub(super) fn encode(self, value: f32) -> u32 {
        match self {
            Self::F32 => value.to_bits(),
            Self::Bf16 => u32::from(f32_to_bf16(value)),
            Self::F16 => u32::from(f32_to_f16(value)),
        }
    }
}

#[inline]
fn f16_to_f32(half: u16) -> f32 {
    let (sign, exponent, mantissa) =
        (u32::from(half & 0x8000) << 16, u32::from(half >> 10 & 31), u32::from(half & 0x3ff));
    let size = match exponent {
        31 => 0x7f80_0000 | mantissa << 13,
        // Subnormals are whole multiples of 2^-24, which a float holds exactly.
        0 => (mantissa as f32 * (-24f32).exp2()).to_bits(),
        _ => (exponent + 112) << 23 | mantissa << 13,
    };
    f32::from_bits(sign | size)
}

#[inline]
fn f32_to_f16(value: f32) -> u16 {
    let (sign, size) = ((value.to_bits() >> 16 & 0x8000) as u16, value.to_bits() & 0x7fff_ffff);
    let half = match size {
        0x7f80_0001.. => 0x7e00 | size >> 13 & 0x3ff,
        // From 65520 on (half way between the largest f16 and the next step) it is infinity.
        0x477f_f000.. => 0x7c00,
        0x3880_0000.. => (size - 0x3800_0000 + 0xfff + (size >> 13 & 1)) >> 13,
        // Below 2^-14: in units of 2^-24; up to half of a unit becomes zero.
        0x3300_0001.. => {
            let (shift, mantissa) = (126 - (size >> 23), size & 0x7f_ffff | 0x80_0000);
            let (units, rest, tie) = (mantissa >> shift, mantissa & ((1 << shift) - 1), 1 << (shift - 1));
            units + u32::from(rest > tie || rest == tie && units & 1 == 1)
        }
        _ => 0,
    };
    sign | half as u16
}

#[inline]
fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    // Both are computed and one is chosen, so that the compiler makes loops over this vectors.
    let (quiet, rounded) = (bits | 0x40_0000, bits.wrapping_add(0x7fff + (bits >> 16 & 1)));
    ((if value.is_nan() { quiet } else { rounded }) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What an f16 means, by its definition.
    fn meaning(half: u16) -> f64 {
        let (exponent, mantissa) = (i32::from(half >> 10 & 31), f64::from(half & 0x3ff));
        let size = match exponent {
            31 if mantissa == 0.0 => f64::INFINITY,
            31 => f64::NAN,
            0 => mantissa * (-24f64).exp2(),
            _ => (1024.0 + mantissa) * f64::from(exponent - 25).exp2(),
        };
        if half & 0x8000 == 0 { size } else { -size }
    }

    #[test]
    fn every_f16_means_what_its_definition_says_and_comes_back() {
        for half in 0..=u16::MAX {
            let (value, expected) = (FloatKind::F16.decode(u32::from(half)), meaning(half));
            assert!(f64::from(value) == expected || expected.is_nan() && value.is_nan(), "{half:#x}");
            let back = FloatKind::F16.encode(value);
            assert!(back == u32::from(half) || value.is_nan() && back == u32::from(half) | 0x200, "{half:#x}");
        }
    }

    #[test]
    fn values_between_two_f16_go_to_the_nearer_and_ties_to_the_even_one() {
        for half in 0..0x7bffu16 {
            let (low, high) = (meaning(half) as f32, meaning(half + 1) as f32);
            let middle = low + (high - low) / 2.0;
            let even = u32::from(half + half % 2);
            for (value, expected) in [
                (middle, even),
                (f32::from_bits(middle.to_bits() - 1), u32::from(half)),
                (f32::from_bits(middle.to_bits() + 1), u32::from(half) + 1),
            ] {
                assert_eq!(FloatKind::F16.encode(value), expected, "{value:e}");
                assert_eq!(FloatKind::F16.encode(-value), expected | 0x8000, "{value:e}");
            }
        }
        for (value, expected) in [(65_519.996f32, 0x7bff), (65_520.0, 0x7c00), (1e30, 0x7c00), (f32::INFINITY, 0x7c00)]
        {
            assert_eq!(FloatKind::F16.encode(value), expected, "{value}");
        }
    }

    #[test]
    fn bf16_is_the_upper_half_rounded_to_the_nearest_even() {
        for (bits, expected) in [
            (0x3f80_8000, 0x3f80),
            (0x3f80_8001, 0x3f81),
            (0x3f81_8000, 0x3f82),
            (0x3f81_7fff, 0x3f81),
            (0x7f7f_ffff, 0x7f80),
            (0x8000_8000, 0x8000),
            (0xff80_0000, 0xff80),
            (0x7f80_0001, 0x7fc0),
            (1, 0),
        ] {
            assert_eq!(FloatKind::Bf16.encode(f32::from_bits(bits)), expected, "{bits:#x}");
        }
        assert!((0..=0xffffu32).all(|b| {
            let value = FloatKind::Bf16.decode(b);
            FloatKind::Bf16.encode(value) == b || value.is_nan() && FloatKind::Bf16.encode(value) == b | 0x40
        }));
    }
}
