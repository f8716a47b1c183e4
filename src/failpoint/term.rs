//! What happens at a point, and how often: `term := <count>*<type>[(argument)]`, terms joined by `->`.
//!
//! The first term whose count is not used up is used once; when all are, nothing happens any more. The grammar is that
//! of containerd's failpoints (`off`, `error(text)`, `panic(text)`, `delay(milliseconds)`), so that its tests and ours
//! say the same thing with the same words. A point of our own knows three words more, `fail(text)` for `error`, `hang`
//! and `die`, and may do without the count: for ever then.

use std::fmt;
use std::time::Duration;

use crate::error::{Error, Kind, Result};

/// The largest count: containerd's is a signed number of 64 bits.
const FOR_EVER: u64 = i64::MAX as u64;

/// What happens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act {
    /// Nothing.
    Off,
    /// The call fails with this text.
    Error(String),
    /// The code panics with this text.
    Panic(String),
    /// The code waits, then goes on.
    Delay(Duration),
    /// The code does not go on until it is released.
    Hang,
    /// The process is gone, as by SIGKILL.
    Die,
}

/// Terms and what is left of their counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms(Vec<(u64, Act)>);

impl Terms {
    /// Reads terms as containerd does. Invalid: what and where.
    pub fn parse(text: &str) -> Result<Self> {
        Reader { text, left: text }.terms(false)
    }

    /// Reads the terms of a point of our own.
    pub fn parse_of_point(text: &str) -> Result<Self> {
        Reader { text, left: text }.terms(true)
    }

    /// What happens this time; uses it up.
    pub fn take(&mut self) -> Option<Act> {
        let (count, act) = self.0.iter_mut().find(|(count, _)| *count > 0)?;
        if *count < FOR_EVER {
            *count -= 1;
        }
        Some(act.clone())
    }
}

/// The same text with the counts that are left.
impl fmt::Display for Terms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, (count, act)) in self.0.iter().enumerate() {
            if n > 0 {
                f.write_str("->")?;
            }
            write!(f, "{count}*")?;
            match act {
                Act::Off => f.write_str("off")?,
                Act::Error(text) => write!(f, "error({text})")?,
                Act::Panic(text) => write!(f, "panic({text})")?,
                Act::Delay(time) => write!(f, "delay({})", time.as_millis())?,
                Act::Hang => f.write_str("hang")?,
                Act::Die => f.write_str("die")?,
            }
        }
        Ok(())
    }
}

struct Reader<'a> {
    text: &'a str,
    left: &'a str,
}

impl Reader<'_> {
    fn terms(mut self, of_point: bool) -> Result<Terms> {
        let mut terms = vec![self.term(of_point)?];
        while !self.left.is_empty() {
            self.expect("->")?;
            terms.push(self.term(of_point)?);
        }
        Ok(Terms(terms))
    }

    fn term(&mut self, of_point: bool) -> Result<(u64, Act)> {
        let counted = !of_point || self.left.starts_with(|c: char| c.is_ascii_digit());
        let count = if counted { self.number('*')? } else { FOR_EVER };
        let act = if self.eat("off") {
            Act::Off
        } else if self.eat("error(") || (of_point && self.eat("fail(")) {
            Act::Error(self.words()?)
        } else if self.eat("panic(") {
            Act::Panic(self.words()?)
        } else if self.eat("delay(") {
            Act::Delay(Duration::from_millis(self.number(')')?))
        } else if of_point && self.eat("hang") {
            Act::Hang
        } else if of_point && self.eat("die") {
            Act::Die
        } else {
            return Err(self.wrong("a type (off, error(text), panic(text), delay(milliseconds))"));
        };
        Ok((count, act))
    }

    /// Digits and what ends them.
    fn number(&mut self, end: char) -> Result<u64> {
        let digits = self.left.bytes().take_while(u8::is_ascii_digit).count();
        let (number, rest) = self.left.split_at(digits);
        let value = number.parse().ok().filter(|n| *n <= FOR_EVER);
        match (value, rest.strip_prefix(end)) {
            (Some(value), Some(rest)) => {
                self.left = rest;
                Ok(value)
            }
            _ => Err(self.wrong(&format!("a number and then '{end}'"))),
        }
    }

    /// At least one character, up to the first ')'.
    fn words(&mut self) -> Result<String> {
        match self.left.split_once(')') {
            Some((words, rest)) if !words.is_empty() => {
                self.left = rest;
                Ok(words.to_owned())
            }
            _ => Err(self.wrong("a text and then ')'")),
        }
    }

    fn expect(&mut self, word: &str) -> Result<()> {
        if self.eat(word) {
            return Ok(());
        }
        Err(self.wrong(&format!("'{word}' and another term")))
    }

    fn eat(&mut self, word: &str) -> bool {
        let rest = self.left.strip_prefix(word);
        self.left = rest.unwrap_or(self.left);
        rest.is_some()
    }

    fn wrong(&self, wanted: &str) -> Error {
        Error::new(
            Kind::Invalid,
            format!(
                "read failpoint terms {:?}: wanted {wanted} at {:?}",
                self.text, self.left
            ),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// containerd's own cases (`TestParseTerms`): good ones are printed as they were written.
    #[test]
    fn the_grammar_is_containerds() {
        for (terms, good) in [
            ("5", false),
            ("*off()", false),
            ("5*off()", false),
            ("5*off(nothing)", false),
            ("5*off(", false),
            ("5*off", true),
            ("10000error(oops)", false),
            ("10*error(oops)", true),
            ("1234*error(oops))", false),
            ("12342*error()", false),
            ("1panic(oops)", false),
            ("1000000*panic(oops)", true),
            ("12345*panic(oops))", false),
            ("12*panic()", false),
            ("1*delay(oops)", false),
            ("1000000*delay(-1)", false),
            ("1000000*delay(1)", true),
            ("1*delay(1)-", false),
            ("10*delay(2)->", false),
            ("11*delay(3)->10*off(", false),
            ("12*delay(4)->10*of", false),
            ("13*delay(5)->10*off->1000*panic(oops)", true),
        ] {
            match Terms::parse(terms) {
                Ok(parsed) => {
                    assert!(good, "{terms} was taken");
                    assert_eq!(parsed.to_string(), terms);
                }
                Err(error) => assert!(!good, "{error}"),
            }
        }
    }

    /// containerd's own case (`TestEvaluate`).
    #[test]
    fn each_call_uses_up_one_of_the_first_term_that_is_left() {
        let mut terms =
            Terms::parse("1*error(oops-)->1*off->1*delay(1000)->1*panic(panic)").unwrap();
        let taken: Vec<_> = std::iter::from_fn(|| terms.take()).collect();
        assert_eq!(
            taken,
            [
                Act::Error("oops-".into()),
                Act::Off,
                Act::Delay(Duration::from_secs(1)),
                Act::Panic("panic".into()),
            ]
        );
        assert_eq!(
            terms.to_string(),
            "0*error(oops-)->0*off->0*delay(1000)->0*panic(panic)"
        );
        assert_eq!(terms.take(), None);
    }

    #[test]
    fn what_is_no_term_is_an_error_with_the_place() {
        for bad in [
            "",
            "1*",
            "1*die",
            "1*hang",
            "1*fail(x)",
            "off",
            "error(x)",
            "-1*off",
            "1*off->",
            "99999999999999999999*off",
            "1*delay(99999999999999999999)",
            "1*off 1*off",
        ] {
            let error = Terms::parse(bad).unwrap_err();
            assert_eq!(error.kind(), Kind::Invalid, "{bad}");
        }
        let told = Terms::parse("1*off->2*of").unwrap_err().to_string();
        assert!(told.contains("at \"of\""), "{told}");
    }

    #[test]
    fn a_point_of_our_own_knows_more_and_needs_no_count() {
        let mut terms = Terms::parse_of_point("1*off->2*fail(no)->die").unwrap();
        let taken: Vec<_> = (0..5).filter_map(|_| terms.take()).collect();
        let no = || Act::Error("no".into());
        assert_eq!(taken, [Act::Off, no(), no(), Act::Die, Act::Die]);
        // Written down and read again while it is counted down.
        assert_eq!(Terms::parse_of_point(&terms.to_string()).unwrap(), terms);
        assert!(Terms::parse_of_point("hang").is_ok() && Terms::parse_of_point("han").is_err());
    }
}
