//! `GET /metrics` and `GET /health`, for a scraper and a prober.
//!
//! Strangers may reach this port, so nothing that a client does costs more than a bounded share: at
//! most [`CONNECTIONS_MAX`] connections at once, each closed after one answer or after [`DEADLINE`],
//! whichever comes first, with at most [`HEAD_BYTES_MAX`] of request head. A request's body is never
//! read. Where there are more, the oldest makes way: an answer takes milliseconds, so that one has most
//! likely said nothing, and a prober is not shut out, who would have a healthy process killed.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// Connections at once; one more ends the oldest of them.
pub const CONNECTIONS_MAX: usize = 64;
/// Longest head of a request, bytes.
pub const HEAD_BYTES_MAX: usize = 16 << 10;
/// Time for one connection, from its accept to the last byte of the answer.
pub const DEADLINE: Duration = Duration::from_secs(5);

/// Wait after an accept that failed for want of file descriptors, before the next one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// An answer that may have to ask another thread first.
pub type Observation<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What a process tells about itself.
pub trait Observed: Send + Sync + Debug {
    /// Its metrics in Prometheus' text format.
    fn render(&self) -> Observation<'_, String>;

    /// Whether it does its work, and what there is to say about it.
    fn health(&self) -> Observation<'_, (bool, serde_json::Value)>;
}

/// Answers until `shutdown` ends. `/health` is 200 where the process is healthy and 503 where not.
///
/// # Errors
/// The listener's own, where it is unusable; a client's never end the server.
pub async fn serve(
    listener: TcpListener,
    observed: Arc<dyn Observed>,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    serve_within(listener, observed, shutdown, DEADLINE).await
}

async fn serve_within(
    listener: TcpListener,
    observed: Arc<dyn Observed>,
    shutdown: impl Future<Output = ()>,
    deadline: Duration,
) -> io::Result<()> {
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/health", get(health))
        .with_state(observed);
    let mut answering: VecDeque<JoinHandle<()>> = VecDeque::with_capacity(CONNECTIONS_MAX);
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            () = &mut shutdown => return Ok(()),
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _from)) => {
                answering.retain(|one| !one.is_finished());
                if answering.len() >= CONNECTIONS_MAX
                    && let Some(oldest) = answering.pop_front()
                {
                    oldest.abort();
                }
                let router = router.clone();
                answering.push_back(tokio::spawn(async move {
                    tokio::time::timeout(deadline, answer(stream, router)).await.ok();
                }));
            }
            Err(error) if is_transient(&error) => tokio::time::sleep(ACCEPT_PAUSE).await,
            Err(error) => return Err(error),
        }
    }
}

/// Whether the next accept may succeed: the client went away, or descriptors ran out.
fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(
            libc::ECONNABORTED
                | libc::EMFILE
                | libc::ENFILE
                | libc::ENOBUFS
                | libc::ENOMEM
                | libc::EINTR
        )
    )
}

async fn answer(stream: TcpStream, router: Router) {
    let ended = http1::Builder::new()
        .timer(TokioTimer::new())
        .keep_alive(false)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
        .await;
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection to the metrics port failed");
    }
}

async fn metrics(State(observed): State<Arc<dyn Observed>>) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (kind, observed.render().await).into_response()
}

async fn health(State(observed): State<Arc<dyn Observed>>) -> Response {
    let (healthy, body) = observed.health().await;
    let status = if healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let kind = [(header::CONTENT_TYPE, "application/json")];
    (status, kind, body.to_string()).into_response()
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::atomic::{AtomicBool, Ordering};

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::oneshot;

    use super::*;

    #[derive(Debug, Default)]
    struct Sick(AtomicBool);

    impl Observed for Sick {
        fn render(&self) -> Observation<'_, String> {
            Box::pin(async { "up 1\n".to_owned() })
        }

        fn health(&self) -> Observation<'_, (bool, serde_json::Value)> {
            Box::pin(async {
                let healthy = !self.0.load(Ordering::Relaxed);
                (healthy, serde_json::json!({ "healthy": healthy }))
            })
        }
    }

    async fn start(observed: Arc<Sick>, deadline: Duration) -> (SocketAddr, oneshot::Sender<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        tokio::spawn(serve_within(
            listener,
            observed,
            async {
                stopped.await.ok();
            },
            deadline,
        ));
        (address, stop)
    }

    /// Sends `request` and returns all that comes until the server closes.
    async fn exchange(address: SocketAddr, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        // The server may have refused before it has read everything.
        stream.write_all(request).await.ok();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.ok();
        String::from_utf8_lossy(&answer).into_owned()
    }

    #[tokio::test]
    async fn metrics_and_health_are_answered() {
        let observed = Arc::new(Sick::default());
        let (address, _stop) = start(observed.clone(), DEADLINE).await;
        let metrics = exchange(address, b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").await;
        assert!(metrics.starts_with("HTTP/1.1 200") && metrics.ends_with("up 1\n"), "{metrics}");
        let well = exchange(address, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
        assert!(well.starts_with("HTTP/1.1 200"), "{well}");
        observed.0.store(true, Ordering::Relaxed);
        let sick = exchange(address, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
        assert!(sick.starts_with("HTTP/1.1 503"), "{sick}");
        assert!(sick.ends_with("{\"healthy\":false}"), "{sick}");
        let other = exchange(address, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
        assert!(other.starts_with("HTTP/1.1 404"), "{other}");
    }

    #[tokio::test]
    async fn garbage_and_endless_heads_are_refused() {
        let (address, _stop) = start(Arc::default(), DEADLINE).await;
        let garbage = exchange(address, &[0xff; 64]).await;
        assert!(garbage.is_empty() || garbage.starts_with("HTTP/1.1 400"), "{garbage}");
        let mut endless = b"GET /metrics HTTP/1.1\r\nx: ".to_vec();
        endless.resize(HEAD_BYTES_MAX * 4, b'a');
        let refused = exchange(address, &endless).await;
        assert!(refused.is_empty() || refused.starts_with("HTTP/1.1 431"), "{refused}");
    }

    #[tokio::test]
    async fn clients_that_say_nothing_do_not_shut_others_out() {
        // Their time is not over before the test's is.
        let (address, _stop) = start(Arc::default(), Duration::from_secs(3600)).await;
        let mut silent = VecDeque::new();
        for _ in 0..CONNECTIONS_MAX * 2 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(b"G").await.ok();
            silent.push_back(stream);
        }
        let answer = exchange(address, b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        // The oldest were closed without a word.
        for mut stream in silent.drain(..CONNECTIONS_MAX) {
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).await.ok();
            assert!(rest.is_empty());
        }
    }

    #[tokio::test]
    async fn who_says_nothing_is_closed_in_the_end() {
        let (address, _stop) = start(Arc::default(), Duration::from_millis(50)).await;
        let said = exchange(address, b"G").await;
        assert!(said.is_empty() || said.starts_with("HTTP/1.1 408"), "{said}");
    }

    #[tokio::test]
    async fn the_port_is_free_after_shutdown() {
        let (address, stop) = start(Arc::default(), DEADLINE).await;
        drop(stop);
        let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
        while TcpStream::connect(address).await.is_ok() {
            assert!(tokio::time::Instant::now() < deadline, "still listening");
            tokio::task::yield_now().await;
        }
    }
}
