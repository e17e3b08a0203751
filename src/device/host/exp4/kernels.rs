//! The loops over blocks, as fast as the processor allows.
#![expect(unsafe_code, reason = "vector loads and stores, and calls of what only some processors have")]

use std::sync::OnceLock;

use crate::format::exp4::{Dictionary, Escape, decode_blocks, encode_blocks};

/// Codes whole blocks: [`encode_blocks`].
pub(super) type Encode = fn(&[u8], &Dictionary, &mut [u8], &mut Vec<Escape>);
/// Decodes whole blocks: [`decode_blocks`].
pub(super) type Decode = fn(&[u8], &Dictionary, &mut [u8]);

/// Loops that code and decode with the same instructions.
#[derive(Clone, Copy, Debug)]
pub struct CodecKernels {
    /// The instructions that they need.
    pub name: &'static str,
    /// Codes.
    pub(super) encode: Encode,
    /// Decodes.
    pub(super) decode: Decode,
}

const PORTABLE: CodecKernels = CodecKernels { name: "portable", encode: encode_blocks, decode: decode_blocks };

impl CodecKernels {
    /// All kinds that this processor has the instructions for, the fastest last.
    #[must_use]
    pub fn all() -> Vec<Self> {
        #[cfg_attr(any(miri, not(target_arch = "x86_64")), expect(unused_mut, reason = "nothing is added"))]
        let mut all = vec![PORTABLE];
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            if is_x86_feature_detected!("avx2") {
                all.push(avx2::KERNELS);
            }
            if is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vbmi") {
                all.push(avx512::KERNELS);
            }
        }
        all
    }

    /// Whether it uses the processor's vectors.
    #[must_use]
    pub fn has_vectors(&self) -> bool {
        self.name != PORTABLE.name
    }

    /// The best for this processor.
    #[must_use]
    pub fn best() -> &'static Self {
        static BEST: OnceLock<CodecKernels> = OnceLock::new();
        BEST.get_or_init(|| Self::all().pop().unwrap_or(PORTABLE))
    }
}

/// Adds the escapes of the values from `place` on for which `mask` has a bit.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
fn add_escapes(mut mask: u64, place: usize, raw: &[u8], escapes: &mut Vec<Escape>) {
    while mask != 0 {
        let place = place + mask.trailing_zeros() as usize;
        if let Some(value) = raw.get(2 * place..).and_then(|v| v.first_chunk()) {
            escapes.push(Escape { place: place as u16, exponent: (u16::from_le_bytes(*value) >> 7) as u8 });
        }
        mask &= mask - 1;
    }
}

/// 256 bits at a time.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod avx2 {
    use std::arch::x86_64::{
        __m256i, _mm_loadu_si128, _mm256_and_si256, _mm256_broadcastsi128_si256, _mm256_cmpeq_epi8, _mm256_loadu_si256,
        _mm256_min_epu8, _mm256_movemask_epi8, _mm256_or_si256, _mm256_packus_epi16, _mm256_permute2x128_si256,
        _mm256_permute4x64_epi64, _mm256_set1_epi8, _mm256_set1_epi16, _mm256_setzero_si256, _mm256_shuffle_epi8,
        _mm256_slli_epi16, _mm256_srli_epi16, _mm256_storeu_si256, _mm256_sub_epi8, _mm256_unpackhi_epi8,
        _mm256_unpacklo_epi8,
    };

    use super::{CodecKernels, add_escapes};
    use crate::format::exp4::{BLOCK_BYTES, BLOCK_CODES, BLOCK_RAW_BYTES, BLOCK_VALUES, Dictionary, Escape};

    pub(super) const KERNELS: CodecKernels = CodecKernels { name: "avx2", encode, decode };

    /// Values whose bytes (of sign and mantissa) fill a vector.
    const LANES: usize = 32;
    /// Such vectors in a block.
    const VECTORS: usize = BLOCK_VALUES / LANES;

    fn decode(blocks: &[u8], dictionary: &Dictionary, raw: &mut [u8]) {
        // SAFETY: this is among the kernels only where the processor has AVX2.
        unsafe { decode_avx2(blocks, dictionary, raw) }
    }

    fn encode(raw: &[u8], dictionary: &Dictionary, blocks: &mut [u8], escapes: &mut Vec<Escape>) {
        let is_row = dictionary.windows(2).all(|pair| matches!(pair, [a, b] if a.wrapping_add(1) == *b));
        // SAFETY: this is among the kernels only where the processor has AVX2.
        unsafe {
            if is_row {
                encode_avx2::<true>(raw, dictionary, blocks, escapes);
            } else {
                encode_avx2::<false>(raw, dictionary, blocks, escapes);
            }
        }
    }

    #[target_feature(enable = "avx2")]
    fn decode_avx2(blocks: &[u8], dictionary: &Dictionary, raw: &mut [u8]) {
        // SAFETY: the dictionary has 16 bytes.
        let entries = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(dictionary.as_ptr().cast()) });
        let (low_bits, sign, rest) = (_mm256_set1_epi8(15), _mm256_set1_epi8(-128), _mm256_set1_epi8(127));
        for (block, raw) in blocks.chunks_exact(BLOCK_BYTES).zip(raw.chunks_exact_mut(BLOCK_RAW_BYTES)) {
            // SAFETY: two vectors of codes lie at the start of a block.
            let codes = [0, LANES].map(|at| unsafe { load(block.as_ptr().wrapping_add(at)) });
            for at in 0..VECTORS {
                let codes = if at % 2 == 0 { codes[0] } else { codes[1] };
                let codes = if at < 2 { codes } else { _mm256_srli_epi16::<4>(codes) };
                let exponents = _mm256_shuffle_epi8(entries, _mm256_and_si256(codes, low_bits));
                // SAFETY: so many vectors of sign and mantissa follow the codes.
                let bytes = unsafe { load(block.as_ptr().wrapping_add(BLOCK_CODES + at * LANES)) };
                let high = _mm256_or_si256(
                    _mm256_and_si256(bytes, sign),
                    _mm256_and_si256(_mm256_srli_epi16::<1>(exponents), rest),
                );
                let low = _mm256_or_si256(
                    _mm256_and_si256(bytes, rest),
                    _mm256_and_si256(_mm256_slli_epi16::<7>(exponents), sign),
                );
                let (a, b) = (_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high));
                let to = raw.as_mut_ptr().wrapping_add(2 * at * LANES);
                // SAFETY: the values of a block are twice as many vectors as its bytes.
                unsafe {
                    store(to, _mm256_permute2x128_si256::<0x20>(a, b));
                    store(to.wrapping_add(LANES), _mm256_permute2x128_si256::<0x31>(a, b));
                }
            }
        }
    }

    /// With `ROW`, the exponents of the dictionary are consecutive numbers.
    #[target_feature(enable = "avx2")]
    fn encode_avx2<const ROW: bool>(raw: &[u8], dictionary: &Dictionary, blocks: &mut [u8], escapes: &mut Vec<Escape>) {
        let (most, first) = (_mm256_set1_epi8(15), _mm256_set1_epi8(dictionary[0] as i8));
        let (high_bit, rest, byte) = (_mm256_set1_epi16(0x80), _mm256_set1_epi16(0x7f), _mm256_set1_epi16(0xff));
        let both = raw.chunks_exact(BLOCK_RAW_BYTES).zip(blocks.chunks_exact_mut(BLOCK_BYTES));
        for (n, (values, block)) in both.enumerate() {
            let mut codes = [_mm256_setzero_si256(); VECTORS];
            for (at, code) in codes.iter_mut().enumerate() {
                let from = values.as_ptr().wrapping_add(2 * at * LANES);
                // SAFETY: the values of a block are twice as many vectors as its bytes.
                let v = [0, LANES].map(|half| unsafe { load(from.wrapping_add(half)) });
                let bytes = v.map(|v| {
                    let sign = _mm256_and_si256(_mm256_srli_epi16::<8>(v), high_bit);
                    _mm256_or_si256(sign, _mm256_and_si256(v, rest))
                });
                let exponents = v.map(|v| _mm256_and_si256(_mm256_srli_epi16::<7>(v), byte));
                let exponents = packed(exponents);
                // SAFETY: so many vectors of sign and mantissa follow the codes.
                unsafe { store(block.as_mut_ptr().wrapping_add(BLOCK_CODES + at * LANES), packed(bytes)) };
                let mut found = _mm256_setzero_si256();
                if ROW {
                    let beyond = _mm256_sub_epi8(exponents, first);
                    found = _mm256_cmpeq_epi8(_mm256_min_epu8(beyond, most), beyond);
                    *code = _mm256_and_si256(beyond, found);
                } else {
                    for (number, &entry) in (0i8..).zip(dictionary) {
                        let is = _mm256_cmpeq_epi8(exponents, _mm256_set1_epi8(entry as i8));
                        *code = _mm256_or_si256(*code, _mm256_and_si256(is, _mm256_set1_epi8(number)));
                        found = _mm256_or_si256(found, is);
                    }
                }
                let missing = !(_mm256_movemask_epi8(found) as u32);
                if missing != 0 {
                    add_escapes(u64::from(missing), n * BLOCK_VALUES + at * LANES, raw, escapes);
                }
            }
            for half in 0..2 {
                let both = _mm256_or_si256(codes[half], _mm256_slli_epi16::<4>(codes[half + 2]));
                // SAFETY: two vectors of codes lie at the start of a block.
                unsafe { store(block.as_mut_ptr().wrapping_add(half * LANES), both) };
            }
        }
    }

    /// The low bytes of 32 words in their order; their high bytes must be zero.
    #[target_feature(enable = "avx2")]
    fn packed([a, b]: [__m256i; 2]) -> __m256i {
        _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi16(a, b))
    }

    /// # Safety
    /// 32 bytes must be readable there.
    #[target_feature(enable = "avx2")]
    unsafe fn load(from: *const u8) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_si256(from.cast()) }
    }

    /// # Safety
    /// 32 bytes must be writable there.
    #[target_feature(enable = "avx2")]
    unsafe fn store(to: *mut u8, v: __m256i) {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_si256(to.cast(), v) }
    }
}

/// 512 bits at a time, with permutations of bytes.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod avx512 {
    use std::arch::x86_64::{
        __m512i, _mm_loadu_si128, _mm512_and_si512, _mm512_broadcast_i32x4, _mm512_loadu_si512, _mm512_mask_blend_epi8,
        _mm512_movepi8_mask, _mm512_or_si512, _mm512_permutex2var_epi8, _mm512_set1_epi8, _mm512_shuffle_epi8,
        _mm512_slli_epi16, _mm512_srli_epi16, _mm512_storeu_si512, _mm512_ternarylogic_epi64,
    };

    use super::{CodecKernels, add_escapes};
    use crate::format::exp4::{BLOCK_BYTES, BLOCK_CODES, BLOCK_RAW_BYTES, BLOCK_VALUES, Dictionary, Escape};

    pub(super) const KERNELS: CodecKernels = CodecKernels { name: "avx512", encode, decode };

    /// Values whose bytes (of sign and mantissa) fill a vector.
    const LANES: usize = 64;
    /// Ternary logic: the second operand's bits where the first has ones, else the third's.
    const SELECT: i32 = 0xca;
    /// The entry of an exponent without a code in the table of codes.
    const NONE: u8 = 0x80;

    fn decode(blocks: &[u8], dictionary: &Dictionary, raw: &mut [u8]) {
        // SAFETY: this is among the kernels only where the processor has what it needs.
        unsafe { decode_avx512(blocks, dictionary, raw) }
    }

    fn encode(raw: &[u8], dictionary: &Dictionary, blocks: &mut [u8], escapes: &mut Vec<Escape>) {
        // SAFETY: this is among the kernels only where the processor has what it needs.
        unsafe { encode_avx512(raw, dictionary, blocks, escapes) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn decode_avx512(blocks: &[u8], dictionary: &Dictionary, raw: &mut [u8]) {
        // SAFETY: the dictionary has 16 bytes.
        let entries = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(dictionary.as_ptr().cast()) });
        let (low_bits, rest) = (_mm512_set1_epi8(15), _mm512_set1_epi8(127));
        // Indices that interleave the bytes of two vectors: of their first halves, of their second.
        let turns = [0, 1].map(|half| bytes(|i| half * 32 + i / 2 + (i & 1) * 64));
        for (block, raw) in blocks.chunks_exact(BLOCK_BYTES).zip(raw.chunks_exact_mut(BLOCK_RAW_BYTES)) {
            // SAFETY: a vector of codes lies at the start of a block.
            let codes = unsafe { load(block.as_ptr()) };
            for (at, codes) in [codes, _mm512_srli_epi16::<4>(codes)].into_iter().enumerate() {
                let exponents = _mm512_shuffle_epi8(entries, _mm512_and_si512(codes, low_bits));
                // SAFETY: two vectors of sign and mantissa follow the codes.
                let bytes = unsafe { load(block.as_ptr().wrapping_add(BLOCK_CODES + at * LANES)) };
                let high = _mm512_ternarylogic_epi64::<SELECT>(rest, _mm512_srli_epi16::<1>(exponents), bytes);
                let low = _mm512_ternarylogic_epi64::<SELECT>(rest, bytes, _mm512_slli_epi16::<7>(exponents));
                for (half, turns) in turns.into_iter().enumerate() {
                    let to = raw.as_mut_ptr().wrapping_add((2 * at + half) * LANES);
                    // SAFETY: the values of a block are four vectors.
                    unsafe { store(to, _mm512_permutex2var_epi8(low, turns, high)) };
                }
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn encode_avx512(raw: &[u8], dictionary: &Dictionary, blocks: &mut [u8], escapes: &mut Vec<Escape>) {
        let mut code_of = [NONE; 256];
        for (code, &exponent) in (0u8..).zip(dictionary) {
            code_of[usize::from(exponent)] = code;
        }
        // SAFETY: the table is four vectors.
        let table = [0, 1, 2, 3].map(|at| unsafe { load(code_of.as_ptr().wrapping_add(at * LANES)) });
        let (low_bits, rest) = (_mm512_set1_epi8(15), _mm512_set1_epi8(127));
        // Indices of the low bytes of the words of two vectors, and of the high ones.
        let (lows, highs) = (bytes(|i| 2 * i), bytes(|i| 2 * i + 1));
        let both = raw.chunks_exact(BLOCK_RAW_BYTES).zip(blocks.chunks_exact_mut(BLOCK_BYTES));
        for (n, (values, block)) in both.enumerate() {
            let mut codes = [rest; BLOCK_VALUES / LANES];
            for (at, code) in codes.iter_mut().enumerate() {
                let from = values.as_ptr().wrapping_add(2 * at * LANES);
                // SAFETY: the values of a block are four vectors.
                let [a, b] = [0, LANES].map(|half| unsafe { load(from.wrapping_add(half)) });
                let [low, high] = [lows, highs].map(|which| _mm512_permutex2var_epi8(a, which, b));
                let exponents = _mm512_permutex2var_epi8(_mm512_srli_epi16::<7>(a), lows, _mm512_srli_epi16::<7>(b));
                let bytes = _mm512_ternarylogic_epi64::<SELECT>(rest, low, high);
                // SAFETY: two vectors of sign and mantissa follow the codes.
                unsafe { store(block.as_mut_ptr().wrapping_add(BLOCK_CODES + at * LANES), bytes) };
                let [below, above] = [[table[0], table[1]], [table[2], table[3]]]
                    .map(|[first, second]| _mm512_permutex2var_epi8(first, exponents, second));
                *code = _mm512_mask_blend_epi8(_mm512_movepi8_mask(exponents), below, above);
                let missing = _mm512_movepi8_mask(*code);
                if missing != 0 {
                    add_escapes(missing, n * BLOCK_VALUES + at * LANES, raw, escapes);
                }
            }
            let [low, high] = codes.map(|code| _mm512_and_si512(code, low_bits));
            // SAFETY: a vector of codes lies at the start of a block.
            unsafe { store(block.as_mut_ptr(), _mm512_or_si512(low, _mm512_slli_epi16::<4>(high))) };
        }
    }

    /// The vector with these bytes.
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn bytes(of: impl Fn(usize) -> usize) -> __m512i {
        let bytes: [u8; LANES] = std::array::from_fn(|i| of(i) as u8);
        // SAFETY: these are 64 bytes.
        unsafe { load(bytes.as_ptr()) }
    }

    /// # Safety
    /// 64 bytes must be readable there.
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    unsafe fn load(from: *const u8) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    /// # Safety
    /// 64 bytes must be writable there.
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    unsafe fn store(to: *mut u8, v: __m512i) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_si512(to.cast(), v) }
    }
}
