//! Rooms and the three bootstrap fields, as JSON text. A room comes from a CSPRNG, has 63 bits, and is never used twice by
//! this gateway but by chance of 2^-63 (H8: each attempt gets new ones). Pure but for the randomness handed in.

use std::fmt::Write;

use rand::CryptoRng;
use tandem_handoff::ids::Room;

use crate::fleet::Rank;

/// How many rooms a request needs, and in which shape the fields carry them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Samples {
    /// Scalar fields.
    One,
    /// List-valued fields: entry `i` belongs to sample `i % n` of prompt `i / n`.
    List(usize),
}

impl Samples {
    pub fn count(self) -> usize {
        match self {
            Samples::One => 1,
            Samples::List(count) => count,
        }
    }
}

/// Rooms that name P's data-parallel rank: `room % size` is its index, by which SGLang's workers find it.
pub fn mint_for(rank: Option<Rank>, samples: Samples, rng: &mut impl CryptoRng) -> Vec<Room> {
    let Some(Rank { index, size }) = rank.filter(|rank| rank.index < rank.size) else { return mint(samples, rng) };
    let (index, size) = (u64::from(index), u64::from(size));
    let named = |room: Room| {
        let room = room.get() - room.get() % size + index;
        let room = if room > i64::MAX as u64 { room - size } else { room };
        Room::new(room).expect("63 bits are a room")
    };
    mint(samples, rng).into_iter().map(named).collect()
}

/// One unguessable room per sample.
pub fn mint(samples: Samples, rng: &mut impl CryptoRng) -> Vec<Room> {
    (0..samples.count()).map(|_| Room::new(rng.next_u64() >> 1).expect("63 bits are a room")).collect()
}

/// `"bootstrap_host":…,"bootstrap_port":…,"bootstrap_room":…` without braces. `host` is a name, an IPv4 address, or an IPv6
/// address in brackets; a port that nobody knows is `null`.
pub fn fields(host: &str, port: Option<u16>, samples: Samples, rooms: &[Room]) -> String {
    let host = serde_json::Value::from(host).to_string();
    let port = port.map_or_else(|| "null".to_owned(), |p| p.to_string());
    let mut out = String::with_capacity(64 + rooms.len() * (host.len() + port.len() + 22));
    match samples {
        Samples::One => {
            let room = rooms[0];
            let _ = write!(out, r#""bootstrap_host":{host},"bootstrap_port":{port},"bootstrap_room":{room}"#);
        }
        Samples::List(_) => {
            out.push_str("\"bootstrap_host\":");
            list(&mut out, rooms.iter().map(|_| &host));
            out.push_str(",\"bootstrap_port\":");
            list(&mut out, rooms.iter().map(|_| &port));
            out.push_str(",\"bootstrap_room\":");
            list(&mut out, rooms.iter());
        }
    }
    out
}

fn list(out: &mut String, items: impl Iterator<Item = impl std::fmt::Display>) {
    out.push('[');
    for (i, item) in items.enumerate() {
        let _ = write!(out, "{}{item}", if i == 0 { "" } else { "," });
    }
    out.push(']');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rooms_fit_63_bits_and_differ() {
        let mut rng = rand::rng();
        let rooms = mint(Samples::List(100_000), &mut rng);
        assert!(rooms.iter().all(|r| r.get() <= i64::MAX as u64));
        assert!(rooms.iter().any(|r| r.get() > u32::MAX as u64));
        let distinct: std::collections::HashSet<_> = rooms.iter().collect();
        assert_eq!(distinct.len(), rooms.len());
    }

    #[test]
    fn rooms_name_a_rank() {
        let mut rng = rand::rng();
        for (index, size) in [(0, 1), (2, 3), (7, 8), (u16::MAX - 1, u16::MAX)] {
            let rooms = mint_for(Some(Rank { index, size }), Samples::List(1000), &mut rng);
            assert!(rooms.iter().all(|r| r.get() % u64::from(size) == u64::from(index) && r.get() <= i64::MAX as u64));
        }
        assert_eq!(mint_for(Some(Rank { index: 4, size: 4 }), Samples::One, &mut rng).len(), 1, "no such rank");
    }

    #[test]
    fn the_fields_are_json_numbers_and_lists() {
        let rooms = [Room::new(5).unwrap(), Room::new(i64::MAX as u64).unwrap()];
        let one = format!("{{{}}}", fields("[::1]", Some(8998), Samples::One, &rooms[..1]));
        let one: serde_json::Value = serde_json::from_str(&one).unwrap();
        assert_eq!(one, serde_json::json!({"bootstrap_host": "[::1]", "bootstrap_port": 8998, "bootstrap_room": 5}));
        let two = format!("{{{}}}", fields("h", None, Samples::List(2), &rooms));
        let two: serde_json::Value = serde_json::from_str(&two).unwrap();
        assert_eq!(two["bootstrap_host"], serde_json::json!(["h", "h"]));
        assert_eq!(two["bootstrap_port"], serde_json::json!([null, null]));
        assert_eq!(two["bootstrap_room"], serde_json::json!([5, i64::MAX]));
    }
}
