//! What every handler has around it: ids checked early, deadlines read, panics caught, kinds turned into codes.
//!
//! ttrpc drops a handler's future when the caller's deadline passes and when its connection closes. So whatever changes
//! something goes through [`detached`], and only what merely waits may live in the handler ([`waiting`]).

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Poll;
use std::time::{Duration, Instant};

use ttrpc::Code;
use ttrpc::asynchronous::TtrpcContext;

use crate::error::{Error, Kind, Result};
use crate::proto::deadline;

/// Runs `work` as a task of its own: it is finished even if nobody waits for it any more.
pub async fn detached<T: Send + 'static>(
    method: &'static str,
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> ttrpc::Result<T> {
    match tokio::spawn(timed(method, work)).await {
        Ok(result) => result,
        Err(error) => Err(internal(method, &error.to_string())),
    }
}

/// Runs `work` in the handler: it is dropped with the request. For waits and queries.
pub async fn waiting<T>(
    method: &'static str,
    work: impl Future<Output = Result<T>> + Send,
) -> ttrpc::Result<T> {
    timed(method, work).await
}

/// What is left of the caller's deadline; `None`: it gave none. Already passed: zero (the request still counts).
pub fn limit(ctx: &TtrpcContext) -> Option<Duration> {
    deadline::of(ctx.timeout_nano, &ctx.metadata)
}

/// The answer to a request that is not looked at further.
#[cfg(feature = "failpoint")]
pub fn refused<T>(error: &Error) -> ttrpc::Result<T> {
    Err(to_status(error))
}

async fn timed<T>(
    method: &'static str,
    work: impl Future<Output = Result<T>> + Send,
) -> ttrpc::Result<T> {
    let began = Instant::now();
    let result = catching(method, work).await;
    let took_us = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
    match &result {
        Ok(_) => tracing::debug!(method, took_us, "call"),
        Err(error) => tracing::info!(method, took_us, %error, "call failed"),
    }
    super::tidy::after(method);
    result
}

async fn catching<T>(
    method: &'static str,
    work: impl Future<Output = Result<T>> + Send,
) -> ttrpc::Result<T> {
    #[cfg(feature = "failpoint")]
    let work = async move {
        crate::failpoint::call(method).await?;
        work.await
    };
    let mut work = Box::pin(work);
    poll_fn(|cx| {
        // The future is not polled again after a panic, so what it may have left half done is never seen.
        match catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(cx))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(result)) => Poll::Ready(result.map_err(|e| to_status(&e))),
            Err(_) => Poll::Ready(Err(internal(
                method,
                "it panicked; see the supervisor's log",
            ))),
        }
    })
    .await
}

/// With the words a daemon of 1.x puts there by itself, and one of 2.x takes from what the shim says.
fn to_status(error: &Error) -> ttrpc::Error {
    let mut text = error.to_string();
    if let Some(words) = error.kind().daemons_words()
        && !text.ends_with(words)
    {
        text.push_str(words);
    }
    status(code(error.kind()), text)
}

/// containerd's client understands these codes; everything else is Unknown to it.
fn code(kind: Kind) -> Code {
    match kind {
        Kind::NotFound => Code::NOT_FOUND,
        Kind::Exists => Code::ALREADY_EXISTS,
        Kind::State => Code::FAILED_PRECONDITION,
        Kind::Invalid => Code::INVALID_ARGUMENT,
        Kind::Deadline => Code::DEADLINE_EXCEEDED,
        Kind::Busy | Kind::Gone => Code::UNAVAILABLE,
        Kind::Unsupported => Code::UNIMPLEMENTED,
        Kind::Cancelled => Code::CANCELLED,
        Kind::Denied => Code::PERMISSION_DENIED,
        Kind::Other => Code::UNKNOWN,
    }
}

fn internal(method: &str, why: &str) -> ttrpc::Error {
    tracing::error!(method, why, "handler");
    status(Code::INTERNAL, format!("{method}: {why}"))
}

fn status(code: Code, text: String) -> ttrpc::Error {
    ttrpc::Error::RpcStatus(ttrpc::get_status(code, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code_of(error: ttrpc::Error) -> Code {
        match error {
            ttrpc::Error::RpcStatus(status) => status.code.enum_value_or_default(),
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_panic_is_internal_and_not_a_silence() {
        let panicking = async { if true { panic!("on purpose") } else { Ok(()) } };
        assert_eq!(
            code_of(waiting("t", panicking).await.unwrap_err()),
            Code::INTERNAL
        );
        let panicking = async { if true { panic!("on purpose") } else { Ok(()) } };
        assert_eq!(
            code_of(detached("t", panicking).await.unwrap_err()),
            Code::INTERNAL
        );
    }

    #[tokio::test]
    async fn the_kind_chooses_the_code() {
        let gone = async { Result::<()>::Err(Error::new(Kind::NotFound, "x")) };
        assert_eq!(
            code_of(waiting("t", gone).await.unwrap_err()),
            Code::NOT_FOUND
        );
    }

    #[test]
    fn a_text_ends_with_the_words_of_its_class_once() {
        for text in ["find x", "find x: not found"] {
            let error = to_status(&Error::new(Kind::NotFound, text));
            let ttrpc::Error::RpcStatus(status) = error else {
                panic!("{error:?}");
            };
            assert_eq!(status.message, "find x: not found");
        }
    }

    #[tokio::test]
    async fn detached_work_goes_on_when_its_handler_is_dropped() {
        let (done, seen) = tokio::sync::oneshot::channel();
        let work = async move {
            tokio::time::sleep(Duration::from_millis(30)).await;
            let _ = done.send(());
            Ok(())
        };
        let _ = tokio::time::timeout(Duration::from_millis(1), detached("t", work)).await;
        assert!(seen.await.is_ok());
    }
}
