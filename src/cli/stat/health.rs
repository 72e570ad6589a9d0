//! The health of peers as a person reads it.

use super::human;
use crate::cli::table::table;
use crate::protocol::door::stat::HealthStat;
use crate::types::Path;

/// One line for each peer, path and NIC that something is known of.
pub(super) fn text(health: &[HealthStat]) -> String {
    if health.is_empty() {
        return "nothing has been asked of a peer yet\n".to_owned();
    }
    let header = [
        "scope",
        "peer",
        "nics",
        "state",
        "failures",
        "next probe",
        "rate",
        "lends",
        "last reason",
    ];
    let mut lines = table(header, 9);
    for one in health {
        let of_peer = |text: String| if one.scope == "peer" { text } else { String::new() };
        lines.add_row([
            one.scope.clone(),
            one.peer.clone(),
            match one.scope.as_str() {
                "path" if one.local_nic == Path::MESSAGES.local.0 => "messages".to_owned(),
                "path" => format!("{} to {}", one.local_nic, one.peer_nic),
                "local" => one.local_nic.to_string(),
                _ => String::new(),
            },
            one.state.clone(),
            format!("{} of {}", one.failures, one.weighed),
            one.next_probe_ms.map(|millis| format!("{millis} ms")).unwrap_or_default(),
            one.bytes_per_second.map(|rate| format!("{}/s", human(rate))).unwrap_or_default(),
            of_peer(human(one.outstanding_bytes)),
            one.reason.clone(),
        ]);
    }
    format!("{}\n", lines.trim_fmt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thing_has_its_line() {
        let peer = HealthStat {
            scope: "peer".to_owned(),
            peer: "ab".repeat(16),
            state: "open".to_owned(),
            reason: "no answer in time".to_owned(),
            failures: 6,
            weighed: 7,
            next_probe_ms: Some(250),
            bytes_per_second: Some(1 << 30),
            outstanding_bytes: 1 << 20,
            ..HealthStat::default()
        };
        let path = HealthStat { scope: "path".to_owned(), peer_nic: 1, ..peer.clone() };
        let of_messages =
            HealthStat { local_nic: Path::MESSAGES.local.0, peer_nic: 255, ..path.clone() };
        let text = text(&[peer, path, of_messages]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert!(lines[3].contains("messages"), "{text}");
        for part in ["open", "6 of 7", "250 ms", "1.0 GiB/s", "1.0 MiB", "no answer in time"] {
            assert!(lines[1].contains(part), "{part}: {text}");
        }
        assert!(lines[2].contains("0 to 1"), "{text}");
    }
}
