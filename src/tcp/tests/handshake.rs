//! Connections that begin wrongly, slowly, or beyond a limit.

use std::net::TcpListener;

use super::*;

#[test]
fn nonsense_on_the_listening_socket_harms_nobody() {
    let mut b = Node::new(config());
    let mut honest = Honest::new(&mut b);
    let mut bad_version = Preamble::new(PRIMARY, 1, [0; 16]);
    bad_version.version = 9;
    let mut chatty = bytemuck::bytes_of(&Preamble::new(PRIMARY, 1, [0; 16])).to_vec();
    chatty.extend([0xff; 8]);
    let preamble =
        |kind, streams| bytemuck::bytes_of(&Preamble::new(kind, streams, [3; 16])).to_vec();
    let greetings = [
        vec![0x16; 5000],
        b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n".to_vec(),
        bytemuck::bytes_of(&bad_version).to_vec(),
        preamble(99, 1),
        preamble(PRIMARY, 0),
        preamble(WELCOME, 1),
        preamble(JOIN, 1),
        chatty,
    ];
    for greeting in greetings {
        let mut socket = b.connect_raw();
        socket.write_all(&greeting).unwrap();
        b.until_closed(&mut socket);
        honest.read(&mut b);
    }
    assert_eq!(b.events, [], "nobody hears of what never was a connection");
}

#[test]
fn those_who_never_finish_their_handshake_are_closed_in_time() {
    let mut b = Node::new(config());
    let mut honest = Honest::new(&mut b);
    b.wait_at_most(HASTY);
    let preamble = Preamble::new(PRIMARY, 1, [0; 16]);
    let mut silent = b.connect_raw();
    let mut partial = b.connect_raw();
    let most = &bytemuck::bytes_of(&preamble)[..PREAMBLE_BYTES - 1];
    partial.write_all(most).unwrap();
    let mut unjoined = b.connect_raw();
    send(&mut unjoined, &preamble);
    // Where this thread stood still it is closed already.
    b.try_read(&mut unjoined, PREAMBLE_BYTES);
    b.until_closed(&mut silent);
    b.until_closed(&mut partial);
    b.until_closed(&mut unjoined);
    assert_eq!(b.events, []);
    assert!(b.fabric.arrivals.is_empty());
    b.wait_at_most(PATIENT);
    honest.read(&mut b);
}

#[test]
fn of_silent_sockets_beyond_the_limit_the_oldest_is_closed() {
    let mut b = Node::new(TcpConfig { handshake_timeout: Duration::from_secs(3600), ..config() });
    let mut silent: Vec<TcpStream> = (0..HANDSHAKES_MAX).map(|_| b.connect_raw()).collect();
    b.until(|b| b.fabric.arrivals.is_full().then_some(()));
    let _late = b.connect_raw();
    b.until_closed(&mut silent[0]);
    // They keep nobody out.
    Honest::new(&mut b).read(&mut b);
    drop(silent);
}

#[test]
fn an_acceptor_that_answers_wrongly_or_never_ends_the_connect() {
    let welcome = |streams| Preamble::new(WELCOME, streams, [0; 16]);
    let none = welcome(0);
    let many = welcome(3);
    let wrong = Preamble::new(PRIMARY, 1, [0; 16]);
    let mut early = bytemuck::bytes_of(&welcome(1)).to_vec();
    early.extend(bytemuck::bytes_of(&ControlHeader { kind: READY, len: 0 }));
    let answers: [(&[u8], Duration, CloseReason); 6] = [
        (&[], HASTY, CloseReason::Unreachable),
        (&[1; 64], PATIENT, CloseReason::Violation),
        (bytemuck::bytes_of(&none), PATIENT, CloseReason::Violation),
        (bytemuck::bytes_of(&many), PATIENT, CloseReason::Violation),
        (bytemuck::bytes_of(&wrong), PATIENT, CloseReason::Violation),
        (&early, PATIENT, CloseReason::Violation),
    ];
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    for (answer, handshake_timeout, reason) in answers {
        let mut a = Node::new(TcpConfig { handshake_timeout, ..config() });
        let connection = a.fabric.connect(&to).unwrap();
        let (mut socket, _) = listener.accept().unwrap();
        socket.write_all(answer).unwrap();
        assert_eq!(a.until_ended(connection), reason, "{answer:?}");
        assert_eq!(a.events.len(), 1, "{:?}", a.events);
    }
}

#[test]
fn a_number_of_streams_out_of_range_is_refused() {
    for streams in [0, STREAMS_MAX + 1] {
        let refused = TcpFabric::new(TcpConfig { streams, ..config() });
        assert!(matches!(refused, Err(FabricError::Limit { .. })));
    }
}

#[test]
fn connections_beyond_the_limit_are_refused() {
    let mut a = Node::new(config());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    let first = a.fabric.connect(&to).unwrap();
    // The slots are taken without sockets, of which a test may not have a thousand.
    while a.fabric.table.reserve().is_ok() {}
    assert!(matches!(a.fabric.connect(&to), Err(FabricError::Limit { .. })));
    a.fabric.close(first);
    a.poll();
    a.fabric.connect(&to).unwrap();
}
