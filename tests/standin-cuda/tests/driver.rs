//! The stand-in behaves as the driver does where the engine relies on it.
use standin_cuda::{Server, load};

#[test]
fn streams_run_on_their_own_and_events_order_them() {
    let lib = load();
    let server = Server::new(0);
    let (a, b) = (server.stream(true), server.stream(true));
    let (x, y) = (server.alloc(4096), server.alloc(4096));
    a.fill(&x, 0);
    assert_eq!(a.synchronize(), 0);
    let event = server.event();
    assert_eq!(event.query(), 0, "an event that was never recorded has passed");
    a.hold();
    a.fill(&x, 7);
    event.record(&a);
    assert_eq!(event.wait(&b), 0);
    b.copy(&x, &y);
    lib.settle();
    assert_eq!((event.query(), x.peek()[0]), (600, 0));
    assert_ne!(y.peek()[0], 7);
    a.release();
    assert_eq!(b.synchronize(), 0);
    assert!(y.peek().iter().all(|&v| v == 7));
}

#[test]
fn a_wait_means_the_record_before_it_and_none_where_there_is_none() {
    let lib = load();
    let server = Server::new(0);
    let (a, b) = (server.stream(true), server.stream(true));
    let x = server.alloc(64);
    let event = server.event();
    a.hold();
    assert_eq!(event.wait(&b), 0);
    a.fill(&x, 1);
    event.record(&a);
    b.fill(&x, 2);
    assert_eq!(b.synchronize(), 0);
    assert_eq!((x.peek()[0], lib.get("waits_for_nothing")), (2, 1));
    a.release();
    assert_eq!(a.synchronize(), 0);
    assert_eq!(x.peek()[0], 1);
}

#[test]
fn the_default_stream_waits_for_streams_that_block_and_not_for_side_streams() {
    load();
    let server = Server::new(0);
    let (blocking, side, default) = (server.stream(false), server.stream(true), server.default_stream());
    let (x, y) = (server.alloc(64), server.alloc(64));
    side.hold();
    side.fill(&x, 1);
    default.fill(&x, 2);
    assert_eq!(default.synchronize(), 0);
    assert_eq!(x.peek()[0], 2);
    side.release();
    blocking.hold();
    blocking.fill(&y, 3);
    default.fill(&y, 4);
    load().settle();
    assert!(y.peek()[0] != 4 && y.peek()[0] != 3);
    blocking.release();
    assert_eq!(default.synchronize(), 0);
    assert_eq!(y.peek()[0], 4);
}

#[test]
fn captures_execute_nothing_and_are_broken_by_forbidden_calls() {
    let server = Server::new(1);
    let stream = server.stream(true);
    let x = server.alloc(64);
    x.poke(0, &[9; 64]);
    stream.begin_capture(1);
    stream.fill(&x, 1);
    assert_eq!(stream.end_capture(), 0);
    assert_eq!(x.peek()[0], 9);
    stream.begin_capture(1);
    assert_eq!(stream.synchronize(), 900);
    assert_eq!(stream.end_capture(), 901);
    let outside = server.event();
    outside.record(&stream);
    stream.begin_capture(1);
    assert_eq!(outside.wait(&stream), 905, "an event from outside the capture");
    assert_eq!(stream.end_capture(), 901);
    let other = server.event();
    stream.begin_capture(0);
    assert_eq!(other.query(), 900, "in global mode any thread's query breaks a capture");
    assert_eq!(stream.end_capture(), 901);
}

#[test]
fn everything_is_counted() {
    let lib = load();
    {
        let server = Server::new(0);
        let (_s, _m, _e) = (server.stream(true), server.alloc(100), server.event());
        assert_eq!((lib.get("live_streams"), lib.get("live_allocations"), lib.get("live_events")), (1, 1, 1));
        assert_eq!((lib.get("retained"), lib.get("used_bytes"), lib.get("calls")), (1, 100, 0));
    }
    lib.assert_clean();
}
