//! One verb for many pods, some of them at the same time.
//!
//! Promises that one pod's trouble does not keep the others from their turn, and the code of the first that failed.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::task::Poll;

use tokio::task::{JoinSet, LocalSet};

use super::failure::{Failure, PODVISOR_FAILED};
use super::output;

/// Pods at the same time: stopping is mostly waiting, and each is one connection.
const AT_ONCE: usize = 64;

/// Runs `act` for each target and reports each failure when it happens.
pub async fn run<F, Fut>(targets: Vec<String>, act: F) -> Result<u8, Failure>
where
    F: Fn(String) -> Fut,
    Fut: Future<Output = Result<(), Failure>> + 'static,
{
    let local = LocalSet::new();
    let all = async {
        let mut under_way = JoinSet::new();
        let mut code = 0;
        for target in targets {
            if under_way.len() >= AT_ONCE {
                keep_first(&mut code, under_way.join_next().await);
            }
            under_way.spawn_local(act(target));
        }
        while let Some(ended) = under_way.join_next().await {
            keep_first(&mut code, Some(ended));
        }
        code
    };
    match local.run_until(all).await {
        0 => Ok(0),
        code => Err(Failure::silent(code)),
    }
}

/// Asks one after another, and gives the answers with their places.
type Worker<'a, R> = Pin<Box<dyn Future<Output = Vec<(usize, R)>> + 'a>>;

/// Asks `ask` of every item, of some at the same time, and gives the answers in the order of the items.
pub async fn gather<T, R>(items: &[T], ask: impl AsyncFn(&T) -> R) -> Vec<R> {
    let mut answers: Vec<Option<R>> = items.iter().map(|_| None).collect();
    let next = Cell::new(0);
    let ask = &ask;
    let (slots, mut sent) = (answers.len(), Vec::new());
    // Each of these takes the next item until there is none: nobody waits for the slowest of a batch.
    let mut workers: Vec<Worker<'_, R>> = Vec::new();
    for _ in 0..AT_ONCE.min(slots) {
        let next = &next;
        workers.push(Box::pin(async move {
            let mut done = Vec::new();
            while let Some(item) = items.get(next.get()) {
                let place = next.replace(next.get() + 1);
                done.push((place, ask(item).await));
            }
            done
        }));
    }
    std::future::poll_fn(|cx| {
        workers.retain_mut(|worker| match worker.as_mut().poll(cx) {
            Poll::Ready(done) => {
                sent.extend(done);
                false
            }
            Poll::Pending => true,
        });
        if workers.is_empty() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    })
    .await;
    for (place, answer) in sent {
        if let Some(slot) = answers.get_mut(place) {
            *slot = Some(answer);
        }
    }
    answers.into_iter().flatten().collect()
}

fn keep_first(code: &mut u8, ended: Option<Result<Result<(), Failure>, tokio::task::JoinError>>) {
    let failed = match ended {
        None | Some(Ok(Ok(()))) => return,
        Some(Ok(Err(failure))) => {
            output::complain(failure.text().unwrap_or_default());
            failure.code()
        }
        Some(Err(e)) => {
            output::complain(format!("finish: {e}"));
            PODVISOR_FAILED
        }
    };
    if *code == 0 {
        *code = failed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;
    use std::rc::Rc;

    #[tokio::test]
    async fn answers_come_in_the_order_of_the_items_and_some_at_a_time() {
        let (under_way, most) = (Cell::new(0_usize), Cell::new(0));
        let items: Vec<usize> = (0..100).collect();
        let answers = gather(&items, async |n| {
            under_way.set(under_way.get() + 1);
            most.set(most.get().max(under_way.get()));
            for _ in 0..n % 7 {
                tokio::task::yield_now().await;
            }
            under_way.set(under_way.get() - 1);
            n * 2
        });
        let wanted: Vec<usize> = (0..100).map(|n| n * 2).collect();
        assert_eq!(answers.await, wanted);
        assert!(most.get() > 1 && most.get() <= AT_ONCE, "{}", most.get());
        assert!(gather(&[0; 0], async |n| *n).await.is_empty());
    }

    #[test]
    fn one_failure_does_not_stop_the_others() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        let done = Rc::new(Cell::new(0));
        let targets = (0..40).map(|n| n.to_string()).collect();
        let count = Rc::clone(&done);
        let ended = runtime.block_on(run(targets, move |target| {
            let count = Rc::clone(&count);
            async move {
                count.set(count.get() + 1);
                if target == "3" {
                    Err(Failure::no_such(Kind::NotFound, "x"))
                } else {
                    Ok(())
                }
            }
        }));
        assert_eq!(ended.map_err(|f| f.code()), Err(1));
        assert_eq!(done.get(), 40);
    }
}
