//! The supervisor's log: one logfmt line per event on descriptor 2.
//!
//! Promises never to block and never to fail: descriptor 2 is non-blocking, a line that does not fit is dropped and
//! counted, and the count is told in the next line that fits. Lines are written with one call each and kept below the
//! size a pipe takes whole. Must never be used by `start` itself, whose standard error belongs to the answer.

use std::fmt::{self, Write as _};
use std::io::{self, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, Registry};

use crate::clock;

/// Longest line with its newline: a pipe takes up to this much whole or not at all (PIPE_BUF).
const LINE_MAX: usize = 4096;

static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Installs the log for this process; a second call changes nothing. `pod` is added to every line.
pub fn init(level: LevelFilter, pod: &str) {
    let subscriber = Registry::default().with(level).with(Lines {
        pod: pod.to_owned(),
    });
    if tracing::subscriber::set_global_default(subscriber).is_ok() {
        // ttrpc speaks through `log`; only what is wrong there is of interest.
        let _ = tracing_log::LogTracer::builder()
            .with_max_level(tracing_log::log::LevelFilter::Warn)
            .init();
    }
}

/// The level for `-debug` and the daemon's own level (-8 trace, -4 debug, 0 info, 4 warn, 8 error); the lower wins.
pub fn level(debug: bool, daemon: Option<i32>) -> LevelFilter {
    let told = match daemon {
        None => LevelFilter::INFO,
        Some(n) if n <= -6 => LevelFilter::TRACE,
        Some(n) if n <= -2 => LevelFilter::DEBUG,
        Some(n) if n < 2 => LevelFilter::INFO,
        Some(n) if n < 6 => LevelFilter::WARN,
        Some(_) => LevelFilter::ERROR,
    };
    if debug {
        told.max(LevelFilter::DEBUG)
    } else {
        told
    }
}

/// Lines dropped since the last one that was written.
pub fn dropped() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

/// The layer: formats and writes.
struct Lines {
    pod: String,
}

/// Fields of a span, formatted once.
struct SpanFields(String);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Lines {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        if let Some(span) = context.span(id) {
            let mut fields = Fields::default();
            attributes.record(&mut fields);
            span.extensions_mut().insert(SpanFields(fields.rest));
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id) {
            let mut fields = Fields::default();
            values.record(&mut fields);
            if let Some(known) = span.extensions_mut().get_mut::<SpanFields>() {
                known.0.push_str(&fields.rest);
            }
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        for span in context.event_scope(event).into_iter().flatten() {
            if let Some(known) = span.extensions().get::<SpanFields>() {
                fields.rest.push_str(&known.0);
            }
        }
        let level = event.metadata().level().as_str().to_ascii_lowercase();
        write_line(&line(
            &clock::rfc3339(SystemTime::now()),
            &level,
            &fields,
            &self.pod,
            dropped(),
        ));
    }
}

/// Collects the message and ` key=value` for the rest.
#[derive(Default)]
struct Fields {
    message: String,
    rest: String,
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field.name(), value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field.name(), &format!("{value:?}"));
    }
}

impl Fields {
    fn add(&mut self, name: &str, value: &str) {
        match name {
            "message" => self.message = value.to_owned(),
            // Where in a library a bridged record comes from; its text says enough.
            "log.target" | "log.module_path" | "log.file" | "log.line" => {}
            _ => {
                // Writing to a String does not fail.
                let _ = write!(self.rest, " {name}=");
                push_value(&mut self.rest, value);
            }
        }
    }
}

fn line(time: &str, level: &str, fields: &Fields, pod: &str, dropped: u64) -> String {
    let mut line = format!("time={time} level={level} msg=");
    push_value(&mut line, &fields.message);
    line.push_str(&fields.rest);
    line.push_str(" pod=");
    push_value(&mut line, pod);
    if dropped > 0 {
        let _ = write!(line, " dropped={dropped}");
    }
    if line.len() >= LINE_MAX {
        let mut cut = LINE_MAX - 5;
        while !line.is_char_boundary(cut) {
            cut -= 1;
        }
        line.truncate(cut);
        line.push_str("...");
    }
    line.push('\n');
    line
}

/// Bare when nothing in it could be misread, else in double quotes.
fn push_value(out: &mut String, value: &str) {
    let bare = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | '=' | '\\');
    if !value.is_empty() && value.chars().all(bare) {
        out.push_str(value);
        return;
    }
    out.push('"');
    for c in value.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            c if c.is_control() => out.extend(c.escape_unicode()),
            c => out.push(c),
        }
    }
    out.push('"');
}

fn write_line(line: &str) {
    let told = dropped();
    match io::stderr().lock().write(line.as_bytes()) {
        Ok(n) if n == line.len() => {
            DROPPED.fetch_sub(told.min(dropped()), Ordering::Relaxed);
        }
        // A full or closed pipe: whoever reads the log is slow or gone, and the pod matters more.
        _ => {
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(message: &str, rest: &[(&str, &str)]) -> Fields {
        let mut fields = Fields::default();
        fields.add("message", message);
        for (name, value) in rest {
            fields.add(name, value);
        }
        fields
    }

    #[test]
    fn a_line_is_logfmt() {
        let fields = fields(
            "say \"hi\"\n",
            &[("step", "cni-add"), ("took", "2 ms"), ("log.file", "x.rs")],
        );
        let line = line("T", "info", &fields, "web", 0);
        assert_eq!(
            line,
            "time=T level=info msg=\"say \\\"hi\\\"\\n\" step=cni-add took=\"2 ms\" pod=web\n"
        );
    }

    #[test]
    fn dropped_lines_are_told_and_long_ones_cut() {
        assert!(line("T", "info", &fields("m", &[]), "p", 3).ends_with(" dropped=3\n"));
        let long = line("T", "info", &fields(&"é".repeat(5000), &[]), "p", 0);
        assert!(long.len() <= LINE_MAX && long.ends_with("...\n"));
    }

    #[test]
    fn debug_only_ever_adds() {
        for (debug, daemon, wanted) in [
            (false, None, LevelFilter::INFO),
            (true, None, LevelFilter::DEBUG),
            (true, Some(-8), LevelFilter::TRACE),
            (true, Some(8), LevelFilter::DEBUG),
            (false, Some(4), LevelFilter::WARN),
            (false, Some(12), LevelFilter::ERROR),
            (false, Some(-4), LevelFilter::DEBUG),
        ] {
            assert_eq!(level(debug, daemon), wanted, "{debug} {daemon:?}");
        }
    }
}
