use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use super::*;
use crate::io::{AlignedBuf, Completion};

const BLOCK: usize = 4096;

struct Bench {
    jobs: Jobs,
    stats: Arc<IoStats>,
    file: Arc<DirectFile>,
    now: Instant,
}

impl Bench {
    fn new() -> Self {
        let stats = Arc::new(IoStats::default());
        let file = Arc::new(DirectFile::from_file(tempfile::tempfile().unwrap(), "f"));
        Self { jobs: Jobs::new(BLOCK), stats, file, now: Instant::now() }
    }

    fn admit(&mut self, op: Op, blocks: usize) -> Receiver<Completion> {
        let (tx, rx) = channel();
        let done = move |c| tx.send(c).unwrap();
        let file = Arc::clone(&self.file);
        let request = if op == Op::Flush {
            Request::flush(file, done)
        } else {
            let buf = AlignedBuf::zeroed(blocks * BLOCK).unwrap().into();
            Request { op, ..Request::read(file, 0, buf, done) }
        };
        assert!(self.stats.enter(100));
        self.jobs.admit(request.timeout(Duration::from_secs(1)), self.now, Arc::clone(&self.stats));
        rx
    }

    fn end(&mut self, span: IoSpan, moved: std::result::Result<usize, i32>) {
        if let Some(e) = self.jobs.span_ended(span, moved) {
            e.deliver();
        }
    }
}

#[test]
fn a_request_is_split_and_ends_with_its_last_block_in_any_order() {
    let mut b = Bench::new();
    let rx = b.admit(Op::Read, 3);
    let mut pieces: Vec<_> = std::iter::from_fn(|| b.jobs.next()).collect();
    assert_eq!(pieces.iter().map(|p| p.offset).collect::<Vec<_>>(), [0, 4096, 8192]);
    while let Some(p) = pieces.pop() {
        assert!(rx.try_recv().is_err());
        b.end(p.span, Ok(BLOCK));
    }
    let c = rx.try_recv().unwrap();
    c.result.unwrap();
    assert_eq!((c.buf.unwrap().len(), b.stats.in_flight(), b.jobs.live()), (3 * BLOCK, 0, 0));
}

#[test]
fn a_failed_block_stops_the_rest_but_waits_for_what_is_in_the_kernel() {
    let mut b = Bench::new();
    let rx = b.admit(Op::Write, 4);
    let (one, two) = (b.jobs.next().unwrap(), b.jobs.next().unwrap());
    b.end(two.span, Err(libc::EIO));
    assert!(b.jobs.next().is_none() && rx.try_recv().is_err());
    b.end(one.span, Ok(BLOCK));
    let c = rx.try_recv().unwrap();
    assert_eq!(c.result.unwrap_err().kind(), ErrorKind::Io);
    assert!(c.buf.is_some());
}

#[test]
fn a_block_that_is_tried_again_waits_for_room_and_lets_others_by() {
    let mut b = Bench::new();
    let rx = b.admit(Op::Read, 3);
    let (long, short) = (b.jobs.next_within(2 * BLOCK).unwrap(), b.jobs.next_within(BLOCK).unwrap());
    b.end(long.span, Err(libc::EAGAIN));
    assert_eq!(b.jobs.upcoming(), Some(Upcoming { bytes: 2 * BLOCK, cut: true }));
    assert!(b.jobs.next_within(BLOCK).is_none());
    b.end(short.span, Err(libc::EINTR));
    let again = b.jobs.next_within(BLOCK).unwrap();
    assert_eq!((again.offset, again.span.len), (2 * BLOCK as u64, BLOCK));
    b.end(again.span, Ok(BLOCK));
    let again = b.jobs.next_within(2 * BLOCK).unwrap();
    assert_eq!((again.offset, again.span.len), (0, 2 * BLOCK));
    b.end(again.span, Ok(2 * BLOCK));
    rx.try_recv().unwrap().result.unwrap();
}

#[test]
fn neither_a_kernel_without_memory_nor_a_broken_queue_says_that_the_bytes_are_bad() {
    let mut b = Bench::new();
    let rx = b.admit(Op::Read, 1);
    let p = b.jobs.next().unwrap();
    b.end(p.span, Err(libc::ENOMEM));
    assert_eq!(rx.try_recv().unwrap().result.unwrap_err().kind(), ErrorKind::Internal);
    let rx = b.admit(Op::Read, 1);
    b.jobs.abandon(Some(libc::EBADFD)).ended.into_iter().for_each(Ended::deliver);
    assert_eq!(rx.try_recv().unwrap().result.unwrap_err().kind(), ErrorKind::TimedOut);
}

#[test]
fn a_short_block_is_an_error() {
    let mut b = Bench::new();
    let rx = b.admit(Op::Read, 1);
    let p = b.jobs.next().unwrap();
    b.end(p.span, Ok(BLOCK - 1));
    assert_eq!(rx.try_recv().unwrap().result.unwrap_err().kind(), ErrorKind::ShortIo);
}

#[test]
fn interrupted_blocks_are_tried_again_but_not_for_ever() {
    let mut b = Bench::new();
    let rx = b.admit(Op::Read, 1);
    let mut tries = 0;
    while let Some(p) = b.jobs.next() {
        tries += 1;
        b.end(p.span, Err(if tries % 2 == 0 { libc::EINTR } else { libc::EAGAIN }));
    }
    assert_eq!(tries, MAX_TRIES + 1);
    assert_eq!(rx.try_recv().unwrap().result.unwrap_err().kind(), ErrorKind::Io);
}

#[test]
fn a_time_out_is_delivered_once_and_the_buffer_stays_until_the_last_block_has_ended() {
    let mut b = Bench::new();
    let rx = b.admit(Op::Read, 3);
    let (one, two) = (b.jobs.next().unwrap(), b.jobs.next().unwrap());
    assert_eq!(b.jobs.expire(b.now).ended.len(), 0);
    let late = b.now + Duration::from_secs(2);
    let expired = b.jobs.expire(late);
    assert_eq!(expired.stuck.len(), 1);
    expired.ended.into_iter().for_each(Ended::deliver);
    let c = rx.try_recv().unwrap();
    assert_eq!((c.result.unwrap_err().kind(), c.buf.is_none()), (ErrorKind::TimedOut, true));
    assert!(b.jobs.next().is_none(), "the third block must not start");
    assert_eq!((b.stats.counts().quarantined, b.jobs.live(), b.jobs.next_check()), (1, 1, None));
    b.end(one.span, Ok(BLOCK));
    assert_eq!(b.stats.counts().quarantined, 1);
    b.end(two.span, Err(libc::EINTR));
    assert_eq!((b.stats.counts().quarantined, b.stats.in_flight(), b.jobs.live()), (0, 0, 0));
    assert!(rx.try_recv().is_err(), "delivered twice");
}

#[test]
fn a_read_is_detached_only_while_a_block_of_it_is_out_and_ends_with_that() {
    let mut b = Bench::new();
    let rx = b.admit(Op::Read, 2);
    assert_eq!(b.jobs.awaited_read(0), None, "nothing that could hang");
    assert!(b.jobs.detach(0, 0).is_none());
    let p = b.jobs.next().unwrap();
    let (seq, bytes) = b.jobs.awaited_read(p.span.job).unwrap();
    assert_eq!(bytes, 2 * BLOCK);
    assert!(b.jobs.detach(p.span.job, seq + 1).is_none(), "another request");
    let detached = b.jobs.detach(p.span.job, seq).unwrap();
    assert_eq!((detached.len, b.jobs.next().is_none(), b.jobs.live()), (2 * BLOCK, true, 1));
    detached.caller.tell(Ok(()), None);
    rx.try_recv().unwrap().result.unwrap();
    b.end(p.span, Ok(BLOCK));
    assert_eq!((b.jobs.live(), b.stats.in_flight(), b.stats.counts().quarantined), (0, 0, 0));
}

#[test]
fn a_request_that_never_started_gets_its_buffer_back_with_the_time_out() {
    let mut b = Bench::new();
    let rx = b.admit(Op::Read, 1);
    let expired = b.jobs.expire(b.now + Duration::from_secs(2));
    assert!(expired.stuck.is_empty());
    expired.ended.into_iter().for_each(Ended::deliver);
    let c = rx.try_recv().unwrap();
    assert_eq!((c.result.unwrap_err().kind(), c.buf.is_some()), (ErrorKind::TimedOut, true));
    assert_eq!((b.jobs.live(), b.stats.in_flight(), b.jobs.has_work()), (0, 0, false));
}

#[test]
fn a_flush_waits_for_earlier_writes_of_its_file_only_and_lets_later_ones_pass() {
    let mut b = Bench::new();
    let _w1 = b.admit(Op::Write, 1);
    let other = Arc::new(DirectFile::from_file(tempfile::tempfile().unwrap(), "g"));
    let mine = std::mem::replace(&mut b.file, other);
    let _w2 = b.admit(Op::Write, 1);
    b.file = mine;
    let flushed = b.admit(Op::Flush, 0);
    let _w3 = b.admit(Op::Write, 1);
    let order: Vec<_> = std::iter::from_fn(|| b.jobs.next()).collect();
    assert_eq!(order.iter().map(|p| p.op).collect::<Vec<_>>(), [Op::Write; 3]);
    b.end(order[2].span, Ok(BLOCK));
    assert!(b.jobs.next().is_none(), "the first write is still out");
    b.end(order[0].span, Ok(BLOCK));
    let flush = b.jobs.next().unwrap();
    assert_eq!(flush.op, Op::Flush);
    b.end(flush.span, Ok(0));
    flushed.try_recv().unwrap().result.unwrap();
    b.end(order[1].span, Ok(BLOCK));
    assert_eq!(b.jobs.live(), 0);
}

#[test]
fn an_abandoned_queue_answers_everybody() {
    let mut b = Bench::new();
    let started = b.admit(Op::Write, 1);
    let flush = b.admit(Op::Flush, 0);
    let waiting = b.admit(Op::Read, 1);
    let p = b.jobs.next().unwrap();
    b.jobs.abandon(None).ended.into_iter().for_each(Ended::deliver);
    for (rx, with_buf) in [(&started, false), (&flush, false), (&waiting, true)] {
        let c = rx.try_recv().unwrap();
        assert_eq!((c.result.unwrap_err().kind(), c.buf.is_some()), (ErrorKind::Closed, with_buf));
    }
    b.end(p.span, Ok(BLOCK));
    assert_eq!((b.jobs.live(), b.stats.counts().in_flight, b.stats.counts().quarantined), (0, 0, 0));
}
