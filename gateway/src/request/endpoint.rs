//! The routes that carry a prompt or another question for a worker. *Pure.*

/// One of the APIs that workers serve.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Endpoint {
    Chat,
    Completions,
    Generate,
    /// OpenAI's Responses.
    Responses,
    /// Anthropic's Messages.
    Messages,
    Embeddings,
    Rerank,
    Classify,
    Score,
}

impl Endpoint {
    pub const ALL: [Endpoint; 9] = [
        Endpoint::Chat,
        Endpoint::Completions,
        Endpoint::Generate,
        Endpoint::Responses,
        Endpoint::Messages,
        Endpoint::Embeddings,
        Endpoint::Rerank,
        Endpoint::Classify,
        Endpoint::Score,
    ];

    pub fn of_path(path: &str) -> Option<Self> {
        match path {
            // sglang_router's second name for it.
            "/rerank" => Some(Endpoint::Rerank),
            path => Self::ALL.into_iter().find(|endpoint| endpoint.path() == path),
        }
    }

    /// The path at the workers.
    pub fn path(self) -> &'static str {
        match self {
            Endpoint::Chat => "/v1/chat/completions",
            Endpoint::Completions => "/v1/completions",
            Endpoint::Generate => "/generate",
            Endpoint::Responses => "/v1/responses",
            Endpoint::Messages => "/v1/messages",
            Endpoint::Embeddings => "/v1/embeddings",
            Endpoint::Rerank => "/v1/rerank",
            Endpoint::Classify => "/v1/classify",
            Endpoint::Score => "/v1/score",
        }
    }

    /// The value of metrics' label.
    pub fn name(self) -> &'static str {
        match self {
            Endpoint::Chat => "chat",
            Endpoint::Completions => "completions",
            Endpoint::Generate => "generate",
            Endpoint::Responses => "responses",
            Endpoint::Messages => "messages",
            Endpoint::Embeddings => "embeddings",
            Endpoint::Rerank => "rerank",
            Endpoint::Classify => "classify",
            Endpoint::Score => "score",
        }
    }

    /// Whether the answer is generated token by token; anything else is one pass over the input, which only a plain worker
    /// does.
    pub fn generates(self) -> bool {
        !matches!(self, Endpoint::Embeddings | Endpoint::Rerank | Endpoint::Classify | Endpoint::Score)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_name_their_endpoints() {
        for endpoint in Endpoint::ALL {
            assert_eq!(Endpoint::of_path(endpoint.path()), Some(endpoint));
        }
        assert_eq!(Endpoint::of_path("/rerank"), Some(Endpoint::Rerank));
        assert_eq!(Endpoint::of_path("/v1/chat"), None);
    }
}
