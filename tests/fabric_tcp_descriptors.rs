//! Connections that end leave no descriptor behind.
//!
//! Alone in its process, since it counts all descriptors of the process.

use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use kvrail::fabric::{EventBatch, Fabric, FabricEvent};
use kvrail::tcp::{TcpConfig, TcpFabric};

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

fn poll(fabric: &mut TcpFabric) -> Vec<FabricEvent> {
    let mut batch = EventBatch::default();
    let polled = fabric.poll(&mut batch, Duration::from_millis(1));
    assert!(polled.is_ok(), "{polled:?}");
    batch.events
}

#[test]
fn closed_connections_leave_no_descriptor() {
    let config = TcpConfig {
        listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
        streams: 4,
        handshake_timeout: Duration::from_secs(2),
        ..TcpConfig::default()
    };
    let mut a = TcpFabric::new(config.clone()).unwrap();
    let mut b = TcpFabric::new(config).unwrap();
    let before = open_descriptors();
    let to = b.local_addr().unwrap();
    let (mut ended, mut most) = (0, 0);
    let mut garbage = Vec::new();
    for round in 0..200 {
        let id = a.connect(&to).unwrap();
        if round % 10 == 0 {
            garbage.push(TcpStream::connect(to).unwrap());
        }
        // A third ends from this side, a third from the other, a third before it is up.
        if round % 3 == 2 {
            a.close(id);
        }
        let goal = ended + 1;
        while ended < goal {
            for event in poll(&mut a) {
                match event {
                    FabricEvent::Connected { connection } if round % 3 == 0 => a.close(connection),
                    FabricEvent::Closed { .. } => ended += 1,
                    _ => {}
                }
            }
            for event in poll(&mut b) {
                if let FabricEvent::Accepted { connection } = event
                    && round % 3 == 1
                {
                    b.close(connection);
                }
            }
            most = most.max(open_descriptors());
        }
    }
    assert!(most > before + 8, "sockets were open in between");
    drop(garbage);
    let mut polls = 0;
    while open_descriptors() > before {
        poll(&mut a);
        poll(&mut b);
        polls += 1;
        assert!(polls < 10_000, "{} > {before}", open_descriptors());
    }
    assert_eq!(open_descriptors(), before);
}
