//! The supervisor's log: tracing to logfmt lines. STUB.
