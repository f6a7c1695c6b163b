//! The top-level fields that the gateway knows: to read them, or because only it may set them. *Pure.*

/// A known field. Everything else in a body passes byte for byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Field {
    Stream,
    StreamOptions,
    Model,
    User,
    Rid,
    Priority,
    N,
    Prompt,
    Text,
    InputIds,
    Input,
    Instructions,
    System,
    Tools,
    Messages,
    SamplingParams,
    Echo,
    Logprobs,
    PromptLogprobs,
    ReturnLogprob,
    LogprobStartLen,
    MaxTokens,
    MaxCompletionTokens,
    MaxOutputTokens,
    MinTokens,
    BootstrapHost,
    BootstrapPort,
    BootstrapRoom,
    BootstrapPairKey,
    DecodeTpSize,
    RoutedDpRank,
    DisaggPrefillDpRank,
    DataParallelRank,
    KvTransferParams,
}

impl Field {
    pub fn of_name(name: &[u8]) -> Option<Self> {
        Some(match name {
            b"stream" => Field::Stream,
            b"stream_options" => Field::StreamOptions,
            b"model" => Field::Model,
            b"user" => Field::User,
            b"rid" => Field::Rid,
            b"priority" => Field::Priority,
            b"n" => Field::N,
            b"prompt" => Field::Prompt,
            b"text" => Field::Text,
            b"input_ids" => Field::InputIds,
            b"input" => Field::Input,
            b"instructions" => Field::Instructions,
            b"system" => Field::System,
            b"tools" => Field::Tools,
            b"messages" => Field::Messages,
            b"sampling_params" => Field::SamplingParams,
            b"echo" => Field::Echo,
            b"logprobs" => Field::Logprobs,
            b"prompt_logprobs" => Field::PromptLogprobs,
            b"return_logprob" => Field::ReturnLogprob,
            b"logprob_start_len" => Field::LogprobStartLen,
            b"max_tokens" => Field::MaxTokens,
            b"max_completion_tokens" => Field::MaxCompletionTokens,
            b"max_output_tokens" => Field::MaxOutputTokens,
            b"min_tokens" => Field::MinTokens,
            b"bootstrap_host" => Field::BootstrapHost,
            b"bootstrap_port" => Field::BootstrapPort,
            b"bootstrap_room" => Field::BootstrapRoom,
            b"bootstrap_pair_key" => Field::BootstrapPairKey,
            b"decode_tp_size" => Field::DecodeTpSize,
            b"routed_dp_rank" => Field::RoutedDpRank,
            b"disagg_prefill_dp_rank" => Field::DisaggPrefillDpRank,
            b"data_parallel_rank" => Field::DataParallelRank,
            b"kv_transfer_params" => Field::KvTransferParams,
            _ => return None,
        })
    }

    /// Names an address or a handoff inside the fleet. A client that could say it would send workers to hosts of its
    /// choice and into the rooms of others.
    pub fn is_handoff(self) -> bool {
        matches!(
            self,
            Field::BootstrapHost
                | Field::BootstrapPort
                | Field::BootstrapRoom
                | Field::BootstrapPairKey
                | Field::DecodeTpSize
                | Field::DisaggPrefillDpRank
                | Field::KvTransferParams
        )
    }

    /// Chooses a data-parallel rank. Where the gateway chooses, or both legs must agree, the client's choice is dropped.
    pub fn is_rank(self) -> bool {
        matches!(self, Field::RoutedDpRank | Field::DataParallelRank)
    }
}
