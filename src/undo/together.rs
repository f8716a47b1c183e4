//! Several pieces of work at once on one task: one that is stuck delays no other.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

/// Runs all of them, at most `limit` at a time, begun in this order; the answers are in this order, too.
pub async fn together<F: Future + Unpin>(pieces: Vec<F>, limit: usize) -> Vec<F::Output> {
    let count = pieces.len();
    let mut answers: Vec<Option<F::Output>> = (0..count).map(|_| None).collect();
    let mut waiting = pieces.into_iter().enumerate();
    let mut running: Vec<(usize, F)> = Vec::new();
    poll_fn(|cx| {
        loop {
            let mut ended = false;
            running.retain_mut(|(at, piece)| match Pin::new(piece).poll(cx) {
                Poll::Ready(answer) => {
                    answers[*at] = Some(answer);
                    ended = true;
                    false
                }
                Poll::Pending => true,
            });
            let before = running.len();
            running.extend(waiting.by_ref().take(limit.max(1).saturating_sub(before)));
            if running.is_empty() {
                return Poll::Ready(());
            }
            // What was begun just now has not been polled yet; what ended may have woken another.
            if !ended && running.len() == before {
                return Poll::Pending;
            }
        }
    })
    .await;
    answers.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::{Instant, sleep};

    #[tokio::test(start_paused = true)]
    async fn one_that_is_stuck_delays_no_other_and_answers_keep_their_places() {
        let begun = Instant::now();
        let piece = |seconds: u64| {
            Box::pin(async move {
                sleep(Duration::from_secs(seconds)).await;
                (seconds, begun.elapsed().as_secs())
            })
        };
        let all = together([60, 1, 2, 3].map(piece).into(), 2).await;
        assert_eq!(all, [(60, 60), (1, 1), (2, 3), (3, 6)]);
    }
}
