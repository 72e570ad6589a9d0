//! Open connections whose peer breaks the rules.

use super::*;
use crate::limits::MESSAGE_BYTES_MAX;

#[test]
fn a_violation_on_a_stream_closes_its_connection_only() {
    let message = |len| ControlHeader { kind: MESSAGE, len };
    type Act<'a> = (&'a str, &'a dyn Fn(&mut Raw));
    let acts: [Act<'_>; 6] = [
        ("oversize message", &|raw| {
            send(&mut raw.control, &message(MESSAGE_BYTES_MAX as u32 + 1));
        }),
        ("unknown control frame", &|raw| {
            send(&mut raw.control, &ControlHeader { kind: 77, len: 0 });
        }),
        ("ready from the connector", &|raw| {
            send(&mut raw.control, &ControlHeader { kind: READY, len: 0 });
        }),
        ("unknown frame", &|raw| send(&mut raw.data, &frame(5, 0, 0))),
        ("overlong READ", &|raw| {
            send(&mut raw.data, &frame(REQUEST, 0, READ_BYTES_MAX + 1));
        }),
        ("answer that nobody asked for", &|raw| {
            send(&mut raw.data, &frame(RESPONSE, STATUS_SUCCESS, 8));
        }),
    ];
    let mut b = Node::new(config());
    let mut honest = Honest::new(&mut b);
    for (name, act) in acts {
        let mut raw = b.raw_peer();
        act(&mut raw);
        let reason = b.until_ended(raw.connection);
        assert_eq!(reason, CloseReason::Violation, "{name}");
        honest.read(&mut b);
    }
}

#[test]
fn a_trickle_closes_its_connection_only() {
    let mut b = Node::new(config());
    let mut honest = Honest::new(&mut b);
    let mut in_message = b.raw_peer();
    send(&mut in_message.control, &ControlHeader { kind: MESSAGE, len: 100 });
    in_message.control.write_all(&[1; 50]).unwrap();
    b.wait_at_most(HASTY);
    assert_eq!(b.until_ended(in_message.connection), CloseReason::Violation);
    b.wait_at_most(PATIENT);
    honest.read(&mut b);
    let mut in_frame = b.raw_peer();
    in_frame.data.write_all(&[0; FRAME_BYTES - 1]).unwrap();
    b.wait_at_most(HASTY);
    assert_eq!(b.until_ended(in_frame.connection), CloseReason::Violation);
    b.wait_at_most(PATIENT);
    honest.read(&mut b);
}

#[test]
fn more_reads_than_the_limit_are_a_violation() {
    let mut b = Node::new(config());
    let mut honest = Honest::new(&mut b);
    let mut raw = b.raw_peer();
    let mut request = frame(REQUEST, honest.remote.rkey, BLOCK as u32);
    request.address = honest.remote.address;
    for _request in 0..2 * READS_OUTSTANDING_MAX {
        send(&mut raw.data, &request);
    }
    assert_eq!(b.until_ended(raw.connection), CloseReason::Violation);
    honest.read(&mut b);
}

#[test]
fn a_peer_that_takes_no_data_is_closed_after_the_timeout() {
    let mut b = Node::new(config());
    let mut honest = Honest::new(&mut b);
    let mut raw = b.raw_peer();
    let mut request = frame(REQUEST, honest.remote.rkey, BLOCK as u32);
    request.address = honest.remote.address;
    // More than the sockets of both ends buffer.
    for _request in 0..READS_OUTSTANDING_MAX {
        send(&mut raw.data, &request);
    }
    b.wait_at_most(HASTY);
    assert_eq!(b.until_ended(raw.connection), CloseReason::Unreachable);
    b.wait_at_most(PATIENT);
    honest.read(&mut b);
}

/// A READ by the fabric, which waits so long, from a raw peer that answers with `answer`; its own span
/// is bytes 0..64 of 128. Answers how the READ and the connection ended.
fn read_from_liar(patience: Duration, answer: &[u8]) -> (CompletionStatus, CloseReason) {
    let mut b = Node::new(config());
    let landed = mapping(&[9; 128]);
    let local = b.fabric.register(landed.clone(), Access::Local).unwrap();
    let mut raw = b.raw_peer();
    let remote = RemoteSpan { rkey: 1, address: 0, len: 64 };
    let batch = one_read(&local, remote);
    b.fabric.post(raw.connection, &batch).unwrap();
    b.read(&mut raw.data, FRAME_BYTES);
    raw.data.write_all(answer).unwrap();
    b.wait_at_most(patience);
    let reason = b.until_ended(raw.connection);
    let mut rest = [0; 64];
    landed.read(64, &mut rest).unwrap();
    assert_eq!(rest, [9; 64], "bytes outside the posted span were written");
    let statuses = b.statuses();
    assert_eq!(statuses.len(), 1);
    (statuses[0], reason)
}

#[test]
fn an_answer_that_does_not_match_its_read_is_a_violation() {
    let good = frame(RESPONSE, STATUS_SUCCESS, 64);
    let mut stale = good;
    stale.generation = 1;
    let mut unknown = good;
    unknown.slot = 77;
    let longer = Frame { len: 65, ..good };
    let shorter = Frame { len: 63, ..good };
    let status = Frame { word: 9, ..good };
    let refusal = frame(RESPONSE, STATUS_REMOTE_ACCESS, 64);
    for lie in [stale, unknown, longer, shorter, status, refusal] {
        let mut answer = bytemuck::bytes_of(&lie).to_vec();
        answer.extend([1; 200]);
        assert_eq!(
            read_from_liar(PATIENT, &answer),
            (CompletionStatus::Unreachable, CloseReason::Violation),
            "{lie:?}"
        );
    }
    let mut chatty = bytemuck::bytes_of(&good).to_vec();
    chatty.extend([1; 64 + FRAME_BYTES]);
    assert_eq!(
        read_from_liar(PATIENT, &chatty),
        (CompletionStatus::Success, CloseReason::Violation)
    );
}

#[test]
fn a_read_whose_answer_stands_still_ends_after_the_timeout() {
    let mut half = bytemuck::bytes_of(&frame(RESPONSE, STATUS_SUCCESS, 64)).to_vec();
    half.extend([1; 32]);
    for answer in [&[][..], &half] {
        assert_eq!(
            read_from_liar(HASTY, answer),
            (CompletionStatus::Unreachable, CloseReason::Unreachable)
        );
    }
}

#[test]
fn a_peer_that_takes_no_messages_is_closed_after_the_timeout() {
    let mut b = Node::new(config());
    let mut honest = Honest::new(&mut b);
    let raw = b.raw_peer();
    let message = vec![1; MESSAGE_BYTES_MAX];
    let full = b.until(|b| b.fabric.send(raw.connection, &message).err());
    assert!(matches!(full, FabricError::Full), "{full}");
    b.wait_at_most(HASTY);
    assert_eq!(b.until_ended(raw.connection), CloseReason::Unreachable);
    b.wait_at_most(PATIENT);
    honest.read(&mut b);
}

#[test]
fn the_last_message_arrives_although_a_data_stream_ended_before_it() {
    let mut b = Node::new(config());
    let Raw { connection, mut control, data } = b.raw_peer();
    b.events.clear();
    drop(data);
    let mut last = bytemuck::bytes_of(&ControlHeader { kind: MESSAGE, len: 3 }).to_vec();
    last.extend(b"bye");
    control.write_all(&last).unwrap();
    assert_eq!(b.until_ended(connection), CloseReason::PeerClosed);
    let message = FabricEvent::Message { connection, start: 0, end: 3 };
    assert_eq!(b.events.first(), Some(&message));
}
