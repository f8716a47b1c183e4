//! Values of flags: published ports, time spans, environment.
//!
//! Pure text to value. Promises that what it lets through needs no second look. Must never touch the machine.

use std::net::IpAddr;
use std::time::Duration;

use crate::network::PortMapping;

/// `[HOST_IP:]HOST:CONTAINER[/tcp|udp|sctp]`; an IPv6 address in brackets.
pub fn port(text: &str) -> Result<PortMapping, String> {
    let usage = || {
        format!(
            "{text:?} is no port to publish: write HOST:CONTAINER, as in 8080:80 or 127.0.0.1:5353:53/udp"
        )
    };
    let (ports, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    let protocol = protocol.to_ascii_lowercase();
    if !matches!(protocol.as_str(), "tcp" | "udp" | "sctp") {
        return Err(format!(
            "{text:?}: protocol {protocol:?} is none of tcp, udp, sctp"
        ));
    }
    let (rest, container) = ports.rsplit_once(':').ok_or_else(usage)?;
    let (address, host) = match rest.rsplit_once(':') {
        Some((address, host)) => (Some(address), host),
        None => (None, rest),
    };
    let host_ip = match address {
        None => String::new(),
        Some(address) => {
            let bare = address.strip_prefix('[').and_then(|a| a.strip_suffix(']'));
            let parsed: IpAddr = bare.unwrap_or(address).parse().map_err(|_| usage())?;
            if parsed.is_ipv6() != bare.is_some() {
                return Err(usage());
            }
            parsed.to_string()
        }
    };
    let number = |digits: &str| match digits.parse::<u16>() {
        // parse takes a sign, people do not.
        Ok(n) if n > 0 && !digits.starts_with('+') => Ok(n),
        _ => Err(format!(
            "{text:?}: port {digits:?} is no number from 1 to 65535"
        )),
    };
    Ok(PortMapping {
        host_port: number(host)?,
        container_port: number(container)?,
        protocol,
        host_ip,
    })
}

/// Two mappings cannot share a host port: says which.
pub fn clash(ports: &[PortMapping]) -> Option<String> {
    let any = |ip: &str| ip.is_empty() || ip == "0.0.0.0" || ip == "::";
    for (i, a) in ports.iter().enumerate() {
        for b in &ports[..i] {
            let same = a.host_port == b.host_port && a.protocol == b.protocol;
            if same && (a.host_ip == b.host_ip || any(&a.host_ip) || any(&b.host_ip)) {
                return Some(format!("{}/{}", a.host_port, a.protocol));
            }
        }
    }
    None
}

/// Seconds with an optional fraction ("2.5"), or units: "90s", "4m", "1h30m", "500ms". From 1 ms to 24 hours.
pub fn span(text: &str) -> Result<Duration, String> {
    let usage =
        || format!("{text:?} is no time span: write seconds, or units as in 30s, 4m, 1h30m");
    let mut total = Duration::ZERO;
    let mut rest = text;
    if text.is_empty() {
        return Err(usage());
    }
    while !rest.is_empty() {
        let end = rest
            .find(|c: char| !(c.is_ascii_digit() || c == '.'))
            .unwrap_or(rest.len());
        let (number, tail) = rest.split_at(end);
        let unit_end = tail
            .find(|c: char| !c.is_ascii_alphabetic())
            .unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit_end);
        let scale = match unit {
            "ms" => 0.001,
            "s" => 1.0,
            "" if rest.len() == text.len() && tail.is_empty() => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return Err(usage()),
        };
        let number: f64 = number.parse().map_err(|_| usage())?;
        total += Duration::try_from_secs_f64(number * scale).map_err(|_| usage())?;
        rest = tail;
    }
    if !(Duration::from_millis(1)..=Duration::from_secs(86_400)).contains(&total) {
        return Err(format!("{text:?} is outside 1ms to 24h"));
    }
    Ok(total)
}

/// `KEY=VALUE`, or `KEY` alone to pass on our own value (empty when we have none).
pub fn variable(text: &str) -> Result<String, String> {
    let key = text.split('=').next().unwrap_or_default();
    if key.is_empty() || text.contains('\0') {
        return Err(format!("{text:?} is no variable: write KEY=VALUE"));
    }
    if text.contains('=') {
        return Ok(text.to_owned());
    }
    let value = std::env::var(key).unwrap_or_default();
    Ok(format!("{key}={value}"))
}

/// `KEY=VALUE` of a label or an annotation; the value may be empty.
pub fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() && !text.contains('\0') => {
            Ok((key.to_owned(), value.to_owned()))
        }
        _ => Err(format!("{text:?}: write KEY=VALUE")),
    }
}

/// Bytes: a number, or one with a unit as in 512k, 64m, 2g, 1.5GiB; powers of 1024.
pub fn size(text: &str) -> Result<u64, String> {
    let usage = || format!("{text:?} is no size: write bytes, or units as in 512k, 64m, 2g");
    let end = text
        .find(|c: char| !(c.is_ascii_digit() || c == '.'))
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = unit.to_ascii_lowercase();
    let letter = unit.strip_suffix("ib").or_else(|| unit.strip_suffix('b'));
    let shift = match letter.unwrap_or(&unit) {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(usage()),
    };
    let number: f64 = number.parse().map_err(|_| usage())?;
    let bytes = number * f64::from(1_u32 << (shift / 2)) * f64::from(1_u32 << (shift / 2));
    // Beyond what a f64 counts exactly there is no memory.
    match (1.0..9e15).contains(&bytes) {
        true => Ok(bytes as u64),
        false => Err(usage()),
    }
}

/// Processors, from 0.01.
pub fn cpus(text: &str) -> Result<f64, String> {
    let plain = text.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    let number = text.parse::<f64>().ok().filter(|_| plain);
    number
        .filter(|n| (0.01..=65_535.0).contains(n))
        .ok_or_else(|| {
            format!("{text:?} is no number of processors: write one from 0.01, as in 0.5 or 2")
        })
}

/// A name for a pod or a container: the rule of ids, at most 63 characters, and nothing that looks like a whole pod id.
pub fn name(text: &str) -> Result<String, String> {
    crate::id::check("name", text).map_err(|e| e.to_string())?;
    if text.len() > 63 {
        return Err(format!(
            "{text:?} has {} characters and the limit is 63",
            text.len()
        ));
    }
    if super::names::is_id(text) {
        return Err(format!(
            "{text:?} looks like a pod's id: choose a name that does not"
        ));
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(host_ip: &str, host_port: u16, container_port: u16, protocol: &str) -> PortMapping {
        PortMapping {
            host_port,
            container_port,
            protocol: protocol.into(),
            host_ip: host_ip.into(),
        }
    }

    #[test]
    fn ports_in_every_spelling() {
        assert_eq!(port("8080:80"), Ok(mapping("", 8080, 80, "tcp")));
        assert_eq!(port("53:5353/UDP"), Ok(mapping("", 53, 5353, "udp")));
        assert_eq!(
            port("127.0.0.1:1:2/sctp"),
            Ok(mapping("127.0.0.1", 1, 2, "sctp"))
        );
        assert_eq!(port("[::1]:1:2"), Ok(mapping("::1", 1, 2, "tcp")));
    }

    #[test]
    fn ports_that_are_none() {
        let bad = [
            "",
            ":",
            "80",
            "80:",
            ":80",
            "0:80",
            "80:0",
            "65536:1",
            "-1:80",
            "+1:80",
            "a:b",
            "1:2:3",
            "::1:1:2",
            "1:2/",
            "1:2/icmp",
            "[127.0.0.1]:1:2",
            "1:2/tcp/udp",
            "1 :2",
            "1:2\n",
        ];
        for text in bad {
            assert!(port(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn one_host_port_is_given_once() {
        let a = mapping("", 80, 1, "tcp");
        assert!(clash(&[a.clone(), mapping("127.0.0.1", 80, 2, "tcp")]).is_some());
        assert!(
            clash(&[
                mapping("127.0.0.2", 80, 1, "tcp"),
                mapping("127.0.0.1", 80, 2, "tcp")
            ])
            .is_none()
        );
        assert!(clash(&[a, mapping("", 80, 2, "udp")]).is_none());
    }

    #[test]
    fn spans_with_and_without_units() {
        for (text, ms) in [
            ("4m", 240_000),
            ("2.5", 2_500),
            ("500ms", 500),
            ("1h30m", 5_400_000),
            ("90s", 90_000),
        ] {
            assert_eq!(span(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in [
            "", "-1", "0", "x", "1x", "1m30", "25h", "1e3", "nan", "inf", ".", "s", " 1",
        ] {
            assert!(span(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn sizes_and_processors() {
        for (text, bytes) in [
            ("1", 1),
            ("512k", 512 << 10),
            ("64M", 64 << 20),
            ("1.5g", 3 << 29),
            ("2GiB", 2 << 30),
            ("3mb", 3 << 20),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in [
            "", "0", "-1", "x", "1x", "1 m", "m", "1e9", "inf", "1.2.3", "9999999t",
        ] {
            assert!(size(text).is_err(), "{text:?}");
        }
        assert_eq!((cpus("0.5"), cpus("2")), (Ok(0.5), Ok(2.0)));
        for text in ["", "0", "0.001", "-1", "nan", "inf", "1e1", "65536"] {
            assert!(cpus(text).is_err(), "{text:?}");
        }
        assert_eq!(pair("a=b=c"), Ok(("a".to_owned(), "b=c".to_owned())));
        assert!(pair("a").is_err() && pair("=a").is_err());
    }

    #[test]
    fn names_follow_the_rule_of_ids() {
        assert!(name("web-1").is_ok());
        let long = "a".repeat(300);
        let id = "0123456789abcdef0123456789abcdef";
        for text in ["", "..", "a/b", "-rf", "a\nb", &long, &"a".repeat(64), id] {
            assert!(name(text).is_err(), "{text:?}");
        }
        assert!(variable("=x").is_err());
        assert_eq!(variable("A=b=c").as_deref(), Ok("A=b=c"));
    }
}
