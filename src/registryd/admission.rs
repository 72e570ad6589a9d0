//! The bound on calls over all connections. A call that waits for its turn has read nothing of its
//! message beyond what flow control lets the client send, so that the calls admitted, times the
//! longest message, are the memory that clients can fill.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::sync::Semaphore;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;

/// A gRPC service of which a bounded number of calls run at once; others wait.
#[derive(Debug, Clone)]
pub(super) struct Admission<S> {
    inner: S,
    turns: Arc<Semaphore>,
}

impl<S> Admission<S> {
    pub(super) fn new(inner: S, calls_max: usize) -> Self {
        Self { inner, turns: Arc::new(Semaphore::new(calls_max.min(Semaphore::MAX_PERMITS))) }
    }
}

impl<S: NamedService> NamedService for Admission<S> {
    const NAME: &'static str = S::NAME;
}

type Answer = Result<http::Response<Body>, Infallible>;

impl<S> Service<http::Request<Body>> for Admission<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Answer> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        // The clone that was asked whether it is ready takes the call; a fresh one stays.
        let fresh = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, fresh);
        let turns = Arc::clone(&self.turns);
        Box::pin(async move {
            // The semaphore is never closed, so that this waits for a turn and cannot fail.
            let _turn = turns.acquire().await;
            inner.call(request).await
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Counts how many of its calls run, and the most that ran at once.
    #[derive(Debug, Clone, Default)]
    struct Counting {
        running: Arc<AtomicUsize>,
        most: Arc<AtomicUsize>,
    }

    impl Service<http::Request<Body>> for Counting {
        type Response = http::Response<Body>;
        type Error = Infallible;
        type Future = Pin<Box<dyn Future<Output = Answer> + Send>>;

        fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _request: http::Request<Body>) -> Self::Future {
            let this = self.clone();
            Box::pin(async move {
                let running = this.running.fetch_add(1, Ordering::SeqCst) + 1;
                this.most.fetch_max(running, Ordering::SeqCst);
                for _ in 0..10 {
                    tokio::task::yield_now().await;
                }
                this.running.fetch_sub(1, Ordering::SeqCst);
                Ok(http::Response::new(Body::empty()))
            })
        }
    }

    #[tokio::test]
    async fn calls_beyond_the_bound_wait_for_their_turn() {
        let counting = Counting::default();
        let mut service = Admission::new(counting.clone(), 3);
        let calls = (0..20).map(|_| tokio::spawn(service.call(http::Request::new(Body::empty()))));
        for call in calls.collect::<Vec<_>>() {
            call.await.unwrap().unwrap();
        }
        assert_eq!(counting.most.load(Ordering::SeqCst), 3);
    }
}
