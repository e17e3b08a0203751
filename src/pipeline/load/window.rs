//! How many bytes of reads a drive has in flight.
//!
//! No one number is right through host memory. With few, the bytes that the processors check and
//! copy, and the memory that the drive fills next, are in their caches; with many, the drive is
//! never short of reads. Which of the two is faster depends on the drive, and on virtual machines
//! it changes within seconds. So both sizes are measured at work, and the faster one is used.

use std::time::{Duration, Instant};

/// Bytes that the drive reads, while it never lacks a read, until its rate is taken.
const MEASURED_BYTES: usize = 64 << 20;
/// Rates taken until the slower size is tried again.
const TRY_AGAIN: u32 = 16;

pub(super) struct LoadWindow {
    sizes: [usize; 2],
    /// Bytes a second with each size: the mean of the latest rate and of the mean before it.
    rates: [f64; 2],
    /// Which size is in use, and how many rates were taken since it is.
    current: usize,
    taken: u32,
    bytes: usize,
    time: Duration,
    /// When a read ended last, where another one waited then.
    busy_since: Option<Instant>,
}

impl LoadWindow {
    /// One of two sizes. What has not been measured is thought fast.
    pub(super) fn new(sizes: [usize; 2]) -> Self {
        let rates = [f64::INFINITY; 2];
        Self { sizes, rates, current: 0, taken: 0, bytes: 0, time: Duration::ZERO, busy_since: None }
    }

    pub(super) fn bytes(&self) -> usize {
        self.sizes[self.current]
    }

    /// A read of `bytes` has ended well, and others wait for the drive or not.
    pub(super) fn read_ended(&mut self, bytes: usize, others_wait: bool, now: Instant) {
        if let Some(since) = self.busy_since {
            self.bytes += bytes;
            self.time += now - since;
        }
        self.busy_since = others_wait.then_some(now);
        if self.bytes >= MEASURED_BYTES {
            self.take_rate();
        }
    }

    /// A read has failed, or taken too long: neither is the size's doing.
    pub(super) fn read_failed(&mut self) {
        self.busy_since = None;
    }

    fn take_rate(&mut self) {
        let rate = self.bytes as f64 / self.time.as_secs_f64().max(1e-9);
        (self.bytes, self.time) = (0, Duration::ZERO);
        let mean = &mut self.rates[self.current];
        *mean = if mean.is_finite() { (*mean + rate) / 2.0 } else { rate };
        self.taken += 1;
        let other = 1 - self.current;
        if self.rates[other] > self.rates[self.current] || self.taken >= TRY_AGAIN {
            (self.current, self.taken) = (other, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [usize; 2] = [8 << 20, 3 << 20];

    /// Reads 1 GiB from a drive that is faster with `best`, and returns the share of it that was
    /// read with that size.
    fn share(window: &mut LoadWindow, now: &mut Instant, best: usize) -> f64 {
        let (read, all) = (1 << 20, 1 << 30);
        let mut well = 0;
        for _ in 0..all / read {
            let is_best = window.bytes() == best;
            well += if is_best { read } else { 0 };
            *now += Duration::from_micros(if is_best { 400 } else { 500 });
            window.read_ended(read, true, *now);
        }
        well as f64 / all as f64
    }

    #[test]
    fn the_faster_size_is_used_and_followed_when_it_changes() {
        let (mut window, mut now) = (LoadWindow::new(SIZES), Instant::now());
        for best in [SIZES[0], SIZES[1], SIZES[1], SIZES[0]] {
            share(&mut window, &mut now, best);
            assert!(share(&mut window, &mut now, best) > 0.8, "{best}");
        }
    }

    #[test]
    fn time_without_reads_is_not_measured() {
        let (mut window, mut now) = (LoadWindow::new(SIZES), Instant::now());
        share(&mut window, &mut now, SIZES[0]);
        for _ in 0..1000 {
            for n in 0..100 {
                if n == 50 && window.bytes() == SIZES[0] {
                    // A hang.
                    now += Duration::from_secs(10);
                    window.read_failed();
                }

                now += Duration::from_micros(if window.bytes() == SIZES[0] { 400 } else { 500 });
                window.read_ended(1 << 20, n < 99, now);
            }
            // The larger the gap, the slower the size in use would seem.
            now += Duration::from_millis(if window.bytes() == SIZES[0] { 50 } else { 0 });
        }
        assert!(share(&mut window, &mut now, SIZES[0]) > 0.8);
    }
}
