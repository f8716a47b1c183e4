//! Base64 with padding (RFC 4648 §4): how Go writes bytes into JSON, and therefore how libcni's cache holds a configuration.
//!
//! Written by hand: it is all the supervisor needs of the crate of that name.

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Encodes.
pub(super) fn encode(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let group =
            chunk.iter().fold(0_u32, |acc, b| acc << 8 | u32::from(*b)) << (8 * (3 - chunk.len()));
        for i in 0..4 {
            let digit = ALPHABET[(group >> (18 - 6 * i)) as usize & 63];
            out.push(if i > chunk.len() {
                '='
            } else {
                char::from(digit)
            });
        }
    }
    out
}

/// Decodes; None for anything that [`encode`] does not write.
pub(super) fn decode(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=').as_bytes();
    let padding = text.len() - digits.len();
    if !text.len().is_multiple_of(4) || padding > 2 {
        return None;
    }
    let mut out = Vec::with_capacity(text.len() / 4 * 3);
    for chunk in digits.chunks(4) {
        let mut group = 0_u32;
        for digit in chunk {
            group = group << 6 | u32::try_from(ALPHABET.iter().position(|c| c == digit)?).ok()?;
        }
        group <<= 6 * (4 - chunk.len());
        out.extend_from_slice(group.to_be_bytes().get(1..chunk.len())?);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vectors_of_the_rfc_hold_both_ways() {
        for (plain, coded) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(encode(plain.as_bytes()), coded);
            assert_eq!(decode(coded).as_deref(), Some(plain.as_bytes()));
        }
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(decode(&encode(&all)), Some(all));
    }

    #[test]
    fn anything_else_is_refused() {
        for text in ["Zg", "Zg=", "Z===", "====", "Zm9v\n", "Zm9*", "=Zm9"] {
            assert_eq!(decode(text), None, "{text:?}");
        }
    }
}
