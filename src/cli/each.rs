//! One verb for many pods, some of them at the same time.
//!
//! Promises that one pod's trouble does not keep the others from their turn, and the code of the first that failed.

use std::future::Future;

use tokio::task::{JoinSet, LocalSet};

use super::failure::{Failure, PODVISOR_FAILED};
use super::output;

/// Pods at the same time: stopping is mostly waiting, and each is one connection.
pub const AT_ONCE: usize = 64;

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
    use std::cell::Cell;
    use std::rc::Rc;

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
